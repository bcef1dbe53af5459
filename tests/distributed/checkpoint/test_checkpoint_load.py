"""Collective loads: each rank reads only what it needs, and nothing changes unless it fits on all ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

import holdfast
from holdfast.tensors.sharding import per_rank, shard
from tests.distributed.conftest import World
from tests.distributed.outcomes import ActOutcome, counting, report_outcome
from tests.distributed.placing import place
from tests.kit.patience import PATIENCE_S
from tests.kit.thinning import keep

MIB = 1 << 20


def make_noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def make_world_mesh() -> DeviceMesh:
    return DeviceMesh("cpu", torch.arange(dist.get_world_size()))


# What is read


def save_rows(rank: int, path: Path) -> None:
    mesh = make_world_mesh()
    tree = {f"layer {number}": place(make_noise(2304, 1024, seed=number), mesh, [Shard(0)]) for number in range(3)}
    with holdfast.open(path) as store:
        store.save("run", {"model": tree, "bias": make_noise(600, seed=9)})


def load_rows(rank: int, path: Path) -> dict[str, Any]:
    mesh = make_world_mesh()
    tree = {f"layer {number}": place(torch.zeros(2304, 1024), mesh, [Shard(0)]) for number in range(3)}
    with counting(path) as (store, inner):
        store.load_into("run", {"model": tree, "bias": torch.zeros(600)})
    return {
        "right": all(
            torch.equal(value._local_tensor, place(make_noise(2304, 1024, seed=at), mesh, [Shard(0)])._local_tensor)
            for at, value in enumerate(tree.values())
        ),
        "needed": sum(value._local_tensor.nbytes for value in tree.values()),
        "read": inner.read_bytes["packs"],
        "manifests": {key: count for key, count in inner.reads.items() if key.startswith("manifests/")},
    }


@pytest.mark.parametrize("size", keep([1, 2, 4], 2))
def test_ranks_read_exact_ranges_and_each_manifest_once(world: World, tmp_path: Path, size: int) -> None:
    world(3)(save_rows, tmp_path)

    results = world(size)(load_rows, tmp_path)

    for result in results:
        assert result["right"]
        # An edge inside of a chunk costs that chunk: two edges a tensor, and what is plain.
        assert result["read"] <= result["needed"] + 3 * 2 * MIB + 4096
    manifests = [key for result in results for key, count in result["manifests"].items() for _ in range(count)]
    assert len(manifests) == 1 + 3
    assert len(set(manifests)) == 1 + 3


# Who gets what


def save_own(rank: int, path: Path) -> None:
    model = torch.nn.BatchNorm1d(4)
    assert model.running_mean is not None
    model.running_mean.fill_(rank + 1)
    tree = {"model": model, "rng": per_rank(torch.full((5,), rank)), "place": per_rank(10 + rank), "loss": 0.5 + rank}
    with holdfast.open(path) as store:
        report_outcome(lambda: store.save("run", tree))


def load_own(rank: int, path: Path) -> tuple[ActOutcome, list[Any]]:
    model = torch.nn.BatchNorm1d(4)
    assert model.running_mean is not None
    tree = {"model": model, "rng": torch.zeros(5, dtype=torch.int64), "place": 0, "loss": 0.0}
    with holdfast.open(path) as store:
        outcome = report_outcome(lambda: store.load_into("run", tree) and None)
    return outcome, [model.running_mean[0].item(), tree["rng"][0].item(), tree["place"], tree["loss"]]  # type: ignore[index]


def test_as_many_ranks_get_each_its_own_back(world: World, tmp_path: Path) -> None:
    world(3)(save_own, tmp_path)

    results = world(3)(load_own, tmp_path)

    assert [values for _, values in results] == [[rank + 1, rank, 10 + rank, 0.5 + rank] for rank in range(3)]
    assert [outcome.warned for outcome, _ in results] == [()] * 3


@pytest.mark.parametrize("size", keep([1, 2, 4], 2))
def test_another_number_of_ranks_gets_those_of_the_lowest_and_is_told(world: World, tmp_path: Path, size: int) -> None:
    world(3)(save_own, tmp_path)

    results = world(size)(load_own, tmp_path)

    assert [values for _, values in results] == [[1, 0, 10, 0.5]] * size
    assert [len(outcome.warned) for outcome, _ in results] == [1] + [0] * (size - 1)
    assert "model.running_mean" in results[0][0].warned[0]
    assert "lowest rank" in results[0][0].warned[0]


def test_one_process_gets_those_of_the_lowest_and_is_told(world: World, tmp_path: Path) -> None:
    world(3)(save_own, tmp_path)

    with holdfast.open(tmp_path) as store, pytest.warns(UserWarning, match=r"saved by 3 ranks.*model\.running_mean"):
        tree = store.load("run")

    assert tree["model"]["running_mean"][0].item() == 1


def save_one_declared(rank: int, path: Path) -> None:
    with holdfast.open(path) as store:
        store.save("declared", {"own": per_rank(torch.full((5,), rank))})


def test_nobody_is_told_of_what_was_declared(world: World, tmp_path: Path) -> None:
    world(2)(save_one_declared, tmp_path)

    with holdfast.open(tmp_path) as store:
        assert store.load("declared")["own"].tolist() == [0] * 5


def load_declared_own(rank: int, path: Path) -> tuple[ActOutcome, list[Any]]:
    def make(value: int) -> dict[str, Any]:
        return {
            "rng": per_rank(torch.full((5,), value)),
            "place": per_rank(value),
            "loader": per_rank({"at": value, "name": f"worker {value}", "order": torch.full((2,), value)}),
        }

    tree = make(9)
    with holdfast.open(path) as store:
        store.save("run", make(rank))
        outcome = report_outcome(lambda: store.load_into("run", tree) and None)
        again = report_outcome(lambda: store.save("run", tree).existed)
    loader = tree["loader"].value
    values = [tree["rng"].value[0].item(), tree["place"].value, loader["at"], loader["name"], loader["order"][0].item()]
    return outcome, [*values, again.value]


def test_a_tree_with_declarations_is_loaded_into_and_keeps_them(world: World, tmp_path: Path) -> None:
    results = world(2)(load_declared_own, tmp_path)

    assert [outcome.text for outcome, _ in results] == ["", ""]
    assert [values for _, values in results] == [[rank, rank, rank, f"worker {rank}", rank, True] for rank in range(2)]


def save_shapes(rank: int, path: Path) -> None:
    with holdfast.open(path) as store:
        report_outcome(
            lambda: store.save("run", {"batch": torch.arange(3 + rank), "only": {f"of {rank}": make_noise(4)}})
        )


def load_shapes(rank: int, path: Path) -> tuple[ActOutcome, list[int]]:
    tree = {"batch": torch.zeros(3 + rank, dtype=torch.int64), "only": {f"of {rank}": torch.zeros(4)}}
    with holdfast.open(path) as store:
        outcome = report_outcome(lambda: store.load_into("run", tree) and None)
    return outcome, tree["batch"].tolist()  # type: ignore[attr-defined]


def test_trees_that_differ_in_keys_and_shapes_come_back_to_their_ranks(world: World, tmp_path: Path) -> None:
    world(3)(save_shapes, tmp_path)

    results = world(3)(load_shapes, tmp_path)

    assert [outcome.text for outcome, _ in results] == [""] * 3
    assert [batch for _, batch in results] == [list(range(3 + rank)) for rank in range(3)]


def save_declared(rank: int, path: Path) -> None:
    full = make_noise(9, 4)
    rows = slice(rank * 4, rank * 4 + 4 if rank == 0 else 9)
    with holdfast.open(path) as store:
        store.save("run", {"w": shard(full[rows], global_shape=(9, 4), offsets=(rows.start, 0)), "p": full})


def load_declared(rank: int, path: Path) -> list[bool]:
    full = make_noise(9, 4)
    columns = slice(rank, rank + 2)
    parts = [torch.zeros(9, 2), torch.zeros(9, 2)]
    tree = {
        name: shard(part, global_shape=(9, 4), offsets=(0, columns.start))
        for name, part in zip(("w", "p"), parts, strict=True)
    }
    with holdfast.open(path) as store:
        store.load_into("run", tree)
    return [torch.equal(part, full[:, columns]) for part in parts]


def test_declared_shards_load_as_any_other_box_even_if_those_overlap(world: World, tmp_path: Path) -> None:
    world(2)(save_declared, tmp_path)

    assert world(3)(load_declared, tmp_path) == [[True, True]] * 3


def load_group(rank: int, path: Path) -> float:
    group = dist.new_group([1, 2])
    weight = torch.zeros(4)
    if rank:
        with holdfast.open(path) as store:
            store.load_into("alone", {"w": weight}, process_group=group)
    else:
        with holdfast.open(path) as store:
            store.load_into("alone", {"w": weight}, collective=False)
    dist.barrier()
    return weight[0].item()


def test_a_group_of_some_and_a_process_alone_load(world: World, tmp_path: Path) -> None:
    with holdfast.open(tmp_path) as store:
        store.save("alone", {"w": torch.ones(4)})

    assert world(3)(load_group, tmp_path) == [1.0] * 3


# What does not fit


def load_misfits(rank: int, path: Path) -> tuple[ActOutcome, list[Any]]:
    tree: dict[str, Any] = {
        "w": torch.zeros(4) if rank != 1 else torch.zeros(5),
        "b": torch.zeros(2) if rank != 2 else torch.zeros(2, dtype=torch.int64),
        "step": 0,
    }
    if rank == 2:
        tree["more"] = torch.zeros(1)
    if rank == 1:
        del tree["step"]
    with holdfast.open(path) as store:
        outcome = report_outcome(lambda: store.load_into("run", tree, timeout_s=PATIENCE_S) and None)
        after = torch.zeros(4)
        store.load_into("run", {"w": after, "b": torch.zeros(2), "step": 0})
    return outcome, [tree["w"].any().item(), tree["b"].any().item(), tree.get("step"), after.tolist()]


def test_all_that_does_not_fit_on_any_rank_is_one_error_and_nothing_changes(world: World, tmp_path: Path) -> None:
    with holdfast.open(tmp_path) as store:
        store.save("run", {"w": torch.ones(4), "b": torch.ones(2), "step": 7})

    results = world(3)(load_misfits, tmp_path)

    for rank, (outcome, values) in enumerate(results):
        assert outcome.kind == "Mismatch"
        assert "rank 1: w" in outcome.text
        assert "rank 1: step" in outcome.text
        assert "rank 2: b" in outcome.text
        assert "rank 2: more" in outcome.text
        assert values == [False, False, None if rank == 1 else 0, [1.0] * 4]


def load_others(rank: int, path: Path, how: str) -> tuple[ActOutcome, bool, ActOutcome]:
    weight = torch.zeros(4)
    name = f"run/{rank}" if how == "names" else "run/0"
    if how == "absent" and rank == 1:
        name = "run/9"
    with holdfast.open(path) as store:
        snapshot: Any = store.snapshot(name) if how == "generations" and rank == 1 else name
        dist.barrier()
        if how == "generations" and rank == 0:
            store.save("run/0", {"w": torch.full((4,), 5.0)}, overwrite=True, collective=False)
        dist.barrier()
        outcome = report_outcome(lambda: store.load_into(snapshot, {"w": weight}, timeout_s=PATIENCE_S) and None)
        unchanged = not weight.any().item()
        dist.barrier()
        return (
            outcome,
            unchanged,
            report_outcome(lambda: store.load_into("run/0", {"w": weight}, timeout_s=PATIENCE_S) and None),
        )


@pytest.mark.parametrize(
    ("how", "texts"),
    [
        ("names", ["rank 0 'run/0' (generation 0)", "rank 1 'run/1' (generation 0)"]),
        ("generations", ["rank 0 'run/0' (generation 1)", "rank 1 'run/0' (generation 0)"]),
        ("absent", ["run/9", "rank 1"]),
    ],
)
def test_ranks_that_open_different_snapshots_are_told_so(
    world: World, tmp_path: Path, how: str, texts: list[str]
) -> None:
    with holdfast.open(tmp_path) as store:
        for number in range(3):
            store.save(f"run/{number}", {"w": torch.full((4,), 1.0 + number)})

    results = world(3)(load_others, tmp_path, how)

    for outcome, unchanged, after in results:
        assert outcome.kind in ("Mismatch", "RankError")
        assert [text for text in texts if text not in outcome.text] == [], outcome.text
        assert unchanged
        assert after.kind == "", after


def load_rotten(rank: int, path: Path) -> tuple[ActOutcome, ActOutcome]:
    mesh = make_world_mesh()
    with holdfast.open(path) as store:
        rows = place(torch.zeros(900, 1024), mesh, [Shard(0)])
        rotten = report_outcome(lambda: store.load_into("run", {"w": rows}, timeout_s=PATIENCE_S) and None)
        return rotten, report_outcome(lambda: store.load_into("good", {"w": rows}, timeout_s=PATIENCE_S) and None)


def test_damage_that_one_rank_meets_is_told_to_all(world: World, tmp_path: Path) -> None:
    with holdfast.open(tmp_path) as store:
        store.save("run", {"w": make_noise(900, 1024)})
        (pack,) = (tmp_path / "packs").iterdir()
        store.save("good", {"w": make_noise(900, 1024, seed=1)})
    data = bytearray(pack.read_bytes())
    data[-100_000] ^= 1  # in the last rows, which belong to the last rank
    pack.write_bytes(data)

    results = world(3)(load_rotten, tmp_path)

    for rotten, good in results:
        assert rotten.kind == "RankError"
        assert rotten.failures == {2: "DigestMismatch"}
        assert "w" in rotten.text
        assert good.kind == "", good
