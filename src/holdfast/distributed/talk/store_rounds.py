"""Rounds over the group's key-value store, on a private thread: every wait ends, and keys are deleted after use."""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from typing import Any, Final, TypeVar

from torch.distributed import FileStore, TCPStore  # type: ignore[attr-defined]  # exist, but are not declared
from torch.distributed.distributed_c10d import PrefixStore, Store

from holdfast.distributed.talk import wire
from holdfast.distributed.talk.call_ids import (
    CallId,
    PeerWatch,
    Pulse,
    describe_mismatch,
    format_closed,
    read_mismatches,
    withdraw_mismatched,
)
from holdfast.distributed.talk.failures import MAX_READ, MISMATCH, decode_failures, encode_failures, name_ranks
from holdfast.distributed.talk.rounds import Answer, RoundCall, RoundFailed
from holdfast.distributed.talk.wire import Frame
from holdfast.errors import RankFailure
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


_log = logging.getLogger(__name__)

_OK_EACH: Final = "ok each"
_OK_ALL: Final = "ok all"
_FAILED: Final = "failed"
_AGREED: Final = "coordinator"
_HEAD_BYTES: Final = 4
_FIRST_DELAY_S: Final = 0.0002
_SETTLE_S: Final = 0.1
"""How long to wait for another failure of the same round after the last one, so that the error names all of them."""
_MAX_SETTLE_S: Final = 0.5
"""How long to wait for further failures in total, so that the error is raised soon."""
_WARN_S: Final = 10.0
_CLOSE_S: Final = 5.0
_MAX_NAMED: Final = 64
"""In larger groups only the coordinator finds out which ranks are missing. If every rank did, it would overload the
store."""


class StoreRounds:
    """The rounds of one rank. Keys of round n: `n/a` arrivals, `n/v` verdict, `n/o` and `n/e` answers, `n/f` failures.

    The verdict is set once, by the first rank that sets it: the coordinator sets success after it has answered, any
    rank sets failure. So all ranks read the same verdict, even if they disagree about which rank is alive. When a
    later round has succeeded, all ranks have arrived there and none reads the earlier round any more. A rank then
    deletes the keys that it wrote for the earlier round.
    """

    def __init__(
        self, thread: StoreThread, *, rank: int, size: int, coordinator: int, call_id: CallId, timeout_s: float
    ) -> None:
        """Join the rounds of the collective `call_id`."""
        self._thread = thread
        self._rank = rank
        self._size = size
        self._coordinator = coordinator
        self._timeout_s = timeout_s
        self._pulse = Pulse(timeout_s=timeout_s)
        self._max_delay_s = min(0.1, 0.01 + 0.0001 * size)
        self._call_id = call_id
        self._prefix = call_id.prefix
        self._number = 0
        self._call = RoundCall("", "")
        self._part = b""
        self._own_message = b""
        # By round, the keys that this rank has written and that are not deleted yet.
        self._written: dict[int, list[str]] = {}
        self.beat("")
        self._agree()

    def _agree(self) -> None:
        # If the ranks named different coordinators, all of them could wait, and beat, for ever.
        wanted = str(self._coordinator)
        agreed = self._thread.call(lambda store: store.compare_set(self._prefix + _AGREED, "", wanted)).decode()
        if agreed != wanted:
            self.close()
            raise ValueError(
                f"rank {self._rank} names rank {wanted} as coordinator, another rank names rank {agreed};"
                " pass the same coordinator on all ranks"
            )

    def arrive(self, call: RoundCall, message: Sequence[Frame]) -> None:
        """Join the round, with a message for the coordinator."""
        self._call = call
        head = b"".join(wire.encode((call.kind, call.step)))
        pieces = [len(head).to_bytes(_HEAD_BYTES, "little"), head, *message]
        self._write(self._key("a", self._rank), pieces)
        self.beat(call.step)

    def send(self, rank: int, message: Sequence[Frame]) -> None:
        """Write a message for one rank, which receives it after the coordinator has answered."""
        if rank == self._rank:
            self._own_message = b"".join(message)
        else:
            self._write(self._key("x", self._rank, rank), message)

    def collect(self) -> list[bytes]:
        """Wait for all ranks and return their messages, by rank; raise RoundFailed if their calls are not the same."""
        keys = [self._key("a", rank) for rank in range(self._size)]
        self._wait(lambda store: store.check(keys), lambda: self._read_missing(range(self._size)))
        calls, messages = [], []
        for key in keys:
            data, _ = self._thread.call(partial(read_message, key=key))
            start = _HEAD_BYTES + int.from_bytes(data[:_HEAD_BYTES], "little")
            calls.append(RoundCall(*wire.decode(data[_HEAD_BYTES:start])))
            messages.append(data[start:])
            self.beat(self._call.step)
        mismatched = [rank for rank, call in enumerate(calls) if call != self._call]
        if mismatched:
            self._declare([self._describe_mismatch(rank, calls[rank]) for rank in mismatched])
            raise RoundFailed(self._read_failures())
        return messages

    def answer(self, answer: Answer) -> None:
        """Write the answer and declare success; raise RoundFailed if another rank has declared a failure before."""
        if answer.each is not None:
            for rank in range(self._size):
                if rank != self._rank:
                    self._write(self._key("e", rank), answer.each[rank])
        elif answer.shared is not None:
            self._write(self._key("o"), answer.shared)
        wanted = _OK_ALL if answer.each is None else _OK_EACH
        wanted = "ok" if answer.each is None and answer.shared is None else wanted
        if self._set_verdict(wanted) != wanted:
            raise RoundFailed(self._read_failures())
        self._part = answer.find_part(self._rank)
        self._sweep()

    def wait_answer(self) -> bytes:
        """Wait for the verdict and return the answer for this rank."""
        if self._rank == self._coordinator:
            return self._part
        # Each rank watches the coordinator and its neighbour. So a death is noticed while the coordinator is busy.
        watched = {self._coordinator, (self._rank + 1) % self._size} - {self._rank}
        verdict = self._wait(lambda store: False, lambda: sorted(watched))
        self._sweep()
        if verdict == _OK_EACH:
            return self._take(self._key("e", self._rank))
        key = self._key("o")
        return self._thread.call(lambda store: read_message(store, key)[0]) if verdict == _OK_ALL else b""

    def receive(self, ranks: Sequence[int]) -> list[bytes]:
        """Return the messages that these ranks sent to this one."""
        return [
            self._own_message if rank == self._rank else self._take(self._key("x", rank, self._rank)) for rank in ranks
        ]

    def finish(self) -> None:
        """End the current round on this rank."""
        self._number += 1
        self._part = self._own_message = b""

    def fail(self, failure: RankFailure) -> list[RankFailure]:
        """End the current round with a failure, or the next one if it has just succeeded; return all failures."""
        while not self._declare([failure]).startswith(_FAILED):
            self.finish()
        failures = {one.rank: one for one in self._read_failures()}
        self.finish()
        return list({**failures, failure.rank: failure}.values())

    def read_failures(self) -> list[RankFailure]:
        """Return the failures that have ended the current round, or the next one; empty if it has not failed."""
        verdict = self._thread.call(self._read_verdict)
        return self._read_failures() if verdict is not None and verdict.startswith(_FAILED) else []

    def watch_others(self) -> Callable[[], list[RankFailure]]:
        """Return a function that, called often, returns the ranks that are silent for too long and ends the round."""
        near = {self._coordinator, (self._rank + 1) % self._size}
        watched = sorted((set(range(self._size)) if self._size <= _MAX_NAMED else near) - {self._rank})
        watch = PeerWatch(timeout_s=self._timeout_s)

        def read_silent() -> list[RankFailure]:
            if not watch.is_due() or not (failures := watch.observe(self._read_beats(watched))):
                return []
            self._declare(failures)
            return self._read_failures()

        return read_silent

    def beat(self, step: str) -> None:
        """Give a sign of life, if one is due or the step is new."""
        due = self._pulse.find_due(step)
        if due is not None:
            self._thread.post(lambda store: put(store, self._life_key(self._rank), due))

    def close(self) -> None:
        """Leave, and let the other ranks know; the last rank to leave deletes the remaining keys of all ranks."""
        left = [key for keys in [self._call_id.keys, *self._written.values()] for key in keys]
        with suppress(StoreThreadLost):  # without the store there are no keys to write or delete
            self._thread.call(lambda store: self._leave(store, left), limit_s=_CLOSE_S)
        self._thread.close()

    def _key(self, *parts: object) -> str:
        return self._prefix + "/".join(map(str, (self._number, *parts)))

    def _life_key(self, rank: int) -> str:
        return f"{self._prefix}life/{rank}"

    def _write(self, key: str, pieces: Sequence[Frame]) -> None:
        keys = self._thread.call(lambda store: write_message(store, key, pieces))
        self._written.setdefault(self._number, []).extend(keys)

    def _take(self, key: str) -> bytes:
        # No other rank reads this message, so its keys can be deleted at once.
        data, keys = self._thread.call(lambda store: read_message(store, key))
        self._thread.post(lambda store: delete_keys(store, keys))
        return data

    def _sweep(self) -> None:
        old = [key for number in list(self._written) if number < self._number for key in self._written.pop(number)]
        if old:
            self._thread.post(lambda store: delete_keys(store, old))

    def _leave(self, store: Store, left: Sequence[str]) -> None:
        put(store, self._life_key(self._rank), format_closed())
        write_message(store, f"{self._prefix}left/{self._rank}", wire.encode(left))
        closed = f"{self._prefix}closed"
        if store.add(closed, 1) == self._size:
            for rank in range(self._size):
                data, keys = read_message(store, f"{self._prefix}left/{rank}")
                delete_keys(store, [*wire.decode(data), *keys, self._life_key(rank)])
            delete_keys(store, [closed, self._prefix + _AGREED])

    # Verdicts

    def _read_verdict(self, store: Store) -> str | None:
        key = self._key("v")
        return store.get(key).decode() if store.check([key]) else None

    def _set_verdict(self, wanted: str) -> str:
        key = self._key("v")
        verdict = self._thread.call(lambda store: store.compare_set(key, "", wanted)).decode()
        if verdict == wanted:
            self._written.setdefault(self._number, []).append(key)
        return verdict

    def _declare(self, failures: Sequence[RankFailure]) -> str:
        counter = self._key("f")
        number = self._thread.call(lambda store: store.add(counter, 1))
        if number == 1:
            self._written.setdefault(self._number, []).append(counter)
        self._write(f"{counter}/{number}", encode_failures(failures))
        # The verdict contains the rank, so that the rank that set the key knows that it must delete it.
        return self._set_verdict(f"{_FAILED} {self._rank}")

    def _read_failures(self) -> list[RankFailure]:
        counter = self._key("f")

        def list_keys(count: int) -> list[str]:
            return [f"{counter}/{number}" for number in range(1, min(count, MAX_READ) + 1)]

        def observe(store: Store) -> tuple[int, bool]:
            # A rank increases the counter before it writes its message.
            count = store.add(counter, 0)
            return count, store.check(list_keys(count))

        began = changed = time.monotonic()
        (count, is_written), now = (0, False), began
        while (count < self._size or not is_written) and now - changed < _SETTLE_S and now - began < _MAX_SETTLE_S:
            found = self._thread.call(observe)
            changed = now if found != (count, is_written) else changed
            count, is_written = found
            time.sleep(_SETTLE_S / 10)
            now = time.monotonic()
        keys = list_keys(count)
        messages = self._thread.call(lambda store: [read_message(store, key)[0] for key in keys if store.check([key])])
        return [failure for message in messages for failure in decode_failures(message)]

    def _describe_mismatch(self, rank: int, call: RoundCall) -> RankFailure:
        text = f"called {call} where rank {self._rank} called {self._call}; all ranks must make the same calls"
        return RankFailure(rank, MISMATCH, text)

    # Waiting

    def _wait(self, is_ready: Callable[[Store], bool], read_awaited: Callable[[], Sequence[int]]) -> str:
        """Wait for a verdict and return it, or "" as soon as `is_ready`; raise RoundFailed if the round has failed.

        `read_awaited` returns the ranks that are still waited for.
        """
        watch = PeerWatch(timeout_s=self._timeout_s)
        warned = False
        delay_s = _FIRST_DELAY_S
        while (found := self._thread.call(lambda store: self._check(store, is_ready))) is None:
            self.beat(self._call.step)
            if watch.is_due():
                mismatches = self._read_mismatches()
                failures = mismatches or watch.observe(self._read_beats(read_awaited()))
                # Check again: a rank that has left may have finished its part of this round before.
                if failures and self._thread.call(lambda store: self._check(store, is_ready)) is None:
                    if mismatches:
                        self._end_mismatched([failure.rank for failure in mismatches])
                    self._declare(failures)
                elif watch.waited_s > _WARN_S and not warned:
                    warned = True
                    self._warn(watch.waited_s)
            time.sleep(delay_s)
            delay_s = min(delay_s * 1.3, self._max_delay_s)
        if found.startswith(_FAILED):
            raise RoundFailed(self._read_failures())
        return found

    def _check(self, store: Store, is_ready: Callable[[Store], bool]) -> str | None:
        verdict = self._read_verdict(store)
        return "" if verdict is None and is_ready(store) else verdict

    def _read_beats(self, ranks: Sequence[int]) -> dict[int, bytes | None]:
        keys = {rank: self._life_key(rank) for rank in ranks}
        return self._thread.call(
            lambda store: {rank: store.get(key) if store.check([key]) else None for rank, key in keys.items()}
        )

    def _read_missing(self, ranks: Sequence[int]) -> list[int]:
        keys = {rank: self._key("a", rank) for rank in ranks}
        return self._thread.call(lambda store: [rank for rank, key in keys.items() if not store.check([key])])

    def _read_mismatches(self) -> list[RankFailure]:
        # After the first round, all ranks are known to be in this collective. And a thread other than the main one
        # may still be joined by another thread.
        if self._number or threading.current_thread() is not threading.main_thread():
            return []
        missing = self._read_all_missing()
        return self._thread.call(lambda store: read_mismatches(store, self._call_id, missing, rank=self._rank))

    def _end_mismatched(self, missing: Sequence[int]) -> None:
        """End the collectives in which other ranks wait for this one: when it has left, they could not tell why."""

        def end(store: Store) -> None:
            found = withdraw_mismatched(store, self._call_id, missing, rank=self._rank)
            for other, call_id in found.items():
                elsewhere = {self._rank: self._call_id, **found}
                failures = [
                    describe_mismatch(rank, call.topic, other, call_id.topic)
                    for rank, call in elsewhere.items()
                    if call.number != call_id.number
                ]
                counter = f"{call_id.prefix}0/f"
                write_message(store, f"{counter}/{store.add(counter, 1)}", encode_failures(failures))
                store.compare_set(f"{call_id.prefix}0/v", "", f"{_FAILED} {self._rank}")

        self._thread.call(end)

    def _read_all_missing(self) -> list[int]:
        checks_all = self._rank == self._coordinator or self._size <= _MAX_NAMED
        return self._read_missing(range(self._size) if checks_all else [self._coordinator])

    def _warn(self, waited_s: float) -> None:
        missing = self._read_all_missing()
        awaited = f"{name_ranks(missing)} to arrive" if missing else f"rank {self._coordinator}, the coordinator"
        text = "rank %d of %d has waited %.0f s at %s for %s"
        _log.warning(text, self._rank, self._size, waited_s, self._call, awaited)
