"""Following on several ranks: one sequence for all, only what changed is read, and all ranks move on or none does."""

from __future__ import annotations

import os
from pathlib import Path
from signal import SIGKILL, SIGSTOP, Signals
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import holdfast
from holdfast.errors import RankError, SnapshotGone
from holdfast.repo.format.layout import PACKS
from holdfast.repo.upkeep.collect import Rules
from tests.distributed.conftest import World
from tests.distributed.cues import Moment, Signs, cueing
from tests.distributed.outcomes import ActOutcome, report_outcome
from tests.distributed.watching import noticing
from tests.kit.patience import PATIENCE_S
from tests.kit.thinning import keep, pair_up

ROWS, COLUMNS = 64, 32768
"""A row has 128 KiB, so a chunk has up to eight rows."""


def make_values(seed: int) -> torch.Tensor:
    return torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(seed))


def make_tree(values: torch.Tensor, *, dim: int) -> dict[str, Any]:
    """Return a tensor cut along a dim, one that all ranks have, and a plain one."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {
        "cut": distribute_tensor(values.clone(), mesh, [Shard(dim)]),
        "same": distribute_tensor(values[:8].clone(), mesh, [Replicate()]),
        "plain": values[:9].clone(),
    }


def find_values(tree: dict[str, Any]) -> list[torch.Tensor]:
    return [each.full_tensor() if isinstance(each, DTensor) else each for each in tree.values()]


def holds(tree: dict[str, Any], values: torch.Tensor) -> bool:
    wanted = [values, values[:8], values[:9]]
    return all(torch.equal(one, other) for one, other in zip(find_values(tree), wanted, strict=True))


def _save(rank: int, folder: Path, dim: int) -> None:
    """Save two versions that differ in one row."""
    values = make_values(0)
    with holdfast.open(folder) as store:
        store.publish("v", make_tree(values, dim=dim))
        values[40, 5] += 1
        store.publish("v", make_tree(values, dim=dim))


def _follow(rank: int, folder: Path, dim: int) -> object:
    """Load the first version, then the second; return what was read for the second, and whether all is right."""
    first, second = make_values(0), make_values(0)
    second[40, 5] += 1
    with holdfast.open(folder) as store:
        tree = make_tree(torch.zeros(ROWS, COLUMNS), dim=dim)
        store.load_into("v/00000001", tree)
        is_first = holds(tree, first)
        before = store.statistics().stages["read"].size_bytes
        store.load_into("v/00000002", tree, since="v/00000001")
        read = store.statistics().stages["read"].size_bytes - before
        return is_first, holds(tree, second), read


@pytest.mark.parametrize(("loaded_dim", "saved_dim"), keep([(0, 0), (0, 1), (1, 0), (1, 1)], (0, 1)))
def test_shards_of_any_cut_read_only_what_changed(
    world: World, tmp_path: Path, saved_dim: int, loaded_dim: int
) -> None:
    world(2)(_save, tmp_path, saved_dim)

    results = world(3)(_follow, tmp_path, loaded_dim)

    assert [result[:2] for result in results] == [(True, True)] * 3
    total = ROWS * COLUMNS * 4
    assert 0 < sum(read for *_, read in results) <= total / 2, "several ranks may need parts of one chunk"
    if loaded_dim == saved_dim == 0:
        assert sum(read for *_, read in results) == 2 << 20, "two ranks have rows of the chunk that changed"


def _fail_on_one(rank: int, folder: Path) -> object:
    """Load a version whose bytes one rank cannot read; return the error and whether the tree is as it was."""
    first = make_values(0)
    with holdfast.open(folder) as store:
        tree = make_tree(torch.zeros(ROWS, COLUMNS), dim=0)
        store.load_into("v/00000001", tree)
        try:
            store.load_into("v/00000002", tree, since="v/00000001")
        except RankError as error:
            kinds = sorted({each.type_name for each in error.failures.values()})
            return kinds, holds(tree, first), error.overwritten
    return "loaded"


def test_if_one_rank_cannot_read_all_keep_the_old_values(world: World, tmp_path: Path) -> None:
    world(2)(_save, tmp_path, 0)
    packs = sorted((tmp_path / PACKS).iterdir(), key=lambda path: path.stat().st_mtime)
    damaged = bytearray(packs[-1].read_bytes())
    damaged[len(damaged) // 2] ^= 1
    packs[-1].write_bytes(damaged)

    results = world(2)(_fail_on_one, tmp_path)

    assert results == [(["holdfast.errors.DigestMismatch"], True, ())] * 2


def _iterate(rank: int, folder: Path) -> object:
    """Follow while rank 0 publishes; return the names that were seen and the last values."""
    names = []
    with holdfast.open(folder) as store:
        tree = {"a": torch.zeros(300_000)}
        with store.follow("v/", poll_s=0.01, timeout_s=0.0) as follower:
            for number in range(3):
                # What one rank publishes alone, all ranks find: rank 0 decides when.
                if rank == 0:
                    store.publish("v", {"a": torch.full((300_000,), number + 1.0)}, collective=False)
                loaded = follower.iter_into(tree)
                names.append(next(loaded).name)
            if rank == 0:
                follower.close()
            names += [snapshot.name for snapshot in follower]
    return names, sorted(set(tree["a"].tolist()))


def test_all_ranks_see_the_same_sequence(world: World, tmp_path: Path) -> None:
    results = world(2)(_iterate, tmp_path)

    assert results == [(["v/00000001", "v/00000002", "v/00000003"], [3.0])] * 2


def _lose(rank: int, folder: Path) -> object:
    """Let a snapshot be deleted and collected before it is loaded."""
    with holdfast.open(folder) as store:
        tree = {"a": torch.zeros(300_000)}
        snapshot = store["v/00000001"]
        dist.barrier()
        if rank == 0:
            store.publish("v", {"a": torch.full((300_000,), 2.0)}, keep=1, collective=False)
            store.gc(Rules(min_age_s=0.0))
        dist.barrier()
        with pytest.raises(RankError) as caught:
            store.load_into(snapshot, tree)
        kinds = {each.type_name for each in caught.value.failures.values()}
        with store.follow("v/", poll_s=0.01) as follower:
            follower._waiter._found = [snapshot.record] if rank == 0 else []
            name = next(follower.iter_into(tree)).name
        return (
            kinds == {f"{SnapshotGone.__module__}.{SnapshotGone.__qualname__}"},
            name,
            sorted(set(tree["a"].tolist())),
        )


def test_a_lost_snapshot_is_skipped_by_all_ranks(world: World, tmp_path: Path) -> None:
    with holdfast.open(tmp_path) as store:
        store.publish("v", {"a": torch.ones(300_000)})

    assert world(2)(_lose, tmp_path) == [(True, "v/00000002", [2.0])] * 2


def _disagree(rank: int, folder: Path) -> str:
    with holdfast.open(folder) as store:
        tree = {"a": torch.zeros(3)}
        with pytest.raises(holdfast.Mismatch, match=r"only rank 1 passed since= or atomic=True"):
            store.load_into("v/00000001", tree, since="v/00000001" if rank else None)
        return str(tree["a"].tolist())


def test_since_on_some_ranks_only_is_refused(world: World, tmp_path: Path) -> None:
    with holdfast.open(tmp_path) as store:
        store.publish("v", {"a": torch.ones(3)})

    assert world(2)(_disagree, tmp_path) == ["[0.0, 0.0, 0.0]"] * 2


def _race(rank: int, folder: Path) -> list[str]:
    """Publish on two groups of one rank each, at the same time, and once together."""
    groups = [dist.new_group([each]) for each in range(dist.get_world_size())]
    with holdfast.open(folder) as store:
        dist.barrier()
        names = [store.publish("v", {"by": rank, "n": n}, keep=99, process_group=groups[rank]).name for n in range(4)]
        dist.barrier()
        return [*names, store.publish("v", {"a": torch.ones(2)}, keep=99).name]


def test_groups_that_publish_at_once_get_different_numbers(world: World, tmp_path: Path) -> None:
    one, other = world(2)(_race, tmp_path)

    assert sorted(one[:4] + other[:4]) == [f"v/{n:08d}" for n in range(1, 9)]
    assert one[4] == other[4] == "v/00000009"


# Ranks that are lost


def _wait_for_none(rank: int, folder: Path, signal: Signals) -> ActOutcome:
    """Wait for a version that nobody publishes, while rank 1 is lost."""
    signs = Signs(folder)

    def cue(rank: int, moment: Moment) -> None:
        if rank == 1 and moment == Moment("follow", "arrived"):
            signs.give("halting", 1)
            os.kill(os.getpid(), signal)

    with holdfast.open(folder) as store, store.follow("v/", poll_s=0.01, timeout_s=PATIENCE_S / 4) as follower:
        with cueing(cue), noticing(1, lambda: signs.is_halted(1)):
            return report_outcome(lambda: next(follower).name)


@pytest.mark.parametrize(("signal", "size"), pair_up([SIGKILL, SIGSTOP], [2, 3]))
def test_a_rank_that_is_lost_while_all_wait_for_a_version_is_reported(
    world: World, tmp_path: Path, signal: Signals, size: int
) -> None:
    with holdfast.open(tmp_path) as store:
        store.save("other", {"a": torch.ones(3)})

    results = world(size)(_wait_for_none, tmp_path, signal, lost=[1])

    told = [(each.kind, each.failures) for rank, each in enumerate(results) if rank != 1]
    assert told == [("RankError", {1: "RankGone"})] * (size - 1)


def _make_small(value: float) -> dict[str, Any]:
    """Return tensors large enough to be remembered between two loads, and a value that a step sets."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    cut = distribute_tensor(torch.full((6, 8192), value), mesh, [Shard(0)])
    return {"cut": cut, "plain": torch.full((8192,), value), "step": value}


def _take_over(rank: int, folder: Path, victim: int, at: int, signal: Signals) -> tuple[ActOutcome, set[float], int]:
    """Load two versions, the victim being lost at its `at`-th moment of the second; return what the tree holds."""
    signs = Signs(folder)
    seen: list[Moment] = []

    def cue(_rank: int, moment: Moment) -> None:
        seen.append(moment)
        if rank == victim and len(seen) == at + 1:
            signs.give("halting", rank)
            os.kill(os.getpid(), signal)

    tree = _make_small(0.0)
    with holdfast.open(folder / "store") as store, store.follow("v/") as follower:
        loaded = follower.iter_into(tree)
        next(loaded)
        if rank == 0:
            _publish(store, 2.0)
        dist.barrier()
        with cueing(cue), noticing(victim, lambda: signs.is_halted(victim)):
            outcome = report_outcome(lambda: next(loaded).name)
    held = {tree["step"], *tree["plain"].tolist(), *tree["cut"].to_local().flatten().tolist()}
    return outcome, held, len(seen)


def _publish(store: holdfast.Store, value: float) -> None:
    tree = {"cut": torch.full((6, 8192), value), "plain": torch.full((8192,), value), "step": value}
    store.publish("v", tree, collective=False)


def _publish_first(folder: Path) -> Path:
    """Make a store with one version, and return the folder."""
    folder.mkdir()
    with holdfast.open(folder / "store") as store:
        _publish(store, 1.0)
    return folder


def _lose_at(world: World, folder: Path, victim: int, at: int, signal: Signals, *, is_apart: bool = True) -> list[str]:
    """Lose a rank while all take over the second version; return what is wrong with the others."""
    results = world(3)(_take_over, _publish_first(folder), victim, at, signal, lost=[victim], hosted_apart=is_apart)
    if not Signs(folder).is_halted(victim):
        return ["the rank was not lost"]
    survivors = [results[rank] for rank in range(3) if rank != victim]
    wrong = [f"the tree holds {held}" for _, held, _ in survivors if held not in ({1.0}, {2.0})]
    for outcome, held, _ in survivors:
        if (outcome.kind == "") != (held == {2.0}) or outcome.kind not in ("", "RankError"):
            wrong.append(f"{outcome.kind!r} was told, and the tree holds {held}: {outcome.text[:500]}")
        if outcome.kind and set(outcome.failures) != {victim} and is_apart:
            wrong.append(f"other ranks are blamed: {outcome.failures}")
    # Without the store of the group, ranks cannot learn what the others have done.
    if is_apart and survivors[0][1] != survivors[1][1]:
        wrong.append(f"the ranks hold different versions: {survivors[0][1]} and {survivors[1][1]}")
    return wrong


def test_a_rank_that_is_killed_while_all_take_over_a_version_leaves_the_others_the_old_one(
    world: World, tmp_path: Path
) -> None:
    assert _lose_at(world, tmp_path / "0", 1, 10, SIGKILL) == []


@pytest.mark.slow  # every step, and each time with new processes
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("victim", [0, 1, 2])
@pytest.mark.parametrize(
    ("signal", "is_apart"),
    [(SIGKILL, True), (SIGSTOP, True), (SIGKILL, False)],
    ids=["killed", "stopped", "with store"],
)
def test_whenever_a_rank_is_lost_the_others_hold_the_old_version_or_the_new_one(
    world: World, tmp_path: Path, signal: Signals, is_apart: bool, victim: int
) -> None:
    results = world(3)(_take_over, _publish_first(tmp_path / "whole"), victim, -1, signal)
    assert [(outcome.value, held) for outcome, held, _ in results] == [("v/00000002", {2.0})] * 3

    wrong = {
        at: found
        for at in range(results[victim][2])
        if (found := _lose_at(world, tmp_path / str(at), victim, at, signal, is_apart=is_apart))
    }
    assert wrong == {}
