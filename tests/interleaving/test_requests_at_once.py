"""Writers and collectors on a store that is asked for many things at once: its answers may come in any order."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Final, Generic, TypeVar

import pytest

from holdfast.objects import together
from holdfast.objects.thread_pool import Task, ThreadPool
from tests.interleaving.scenes import CROWDS, SCENES, Scene
from tests.interleaving.schedule import Bounds
from tests.interleaving.theatre import explore
from tests.kit.thinning import thin
from tests.kit.waiting_store import WaitingStore

Result = TypeVar("Result")

# One switch anywhere, or one death anywhere; of three actors, one in three.
PAIR_BOUNDS: Final = Bounds((1, 4))
DEEP_PAIR_BOUNDS: Final = Bounds((1, 2))
CROWD_BOUNDS: Final = Bounds((1, 9))


class AskedAtOnce(WaitingStore):
    """A store whose copies want many requests at once, too."""

    def clone(self, *, read_only: bool = False) -> AskedAtOnce:
        copy = AskedAtOnce(clock=self._clock, read_only=read_only)
        copy._objects = dict(self._objects)
        copy._last_version = self._last_version
        return copy


class LatePool:
    """Runs what it was given when a first result is taken: in the caller's thread, and in another order.

    A request is one step of a store, so requests that overlap are like requests one after another in some order.
    """

    order: Callable[[list[LateTask[object]]], list[LateTask[object]]]

    def __init__(self, name: str, size: int) -> None:
        self.waiting: list[LateTask[object]] = []
        self._begun = ThreadPool(name, size)

    def submit(self, work: Callable[[], object]) -> Task[object]:
        """Run work that begins early on a thread."""
        return self._begun.submit(work)

    def enqueue(self, task: LateTask[object]) -> None:
        self.waiting.append(task)

    def run_all(self) -> None:
        tasks, self.waiting = self.waiting, []
        for task in type(self).order(tasks):
            task.run()

    def shutdown(self) -> None:
        self._begun.shutdown()
        assert not self.waiting


class LateTask(Generic[Result]):
    """One request of a LatePool."""

    def __init__(self, pool: LatePool, work: Callable[[], Result]) -> None:
        self._pool = pool
        self._work = work
        self._results: list[Result] = []
        self._errors: list[BaseException] = []

    def run(self) -> None:
        try:
            self._results.append(self._work())
        except Exception as error:  # noqa: BLE001  # the caller takes it
            self._errors.append(error)

    def result(self) -> Result:
        if not (self._results or self._errors):
            self._pool.run_all()
        for error in self._errors:
            raise error
        return self._results[0]

    def abandon(self) -> None:
        if self in self._pool.waiting:
            self._pool.waiting.remove(self)  # type: ignore[arg-type]  # a task of any result


def _reverse(tasks: list[LateTask[object]]) -> list[LateTask[object]]:
    return tasks[::-1]


def _shuffle(tasks: list[LateTask[object]]) -> list[LateTask[object]]:
    return random.Random(len(tasks)).sample(tasks, len(tasks))


@pytest.fixture(
    params=[pytest.param(_reverse, id="last first"), pytest.param(_shuffle, id="shuffled", marks=pytest.mark.slow)]
)
def late(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let all requests that are in flight together be answered in another order than they were made."""
    monkeypatch.setattr(together, "ThreadPool", LatePool)
    monkeypatch.setattr(together, "Task", LateTask)
    monkeypatch.setattr(LatePool, "order", staticmethod(request.param), raising=False)


@pytest.mark.usefixtures("late")
@pytest.mark.parametrize("scene", thin([scene for scene in SCENES if "collector" in scene.title], 2), ids=str)
@pytest.mark.parametrize(
    "bounds", [PAIR_BOUNDS, pytest.param(DEEP_PAIR_BOUNDS, marks=pytest.mark.slow)], ids=["some", "many"]
)
def test_two_on_a_store_that_answers_in_any_order_keep_every_promise(
    scene: Scene, bounds: Bounds, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = explore(scene, bounds, monkeypatch, base=AskedAtOnce())
    assert not report.broken, "\n".join(report.broken)
    assert report.runs > 10


@pytest.mark.usefixtures("late")
@pytest.mark.parametrize("scene", CROWDS[:1], ids=str)
def test_three_on_a_store_that_answers_in_any_order_keep_every_promise(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = explore(scene, CROWD_BOUNDS, monkeypatch, base=AskedAtOnce())
    assert not report.broken, "\n".join(report.broken)
    assert report.runs > 20
