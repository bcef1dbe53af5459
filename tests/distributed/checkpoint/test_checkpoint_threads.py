"""Threads of one process save at the same time over one group, in a different order on each rank."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

import holdfast
from holdfast.distributed.talk.call_ids import CallId
from holdfast.distributed.talk.collectives import Collectives, find_store
from holdfast.tensors.sharding import per_rank
from tests.distributed.conftest import World
from tests.distributed.outcomes import ActOutcome, report_outcome
from tests.kit.patience import PATIENCE_S
from tests.kit.thinning import keep


def make_noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def save(path: Path, name: str, tree: object, **options: Any) -> ActOutcome:
    """Save as one of all ranks, and tell what came of it."""
    with holdfast.open(path) as store:
        return report_outcome(lambda: store.save(name, tree, timeout_s=PATIENCE_S, **options).existed)


def run_in_threads(act: Callable[[int], None], numbers: Sequence[int]) -> None:
    """Have each number acted on by a thread of its own, begun when the one before has joined its save."""
    joined = threading.Semaphore(0)
    kept = Collectives._assign_call_id

    def assign(self: Collectives, *args: Any) -> CallId:
        call_id = kept(self, *args)
        joined.release()
        return call_id

    threads = [threading.Thread(target=act, args=(number,)) for number in numbers]
    with mock.patch.object(Collectives, "_assign_call_id", assign):
        for thread in threads:
            thread.start()
            assert joined.acquire(timeout=PATIENCE_S)
        for thread in threads:
            thread.join()


def save_at_once(rank: int, path: Path, count: int, groups: int) -> list[ActOutcome]:
    """Save each name from a thread of its own, in another order on each rank."""
    ranks = list(range(dist.get_world_size()))
    own = [dist.new_group(ranks) if groups > 1 else None for _ in range(count)]
    outcome: dict[int, ActOutcome] = {}

    def act(number: int) -> None:
        tree = {"w": make_noise(300, 1024, seed=number), "rank": per_rank(rank)}
        outcome[number] = save(path, f"run {number}", tree, process_group=own[number])

    run_in_threads(act, [(number + rank) % count for number in range(count)])
    return [outcome[number] for number in range(count)]


@pytest.mark.filterwarnings("ignore:.*was saved by")
@pytest.mark.parametrize(("size", "count", "groups"), keep([(2, 2, 2), (2, 2, 1), (3, 4, 1)], (2, 2, 2), (2, 2, 1)))
def test_threads_save_names_of_their_own_at_once_over_one_group_or_several(
    world: World, tmp_path: Path, size: int, count: int, groups: int
) -> None:
    results = world(size)(save_at_once, tmp_path, count, groups)

    assert [outcome.text for rank in results for outcome in rank] == [""] * (size * count)
    with holdfast.open(tmp_path) as store:
        for number in range(count):
            assert torch.equal(store.load(f"run {number}")["w"], make_noise(300, 1024, seed=number))


def save_behind_at_once(rank: int, path: Path) -> list[ActOutcome]:
    """Have two stores save in the background, begun in another order on each rank."""
    outcome: dict[int, ActOutcome] = {}

    def act(number: int) -> None:
        with holdfast.open(path) as store:
            outcome[number] = report_outcome(
                lambda: store.save_async(f"run {number}", {"w": torch.full((9,), number)}).wait().existed
            )

    run_in_threads(act, [rank % 2, (rank + 1) % 2])
    return [outcome[0], outcome[1]]


def test_two_stores_save_in_the_background_at_once_over_one_group(world: World, tmp_path: Path) -> None:
    results = world(2)(save_behind_at_once, tmp_path)

    assert [outcome.text for rank in results for outcome in rank] == [""] * 4
    with holdfast.open(tmp_path) as store:
        assert [store.load(f"run {number}")["w"].tolist() for number in range(2)] == [[0] * 9, [1] * 9]


def save_one_beside_many(rank: int, path: Path) -> tuple[list[ActOutcome], int]:
    """Fail one of two saves that run at once, then save again; tell how many keys are left in the group's store."""
    outcome: dict[int, ActOutcome] = {}
    bad = torch.full((4,), float(rank))
    mesh = DeviceMesh("cpu", torch.arange(dist.get_world_size()))
    wrong = {"w": DTensor.from_local(bad, mesh, [Replicate()], run_check=False)}

    def act(number: int) -> None:
        outcome[number] = save(path, f"run {number}", wrong if number else {"w": make_noise(300, 1024)})

    run_in_threads(act, [rank % 2, (rank + 1) % 2])
    outcome[2] = save(path, "run 1", {"w": torch.ones(3)})
    dist.barrier()
    group = dist.group.WORLD
    assert group is not None
    before = find_store(group).num_keys()
    dist.barrier()
    for number in range(3):
        save(path, f"more {number}", {"w": torch.ones(3)})
    dist.barrier()
    return [outcome[0], outcome[1], outcome[2]], find_store(group).num_keys() - before


def test_a_save_that_fails_beside_another_leaves_that_alone_and_names_leave_no_keys(
    world: World, tmp_path: Path
) -> None:
    results = world(2)(save_one_beside_many, tmp_path)

    for (good, bad, again), more_keys in results:
        assert (good.kind, again.kind) == ("", "")
        assert "declared a replica" in bad.text
        # The barriers of the group have keys of their own.
        assert more_keys <= 2
