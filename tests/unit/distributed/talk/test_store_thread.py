"""Calls to a store on a thread of their own: results, errors, timeouts; and messages of any length."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from torch.distributed import FileStore, HashStore, TCPStore  # type: ignore[attr-defined]  # there, and not declared
from torch.distributed.distributed_c10d import PrefixStore, Store

from holdfast.distributed.talk.store_rounds import (
    PART_BYTES,
    StoreThread,
    StoreThreadLost,
    connect_again,
    delete_keys,
    put,
    read_message,
    write_message,
)


@pytest.fixture
def store() -> HashStore:
    return HashStore()


@pytest.fixture
def thread(store: HashStore) -> Iterator[StoreThread]:
    thread = StoreThread(store, name="test", timeout_s=0.2)
    yield thread
    thread.close()


def fail(store: Store) -> None:
    raise RuntimeError("connection reset\nfurther lines")


def test_operations_run_in_order_and_return_their_results(thread: StoreThread) -> None:
    thread.post(lambda store: put(store, "k", b"1"))

    assert thread.call(lambda store: store.get("k")) == b"1"


def test_once_the_store_has_failed_every_later_call_fails(thread: StoreThread) -> None:
    for _ in range(2):
        with pytest.raises(StoreThreadLost, match=r"^connection reset$"):
            thread.call(fail)
    with pytest.raises(StoreThreadLost, match=r"^connection reset$"):
        thread.post(lambda store: None)


def test_a_call_that_does_not_return_times_out(thread: StoreThread) -> None:
    release = threading.Event()
    try:
        with pytest.raises(StoreThreadLost, match=r"no reply within 0\.2 s"):
            thread.call(lambda store: release.wait())
    finally:
        release.set()


@pytest.mark.parametrize("size", [0, 1, PART_BYTES - 4, PART_BYTES - 3, 2 * PART_BYTES + 5])
def test_messages_of_any_length_are_read_as_written(store: HashStore, size: int) -> None:
    data = bytes(range(256)) * (size // 256 + 1)

    written = write_message(store, "m", [data[:1], data[1:size]] if size else [])

    assert read_message(store, "m") == (data[:size], written)
    assert all(len(store.get(key)) <= PART_BYTES for key in written)


def test_deleting_a_missing_key_is_no_error(store: HashStore) -> None:
    put(store, "a", b"1")

    delete_keys(store, ["a", "missing"])

    assert not store.check(["a"])


class WithoutClone(PrefixStore):
    """A store of a torch that cannot clone it."""

    clone = None


@pytest.mark.parametrize(
    "make",
    [
        lambda path: HashStore(),
        lambda path: FileStore(str(path / "store"), -1),
        lambda path: TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False),
    ],
    ids=["hash", "file", "tcp"],
)
def test_a_store_that_cannot_be_cloned_is_opened_again(tmp_path: Path, make: Callable[[Path], Store]) -> None:
    base = make(tmp_path)
    first, second, other = (WithoutClone(prefix, base) for prefix in ("attempt 0", "attempt 0", "attempt 1"))

    put(connect_again(first), "k", b"1")

    assert connect_again(second).get("k") == b"1"
    assert not connect_again(other).check(["k"])
    assert not base.check(["k"])
