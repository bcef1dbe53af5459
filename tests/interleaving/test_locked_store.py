"""Interleavings on a store with a lock: a collector stops while it holds the lock, and others go on without it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

import pytest

from holdfast.repo.names import leases
from holdfast.repo.names.roots import LeaseView
from holdfast.repo.upkeep import collect as collect_module
from tests.interleaving.locked_store import LockedMemoryStore
from tests.interleaving.scenes import CROWDS, SCENES, Scene
from tests.interleaving.schedule import Bounds, Run, Schedule
from tests.interleaving.theatre import Theatre, explore
from tests.kit.thinning import thin

# In each of these the collector is the second actor.
PAIRS: Final = {scene.title: scene for scene in SCENES if scene.title.endswith("collector")}
CROWD_BOUNDS: Final = Bounds((1, 1, 60, 20_000))


class LockedTheatre:
    """A scene on a store with a lock, and the orders in which its collector stops while it holds the lock alone."""

    def __init__(self, scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
        base = LockedMemoryStore()
        scene.prepare(base)
        self._theatre = Theatre(base, monkeypatch)
        self._parts = scene.parts
        self._perform = self._theatre.play(scene.parts)

    def iter_runs(self, *, every: int) -> Iterator[Run]:
        """Yield the runs in which the writer goes to its end meanwhile, or stops after n steps until the other ends.

        Of the latter, one in `every` is run.
        """
        alone = Schedule(first=1)
        for number in self._list_steps(self._perform(alone), actor=1):
            run = self._perform(alone.then(number, 0))
            if not self._was_refused():
                continue
            yield run
            # Steps are numbered from the collector's stop on: the first of the writer has the same number.
            for other in self._list_steps(run, actor=0)[1::every]:
                run = self._perform(alone.then(number, 0).then(other, 1))
                if self._was_refused():
                    yield run

    def judge(self, run: Run) -> list[str]:
        """Return what is wrong after the last run."""
        return self._theatre.judge(self._parts, run)

    def _was_refused(self) -> bool:
        assert isinstance(self._theatre.store, LockedMemoryStore)
        return self._theatre.store.refused > 0

    @staticmethod
    def _list_steps(run: Run, *, actor: int) -> list[int]:
        return [number for number, step in enumerate(run.steps) if step.actor == actor]


def find_broken(scene: Scene, monkeypatch: pytest.MonkeyPatch, *, every: int = 1) -> tuple[int, list[str]]:
    """Return how many runs were looked at, and what is wrong after the first that breaks a promise."""
    theatre = LockedTheatre(scene, monkeypatch)
    count = 0
    for run in theatre.iter_runs(every=every):
        count += 1
        wrong = theatre.judge(run)
        if wrong:
            return count, [*wrong, run.show()]
    return count, []


@pytest.mark.parametrize("title", thin(PAIRS, 2))
def test_who_goes_on_without_the_lock_of_a_stopped_collector_keeps_every_promise(
    title: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    count, broken = find_broken(PAIRS[title], monkeypatch, every=6)
    assert not broken, "\n".join(broken)
    assert count > 10


@pytest.mark.slow
@pytest.mark.parametrize("title", PAIRS)
def test_who_goes_on_without_the_lock_and_stops_anywhere_keeps_every_promise(
    title: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    count, broken = find_broken(PAIRS[title], monkeypatch)
    assert not broken, "\n".join(broken)
    assert count > 40


def test_a_lease_that_does_not_tell_that_its_save_has_no_lock_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "_NO_LOCK", "")
    _, broken = find_broken(PAIRS["save, patient collector"], monkeypatch)
    assert broken


def test_a_collector_that_takes_the_lock_for_proof_enough_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def find_nobody(_leases: Mapping[str, LeaseView]) -> list[LeaseView]:
        return []

    monkeypatch.setattr(collect_module, "_find_unlocked", find_nobody)
    _, broken = find_broken(PAIRS["save, patient collector"], monkeypatch)
    assert broken


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("scene", CROWDS, ids=str)
def test_three_on_a_store_with_a_lock_keep_every_promise(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    report = explore(scene, CROWD_BOUNDS, monkeypatch, base=LockedMemoryStore())
    assert not report.broken, "\n".join(report.broken)
    assert report.unlocked_runs, f"of {report.runs}"
