"""A store in a bucket: the contract of stores, creates whose replies are lost, clocks, forks, servers that lie."""

from __future__ import annotations

import os
import pickle
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.errors import Corrupt, NotFound, ObjectExists, StoreError
from holdfast.objects.protocol import ObjectStore
from holdfast.objects.settle import commit_settled, create_settled
from holdfast.testing.store_contract import StoreContract
from tests.kit.s3_server import Answer, Fault, Request, S3Server, Stored, serve_s3
from tests.unit.objects.cloud.servers import open_cloud


class TestCloudStore(StoreContract):
    """The contract, on one server for all its tests."""

    running: S3Server

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _serve(cls) -> Iterator[None]:
        with serve_s3() as cls.running:
            yield

    def make_store(self, place: Path, *, read_only: bool = False) -> ObjectStore:
        prefix = "".join(c if c.isalnum() else "-" for c in f"{place.parent.name}-{place.name}")
        return open_cloud(self.running, prefix, read_only=read_only)


def fail_once(server: S3Server, kind: str, fault: Fault) -> None:
    """Let the first request of a kind go wrong."""
    left = [fault]

    def choose(request: Request) -> Fault | None:
        return left.pop() if request.kind == kind and left else None

    server.fault_of = choose


@pytest.mark.parametrize("fault", ["lose reply", "lose request", "503 before", "503 after", "409"])
def test_a_create_whose_reply_is_lost_succeeds(server: S3Server, fault: Fault) -> None:
    store = open_cloud(server, single_writer=True)
    fail_once(server, "PUT", fault)

    create_settled(store, "leases/one", b"with a write id")

    assert store.read("leases/one", limit_bytes=100) == b"with a write id"


@pytest.mark.parametrize("fault", ["lose reply", "503 after"])
def test_a_create_after_another_writers_is_never_taken_for_our_own(server: S3Server, fault: Fault) -> None:
    theirs, ours = open_cloud(server, single_writer=True), open_cloud(server, single_writer=True)
    theirs.create("snapshots/one", b"theirs")
    fail_once(server, "PUT", fault)

    with pytest.raises(ObjectExists):
        create_settled(ours, "snapshots/one", b"ours!!")

    assert ours.read("snapshots/one", limit_bytes=100) == b"theirs"


def test_conflicts_without_an_end_are_not_taken_for_an_object(server: S3Server) -> None:
    store = open_cloud(server, single_writer=True)
    server.fault_of = lambda request: "409" if request.kind == "PUT" else None

    with pytest.raises(StoreError, match="overloaded") as caught:
        create_settled(store, "leases/one", b"x")

    assert not isinstance(caught.value, ObjectExists)
    assert caught.value.fate == "unknown"


def test_an_upload_whose_reply_is_lost_is_committed(server: S3Server) -> None:
    store = open_cloud(server, single_writer=True)
    fail_once(server, "PUT", "lose reply")

    with store.upload("packs/one") as upload:
        upload.append(b"abc")
        commit_settled(store, upload, "packs/one", 3)

    assert store.read("packs/one", limit_bytes=3) == b"abc"


@pytest.mark.parametrize("fault", ["409", "lose request", "lose reply", "503 before", "503 after"])
def test_an_upload_is_sent_again_if_nothing_is_there(server: S3Server, fault: Fault) -> None:
    store = open_cloud(server, single_writer=True, options={"retry_config": {"max_retries": 0}})
    fail_once(server, "PUT", fault)

    with store.upload("packs/one") as upload:
        upload.append(b"abc")
        commit_settled(store, upload, "packs/one", 3)

    assert store.read("packs/one", limit_bytes=3) == b"abc"


def test_an_upload_that_nobody_answers_has_an_unknown_fate(server: S3Server) -> None:
    store = open_cloud(server, options={"retry_config": {"max_retries": 0}})
    server.fault_of = lambda request: "lose reply"

    upload = store.upload("packs/one")
    upload.append(b"abc")
    with pytest.raises(StoreError) as caught:
        upload.commit()

    assert caught.value.fate == "unknown"
    assert "store/packs/one" in server.objects


def test_a_server_that_ignores_conditions_is_refused_and_left_empty(server: S3Server) -> None:
    server.ignores_conditions = True

    with pytest.raises(StoreError, match="single_writer=True"):
        open_cloud(server).create("config/0", b"x")

    assert server.objects == {}


def test_a_single_writer_may_use_a_server_that_ignores_conditions_and_is_told(
    server: S3Server, caplog: pytest.LogCaptureFixture
) -> None:
    server.ignores_conditions = True
    store = open_cloud(server, single_writer=True)

    store.create("config/0", b"x")

    assert store.read("config/0", limit_bytes=1) == b"x"
    assert store.is_exclusive is False
    assert "only one writer is safe" in caplog.text


def test_a_single_writer_overwrites_nothing_on_a_server_that_ignores_conditions(server: S3Server) -> None:
    server.ignores_conditions = True
    open_cloud(server, single_writer=True).create("snapshots/one", b"first")
    store = open_cloud(server, single_writer=True)

    for _ in range(2):
        with pytest.raises(ObjectExists):
            store.create("snapshots/one", b"second")

    assert store.read("snapshots/one", limit_bytes=9) == b"first"


def test_a_server_that_honours_conditions_is_exclusive_for_a_single_writer_too(server: S3Server) -> None:
    store = open_cloud(server, single_writer=True)

    store.create("config/0", b"x")

    assert store.is_exclusive


def test_conditions_are_tested_once(server: S3Server) -> None:
    store = open_cloud(server)
    store.create("leases/one", b"x")
    server.requests.clear()

    store.create("leases/two", b"x")

    assert [request.kind for request in server.requests] == ["PUT"]


def test_a_test_of_conditions_without_an_answer_proves_nothing(server: S3Server) -> None:
    store = open_cloud(server)
    puts: Iterator[Fault | None] = iter([None, "lose request", "lose request", "lose request"])
    server.fault_of = lambda request: next(puts, None) if request.kind == "PUT" else None

    create_settled(store, "leases/one", b"x")
    server.ignores_conditions = True

    with pytest.raises(StoreError, match="single_writer"):
        store.create("leases/two", b"x")


@pytest.mark.parametrize("skew_s", [-3600.0, 0.0, 7200.0])
def test_the_clock_is_that_of_the_server_after_a_listing(server: S3Server, skew_s: float) -> None:
    server.skew_s = skew_s
    store = open_cloud(server)
    store.create("leases/one", b"x")
    server.requests.clear()

    infos = store.list_all("leases/")

    assert abs(store.clock() - infos[0].modified_s) < 30
    assert len(server.requests) == 1


@pytest.mark.parametrize("skew_s", [-3600.0, 7200.0])
def test_a_clock_can_be_learned_without_an_object_of_the_store(server: S3Server, skew_s: float) -> None:
    server.skew_s = skew_s
    store = open_cloud(server)

    store.learn_clock()
    store.learn_clock()

    assert abs(store.clock() - time.time() - skew_s) < 30
    assert [request.kind for request in server.requests] == ["PUT", "HEAD", "DELETE"]
    assert server.objects == {}


def test_a_read_only_store_writes_nothing_to_learn_the_clock(server: S3Server) -> None:
    store = open_cloud(server, read_only=True)

    store.learn_clock()

    assert server.requests == []
    assert abs(store.clock() - time.time()) < 30


def test_scratch_objects_are_in_no_listing_and_are_removed_when_they_are_old(server: S3Server) -> None:
    store = open_cloud(server)
    key = store.create_scratch(b"x")

    assert list(store.list("")) == list(store.list_all("")) == []
    assert [info.key for info in store.list_scratch()] == [key]
    assert store.remove_debris(older_than_s=3600.0) == 0
    assert store.remove_debris(older_than_s=-3600.0) == 1
    assert server.objects == {}


FOREIGN = ["store/A", "store/a b/c", "store/.hidden", "store/packs/Upper", "store/", "store/packs/.tmp"]


@pytest.mark.parametrize("name", FOREIGN)
def test_objects_of_other_programs_are_in_no_listing(server: S3Server, name: str) -> None:
    store = open_cloud(server)
    store.create("packs/one", b"1")
    server.objects[name] = Stored(b"x", time.time())

    assert [info.key for info in store.list("")] == ["packs/one"]
    assert [info.key for info in store.list_all("")] == ["packs/one"]


def test_an_object_that_cannot_be_listed_is_called_one_of_another_program(server: S3Server) -> None:
    server.objects["store/packs//x"] = Stored(b"x", time.time())

    with pytest.raises(StoreError, match=r"another program has put an object there.*packs//x"):
        open_cloud(server).list_all("packs/")


def test_listings_do_not_depend_on_the_order_of_the_server(server: S3Server) -> None:
    keys = ["a-b", "a.b", "a/b", "a/b-c", "a/b.d", "a0", "b/a/a", "b/a-a"]
    store = open_cloud(server, single_writer=True)
    for key in keys:
        store.create(key, b"")
    # Directory by directory, as a server lists that keeps its objects in a tree.
    server.order = lambda key: key.split("/")

    assert [info.key for info in store.list_all("")] == sorted(keys)
    assert [info.key for info in store.list("")] == sorted(keys)


def test_a_whole_listing_takes_one_request_for_a_thousand_objects(server: S3Server) -> None:
    store = open_cloud(server, single_writer=True)
    for number in range(30):
        store.create(f"snapshots/name-{number:02}/0", b"x")
    server.requests.clear()

    keys = [info.key for info in store.iter_objects("snapshots/")]

    assert keys == [f"snapshots/name-{number:02}/0" for number in range(30)]
    assert server.count("LIST") == 1


def test_another_prefix_of_the_bucket_is_another_store(server: S3Server) -> None:
    one, two = open_cloud(server, "a"), open_cloud(server, "a-b")
    one.create("packs/one", b"1")
    two.create("packs/two", b"2")

    assert [info.key for info in one.list("")] == [info.key for info in one.list_all("")] == ["packs/one"]
    assert [info.key for info in two.list_all("")] == ["packs/two"]


def test_a_read_whose_object_was_cut_is_corrupt(server: S3Server) -> None:
    store = open_cloud(server)
    store.create("packs/one", b"12345")
    server.objects["store/packs/one"].data = b"123"

    with pytest.raises(Corrupt, match="ends before byte 5"):
        store.read_into("packs/one", 1, memoryview(bytearray(4)))


def test_a_read_whose_error_message_is_cut_is_made_again(server: S3Server) -> None:
    store = open_cloud(server)
    cuts = [100, 100]

    def cut(request: Request, answer: Answer) -> Answer:
        status, headers, body = answer
        return (status, {**headers, "Content-Length": str(len(body) + cuts.pop())}, body) if cuts else answer

    server.change_answer = cut

    with pytest.raises(NotFound):
        store.read("packs/absent", limit_bytes=9)
    assert cuts == []


def test_a_forked_child_is_refused_instead_of_hanging(server: S3Server) -> None:
    store = open_cloud(server)
    store.create("packs/one", b"1")
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            store.read("packs/one", limit_bytes=1)
        except StoreError as error:
            os.write(write_end, str(error).encode())
        os._exit(0)
    os.close(write_end)
    with open(read_end) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)

    assert "spawn" in text
    assert store.read("packs/one", limit_bytes=1) == b"1"


def test_a_pickled_store_has_no_secrets(server: S3Server) -> None:
    store = open_cloud(server, options={"secret_access_key": "hidden"})

    data = pickle.dumps(store)

    assert b"hidden" not in data
    assert pickle.loads(data).url == store.url
    assert "hidden" not in repr(vars(store))


def test_many_threads_share_a_store(server: S3Server) -> None:
    store = open_cloud(server)
    threads = [threading.Thread(target=store.create, args=(f"leases/{n}", b"x")) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(store.list("leases/")) == 8


def test_what_is_deleted_is_not_found(server: S3Server) -> None:
    store = open_cloud(server)
    store.create("packs/one", b"1")
    store.delete("packs/one")

    with pytest.raises(NotFound, match="packs/one"):
        store.stat("packs/one")


def test_an_answer_of_the_server_is_noted(server: S3Server) -> None:
    store = open_cloud(server)
    assert not store.clients.has_answered

    store.list("packs/")

    assert store.clients.has_answered
