"""The tally of requests: it agrees with what a server has seen, and survives a pickle as an empty one."""

from __future__ import annotations

import pickle
from collections.abc import Iterator

import pytest

from holdfast.errors import Corrupt, NotFound, ObjectExists
from holdfast.objects.memory import MemoryStore
from holdfast.objects.request_tally import KINDS, RequestCount, RequestTally
from tests.kit.s3_server import S3Server, Stored, serve_s3
from tests.unit.objects.cloud.servers import open_cloud


@pytest.fixture
def server() -> Iterator[S3Server]:
    with serve_s3() as running:
        yield running


def test_every_request_is_counted_as_the_server_sees_it(server: S3Server) -> None:
    store = open_cloud(server, "counted")
    store.create("a/one", b"x" * 1000)
    store.create("a/two", b"y" * 500)
    with pytest.raises(ObjectExists):
        store.create("a/two", b"y")
    store.read("a/one", limit_bytes=1000)
    with pytest.raises(Corrupt):
        store.read("a/one", limit_bytes=10)
    store.read_into("a/one", 10, memoryview(bytearray(100)))
    with pytest.raises(NotFound):
        store.stat("a/three")
    store.list("a/")
    store.list_all("a/")
    store.delete("a/one")
    store.delete_many(["a/one", "a/two"])

    found = store.count_requests()

    assert {kind: found[kind].requests for kind in KINDS} == {kind: server.count(kind.upper()) for kind in KINDS}
    assert found["get"].size_bytes == 1000 + 100
    assert found["put"].size_bytes >= 1500


def test_every_page_of_a_listing_is_a_request(server: S3Server) -> None:
    store = open_cloud(server, "many")
    for number in range(1001):
        server.objects[f"many/a/{number:04}"] = Stored(b"x", 1e9)
    store.list_all("a/")
    store.list("a/", limit=2000)

    assert store.request_tally.read()["list"].requests == server.count("LIST") == 4


def test_a_pickle_counts_from_zero() -> None:
    tally = RequestTally()
    tally.add("get", size_bytes=5)

    assert tally.read()["get"] == RequestCount(1, 5)
    assert pickle.loads(pickle.dumps(tally)).read()["get"] == RequestCount()
    assert MemoryStore().count_requests() == {}
