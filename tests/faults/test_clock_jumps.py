"""Clocks of writers and collectors that jump by hours: nothing in use is deleted, and no process waits for hours."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import count
from typing import Final

import pytest

from holdfast.errors import LeaseLost
from holdfast.objects.memory import MemoryStore, VirtualClock
from holdfast.objects.protocol import ObjectStore
from holdfast.repo.format.layout import lease_stem
from holdfast.repo.handle.repository import init_repository
from holdfast.repo.names import leases
from holdfast.repo.names.generations import list_generations
from holdfast.repo.names.leases import RENEW_S, Lease
from holdfast.repo.names.snapshots import delete_snapshot
from holdfast.repo.upkeep.collect import Rules, collect
from tests.faults.hooked_store import HookedStore
from tests.faults.scenario import check_store, holds, random_bytes, read_state, save_content

HOUR_S: Final = 3600.0
JUMPS_S: Final = {"forwards": 7 * HOUR_S, "backwards": -7 * HOUR_S, "a year": 365 * 24 * HOUR_S}
FIRST: Final = {"packed": random_bytes("packed", 2_000), "own": random_bytes("first", 900)}
SECOND: Final = {"shared": random_bytes("shared", 2_500), "own": random_bytes("second", 1_500)}
THIRD: Final = {"own": random_bytes("third", 1_200)}
NOW: Final = Rules(min_age_s=0.0, wait_s=0.0)


class OwnClock(HookedStore):
    """The same store, seen by a process whose clock is off by some seconds; files keep the store's own times."""

    def __init__(self, inner: ObjectStore, **hooks: Callable[[str, str], None]) -> None:
        super().__init__(inner, **hooks)
        self.off_s = 0.0

    def clock(self) -> float:
        return self.inner.clock() + self.off_s


def make_store() -> tuple[MemoryStore, VirtualClock]:
    """Return a store that holds a snapshot, and files that nothing needs any more."""
    clock = VirtualClock()
    store = MemoryStore(clock=clock)
    init_repository(store)
    save_content(store, "kept", FIRST)
    save_content(store, "dead", SECOND)
    delete_snapshot(store, "dead")
    clock.advance(2 * HOUR_S)
    return store, clock


@pytest.mark.parametrize("step", [9, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("whose", ["the writer's", "the collector's", "both"])
@pytest.mark.parametrize("jump_s", JUMPS_S.values(), ids=JUMPS_S)
def test_a_jump_at_any_moment_of_a_save_beside_a_collector_deletes_nothing_in_use(
    whose: str, jump_s: float, step: int
) -> None:
    """At each operation of a save in turn, a clock jumps and a collector runs; the save reuses what is dead."""
    outcomes = set()
    for at in count(1 + int(abs(jump_s) + len(whose)) % step, step):
        store, _ = make_store()
        numbers = iter(range(1, 1 << 20))
        collector = OwnClock(store)

        def strike(_name: str, _key: str) -> None:
            if next(numbers) == at:  # noqa: B023 - called within this round
                writer.off_s = jump_s if whose != "the collector's" else 0.0  # noqa: B023
                collector.off_s = jump_s if whose != "the writer's" else 0.0  # noqa: B023
                collect(collector, NOW)  # noqa: B023

        writer = OwnClock(store, before=strike)
        outcomes.add(save_and_judge(writer, store))
        collect(collector, NOW)
        judge(store)
        if next(numbers) < at:
            break
    assert "saved" in outcomes
    assert outcomes <= {"saved", "LeaseLost"}


def save_and_judge(writer: ObjectStore, store: ObjectStore) -> str:
    """Save what shares bytes with what is dead; return how it ended, having seen that this is true."""
    try:
        save_content(writer, "new", {**SECOND, **THIRD})
    except LeaseLost:
        return "LeaseLost" if "new" not in read_state(store).names else "LeaseLost, and there all the same"
    return "saved" if holds(read_state(store), "new", {**SECOND, **THIRD}) else "wrong"


def judge(store: ObjectStore) -> None:
    state = read_state(store)
    assert holds(state, "kept", FIRST)
    if "new" in state.names:
        assert holds(state, "new", {**SECOND, **THIRD})
    assert [finding for finding in check_store(store) if finding.severity == "error"] == []


def count_generations(store: ObjectStore, lease: Lease) -> int:
    return len(list(list_generations(store, lease_stem(lease.lease_id))))


def test_a_lease_is_renewed_though_the_clock_of_its_writer_has_gone_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it would show nothing for hours, and a collector on another host would fence it."""
    writer = OwnClock(MemoryStore())
    lease = Lease(writer, purpose="save")
    shown = count_generations(writer, lease)

    writer.off_s = -7 * HOUR_S
    lease.keep_alive()
    assert count_generations(writer, lease) == shown + 1
    lease.keep_alive()
    assert count_generations(writer, lease) == shown + 1

    # The clock stands still, as if it were set back again and again; the time that passes is another.
    passed_s = time.monotonic() + RENEW_S
    monkeypatch.setattr(leases, "monotonic", lambda: passed_s)
    lease.keep_alive()
    assert count_generations(writer, lease) == shown + 2


@pytest.mark.parametrize("jump_s", [-7 * HOUR_S, -365 * 24 * HOUR_S])
def test_a_collector_whose_clock_goes_back_while_it_waits_does_not_wait_for_hours(jump_s: float) -> None:
    store, clock = make_store()
    held = Lease(store, purpose="a save under way")
    collector = OwnClock(store)
    naps: list[float] = []

    def nap(seconds: float) -> None:
        naps.append(seconds)
        clock.advance(seconds)
        collector.off_s = jump_s
        assert sum(naps) < 2 * 60.0, "it waits for hours"

    collected = collect(collector, Rules(min_age_s=0.0, wait_s=60.0, sleep=nap))

    assert collected.pending_marks == 1
    assert sum(naps) == pytest.approx(60.0, abs=1.0)
    held.release()
    assert collect(collector, NOW).deleted > 0
    judge(store)


def test_grace_of_a_mark_from_the_future_is_slept_and_not_waited_for_by_the_clock() -> None:
    """On a network there is always a grace time; a clock that was set back must not make it years."""
    store, clock = make_store()
    ahead = OwnClock(store)
    # The mark is made by a collector, and stamped by a store, that are a year ahead.
    clock.advance(365 * 24 * HOUR_S)
    assert collect(ahead, Rules(min_age_s=0.0, grace_s=120.0)).pending_marks == 1
    behind = OwnClock(store)
    behind.off_s = -365 * 24 * HOUR_S
    assert collect(behind, Rules(min_age_s=0.0, grace_s=120.0)).waiting_for == ["120 s of grace"]
    naps: list[float] = []

    collected = collect(behind, Rules(min_age_s=0.0, grace_s=120.0, wait_s=600.0, sleep=naps.append))

    assert collected.deleted > 0
    assert sum(naps) == pytest.approx(120.0, abs=1.0)
    judge(store)


@pytest.mark.parametrize("jump_s", [7 * HOUR_S, 365 * 24 * HOUR_S])
def test_a_collector_that_is_hours_ahead_fences_a_live_save_which_then_fails_and_can_be_repeated(jump_s: float) -> None:
    store, _ = make_store()
    collector = OwnClock(store)
    collector.off_s = jump_s
    has_run: list[bool] = []

    def strike(name: str, key: str) -> None:
        if not has_run and name == "commit" and key.startswith("packs/"):
            has_run.append(True)
            collect(collector, NOW)

    with pytest.raises(LeaseLost):
        save_content(HookedStore(store, after=strike), "new", {**SECOND, **THIRD})

    save_content(store, "new", {**SECOND, **THIRD})
    judge(store)
