"""A rank that dies or is suspended is named by the ranks that wait for it; one that beats is waited for."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path
from signal import SIGKILL, SIGSTOP, Signals
from typing import Any

import pytest

from holdfast.distributed.talk import store_rounds
from holdfast.distributed.talk.collectives import Collectives
from holdfast.errors import RankError
from tests.distributed.conftest import World
from tests.distributed.watching import looking_often
from tests.kit.patience import PATIENCE_S, PROMPT_S

TIMEOUT_S = 8.0


def lose_one(rank: int, victim: int, signal: Signals, timeout_s: float = TIMEOUT_S) -> dict[str, Any]:
    """Have one rank hit by a signal inside a step; say what the others see, and how long that took."""
    ranks = Collectives(timeout_s=timeout_s)

    def work() -> None:
        if rank == victim:
            ranks.check_failures()  # waits for an answer, so that the others have seen its last sign of life
            os.kill(os.getpid(), signal)

    began = time.monotonic()

    def talk() -> None:
        # The coordinator may be in the second step, and die there, while others still read what the first has given.
        ranks.all_gather_object(rank, step="begin")
        ranks.all_gather("write", work)

    with pytest.raises(RankError) as caught:
        talk()
    return {
        "seconds": time.monotonic() - began,
        "text": str(caught.value),
        "failures": {failure.rank: failure.type_name for failure in caught.value.failures.values()},
    }


@pytest.mark.slow  # the timeout has to pass
@pytest.mark.parametrize("signal", [SIGKILL, SIGSTOP])
@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_rank_that_is_killed_or_stopped_is_named_on_all_others(world: World, victim: int, signal: Signals) -> None:
    # Rank 0 is the coordinator; elsewhere hosted, the store outlives it.
    results = world(3)(lose_one, victim, signal, lost=[victim], hosted_apart=True)

    for result in [result for rank, result in enumerate(results) if rank != victim]:
        assert result["failures"] == {victim: "RankGone"}
        seen = "no sign of life for 8 s (timeout_s); it was last seen at step 'write'"
        assert f"rank {victim}: RankGone: {seen}" in result["text"]
        assert result["seconds"] > TIMEOUT_S / 2


def test_the_death_of_the_process_that_hosts_the_store_is_told_at_once(world: World) -> None:
    results = world(3)(lose_one, 0, SIGKILL, PATIENCE_S, lost=[0])

    for result in results[1:]:
        assert "the process that hosts the group's store (rank 0, or the launcher) is gone" in result["text"]
        assert result["failures"] == {}
        assert result["seconds"] < PROMPT_S


@pytest.mark.slow  # the timeout has to pass
def test_a_host_of_the_store_that_is_stopped_keeps_nobody_waiting(world: World) -> None:
    results = world(3)(lose_one, 0, SIGSTOP, lost=[0])

    for result in results[1:]:
        assert "no reply within 8 s" in result["text"]


def never_come(rank: int) -> str:
    if rank == 1:
        return ""
    with looking_often(speed=1000), Collectives() as ranks, pytest.raises(RankError) as caught:
        ranks.all_gather_object(rank, step="plan")
    return str(caught.value)


def test_a_rank_that_never_comes_is_named(world: World) -> None:
    results = world(2)(never_come)

    assert "rank 1: RankGone: no sign of life for 300 s (timeout_s); it has not started" in results[0]


def work_long(rank: int) -> list[int]:
    timeout_s = 4.0
    with Collectives(timeout_s=timeout_s) as ranks:

        def work() -> int:
            end = time.monotonic() + (2.5 * timeout_s if rank == 1 else 0)
            while time.monotonic() < end:
                ranks.beat()
                time.sleep(0.01)
            return rank

        return ranks.all_gather("write", work)


@pytest.mark.slow  # the timeout has to pass, more than once
def test_a_rank_that_is_slow_and_beats_is_waited_for(world: World) -> None:
    assert world(3)(work_long) == [[0, 1, 2]] * 3


class Kept(logging.Handler):
    """Keeps what is logged, and makes a file when there is something."""

    def __init__(self, outcome: Path) -> None:
        super().__init__()
        self.lines: list[str] = []
        self._told = outcome

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())
        self._told.touch()


def wait_long(rank: int, folder: Path) -> list[str]:
    """Rank 1 comes once the others have warned; itself it has more patience."""
    store_rounds._WARN_S = PATIENCE_S if rank == 1 else 0.1  # type: ignore[misc]  # nobody should wait ten seconds here

    def come_late() -> None:
        while rank == 1 and len(os.listdir(folder)) < 2:
            time.sleep(0.01)

    kept = Kept(folder / str(rank))
    logging.getLogger(store_rounds.__name__).addHandler(kept)
    with looking_often(), Collectives() as ranks:
        ranks.all_gather("write", come_late)
        ranks.all_gather_object(rank, step="after")
    return kept.lines


def test_whoever_waits_long_says_once_for_whom(world: World, tmp_path: Path) -> None:
    results = world(3)(wait_long, tmp_path)

    assert [len(lines) for lines in results] == [1, 0, 1]
    for lines in (results[0], results[2]):
        assert "at all_gather 'write' for rank 1 to arrive" in lines[0]
