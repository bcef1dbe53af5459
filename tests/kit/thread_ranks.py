"""Ranks that are threads of one process: each step is a meeting, and what one raises ends it for all."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from holdfast.errors import RankError, RankFailure
from tests.kit.patience import PATIENCE_S

Result = TypeVar("Result")


class _Meeting:
    """Where all ranks come together, once for each step."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.values: list[Any] = [None] * world_size
        self.failures: dict[int, RankFailure] = {}
        self.steps: list[str] = []
        self.outcome: tuple[list[Any], dict[int, RankFailure]] = ([], {})
        self._all_here = threading.Barrier(world_size, self._close, timeout=PATIENCE_S)
        self._all_told = threading.Barrier(world_size, timeout=PATIENCE_S)

    def _close(self) -> None:
        """Take down what came of a step, once all have taken part in it."""
        self.outcome = list(self.values), self.failures
        self.failures = {}

    def meet(self) -> tuple[list[Any], dict[int, RankFailure]]:
        self._all_here.wait()
        outcome = self.outcome
        self._all_told.wait()
        return outcome


class ThreadRanks:
    """One rank among the threads of a process."""

    def __init__(self, meeting: _Meeting, rank: int) -> None:
        self.rank = rank
        self.world_size = meeting.world_size
        self.coordinator = 0
        self.is_coordinator = rank == 0
        self._meeting = meeting
        self.received: list[list[Any]] = []
        """What others have sent to this one alone, in each exchange."""

    def broadcast(self, step: str, map: Callable[[], Any]) -> Any:
        return self._take_part(step, map if self.is_coordinator else lambda: None)[0]

    def all_gather(self, step: str, map: Callable[[], Any]) -> list[Any]:
        return self._take_part(step, map)

    def all_to_all(self, step: str, map: Callable[[], Sequence[Any]]) -> list[Any]:
        values = self._take_part(step, map)
        self.received.append([each[self.rank] for each in values])
        return self.received[-1]

    def beat(self) -> None:
        pass

    def check_failures(self) -> None:
        pass

    def _take_part(self, step: str, map: Callable[[], Any]) -> list[Any]:
        meeting = self._meeting
        cause = None
        try:
            meeting.values[self.rank] = map()
        except Exception as error:  # noqa: BLE001 - told to all
            cause = error
            meeting.failures[self.rank] = RankFailure(self.rank, type(error).__qualname__, str(error))
        if self.is_coordinator:
            meeting.steps.append(step)
        values, failures = meeting.meet()
        if failures:
            raise RankError(f"step {step!r} failed: {failures}", step=step, failures=failures) from cause
        return values


def run_threads(world_size: int, act: Callable[[ThreadRanks], Result]) -> list[Result | BaseException]:
    """Let each rank act in a thread of its own; return what each returned or raised."""
    meeting = _Meeting(world_size)

    def run(rank: int) -> Result | BaseException:
        try:
            return act(ThreadRanks(meeting, rank))
        except BaseException as error:  # noqa: BLE001 - for the test to look at
            return error

    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(run, range(world_size)))
