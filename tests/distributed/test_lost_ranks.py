"""A rank that dies or stops is named by those who wait for it; one that works and says so is waited for."""

from __future__ import annotations

import logging
import os
import time
from signal import SIGKILL, SIGSTOP, Signals
from typing import Any

import pytest

from holdfast.distributed import store_rounds
from holdfast.distributed.collectives import Collectives
from holdfast.errors import RankError
from tests.distributed.conftest import World

TIMEOUT_S = 2.0


def lose_one(rank: int, victim: int, signal: Signals) -> dict[str, Any]:
    """Have one rank hit by a signal inside a step; say what the others see, and how long that took."""
    ranks = Collectives(timeout_s=TIMEOUT_S)

    def work() -> None:
        if rank == victim:
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
        assert f"rank {victim}: RankGone: no sign of life for 2 s (timeout_s); it was last seen" in result["text"]
        assert TIMEOUT_S / 2 < result["seconds"] < TIMEOUT_S * 2


def test_the_death_of_the_process_that_hosts_the_store_is_told_at_once(world: World) -> None:
    results = world(3)(lose_one, 0, SIGKILL, lost=[0])

    for result in results[1:]:
        assert "the process that hosts the group's store (rank 0, or the launcher) is gone" in result["text"]
        assert result["failures"] == {}
        assert result["seconds"] < TIMEOUT_S / 2


@pytest.mark.slow  # the timeout has to pass
def test_a_host_of_the_store_that_is_stopped_keeps_nobody_waiting(world: World) -> None:
    results = world(3)(lose_one, 0, SIGSTOP, lost=[0])

    for result in results[1:]:
        assert "no reply within 2 s" in result["text"]
        assert result["seconds"] < TIMEOUT_S * 2


def never_come(rank: int) -> str:
    if rank == 1:
        return ""
    with Collectives(timeout_s=0.5) as ranks, pytest.raises(RankError) as caught:
        ranks.all_gather_object(rank, step="plan")
    return str(caught.value)


def test_a_rank_that_never_comes_is_named(world: World) -> None:
    results = world(2)(never_come)

    assert "rank 1: RankGone: no sign of life for 0.5 s (timeout_s); it has not even begun" in results[0]


def work_long(rank: int) -> list[int]:
    with Collectives(timeout_s=0.5) as ranks:

        def work() -> int:
            end = time.monotonic() + (1.2 if rank == 1 else 0)
            while time.monotonic() < end:
                ranks.beat()
                time.sleep(0.01)
            return rank

        return ranks.all_gather("write", work)


@pytest.mark.slow  # the timeout has to pass, more than once
def test_a_rank_that_is_slow_and_beats_is_waited_for(world: World) -> None:
    assert world(3)(work_long) == [[0, 1, 2]] * 3


class Kept(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def wait_long(rank: int) -> list[str]:
    store_rounds._WARN_S = 0.1  # type: ignore[misc]  # nobody should wait for ten seconds here
    kept = Kept()
    logging.getLogger(store_rounds.__name__).addHandler(kept)
    with Collectives(timeout_s=1) as ranks:
        ranks.all_gather("write", lambda: time.sleep(0.6) if rank == 1 else None)
    return kept.lines


def test_whoever_waits_long_says_once_for_whom(world: World) -> None:
    results = world(3)(wait_long)

    assert [len(lines) for lines in results] == [1, 0, 1]
    for lines in (results[0], results[2]):
        assert "at all_gather 'write' for rank 1 to arrive" in lines[0]
