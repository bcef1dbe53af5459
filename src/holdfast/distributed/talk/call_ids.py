"""Assigns call ids, which match the collective calls of one rank with those of the others.

The n-th call of a rank on a topic belongs to the n-th call of every other rank on that topic. Several threads of a
process may call at the same time, in a different order on each rank, so counting all calls would mix up topics.
Instead, the collectives that not all ranks have joined yet are listed under one key of the group's store. A rank joins
the first listed collective on its topic that it has not joined. There is one list, however many topics there are.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from torch.distributed.distributed_c10d import Store

from holdfast.digest import hash_bytes
from holdfast.distributed.talk.failures import MISMATCH
from holdfast.distributed.talk.liveness import is_closed
from holdfast.errors import RankFailure

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
