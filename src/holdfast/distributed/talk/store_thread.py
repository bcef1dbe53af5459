"""A rank's own line to its group's store: worked by one thread, so that whoever waits for a reply can give up on it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, Final, TypeVar

from torch.distributed.distributed_c10d import Store

from holdfast.distributed.talk.wire import Frame

T = TypeVar("T")

PART_BYTES: Final = 512 << 10
"""What one key holds at most. A TCPStore drops whoever sends it more than 8 MiB; parts of this size travel fastest."""
_COUNT_BYTES: Final = 4
_SLICE_S: Final = 1.0


class StoreThreadLost(Exception):
    """The store does not answer any more; the text says what was seen of it."""


class StoreThread:
    """Does operations on a connection of its own, one after the other. End it by `close`.

    The store's calls have no deadline of their own: one to a host that was stopped, or whose network is gone, returns
    never. So they are made by a thread that is left behind if need be. And they are made on a clone: whoever shared
    torch's connection would wait for what torch waits for.
    """

    def __init__(self, store: Store, *, name: str, timeout_s: float) -> None:
        """Connect; give up on any reply after `timeout_s`."""
        self._timeout_s = timeout_s
        self._lost = ""
        self._queue: SimpleQueue[tuple[Callable[[Store], Any], Future[Any]] | None] = SimpleQueue()
        threading.Thread(target=_work, args=(store, self._queue), name=name, daemon=True).start()

    def call(self, operation: Callable[[Store], T], *, limit_s: float | None = None) -> T:
        """Return what `operation` returns; LineLost if the store fails or is silent for too long, and ever after."""
        reply = self.post(operation)
        try:
            return _wait(reply, min(self._timeout_s, limit_s or self._timeout_s))
        except RuntimeError as error:  # what the store raises, whatever has happened to it
            self._lost = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise StoreThreadLost(self._lost) from error

    def post(self, operation: Callable[[Store], T]) -> Future[T]:
        """Have `operation` done after those before it, and do not wait."""
        if self._lost:
            raise StoreThreadLost(self._lost)
        reply: Future[T] = Future()
        self._queue.put((operation, reply))
        return reply

    def close(self) -> None:
        """End the thread when it has done what it was given."""
        self._queue.put(None)


def _wait(reply: Future[T], timeout_s: float) -> T:
    # In slices: a process that was stopped for longer than the timeout has lost one slice, and not its line.
    slice_s = min(_SLICE_S, timeout_s / 4)
    waited_s = 0.0
    while waited_s < timeout_s:
        try:
            return reply.result(slice_s)
        except TimeoutError:
            waited_s += slice_s
    raise RuntimeError(f"no reply within {timeout_s:g} s")


def _work(store: Store, queue: SimpleQueue[tuple[Callable[[Store], Any], Future[Any]] | None]) -> None:
    own: Store | None = None
    while work := queue.get():
        operation, reply = work
        try:
            # Connecting may block as any other call may, so it belongs here.
            own = own or store.clone()  # type: ignore[attr-defined]  # there, and not declared
            reply.set_result(operation(own))
        except Exception as error:  # noqa: BLE001 - it belongs to whoever waits for the reply
            reply.set_exception(error)


def write_message(store: Store, key: str, pieces: Sequence[Frame]) -> list[str]:
    """Write bytes of any length under `key`, which appears last; return the keys to delete."""
    data = b"".join(pieces)
    room = PART_BYTES - _COUNT_BYTES
    parts = [data[start : start + PART_BYTES] for start in range(room, len(data), PART_BYTES)]
    keys = [f"{key}/{number}" for number in range(1, len(parts) + 1)]
    for name, part in zip(keys, parts, strict=True):
        put(store, name, part)
    put(store, key, len(parts).to_bytes(_COUNT_BYTES, "little") + data[:room])
    return [key, *keys]


def read_message(store: Store, key: str) -> tuple[bytes, list[str]]:
    """Return the bytes of a message that is known to be there, and its keys."""
    head = store.get(key)
    count = int.from_bytes(head[:_COUNT_BYTES], "little")
    keys = [f"{key}/{number}" for number in range(1, count + 1)]
    return b"".join([head[_COUNT_BYTES:], *map(store.get, keys)]), [key, *keys]


def put(store: Store, key: str, data: bytes) -> None:
    """Set a key to bytes."""
    store.set(key, data)  # type: ignore[arg-type]  # declared for str, and takes bytes


def delete_keys(store: Store, keys: Sequence[str]) -> None:
    """Delete keys; those that are gone already are not missed."""
    for key in keys:
        store.delete_key(key)
