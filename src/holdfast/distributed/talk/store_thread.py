"""Runs calls to the group's store on a private thread and connection, so that callers can time out."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from functools import partial
from queue import SimpleQueue
from typing import Any, Final, TypeVar

from torch.distributed import FileStore, TCPStore  # type: ignore[attr-defined]  # exist, but are not declared
from torch.distributed.distributed_c10d import PrefixStore, Store

from holdfast.distributed.talk.wire import Frame
from holdfast.objects.thread_pool import BackgroundThread

T = TypeVar("T")

PART_BYTES: Final = 512 << 10
"""The most bytes under one key. A TCPStore drops a client that sends more than 8 MiB; this size is the fastest."""
_COUNT_BYTES: Final = 4
_PREFIX_KEY: Final = "holdfast/prefix"
_SLICE_S: Final = 1.0


class StoreThreadLost(Exception):
    """The store failed or does not answer; the text is its error."""


class StoreThread:
    """Runs operations on a store, one after the other, on a thread and connection of its own. Call `close` to end it.

    Calls to a TCPStore have no timeout: a call to a suspended host, or over a broken network, never returns. So a
    background thread makes them, and is abandoned if it hangs. It uses a clone of the store: on torch's own connection,
    calls would wait until those of torch have ended.
    """

    def __init__(self, store: Store, *, name: str, timeout_s: float) -> None:
        """Start the thread, called `name`; a call times out after `timeout_s`."""
        self._timeout_s = timeout_s
        self._lost = ""
        self._queue: SimpleQueue[tuple[Callable[[Store], Any], Future[Any]] | None] = SimpleQueue()
        BackgroundThread(partial(_work, store, self._queue), name, stop=self.close).start()

    def call(self, operation: Callable[[Store], T], *, limit_s: float | None = None) -> T:
        """Return the result of `operation`; once the store fails or times out, this and all later calls raise.

        Raises:
            StoreThreadLost: the store cannot be used any more.
        """
        reply = self.post(operation)
        try:
            return _wait(reply, min(self._timeout_s, limit_s or self._timeout_s))
        except RuntimeError as error:  # the store raises it for any failure
            self._lost = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise StoreThreadLost(self._lost) from error

    def post(self, operation: Callable[[Store], T]) -> Future[T]:
        """Queue `operation` after the earlier ones, without waiting for it."""
        if self._lost:
            raise StoreThreadLost(self._lost)
        reply: Future[T] = Future()
        self._queue.put((operation, reply))
        return reply

    def close(self) -> None:
        """End the thread after the queued operations."""
        self._queue.put(None)


def _wait(reply: Future[T], timeout_s: float) -> T:
    # Wait in slices: if this process is suspended for longer than the timeout, only one slice is lost.
    slice_s = min(_SLICE_S, timeout_s / 4)
    waited_s = 0.0
    while waited_s < timeout_s:
        try:
            return reply.result(slice_s)
        except FutureTimeout:  # the builtin TimeoutError only since Python 3.11
            waited_s += slice_s
    raise RuntimeError(f"no reply within {timeout_s:g} s")


def _work(store: Store, queue: SimpleQueue[tuple[Callable[[Store], Any], Future[Any]] | None]) -> None:
    own: Store | None = None
    while work := queue.get():
        operation, reply = work
        try:
            # Connecting may block like any other call, so it is done on this thread.
            own = own or connect_again(store)
            reply.set_result(operation(own))
        except Exception as error:  # noqa: BLE001 - raised again where the reply is awaited
            reply.set_exception(error)


def connect_again(store: Store) -> Store:
    """Return a view of a group's store on a connection of its own; all ranks get views with the same keys."""
    clone: Callable[[], Store] | None = getattr(store, "clone", None)
    if clone is not None:
        return clone()
    # This torch can neither clone a store nor tell its prefix, which a restarted job may have in place of another. So
    # the ranks agree on a new prefix through the store itself.
    prefix = store.compare_set(_PREFIX_KEY, "", uuid.uuid4().hex).decode()
    return PrefixStore(f"holdfast-{prefix}", _open_again(store))


def _open_again(store: Any) -> Store:
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    opened: Any = store  # the stubs do not list the attributes
    if isinstance(store, TCPStore):
        return TCPStore(opened.host, opened.port, is_master=False, timeout=opened.timeout, wait_for_workers=False)
    return FileStore(opened.path) if isinstance(store, FileStore) else store


def write_message(store: Store, key: str, pieces: Sequence[Frame]) -> list[str]:
    """Write bytes of any length under `key` and further keys, `key` last; return all keys written."""
    data = b"".join(pieces)
    room = PART_BYTES - _COUNT_BYTES
    parts = [data[start : start + PART_BYTES] for start in range(room, len(data), PART_BYTES)]
    keys = [f"{key}/{number}" for number in range(1, len(parts) + 1)]
    for name, part in zip(keys, parts, strict=True):
        put(store, name, part)
    put(store, key, len(parts).to_bytes(_COUNT_BYTES, "little") + data[:room])
    return [key, *keys]


def read_message(store: Store, key: str) -> tuple[bytes, list[str]]:
    """Return the bytes of a message, and its keys. The message must exist: reading a missing key blocks."""
    head = store.get(key)
    count = int.from_bytes(head[:_COUNT_BYTES], "little")
    keys = [f"{key}/{number}" for number in range(1, count + 1)]
    return b"".join([head[_COUNT_BYTES:], *map(store.get, keys)]), [key, *keys]


def put(store: Store, key: str, data: bytes) -> None:
    """Set a key to bytes."""
    store.set(key, data)  # type: ignore[arg-type]  # declared for str, but accepts bytes


def delete_keys(store: Store, keys: Sequence[str]) -> None:
    """Delete keys; missing ones are ignored."""
    for key in keys:
        store.delete_key(key)
