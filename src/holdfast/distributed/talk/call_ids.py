"""Call ids, which match the collective calls of ranks, and signs of life, by which ranks notice a silent one."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from torch.distributed.distributed_c10d import Store

from holdfast.digest import hash_bytes
from holdfast.distributed.talk.failures import GONE, LEFT, MISMATCH
from holdfast.errors import RankFailure

MonotonicClock = Callable[[], float]

BEAT_S: Final = 5.0
"""Shortest time between two beats of a rank within one step; a quarter of the timeout if that is shorter."""
_CLOSED: Final = b"closed"


class Pulse:
    """Decides when this rank writes its next beat. Any thread may use it."""

    def __init__(self, *, timeout_s: float, clock: MonotonicClock = time.monotonic) -> None:
        self._every_s = min(BEAT_S, timeout_s / 4)
        self._clock = clock
        self._lock = threading.Lock()
        self._count = 0
        self._last = -self._every_s
        self._step = ""

    def find_due(self, step: str) -> bytes | None:
        """Return the beat to write if one is due or the step is new, else None. No two beats are equal."""
        now = self._clock()
        with self._lock:
            if self._count and step == self._step and now - self._last < self._every_s:
                return None
            self._last = now
            self._step = step
            self._count += 1
            return f"{self._count} {step}".encode("utf-8", "replace")


def format_closed() -> bytes:
    """Return the last beat of a rank, which says that it has left."""
    return _CLOSED


def is_closed(beat: bytes) -> bool:
    """Return whether a beat says that its rank has left."""
    return beat == _CLOSED


class PeerWatch:
    """The beats of other ranks, as seen by a rank that waits. Silence counts from the start of the wait."""

    def __init__(self, *, timeout_s: float, clock: MonotonicClock = time.monotonic) -> None:
        self._timeout_s = timeout_s
        self._clock = clock
        self.interval_s = min(1.0, timeout_s / 8)
        """How long to wait between two reads of the beats."""
        self._last = self._began = clock()
        self._seen: dict[int, bytes | None] = {}
        self._silent_s: dict[int, float] = {}

    @property
    def waited_s(self) -> float:
        """How long this rank has waited."""
        return self._clock() - self._began

    def is_due(self) -> bool:
        """Return whether it is time to read the beats again."""
        return self._clock() - self._last >= self.interval_s

    def observe(self, beats: Mapping[int, bytes | None]) -> list[RankFailure]:
        """Note the beats of the ranks that are waited for; return those that have left or were silent for too long."""
        now = self._clock()
        # If this process was suspended, the others may have been, too. So one call adds only a short silence.
        passed_s = min(now - self._last, 2 * self.interval_s)
        self._last = now
        for rank, beat in beats.items():
            is_news = rank not in self._seen or self._seen[rank] != beat
            self._silent_s[rank] = 0.0 if is_news else self._silent_s[rank] + passed_s
            self._seen[rank] = beat
        return list(self._find_failures(beats))

    def _find_failures(self, ranks: Iterable[int]) -> Iterable[RankFailure]:
        for rank in ranks:
            beat = self._seen[rank]
            if beat is not None and is_closed(beat):
                text = "left without joining this step; check that all ranks make the same calls"
                yield RankFailure(rank, LEFT, text)
            elif self._silent_s[rank] >= self._timeout_s:
                yield RankFailure(rank, GONE, self._describe_silence(beat))

    def _describe_silence(self, beat: bytes | None) -> str:
        if beat is None:
            last = "it has not started; check that all ranks make this call"
        else:
            step = beat.decode("utf-8", "replace").partition(" ")[2]
            where = f"at step {step!r}" if step else "before its first step"
            last = f"it was last seen {where}; check whether its process is suspended or has died"
        return f"no sign of life for {self._timeout_s:g} s (timeout_s); {last}"


class Pace:
    """Limits how often something is done. Any thread may use it."""

    def __init__(self, *, every_s: float) -> None:
        self._every_s = every_s
        self._next = 0.0
        self._lock = threading.Lock()

    def is_due(self) -> bool:
        """Return whether `every_s` have passed since this last returned True."""
        now = time.monotonic()
        with self._lock:
            if now < self._next:
                return False
            self._next = now + self._every_s
            return True


_MAX_TOPIC: Final = 200
_OPEN: Final = "open"


class CallId(NamedTuple):
    """Identifies one collective, as joined by this rank."""

    base: str
    """Key prefix shared by all collectives of the same name."""
    number: int
    topic: str | None = None
    keys: tuple[str, ...] = ()
    """Keys that this rank wrote to join; they are deleted once all ranks have left."""
    is_main: bool = False
    """Whether the main thread of this rank joined."""

    @property
    def prefix(self) -> str:
        """Key prefix of this collective."""
        return _make_prefix(self.base, self.number)


class _OpenCall(NamedTuple):
    """An item of the list: a collective that not all ranks have joined yet."""

    number: int
    topic: str
    opener: int
    is_main: bool
    """Whether the main thread of the opener added it."""


def number_call(store: Store, base: str, *, rank: int) -> CallId:
    """Return the id of this rank's next call: the n-th call of one rank belongs to the n-th call of every other."""
    return CallId(base, store.add(f"{base}joined/{rank}", 1))


def join_collective(store: Store, base: str, topic: str, *, rank: int, size: int, is_main: bool) -> CallId:
    """Join the first listed collective on a topic that this rank has not joined; list a new one if there is none."""
    shown = _shorten(topic)
    number = 0
    text = _read_list(store, base)
    while True:
        for call in _decode(text):
            keys = _join(store, base, call.number, rank, size) if call.topic == shown else ()
            if keys:
                return CallId(base, call.number, shown, keys, is_main)
        number = number or store.add(f"{base}next", 1)
        wanted = _encode([*_decode(text), _OpenCall(number, shown, rank, is_main)])
        # Another rank may have changed the list first. compare_set returns the current list either way.
        text = store.compare_set(base + _OPEN, text, wanted).decode()
        if text == wanted:
            number = 0  # the number is used up: another thread of this rank may join the new collective first


def read_mismatches(store: Store, call_id: CallId, missing: Sequence[int], *, rank: int) -> list[RankFailure]:
    """Return a failure for each missing rank if all of them wait in other collectives; otherwise return nothing.

    Only main threads are compared. If two main threads wait in different collectives, neither can reach the other's
    call before its own ends. A call of any other thread may still be joined by another thread.
    """
    if call_id.topic is None or not call_id.is_main or not missing:
        return []
    found = {other: call for other in missing for call in _iter_other_calls(store, call_id, other, rank)}
    if len(found) < len(missing):
        return []
    return [describe_mismatch(other, found[other].topic, rank, call_id.topic) for other in missing]


def withdraw_mismatched(store: Store, call_id: CallId, missing: Sequence[int], *, rank: int) -> dict[int, CallId]:
    """Remove this collective, and those in which missing ranks wait, from the list; return the latter, by rank.

    None of them can succeed. The next call of a rank on one of these topics is a new one, and must not join them.
    """
    found = {other: call for other in missing for call in _iter_other_calls(store, call_id, other, rank)}
    for number in {call_id.number, *(call.number for call in found.values())}:
        _remove_listed(store, call_id.base, number)
    return {other: CallId(call_id.base, call.number, call.topic) for other, call in found.items()}


def describe_mismatch(failed: int, topic: str | None, rank: int, own_topic: str | None) -> RankFailure:
    """Return the failure of a rank that waits in another collective than `rank`."""
    text = f"is in {topic!r} while rank {rank} is in {own_topic!r}; all ranks must pass the same name"
    return RankFailure(failed, MISMATCH, text)


def _shorten(topic: str) -> str:
    """Return a topic of bounded length, as it is listed, compared and shown."""
    if len(topic) <= _MAX_TOPIC:
        return topic
    return f"{topic[:_MAX_TOPIC]}... {hash_bytes(topic.encode('utf-8', 'surrogatepass')).hex()}"


def _iter_other_calls(store: Store, call_id: CallId, other: int, rank: int) -> Iterator[_OpenCall]:
    """Yield the collectives that the main thread of rank `other` waits in and that this rank has not joined."""
    for call in _decode(_read_list(store, call_id.base)):
        prefix = _make_prefix(call_id.base, call.number)
        life = f"{prefix}life/{other}"
        is_inside = store.check([f"{prefix}took/{other}", life]) and not is_closed(store.get(life))
        if call.is_main and is_inside and not store.check([f"{prefix}took/{rank}"]):
            yield call


def _join(store: Store, base: str, number: int, rank: int, size: int) -> tuple[str, ...]:
    """Join a collective; return the keys written for that, or none if this rank has joined it before."""
    own_key, count_key = (_make_prefix(base, number) + name for name in (f"took/{rank}", "taken"))
    if store.add(own_key, 1) > 1:
        return ()
    # The collective is no longer listed: all ranks have joined it, another thread of this rank among them, and its
    # keys were deleted. So `add` has created the key again.
    if all(call.number != number for call in _decode(_read_list(store, base))):
        store.delete_key(own_key)
        return ()
    if store.add(count_key, 1) < size:
        return (own_key,)
    _remove_listed(store, base, number)
    return (own_key, count_key)


def _remove_listed(store: Store, base: str, number: int) -> None:
    """Remove a collective that all ranks have joined from the list."""
    text, wanted = _read_list(store, base), ""
    while text != wanted:
        wanted = _encode([call for call in _decode(text) if call.number != number])
        text = store.compare_set(base + _OPEN, text, wanted).decode()


def _make_prefix(base: str, number: int) -> str:
    return f"{base}{number}/"


def _read_list(store: Store, base: str) -> str:
    key = base + _OPEN
    return store.get(key).decode() if store.check([key]) else ""


def _encode(calls: Sequence[_OpenCall]) -> str:
    return json.dumps(calls)


def _decode(text: str) -> list[_OpenCall]:
    return [_OpenCall(*fields) for fields in json.loads(text or "[]")]
