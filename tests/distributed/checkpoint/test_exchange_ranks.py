"""Loads in which each rank learns only the locations of its own chunks have the same result as any other load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

import holdfast
from holdfast.errors import Mismatch
from holdfast.tensors.sharding import per_rank
from tests.distributed.conftest import World


def make_tree(rank: int, fill: float) -> dict[str, Any]:
    mesh = DeviceMesh("cpu", torch.arange(dist.get_world_size()))
    rows = torch.arange(40.0).reshape(10, 4) * fill
    tied = torch.full((300,), fill)
    return {
        "rows": distribute_tensor(rows, mesh, [Shard(0)]),
        "columns": distribute_tensor(rows.clone(), mesh, [Shard(1)]),
        "fixed": (np.arange(1000), "x" * 2000),
        "own": per_rank(torch.full((rank + 1,), fill)),
        "first": tied,
        "second": tied,
    }


def save_tree(rank: int, path: Path) -> None:
    with holdfast.open(path) as store:
        store.save("run", make_tree(rank, 1.0))


def load_tree(rank: int, path: Path) -> dict[str, Any]:
    tree = make_tree(rank, 0.0)
    if dist.get_world_size() != 3:
        tree["own"] = per_rank(torch.zeros(1))
    with holdfast.open(path, read_only=True) as store:
        store.load_into("run", tree)
    loaded = {name: tree[name].full_tensor().tolist() for name in ("rows", "columns")}
    return loaded | {"own": tree["own"].value.tolist(), "tied": float(tree["first"].sum())}


def test_ranks_load_boxes_own_values_and_what_cannot_be_changed(world: World, tmp_path: Path) -> None:
    world(3)(save_tree, tmp_path)

    same = world(3)(load_tree, tmp_path)
    fewer = world(2)(load_tree, tmp_path)

    rows = torch.arange(40.0).reshape(10, 4).tolist()
    expected = {"rows": rows, "columns": rows, "tied": 300.0}
    assert same == [expected | {"own": [1.0] * (rank + 1)} for rank in range(3)]
    assert fewer == [expected | {"own": [1.0]}] * 2


def load_differently(rank: int, path: Path) -> tuple[tuple[str, ...], float]:
    tree = make_tree(rank, 0.0)
    tree["own"] = per_rank(torch.zeros(1))
    if rank == 1:
        tree["fixed"] = (np.arange(1000) + 1, "y" * 2000)
    with holdfast.open(path, read_only=True) as store:
        try:
            store.load_into("run", tree)
        except Mismatch as error:
            return error.problems, float(tree["first"].sum())
    return (), 0.0


def test_what_cannot_be_changed_and_differs_is_listed_before_anything_changes(world: World, tmp_path: Path) -> None:
    world(3)(save_tree, tmp_path)

    outcome = world(2)(load_differently, tmp_path)

    assert [left for _, left in outcome] == [0.0, 0.0]
    for problems, _ in outcome:
        assert len(problems) == 2
        assert sorted(text.partition(" it differs")[0] for text in problems) == ["rank 1: fixed.0:", "rank 1: fixed.1:"]


def load_untied(rank: int, path: Path) -> tuple[str, ...]:
    tree = {"a": torch.zeros(300), "b": torch.zeros(300)}
    tree["b"] = tree["a"]
    with holdfast.open(path, read_only=True) as store:
        try:
            store.load_into("apart", tree)
        except Mismatch as error:
            return error.problems
    return ()


def save_apart(rank: int, path: Path) -> None:
    with holdfast.open(path) as store:
        store.save("apart", {"a": torch.zeros(300), "b": torch.ones(300)})


def test_two_values_for_one_memory_are_still_found(world: World, tmp_path: Path) -> None:
    world(3)(save_apart, tmp_path)

    outcome = world(2)(load_untied, tmp_path)

    assert all(len(problems) == 1 and "shares its memory with a" in problems[0] for problems in outcome)
