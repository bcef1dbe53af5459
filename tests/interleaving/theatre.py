"""Runs schedules of a scene on fresh copies of one store, and judges them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from holdfast.errors import HoldfastError
from holdfast.objects.memory import MemoryStore
from holdfast.repo.format import layout
from tests.interleaving.locked_store import LockedMemoryStore
from tests.interleaving.scenes import Part, Scene
from tests.interleaving.schedule import Bounds, Explorer, Run, Schedule, Stage
from tests.interleaving.verdict import Held, iter_wrong, read_held


class Theatre:
    """One store as it is at first; `store` is the copy that the last run has changed."""

    def __init__(self, base: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
        self.store = base
        self._base = base
        self._patch = monkeypatch
        self._before: Held = read_held(base)

    def play(self, parts: Sequence[Part]) -> Callable[[Schedule], Run]:
        """Return what performs a schedule of `parts` on a fresh copy, with ids that are the same each time."""

        def perform(schedule: Schedule) -> Run:
            self.store = self._base.clone()
            stage = Stage([part.act for part in parts], self.store)
            with self._patch.context() as patch:
                patch.setattr(layout, "os", SimpleNamespace(urandom=stage.urandom))
                return stage.run(schedule)

        return perform

    def judge(self, parts: Sequence[Part], run: Run) -> list[str]:
        """Return all that is wrong after the last run."""
        wrong = []
        try:
            for found in iter_wrong(parts, run, self._before, self.store):
                wrong.append(found)
        except HoldfastError as error:
            wrong.append(f"what is left cannot be judged: {error!r}")
        return wrong


@dataclass(slots=True)
class Report:
    """What an exploration found."""

    runs: int = 0
    unlocked_runs: int = 0
    """Runs in which somebody went on without the lock; needs a LockedMemoryStore."""
    broken: list[str] = field(default_factory=list)
    """What is wrong, with the run that shows it."""


def explore(
    scene: Scene, bounds: Bounds, monkeypatch: pytest.MonkeyPatch, *, base: MemoryStore | None = None
) -> Report:
    """Explore a scene, up to the first run after which something is wrong; `base` is an empty store to begin with."""
    base = MemoryStore() if base is None else base
    scene.prepare(base)
    theatre = Theatre(base, monkeypatch)
    report = Report()
    for run in Explorer(len(scene.parts), bounds).explore(theatre.play(scene.parts)):
        report.runs += 1
        report.unlocked_runs += isinstance(theatre.store, LockedMemoryStore) and theatre.store.refused > 0
        wrong = theatre.judge(scene.parts, run)
        if wrong:
            report.broken = [*wrong, run.show()]
            break
    return report
