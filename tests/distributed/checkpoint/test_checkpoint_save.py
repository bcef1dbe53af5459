"""Collective saves: one snapshot, each byte stored once; mistakes are refused on all ranks."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import holdfast
from holdfast.distributed.talk import store_rounds
from holdfast.repo.format.rank_manifests import read_manifests
from holdfast.tensors.sharding import per_rank, shard
from holdfast.trees.outline import MAX_TREE_DEPTH
from tests.distributed.conftest import World
from tests.distributed.outcomes import ActOutcome, KeptLog, list_files, report_outcome
from tests.distributed.placing import place
from tests.distributed.watching import looking_often
from tests.kit.patience import PATIENCE_S
from tests.kit.tensors import assert_same_tensor
from tests.kit.thinning import thin
from tests.tensor_zoo import SUBCLASSES, TENSORS

MIB = 1 << 20


def make_noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def save(path: Path, name: str, tree: object, **options: Any) -> ActOutcome:
    """Save as one of all ranks, and tell what came of it."""

    def act() -> dict[str, Any]:
        with holdfast.open(path) as store:
            result = store.save(name, tree, timeout_s=PATIENCE_S, **options)
        return {"existed": result.existed, "divergent": result.divergent, "digest": bytes(result.digest)}

    return report_outcome(act)


# What is stored


def save_zoo(rank: int, path: Path) -> ActOutcome:
    with holdfast.open(path, types=SUBCLASSES) as store:
        return report_outcome(
            lambda: store.save("zoo", {name: make() for name, make in TENSORS.items()}, grads=True).divergent
        )


@pytest.mark.slow  # there are a thousand animals
def test_tensors_of_every_kind_that_ranks_hold_alike_are_kept(world: World, tmp_path: Path) -> None:
    outcome = world(3)(save_zoo, tmp_path / "store")

    assert [each.value for each in outcome] == [()] * 3
    with holdfast.open(tmp_path / "store", types=SUBCLASSES) as store:
        loaded = store.load("zoo")
    for name, make in TENSORS.items():
        assert_same_tensor(loaded[name], make())


def save_replicas(rank: int, path: Path) -> None:
    tree = {f"layer {number}": make_noise(700, 1024, seed=number) for number in range(4)}
    mesh = DeviceMesh("cpu", torch.arange(dist.get_world_size()))
    tree["declared"] = place(make_noise(500, 1024, seed=9), mesh, [Replicate()])
    with holdfast.open(path) as store:
        store.save("ddp", tree)


def test_of_what_all_hold_each_writes_its_share_and_one_copy_is_stored(world: World, tmp_path: Path) -> None:
    world(3)(save_replicas, tmp_path)

    with holdfast.open(tmp_path) as store:
        record = store.snapshot("ddp").record
        parts = read_manifests(store.repository.store, record.manifest).parts
        total = record.logical_bytes
    written = [sum(chunk.size_bytes for entry in part.iter_entries() for chunk in entry.chunks) for part in parts]
    packs = {found.name: found.stat().st_size for found in (tmp_path / "packs").iterdir()}
    by_rank = [sum(packs[pack] for pack in part.packs) for part in parts]
    assert sum(written) == total
    assert max(written) <= total / 3 + MIB
    assert max(by_rank) <= total / 3 + 2 * MIB
    assert sum(packs.values()) <= total + MIB


# What differs between ranks


def save_statistics(rank: int, path: Path) -> ActOutcome:
    norm = torch.nn.BatchNorm1d(4)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), norm)
    assert norm.running_mean is not None
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.5)
        norm.running_mean.fill_(rank)
    return save(path, "run", {"model": model, "rng": per_rank(torch.tensor([rank] * 5)), "place": per_rank(rank)})


def test_what_differs_undeclared_is_kept_for_each_and_told_once(world: World, tmp_path: Path) -> None:
    outcome = world(3)(save_statistics, tmp_path)

    assert [each.value["divergent"] for each in outcome] == [("model.1.running_mean",)] * 3
    assert [len(each.warned) for each in outcome] == [1, 0, 0]
    assert "model.1.running_mean" in outcome[0].warned[0]
    assert "rng" not in outcome[0].warned[0]


def save_and_load_strictly(rank: int, path: Path) -> list[ActOutcome]:
    """Save and load, where warnings are errors, what is not the same on all ranks; then something that is."""

    def raising(act: Callable[[], Any]) -> Callable[[], Any]:
        def run() -> None:
            warnings.simplefilter("error")
            act()

        return run

    pair = dist.new_group([0, 1])
    with holdfast.open(path) as store:
        tree = {"statistics": torch.tensor([float(rank)])}
        outcome = [report_outcome(raising(lambda: store.save("strict", tree, timeout_s=PATIENCE_S)))]
        handles: list[Any] = []
        outcome.append(
            report_outcome(raising(lambda: handles.append(store.save_async("behind", tree, timeout_s=PATIENCE_S))))
        )
        outcome.append(save(path, "kept", tree))
        if rank < 2:
            into = {"statistics": torch.zeros(1)}
            outcome.append(
                report_outcome(raising(lambda: store.load_into("kept", into, process_group=pair, timeout_s=PATIENCE_S)))
            )
            outcome.append(report_outcome(lambda: store.load_into("kept", into, process_group=pair) and None))
    return outcome


def test_a_warning_that_is_an_error_is_one_on_all_ranks(world: World, tmp_path: Path) -> None:
    results = world(3)(save_and_load_strictly, tmp_path)

    for outcome in results:
        for failed in (outcome[0], outcome[1], *outcome[3:4]):
            assert (failed.kind, failed.failures) == ("RankError", {0: "UserWarning"}), failed
        assert [outcome[2].kind, *(after.kind for after in outcome[4:])] == [""] * (1 + len(outcome[4:]))
    with holdfast.open(tmp_path) as store:
        assert [found.name for found in store.snapshots()] == ["kept"]


def save_late_statistics(rank: int, path: Path) -> ActOutcome:
    own = {"late": torch.tensor([float(rank)])} if rank else {}
    return save(path, "run", {"step": 1, **own})


def test_what_differs_where_the_first_rank_has_nothing_is_told_all_the_same(world: World, tmp_path: Path) -> None:
    outcome = world(3)(save_late_statistics, tmp_path)

    assert [each.value["divergent"] for each in outcome] == [("late",)] * 3
    assert sum(len(each.warned) for each in outcome) == 1


def save_values(rank: int, path: Path) -> ActOutcome:
    return save(path, "run", {"step": 7, "loss": 0.5 + rank, "stage": {f"layer {rank}": make_noise(3, seed=rank)}})


@pytest.mark.filterwarnings("ignore:.*was saved by")
def test_trees_of_other_keys_on_each_rank_are_united(world: World, tmp_path: Path) -> None:
    outcome = world(3)(save_values, tmp_path)

    assert [each.value["divergent"] for each in outcome] == [("loss",)] * 3
    with holdfast.open(tmp_path) as store:
        tree = store.load("run")
    assert (tree["step"], tree["loss"]) == (7, 0.5)
    assert {name: value.tolist() for name, value in tree["stage"].items()} == {
        f"layer {rank}": make_noise(3, seed=rank).tolist() for rank in range(3)
    }


# What is refused


def save_wrong(rank: int, path: Path, how: str) -> tuple[ActOutcome, list[str], ActOutcome]:
    """Save something that nobody can mean; then something sound, with the same group."""
    size = dist.get_world_size()
    mesh = DeviceMesh("cpu", torch.arange(size))
    tree: dict[str, Any] = {"sound": place(make_noise(6, 4), mesh, [Shard(0)])}
    name = "run"
    if how == "replicas differ":
        tree["w"] = DTensor.from_local(torch.full((4,), float(rank == 2)), mesh, [Replicate()], run_check=False)
    elif how == "partial":
        tree["w"] = DTensor.from_local(torch.ones(4), mesh, [Partial()], run_check=False)
    elif how == "gap":
        tree["w"] = shard(torch.ones(2, 3), global_shape=(8, 3), offsets=(rank * 2 + 2 * (rank == 2), 0))
    elif how == "overlap":
        tree["w"] = shard(torch.ones(4, 3), global_shape=(8, 3), offsets=(rank * 2, 0))
    elif how == "shape":
        tree["w"] = shard(torch.ones(2, 3 + (rank == 1)), global_shape=(6, 3 + (rank == 1)), offsets=(rank * 2, 0))
    elif how == "dtype":
        dtype = torch.float64 if rank == 1 else torch.float32
        tree["w"] = shard(torch.ones(2, 3, dtype=dtype), global_shape=(6, 3), offsets=(rank * 2, 0))
    elif how == "plain beside shards":
        tree["w"] = (
            torch.ones(6, 3) if rank == 1 else shard(torch.ones(2, 3), global_shape=(6, 3), offsets=(rank * 2, 0))
        )
    elif how == "names":
        name = f"run {rank}"
    outcome = save(path, name, tree)
    left = list_files(path)
    dist.barrier()
    return outcome, left, save(path, "after", {"sound": tree["sound"]})


@pytest.mark.parametrize(
    ("how", "texts"),
    thin(
        [
            ("replicas differ", ["w: declared a replica, but its value differs between ranks 0 and 1, and rank 2"]),
            ("partial", ["w", "Partial(sum)", "redistribute it to Replicate() or Shard(dim)"]),
            ("gap", ["w: rows 4:6 are held by no rank"]),
            ("overlap", ["w: rows 2:4 are held by ranks 0 and 1", "w: rows 4:6 are held by ranks 1 and 2"]),
            ("shape", ["w: its shape is (6, 3) on ranks 0 and 2 and (6, 4) on rank 1"]),
            ("dtype", ["w: its dtype is torch.float32 on ranks 0 and 2 and torch.float64 on rank 1"]),
            ("plain beside shards", ["w"]),
            ("names", ["run 0", "run 1", "run 2"]),
        ],
        2,
    ),
)
def test_what_ranks_cannot_mean_is_refused_on_all_and_nothing_is_written(
    world: World, tmp_path: Path, how: str, texts: list[str]
) -> None:
    results = world(3)(save_wrong, tmp_path, how)

    for outcome, left, after in results:
        assert outcome.kind in ("RankError", "Mismatch"), outcome
        assert [text for text in texts if text not in outcome.text] == [], outcome.text
        assert left == []
        assert after.kind == "", after
    with holdfast.open(tmp_path) as store:
        assert [found.name for found in store.snapshots()] == ["after"]


def save_apart(rank: int, path: Path) -> tuple[ActOutcome, list[str]]:
    own = path / f"node {rank}"
    outcome = save(own, "run", {"w": make_noise(600, 600)})
    return outcome, list_files(own) if own.exists() else []


def test_a_path_that_is_another_on_each_node_is_refused_and_left_empty(world: World, tmp_path: Path) -> None:
    results = world(3)(save_apart, tmp_path)

    for outcome, left in results:
        assert outcome.kind in ("RankError", "NotShared")
        assert "the path is local to each node. Use one that all ranks share" in outcome.text
        assert [file for file in left if not file.startswith("config/")] == []


# How a save is called


def save_alone(rank: int, path: Path) -> list[ActOutcome]:
    alone = save(path, f"alone {rank}", {"w": torch.tensor([rank])}, collective=False)
    pair = dist.new_group([0, 2])
    outcome = [alone]
    if rank != 1:
        outcome.append(save(path, "pair", {"w": per_rank(torch.tensor([rank])), "s": 1}, process_group=pair))
    dist.barrier()
    return outcome


def test_a_process_saves_alone_and_a_group_of_some_saves_together(world: World, tmp_path: Path) -> None:
    results = world(3)(save_alone, tmp_path)

    assert [outcome.kind for rank in results for outcome in rank] == [""] * 5
    with holdfast.open(tmp_path) as store:
        assert [found.name for found in store.snapshots()] == ["alone 0", "alone 1", "alone 2", "pair"]
        assert store.load("alone 2")["w"].tolist() == [2]
        assert store.load("pair")["w"].tolist() == [0]


def save_first_only(rank: int, path: Path) -> tuple[ActOutcome, list[str]]:
    if rank:
        return ActOutcome(), []
    with KeptLog(store_rounds.__name__) as lines, looking_often(speed=1000), holdfast.open(path) as store:
        outcome = report_outcome(lambda: store.save("run/7", {"w": torch.ones(3)}, timeout_s=PATIENCE_S))
    return outcome, lines


def test_a_save_that_only_one_rank_calls_says_who_has_not(world: World, tmp_path: Path) -> None:
    (outcome, lines), *_ = world(3)(save_first_only, tmp_path)

    assert outcome.kind == "RankError"
    assert outcome.failures == {1: "RankGone", 2: "RankGone"}
    assert "run/7" in outcome.text
    assert len(lines) == 1
    assert "run/7" in lines[0]
    assert "ranks 1 and 2" in lines[0]


def save_again(rank: int, path: Path) -> list[ActOutcome]:
    mesh = DeviceMesh("cpu", torch.arange(dist.get_world_size()))

    def make(value: float) -> dict[str, Any]:
        return {"w": place(torch.full((5, 3), value), mesh, [Shard(0)]), "step": 1}

    return [
        save(path, "run", make(1.0)),
        save(path, "run", make(1.0)),
        save(path, "run", make(2.0)),
        save(path, "run", make(2.0), overwrite=True),
    ]


def test_the_same_again_has_existed_other_content_is_refused_unless_it_is_to_overwrite(
    world: World, tmp_path: Path
) -> None:
    results = world(3)(save_again, tmp_path)

    for first, same, other, over in results:
        assert (first.value["existed"], same.value["existed"], over.value["existed"]) == (False, True, False)
        assert first.value["digest"] == same.value["digest"] != over.value["digest"]
        assert other.failures == {0: "NameInUse"}
    with holdfast.open(tmp_path) as store:
        assert store.load("run")["w"].tolist() == [[2.0] * 3] * 5


def save_behind(rank: int, path: Path) -> list[ActOutcome]:
    mesh = DeviceMesh("cpu", torch.arange(dist.get_world_size()))
    weight = place(make_noise(700, 1024), mesh, [Shard(0)])
    with holdfast.open(path) as store:
        handle = store.save_async("run/1", {"w": weight, "rank": per_rank(rank)})
        weight._local_tensor.zero_()
        first = report_outcome(lambda: handle.wait().existed)
        # The name is in use, which is found out behind the caller's back, on the first rank.
        handle = store.save_async("run/1", {"w": weight, "rank": per_rank(rank)})
        second = report_outcome(handle.wait)
        third = report_outcome(lambda: store.save_async("run/2", {"w": weight}).wait().existed)
    return [first, second, third]


@pytest.mark.filterwarnings("ignore:.*was saved by")
def test_a_save_in_the_background_is_of_all_ranks_and_so_is_its_error(world: World, tmp_path: Path) -> None:
    results = world(2)(save_behind, tmp_path)

    for first, second, third in results:
        assert (first.value, third.value) == (False, False)
        assert (second.kind, second.failures) == ("RankError", {0: "NameInUse"})
    with holdfast.open(tmp_path) as store:
        assert torch.equal(store.load("run/1")["w"], make_noise(700, 1024))
        assert not store.load("run/2")["w"].any()


def save_one_name(rank: int, path: Path) -> ActOutcome:
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mesh = [DeviceMesh("cpu", torch.arange(2) + 2 * number) for number in range(2)][rank // 2]
    tree = {"w": place(torch.full((300, 10), float(rank // 2)), mesh, [Shard(0)])}
    return save(path, "run", tree, process_group=groups[rank // 2])


def test_of_two_groups_that_save_one_name_at_once_one_wins_and_the_other_is_told(world: World, tmp_path: Path) -> None:
    outcome = world(4)(save_one_name, tmp_path)

    kinds = [each.kind for each in outcome]
    assert kinds in (["", "", "RankError", "RankError"], ["RankError", "RankError", "", ""])
    assert {each.failures.get(0) for each in outcome} == {None, "NameInUse"}
    with holdfast.open(tmp_path) as store:
        assert set(store.load("run")["w"].flatten().tolist()) == {float(kinds[0] != "")}


# What a result says of sizes


def save_sizes(rank: int, path: Path) -> list[tuple[int, int, int]]:
    tree = {"shared": make_noise(2000), "own": per_rank(make_noise(1000, seed=rank)), "tiny": torch.ones(3)}
    with holdfast.open(path) as store:
        results = [store.save("run", tree) for _ in range(2)]
    return [(result.logical_bytes, result.new_bytes, result.reused_bytes) for result in results]


def test_sizes_count_what_each_rank_has_for_itself_and_are_the_same_on_all(world: World, tmp_path: Path) -> None:
    outcome = world(3)(save_sizes, tmp_path)

    logical, saved = 8000 + 4000 + 12, 8000 + 3 * 4000 + 12
    assert outcome == [[(logical, saved, 0), (logical, 0, saved)]] * 3


def nest(depth: int) -> object:
    tree: object = torch.arange(3)
    for _ in range(depth):
        tree = {"a": tree}
    return tree


def save_deep(rank: int, path: Path) -> list[ActOutcome]:
    def save_and_load() -> int:
        with holdfast.open(path) as store:
            store.save("deep", nest(MAX_TREE_DEPTH))
            store.load_into("deep", nest(MAX_TREE_DEPTH))
            return store.save_async("again", nest(MAX_TREE_DEPTH)).wait().logical_bytes

    return [report_outcome(save_and_load), save(path, "deeper", nest(MAX_TREE_DEPTH + 1))]


def test_trees_of_many_ranks_nest_as_deep_as_those_of_one(world: World, tmp_path: Path) -> None:
    outcome = world(2)(save_deep, tmp_path)

    assert [fine.value for fine, _ in outcome] == [24] * 2
    for _, refused in outcome:
        assert f"the tree is nested more than {MAX_TREE_DEPTH} deep; flatten it" in str(refused)
