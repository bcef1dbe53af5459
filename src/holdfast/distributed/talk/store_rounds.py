"""Rounds over a group's store: no tensor, no device and no other connection; every wait ends, and keys go again."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Final

from torch.distributed.distributed_c10d import Store

from holdfast.distributed.talk import wire
from holdfast.distributed.talk.call_ids import CallId, read_mismatches
from holdfast.distributed.talk.failures import ASTRAY, MAX_TOLD, decode_failures, encode_failures, name_ranks
from holdfast.distributed.talk.liveness import PeerWatch, Pulse, format_closed
from holdfast.distributed.talk.rounds import Answer, RoundCall, RoundFailed
from holdfast.distributed.talk.store_thread import (
    StoreThread,
    StoreThreadLost,
    delete_keys,
    put,
    read_message,
    write_message,
)
from holdfast.distributed.talk.wire import Frame
from holdfast.errors import RankFailure

_log = logging.getLogger(__name__)

_OK_EACH: Final = "ok each"
_OK_ALL: Final = "ok all"
_FAILED: Final = "failed"
_AGREED: Final = "coordinator"
_HEAD_BYTES: Final = 4
_FIRST_DELAY_S: Final = 0.0002
_SETTLE_S: Final = 0.1
"""How long to wait for another failure of the same round after the last one, so that an error names all of them..."""
_MAX_SETTLE_S: Final = 0.5
"""... and how long at most: whoever waits wants to know."""
_WARN_S: Final = 10.0
_CLOSE_S: Final = 5.0
_MAX_NAMED: Final = 64
"""In larger groups only the coordinator finds out who is missing: all looking for all would drown the store."""


class StoreRounds:
    """The rounds of one rank. Keys of round n: `n/a` arrivals, `n/v` verdict, `n/o` and `n/e` answers, `n/f` failures.

    The verdict is set once, by whoever is first: by the coordinator when it has answered, by anybody else for a
    failure. So it is one for all, whatever they saw of each other. A rank deletes what it has written for a round
    when a later one has succeeded, for then all have arrived there, and nobody reads the earlier one any more.
    """

    def __init__(
        self, line: StoreThread, *, rank: int, size: int, coordinator: int, seat: CallId, timeout_s: float
    ) -> None:
        """Join the rounds of one meeting, at a seat that nobody else has."""
        self._line = line
        self._rank = rank
        self._size = size
        self._coordinator = coordinator
        self._timeout_s = timeout_s
        self._pulse = Pulse(timeout_s=timeout_s)
        self._max_delay_s = min(0.1, 0.01 + 0.0001 * size)
        self._seat = seat
        self._prefix = seat.prefix
        self._number = 0
        self._call = RoundCall("", "")
        self._part = b""
        self._own_message = b""
        # By round, what this rank has written and nobody has deleted yet.
        self._written: dict[int, list[str]] = {}
        self.beat("")
        self._agree()

    def _agree(self) -> None:
        # If nobody took itself for the coordinator, all would wait, and beat, for ever.
        wanted = str(self._coordinator)
        agreed = self._line.call(lambda store: store.compare_set(self._prefix + _AGREED, "", wanted)).decode()
        if agreed != wanted:
            self.close()
            raise ValueError(
                f"rank {self._rank} names rank {wanted} as coordinator, and others rank {agreed}; agree on one"
            )

    def arrive(self, call: RoundCall, message: Sequence[Frame]) -> None:
        """Tell that this rank takes part, and what it brings."""
        self._call = call
        head = b"".join(wire.encode((call.kind, call.step)))
        pieces = [len(head).to_bytes(_HEAD_BYTES, "little"), head, *message]
        self._write(self._key("a", self._rank), pieces)
        self.beat(call.step)

    def send(self, rank: int, message: Sequence[Frame]) -> None:
        """Leave a message for one rank, to be received once this round is answered."""
        if rank == self._rank:
            self._own_message = b"".join(message)
        else:
            self._write(self._key("x", self._rank, rank), message)

    def collect(self) -> list[bytes]:
        """Wait for all and return what they bring; fail if they do not take part in the same."""
        keys = [self._key("a", rank) for rank in range(self._size)]
        self._wait(lambda store: store.check(keys), lambda: self._find_missing(range(self._size)))
        calls, messages = [], []
        for key in keys:
            data, _ = self._line.call(partial(read_message, key=key))
            start = _HEAD_BYTES + int.from_bytes(data[:_HEAD_BYTES], "little")
            calls.append(RoundCall(*wire.decode(data[_HEAD_BYTES:start])))
            messages.append(data[start:])
            self.beat(self._call.step)
        astray = [rank for rank, call in enumerate(calls) if call != self._call]
        if astray:
            self._declare([self._describe_astray(rank, calls[rank]) for rank in astray])
            raise RoundFailed(self._read_failures())
        return messages

    def answer(self, answer: Answer) -> None:
        """Give the verdict that the round has succeeded, and what it brings; unless somebody has given it up."""
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
        """Wait for the verdict and return this rank's part of the answer."""
        if self._rank == self._coordinator:
            return self._part
        # Beside the coordinator each looks after one other: somebody notices a death while the coordinator is busy.
        watched = {self._coordinator, (self._rank + 1) % self._size} - {self._rank}
        verdict = self._wait(lambda store: False, lambda: sorted(watched))
        self._sweep()
        if verdict == _OK_EACH:
            return self._take(self._key("e", self._rank))
        key = self._key("o")
        return self._line.call(lambda store: read_message(store, key)[0]) if verdict == _OK_ALL else b""

    def receive(self, ranks: Sequence[int]) -> list[bytes]:
        """Return what these ranks have left for this one."""
        return [
            self._own_message if rank == self._rank else self._take(self._key("x", rank, self._rank)) for rank in ranks
        ]

    def finish(self) -> None:
        """End the round under way on this rank."""
        self._number += 1
        self._part = self._own_message = b""

    def fail(self, failure: RankFailure) -> list[RankFailure]:
        """End the round under way by a failure, or the next one if this has just succeeded; return all failures."""
        while not self._declare([failure]).startswith(_FAILED):
            self.finish()
        failures = {one.rank: one for one in self._read_failures()}
        self.finish()
        return list({**failures, failure.rank: failure}.values())

    def find_failures(self) -> list[RankFailure]:
        """Return the failures that have ended the round under way, or the next one; empty while it goes on."""
        verdict = self._line.call(self._peek)
        return self._read_failures() if verdict is not None and verdict.startswith(_FAILED) else []

    def watch_others(self) -> Callable[[], list[RankFailure]]:
        """Return what tells, if called often, who is silent for too long from now on, and ends the round for that."""
        near = {self._coordinator, (self._rank + 1) % self._size}
        watched = sorted((set(range(self._size)) if self._size <= _MAX_NAMED else near) - {self._rank})
        watch = PeerWatch(timeout_s=self._timeout_s)

        def look() -> list[RankFailure]:
            if not watch.is_due() or not (failures := watch.look(self._read_lives(watched))):
                return []
            self._declare(failures)
            return self._read_failures()

        return look

    def beat(self, step: str) -> None:
        """Give a sign of life, if it is time or the step is a new one."""
        due = self._pulse.find_due(step)
        if due is not None:
            self._line.post(lambda store: put(store, self._life_key(self._rank), due))

    def close(self) -> None:
        """Leave, telling so; the last one deletes what is left of all."""
        left = [key for keys in [self._seat.keys, *self._written.values()] for key in keys]
        with suppress(StoreThreadLost):  # then there is nobody to tell and nothing to delete
            self._line.call(lambda store: self._leave(store, left), limit_s=_CLOSE_S)
        self._line.close()

    def _key(self, *parts: object) -> str:
        return self._prefix + "/".join(map(str, (self._number, *parts)))

    def _life_key(self, rank: int) -> str:
        return f"{self._prefix}life/{rank}"

    def _write(self, key: str, pieces: Sequence[Frame]) -> None:
        keys = self._line.call(lambda store: write_message(store, key, pieces))
        self._written.setdefault(self._number, []).extend(keys)

    def _take(self, key: str) -> bytes:
        # Nobody else reads it.
        data, keys = self._line.call(lambda store: read_message(store, key))
        self._line.post(lambda store: delete_keys(store, keys))
        return data

    def _sweep(self) -> None:
        old = [key for number in list(self._written) if number < self._number for key in self._written.pop(number)]
        if old:
            self._line.post(lambda store: delete_keys(store, old))

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

    def _peek(self, store: Store) -> str | None:
        key = self._key("v")
        return store.get(key).decode() if store.check([key]) else None

    def _set_verdict(self, wanted: str) -> str:
        key = self._key("v")
        verdict = self._line.call(lambda store: store.compare_set(key, "", wanted)).decode()
        if verdict == wanted:
            self._written.setdefault(self._number, []).append(key)
        return verdict

    def _declare(self, failures: Sequence[RankFailure]) -> str:
        counter = self._key("f")
        number = self._line.call(lambda store: store.add(counter, 1))
        if number == 1:
            self._written.setdefault(self._number, []).append(counter)
        self._write(f"{counter}/{number}", encode_failures(failures))
        # With the rank, so that one of them knows that the key is its own.
        return self._set_verdict(f"{_FAILED} {self._rank}")

    def _read_failures(self) -> list[RankFailure]:
        counter = self._key("f")
        began = changed = time.monotonic()
        count, now = 0, began
        while count < self._size and now - changed < _SETTLE_S and now - began < _MAX_SETTLE_S:
            found = self._line.call(lambda store: store.add(counter, 0))
            count, changed = found, now if found != count else changed
            time.sleep(_SETTLE_S / 10)
            now = time.monotonic()
        keys = [f"{counter}/{number}" for number in range(1, min(count, MAX_TOLD) + 1)]
        messages = self._line.call(lambda store: [read_message(store, key)[0] for key in keys if store.check([key])])
        return [failure for message in messages for failure in decode_failures(message)]

    def _describe_astray(self, rank: int, call: RoundCall) -> RankFailure:
        text = f"called {call} where rank {self._rank} called {self._call}; all ranks must make the same calls"
        return RankFailure(rank, ASTRAY, text)

    # Waiting

    def _wait(self, is_ready: Callable[[Store], bool], find_awaited: Callable[[], Sequence[int]]) -> str:
        """Wait for a verdict, or until it is ready, which is ""; raise RoundFailed if that is the verdict."""
        watch = PeerWatch(timeout_s=self._timeout_s)
        warned = False
        delay_s = _FIRST_DELAY_S
        while (found := self._line.call(lambda store: self._look(store, is_ready))) is None:
            self.beat(self._call.step)
            if watch.is_due():
                failures = self._find_astray() or watch.look(self._read_lives(find_awaited()))
                # Looked at again: who has left may have taken part before.
                if failures and self._line.call(lambda store: self._look(store, is_ready)) is None:
                    self._declare(failures)
                elif watch.find_waited() > _WARN_S and not warned:
                    warned = True
                    self._warn(watch.find_waited())
            time.sleep(delay_s)
            delay_s = min(delay_s * 1.3, self._max_delay_s)
        if found.startswith(_FAILED):
            raise RoundFailed(self._read_failures())
        return found

    def _look(self, store: Store, is_ready: Callable[[Store], bool]) -> str | None:
        verdict = self._peek(store)
        return "" if verdict is None and is_ready(store) else verdict

    def _read_lives(self, ranks: Sequence[int]) -> dict[int, bytes | None]:
        keys = {rank: self._life_key(rank) for rank in ranks}
        return self._line.call(
            lambda store: {rank: store.get(key) if store.check([key]) else None for rank, key in keys.items()}
        )

    def _find_missing(self, ranks: Sequence[int]) -> list[int]:
        keys = {rank: self._key("a", rank) for rank in ranks}
        return self._line.call(lambda store: [rank for rank, key in keys.items() if not store.check([key])])

    def _find_astray(self) -> list[RankFailure]:
        # Whoever has come to the first round is in the right place. Beside a thread others may still come.
        if self._number or threading.current_thread() is not threading.main_thread():
            return []
        missing = self._find_all_missing()
        return self._line.call(lambda store: read_mismatches(store, self._seat, missing, rank=self._rank))

    def _find_all_missing(self) -> list[int]:
        looks = self._rank == self._coordinator or self._size <= _MAX_NAMED
        return self._find_missing(range(self._size) if looks else [self._coordinator])

    def _warn(self, waited_s: float) -> None:
        missing = self._find_all_missing()
        who = f"{name_ranks(missing)} to arrive" if missing else f"rank {self._coordinator}, the coordinator"
        _log.warning("rank %d of %d has waited %.0f s at %s for %s", self._rank, self._size, waited_s, self._call, who)
