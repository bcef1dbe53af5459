"""Listings of a bucket that also contains what other programs have put there."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import pytest

from holdfast.errors import Corrupt, StoreError
from holdfast.objects.cloud.cloud_store import CloudStore
from holdfast.objects.protocol import ObjectInfo
from tests.kit.s3_server import Answer, Request, S3Server, Stored
from tests.unit.objects.cloud.servers import open_cloud

LISTS: dict[str, Callable[[CloudStore, str], Sequence[ObjectInfo]]] = {
    "list": lambda store, prefix: store.list(prefix),
    "list_all": lambda store, prefix: store.list_all(prefix),
}


def plant(server: S3Server, *keys: str) -> None:
    for key in keys:
        server.objects[key] = Stored(b"", time.time())


@pytest.mark.parametrize("prefix", ["", "leases/", "leases/two/"])
@pytest.mark.parametrize("read", LISTS.values(), ids=LISTS)
def test_objects_that_stand_for_directories_are_not_listed(
    server: S3Server, read: Callable[[CloudStore, str], Sequence[ObjectInfo]], prefix: str
) -> None:
    store = open_cloud(server)
    store.create("leases/two/0", b"x")
    plant(server, "store/", "store/leases/", "store/leases/two/")

    assert [info.key for info in read(store, prefix)] == ["leases/two/0"]


@pytest.mark.parametrize("read", LISTS.values(), ids=LISTS)
def test_names_that_no_key_of_a_store_can_have_are_not_listed(
    server: S3Server, read: Callable[[CloudStore, str], Sequence[ObjectInfo]]
) -> None:
    store = open_cloud(server)
    store.create("leases/one", b"x")
    plant(server, "store/README.md", "store/leases/a b", "store/Folder/one", "store/leases/.hidden")

    assert [info.key for info in read(store, "")] == ["leases/one"]


def test_an_empty_directory_that_the_server_lists_is_no_object(server: S3Server) -> None:
    store = open_cloud(server)
    plant(server, "store/leases/one/")

    assert store.list("") == []


def test_a_version_has_no_quotes_in_any_answer(server: S3Server) -> None:
    """Azure leaves the quotes out in listings."""
    store = open_cloud(server)
    store.create("leases/one", b"x")

    def leave_out(request: Request, answer: Answer) -> Answer:
        status, headers, body = answer
        return status, headers, body.replace(b'<ETag>"', b"<ETag>").replace(b'"</ETag>', b"</ETag>")

    server.change_answer = leave_out

    assert store.list("") == store.list_all("") == [store.stat("leases/one")]


def test_a_range_behind_the_end_is_corrupt_if_the_server_answers_with_the_whole_object(server: S3Server) -> None:
    store = open_cloud(server)
    store.create("packs/one", b"0123456789")
    server.change_answer = lambda request, answer: (
        (206, {"Content-Range": "bytes 0-9/10", "Last-Modified": "Tue, 17 Nov 2026 17:00:00 GMT"}, b"0123456789")
        if request.kind == "GET"
        else answer
    )

    with pytest.raises(Corrupt, match="ends before byte 11"):
        store.read_into("packs/one", 10, memoryview(bytearray(1)))


@pytest.mark.parametrize("read", LISTS.values(), ids=LISTS)
def test_a_listing_whose_answer_is_cut_is_read_again(
    server: S3Server, read: Callable[[CloudStore, str], Sequence[ObjectInfo]]
) -> None:
    store = open_cloud(server)
    store.create("leases/one", b"x")
    cuts = [100, 100]

    def cut(request: Request, answer: Answer) -> Answer:
        status, headers, body = answer
        return (status, {**headers, "Content-Length": str(len(body) + cuts.pop())}, body) if cuts else answer

    server.change_answer = cut

    assert [info.key for info in read(store, "leases/")] == ["leases/one"]
    assert cuts == []


def test_a_listing_whose_answer_is_always_cut_ends_in_an_error(server: S3Server) -> None:
    server.change_answer = lambda request, answer: (answer[0], {"Content-Length": str(len(answer[2]) + 1)}, answer[2])

    with pytest.raises(StoreError, match="the server did not answer"):
        open_cloud(server).list_all("leases/")

    assert server.count("LIST") == 4
