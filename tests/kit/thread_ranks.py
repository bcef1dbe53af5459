"""Ranks that are threads of one process: an error of one rank ends the step on all."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

from holdfast.distributed.checkpoint.plan import plan_save
from holdfast.errors import RankError, RankFailure
from holdfast.repo.handle.repository import Repository
from holdfast.repo.write.world import GatherStep
from holdfast.repo.write.writer import SaveResult, save
from holdfast.snapshot.save import SaveOptions
from holdfast.trees.registered import Types
from tests.kit.patience import PATIENCE_S

Result = TypeVar("Result")


class _SharedStep:
    """The values and failures of the current step; all ranks wait for each other in it."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.values: list[Any] = [None] * world_size
        self.failures: dict[int, RankFailure] = {}
        self.steps: list[str] = []
        self.outcome: tuple[list[Any], dict[int, RankFailure]] = ([], {})
        self._all_arrived = threading.Barrier(world_size, self._close, timeout=PATIENCE_S)
        self._all_left = threading.Barrier(world_size, timeout=PATIENCE_S)

    def _close(self) -> None:
        """Keep the outcome of a step, once all ranks have arrived in it."""
        self.outcome = list(self.values), self.failures
        self.failures = {}

    def wait(self) -> tuple[list[Any], dict[int, RankFailure]]:
        self._all_arrived.wait()
        outcome = self.outcome
        self._all_left.wait()
        return outcome


class ThreadRanks:
    """One rank among the threads of a process."""

    def __init__(self, shared: _SharedStep, rank: int) -> None:
        self.rank = rank
        self.world_size = shared.world_size
        self.coordinator = 0
        self.is_coordinator = rank == 0
        self._shared = shared
        self.received: list[list[Any]] = []
        """The values that this rank has received in each `all_to_all`."""

    def broadcast(self, step: str, map: Callable[[], Any]) -> Any:
        return self.all_gather(step, map if self.is_coordinator else lambda: None)[0]

    def all_gather(self, step: str, map: Callable[[], Any]) -> list[Any]:
        with self.gathering(step) as gathering:
            gathering.given = map()
        return gathering.values

    @contextmanager
    def gathering(self, step: str) -> Iterator[GatherStep]:
        gathering, shared = GatherStep(), self._shared
        cause = None
        try:
            yield gathering
            shared.values[self.rank] = gathering.given
        except Exception as error:  # noqa: BLE001 - reported to all ranks
            cause = error
            shared.failures[self.rank] = RankFailure(self.rank, type(error).__qualname__, str(error))
        if self.is_coordinator:
            shared.steps.append(step)
        gathering.values, failures = shared.wait()
        if failures:
            raise RankError(f"step {step!r} failed: {failures}", step=step, failures=failures) from cause

    def all_to_all(self, step: str, map: Callable[[], Sequence[Any]]) -> list[Any]:
        values = self.all_gather(step, map)
        self.received.append([each[self.rank] for each in values])
        return self.received[-1]

    def beat(self) -> None:
        pass

    def check_failures(self) -> None:
        pass


def run_threads(world_size: int, act: Callable[[ThreadRanks], Result]) -> list[Result | BaseException]:
    """Run `act` for each rank in a thread; return the result or the error of each."""
    shared = _SharedStep(world_size)

    def run(rank: int) -> Result | BaseException:
        try:
            return act(ThreadRanks(shared, rank))
        except BaseException as error:  # noqa: BLE001 - for the test to look at
            return error

    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(run, range(world_size)))


def save_on_threads(repo: Repository, name: str, trees: Sequence[object]) -> SaveResult:
    """Save one tree for each rank together, as processes do; return what the first rank got."""

    def act(ranks: ThreadRanks) -> SaveResult:
        planned = plan_save(name, trees[ranks.rank], SaveOptions(), Types(()), ranks, range(len(trees)))
        return save(repo, planned.request, ranks=ranks)

    results = run_threads(len(trees), act)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    first = results[0]
    assert not isinstance(first, BaseException)
    return first
