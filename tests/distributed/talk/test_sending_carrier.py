"""Bytes are sent between ranks over private connections: failures name the ranks, and the user's group still works."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from signal import SIGKILL, SIGSTOP, Signals
from typing import Any, Final
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import holdfast
from holdfast.distributed.checkpoint.module_sync import sync_module_states
from holdfast.distributed.talk import sending
from holdfast.distributed.talk.collectives import find_store
from holdfast.distributed.talk.sending import Sender
from tests.distributed.conftest import World
from tests.distributed.outcomes import ActOutcome, report_outcome
from tests.kit.patience import PATIENCE_S, PROMPT_S

TIMEOUT_S: Final = 8.0
ROWS: Final = 300


def make(number: int) -> torch.Tensor:
    return torch.full((ROWS, 1000), float(number))


def save(path: Path) -> None:
    holdfast.open(path).save("x", {f"t{number}": make(number) for number in range(6)})


def load(path: Path, **options: Any) -> bool:
    target = {f"t{number}": torch.zeros(ROWS, 1000) for number in range(6)}
    holdfast.open(path).load_into("x", target, replicas="broadcast", **options)
    return all(torch.equal(target[f"t{number}"], make(number)) for number in range(6))


@contextmanager
def striking(act: Callable[[], None], *, at: int) -> Iterator[None]:
    """Have something happen when the `at`-th bucket is about to be sent or received, the first being 0."""
    kept = Sender._send_bucket
    calls = iter(range(1 << 30))

    def send(self: Sender, *args: Any) -> None:
        if next(calls) == at:
            act()
        kept(self, *args)

    with mock.patch.object(Sender, "_send_bucket", send):
        yield


def add_up(group: dist.ProcessGroup | None = None) -> float:
    """Use the user's own group."""
    total = torch.ones(1)
    dist.all_reduce(total, group=group)
    return total.item()


def run_out() -> None:
    raise MemoryError("no room for a bucket")


def fail_in_the_middle(rank: int, path: Path, victim: int, at: int) -> tuple[ActOutcome, float, ActOutcome, int]:
    dist.barrier()
    group = dist.group.WORLD
    assert group is not None
    with striking(run_out, at=at if rank == victim else -1):
        failed = report_outcome(lambda: load(path, timeout_s=PATIENCE_S))
    total = add_up()
    again = report_outcome(lambda: load(path, timeout_s=PATIENCE_S))
    keys = int(find_store(group).num_keys())
    load(path)
    add_up()
    return failed, total, again, int(find_store(group).num_keys()) - keys


@pytest.mark.parametrize(("victim", "at"), [(0, 0), (1, 1), (2, 2)])
def test_a_rank_that_raises_in_the_middle_fails_the_load_and_leaves_the_group_as_it_was(
    world: World, tmp_path: Path, victim: int, at: int
) -> None:
    save(tmp_path)

    for failed, total, again, keys in world(3)(fail_in_the_middle, tmp_path, victim, at):
        assert (failed.kind, failed.failures) == ("RankError", {victim: "MemoryError"}), failed
        assert failed.seconds < PROMPT_S
        assert total == 3.0
        assert again.value is True, again
        assert keys <= 4


def fail_in_a_sync(rank: int) -> tuple[ActOutcome, float, list[float]]:
    module = torch.nn.Linear(3, 3)
    torch.nn.init.constant_(module.weight, rank)
    with striking(run_out, at=1 if rank == 1 else -1):
        failed = report_outcome(lambda: sync_module_states(module, bucket_bytes=16, timeout_s=PATIENCE_S))
    total = add_up()
    # What had arrived before has been overwritten.
    torch.nn.init.constant_(module.weight, rank)
    sync_module_states(module, src=2)
    return failed, total, module.weight[0].tolist()


def test_a_sync_that_fails_leaves_the_group_as_it_was(world: World) -> None:
    for failed, total, weight in world(3)(fail_in_a_sync):
        assert (failed.kind, failed.step, failed.failures) == ("RankError", "sync", {1: "MemoryError"}), failed
        assert (total, weight) == (3.0, [2.0] * 3)


def lose_in_the_middle(rank: int, path: Path, victim: int, at: int, signal: Signals) -> tuple[ActOutcome, float]:
    survivors = dist.new_group([other for other in range(3) if other != victim])
    with striking(lambda: os.kill(os.getpid(), signal), at=at if rank == victim else -1):
        outcome = report_outcome(lambda: load(path, timeout_s=TIMEOUT_S))
    return outcome, add_up(survivors)


@pytest.mark.slow  # the timeout has to pass
@pytest.mark.parametrize(("victim", "at"), [(1, 0), (2, 1)])
@pytest.mark.parametrize("signal", [SIGKILL, SIGSTOP])
def test_a_rank_that_is_lost_in_the_middle_is_named_and_the_others_work_on(
    world: World, tmp_path: Path, victim: int, at: int, signal: Signals
) -> None:
    save(tmp_path)

    results = world(3)(lose_in_the_middle, tmp_path, victim, at, signal, lost=[victim], hosted_apart=True)

    for outcome, total in [result for rank, result in enumerate(results) if rank != victim]:
        assert (outcome.kind, outcome.failures) == ("RankError", {victim: "RankGone"}), outcome
        assert total == 2.0


def lose_before_connecting(rank: int, path: Path) -> ActOutcome:
    def die(*_: object) -> None:
        os.kill(os.getpid(), SIGKILL)

    with mock.patch.object(sending, "_connect", die if rank == 2 else sending._connect):
        return report_outcome(lambda: load(path, timeout_s=TIMEOUT_S))


@pytest.mark.slow  # the timeout has to pass
def test_a_rank_that_is_lost_before_it_connects_is_named(world: World, tmp_path: Path) -> None:
    save(tmp_path)

    for outcome in world(3)(lose_before_connecting, tmp_path, lost=[2], hosted_apart=True)[:2]:
        assert (outcome.kind, outcome.failures) == ("RankError", {2: "RankGone"}), outcome
