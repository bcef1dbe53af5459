"""A function runs on several ranks, and what goes wrong on one of them is told by rank."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from signal import SIGKILL, SIGSTOP, Signals
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from holdfast.testing import ranks
from holdfast.testing.ranks import Lost, RankFault, RanksFailed, run_ranks
from tests.distributed.conftest import World
from tests.kit.hooking import Hook
from tests.kit.patience import PATIENCE_S, PROMPT_S


def add_up(rank: int, start: int, *, factor: int) -> tuple[int, int]:
    tensor = torch.tensor([start + factor * rank])
    dist.all_reduce(tensor)
    return dist.get_world_size(), int(tensor)


@pytest.mark.parametrize("hosted_apart", [False, True])
def test_ranks_form_a_group_and_return_their_results(world: World, hosted_apart: bool) -> None:
    assert world(3)(add_up, 10, factor=2, hosted_apart=hosted_apart) == [(3, 36)] * 3


def run_without_a_group(rank: int) -> bool:
    return dist.is_initialized()


def test_without_a_backend_there_is_no_group(world: World) -> None:
    assert world(2)(run_without_a_group, backend=None) == [False, False]


def go_wrong(rank: int, how: str) -> Any:
    if rank == 0:
        return "fine"
    if how == "raise":
        raise ValueError("it is wrong")
    if how == "exit":
        raise SystemExit(3)
    if how == "die":
        os.kill(os.getpid(), SIGKILL)
    if how == "unpicklable":
        return threading.Lock()
    return threading.Event().wait()


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("raise", 'raise ValueError("it is wrong")'),
        ("exit", "SystemExit: 3"),
        ("die", "ended with code -9 and no answer"),
        ("unpicklable", "cannot pickle '_thread.lock' object"),
    ],
)
def test_what_goes_wrong_on_a_rank_is_told(world: World, how: str, reason: str) -> None:
    with pytest.raises(RanksFailed) as caught:
        run_ranks(2, go_wrong, how, timeout_s=PATIENCE_S, backend=None)

    assert list(caught.value.reasons) == [1]
    assert reason in caught.value.reasons[1]


def test_a_rank_that_hangs_is_named_when_the_time_is_up(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock stands still until the other rank has answered; then all the time is up at once."""
    answered: list[int] = []
    kept = ranks._Answers._take

    def take(self: Any, rank: int) -> None:
        kept(self, rank)
        answered.append(rank)

    monkeypatch.setattr(ranks._Answers, "_take", take)
    # In that module only: others need the real time.
    monkeypatch.setattr(ranks, "time", SimpleNamespace(monotonic=lambda: 2 * PATIENCE_S if answered else 0.0))

    with pytest.raises(RanksFailed) as caught:
        run_ranks(2, go_wrong, "hang", timeout_s=PATIENCE_S, backend=None)

    assert caught.value.reasons == {1: "no answer within 300 s"}


def wait_at(rank: int, marker: Path) -> int:
    if rank == 1:
        marker.with_name("pid").write_text(str(os.getpid()), encoding="ascii")
        marker.touch()
        threading.Event().wait()
    return rank


@pytest.mark.parametrize("signal", [SIGKILL, SIGSTOP])
def test_a_rank_can_be_hit_from_outside_and_leaves_no_process(world: World, tmp_path: Path, signal: Signals) -> None:
    marker = tmp_path / "here"

    results = world(2)(wait_at, marker, backend=None, faults={1: RankFault(signal, marker=marker)})

    assert results == [0, Lost(1)]
    pid = int((tmp_path / "pid").read_text(encoding="ascii"))
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_rank_that_was_to_be_lost_and_answers_is_told(hook: Hook) -> None:
    kept = ranks._Answers._take

    def take_last(self: Any, rank: int) -> None:
        assert self._ranks[1].connection.poll(PATIENCE_S)
        kept(self, rank)

    hook(ranks._Answers, "_take", take_last)

    with pytest.raises(RanksFailed, match="rank 1: answered, but was expected to end or stop itself"):
        run_ranks(2, run_without_a_group, backend=None, timeout_s=PATIENCE_S, lost=[1])


def test_a_fault_that_is_never_due_is_told(tmp_path: Path) -> None:
    fault = RankFault(marker=tmp_path / "never")

    with pytest.raises(RanksFailed, match="rank 1: its fault was not due before the timeout"):
        run_ranks(2, run_without_a_group, backend=None, timeout_s=0.5, faults={1: fault})


@pytest.mark.slow  # those who wait are given a moment to end by themselves
def test_a_run_that_fails_does_not_wait_for_those_who_wait_for_the_failed(world: World) -> None:
    began = time.monotonic()

    with pytest.raises(RanksFailed, match="rank 1: Traceback"):
        world(2)(meet_or_raise)

    assert time.monotonic() - began < PROMPT_S


def meet_or_raise(rank: int) -> None:
    if rank == 1:
        raise ValueError("it does not come")
    dist.barrier()
