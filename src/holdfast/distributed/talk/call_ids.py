"""Which calls of the ranks of a group belong together: those on one topic, in the order in which each rank makes them.

Several threads of a process may call at once, in another order on each rank. So calls are not counted but named: the
meetings that not all ranks have joined yet stand in one list in the group's store, and whoever comes takes its seat in
the first one on its topic that it has none in. That list is one key, whatever the number of topics.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from torch.distributed.distributed_c10d import Store

from holdfast.digest import hash_bytes
from holdfast.distributed.talk.failures import ASTRAY
from holdfast.distributed.talk.liveness import is_closed
from holdfast.errors import RankFailure

_MAX_TOPIC: Final = 200
_OPEN: Final = "open"


class CallId(NamedTuple):
    """A rank's place in one meeting."""

    base: str
    """The beginning of the keys of all meetings of its kind."""
    number: int
    topic: str | None = None
    keys: tuple[str, ...] = ()
    """What this rank has written to get it; to be deleted once all have left."""
    is_main: bool = False
    """Taken by the main thread."""

    @property
    def prefix(self) -> str:
        """The beginning of the keys of this meeting."""
        return _find_prefix(self.base, self.number)


class _OpenCall(NamedTuple):
    """One that not all ranks have joined yet, as it stands in the list."""

    number: int
    topic: str
    opener: int
    is_main: bool
    """Opened by the main thread of its opener."""


def number_call(store: Store, base: str, *, rank: int) -> CallId:
    """Take this rank's next seat: its n-th call belongs to the n-th of all others, whatever it is about."""
    return CallId(base, store.add(f"{base}joined/{rank}", 1))


def join_collective(store: Store, base: str, topic: str, *, rank: int, size: int, is_main: bool) -> CallId:
    """Take this rank's seat in the first meeting on a topic that it has none in; open one if there is none."""
    shown = _shorten(topic)
    number = 0
    text = _peek(store, base)
    while True:
        for meeting in _decode(text):
            keys = _take(store, base, meeting.number, rank, size) if meeting.topic == shown else ()
            if keys:
                return CallId(base, meeting.number, shown, keys, is_main)
        number = number or store.add(f"{base}next", 1)
        wanted = _encode([*_decode(text), _OpenCall(number, shown, rank, is_main)])
        # Whether it was this one or another that has opened it: the list that is there now tells.
        text = store.compare_set(base + _OPEN, text, wanted).decode()
        if text == wanted:
            number = 0  # it stands there now, and another thread of this rank may be faster to take its seat


def read_mismatches(store: Store, seat: CallId, missing: Sequence[int], *, rank: int) -> list[RankFailure]:
    """Return what the missing ranks do instead if all of them wait in other meetings, for this one in vain; or nothing.

    Other threads may still come, so this is certain between main threads only: each stands in a call that the other
    does not make before its own ends.
    """
    if seat.topic is None or not seat.is_main or not missing:
        return []
    found = {other: meeting for other in missing for meeting in _iter_elsewhere(store, seat, other, rank)}
    if len(found) < len(missing):
        return []
    text = "is at {!r} where rank {} is at {!r}; all ranks must give the same name"
    return [RankFailure(other, ASTRAY, text.format(found[other].topic, rank, seat.topic)) for other in missing]


def _shorten(topic: str) -> str:
    """Return a topic as it is told and compared."""
    if len(topic) <= _MAX_TOPIC:
        return topic
    return f"{topic[:_MAX_TOPIC]}... {hash_bytes(topic.encode('utf-8', 'surrogatepass')).hex()}"


def _iter_elsewhere(store: Store, seat: CallId, other: int, rank: int) -> Iterator[_OpenCall]:
    """Yield the meetings that another rank is in, while this one has no seat there."""
    for meeting in _decode(_peek(store, seat.base)):
        prefix = _find_prefix(seat.base, meeting.number)
        life = f"{prefix}life/{other}"
        is_there = store.check([f"{prefix}took/{other}", life]) and not is_closed(store.get(life))
        if meeting.is_main and is_there and not store.check([f"{prefix}took/{rank}"]):
            yield meeting


def _take(store: Store, base: str, number: int, rank: int, size: int) -> tuple[str, ...]:
    """Take a seat in a meeting; return the keys written for it, or none if this rank has one there."""
    took, taken = (_find_prefix(base, number) + name for name in (f"took/{rank}", "taken"))
    if store.add(took, 1) > 1:
        return ()
    # Not in the list any more: all ranks had their seats, this one too, and what they wrote was deleted meanwhile.
    if all(meeting.number != number for meeting in _decode(_peek(store, base))):
        store.delete_key(took)
        return ()
    if store.add(taken, 1) < size:
        return (took,)
    _strike_off(store, base, number)
    return (took, taken)


def _strike_off(store: Store, base: str, number: int) -> None:
    """Take a meeting that all have joined from the list."""
    text, wanted = _peek(store, base), ""
    while text != wanted:
        wanted = _encode([meeting for meeting in _decode(text) if meeting.number != number])
        text = store.compare_set(base + _OPEN, text, wanted).decode()


def _find_prefix(base: str, number: int) -> str:
    return f"{base}{number}/"


def _peek(store: Store, base: str) -> str:
    key = base + _OPEN
    return store.get(key).decode() if store.check([key]) else ""


def _encode(meetings: Sequence[_OpenCall]) -> str:
    return json.dumps(meetings)


def _decode(text: str) -> list[_OpenCall]:
    return [_OpenCall(*fields) for fields in json.loads(text or "[]")]
