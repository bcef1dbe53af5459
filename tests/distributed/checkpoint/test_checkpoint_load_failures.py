"""A load that fails on one rank: each rank reports what was overwritten on it; with `atomic`, nothing is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

import holdfast
from tests.distributed.conftest import World
from tests.distributed.placing import place
from tests.kit.tensors import raw_bytes
from tests.kit.thinning import pair_up

Outcome = dict[str, Any]
NAMES = ["w", "model.weight", "model.bias", "step", "fragile", "last"]


class Fragile:
    """Takes its state over in two moves; on one rank something happens in between."""

    def __init__(self, value: int, error: BaseException | None = None) -> None:
        self.one = self.two = value
        # A list: an atomic load puts attributes back, and the error comes only once, as an interrupt does.
        self.errors = [] if error is None else [error]

    def state_dict(self) -> dict[str, int]:
        return {"one": self.one, "two": self.two}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.one = state["one"]
        if self.errors:
            raise self.errors.pop()
        self.two = state["two"]


def make_tree(seed: int, error: BaseException | None = None) -> dict[str, Any]:
    mesh = DeviceMesh("cpu", torch.arange(dist.get_world_size()))
    torch.manual_seed(seed)
    model = torch.nn.Linear(10, 10)
    return {
        "w": place(torch.full((64, 8), float(seed)), mesh, [Shard(0)]),
        "model": model,
        "step": seed,
        "fragile": Fragile(seed, error),
        "last": seed,
    }


def find_facts(tree: dict[str, Any]) -> dict[str, Any]:
    return {
        "w": raw_bytes(tree["w"].to_local()),
        "model.weight": raw_bytes(tree["model"].weight),
        "model.bias": raw_bytes(tree["model"].bias),
        "step": tree["step"],
        "fragile": (tree["fragile"].one, tree["fragile"].two),
        "last": tree["last"],
    }


def save_tree(rank: int, path: Path) -> None:
    with holdfast.open(path) as store:
        store.save("x", make_tree(2))


ERRORS = {"interrupt": KeyboardInterrupt, "refusal": ValueError, "memory": MemoryError}


def load_failing(rank: int, path: Path, kind: str, options: dict[str, Any]) -> Outcome:
    """Load, the object of rank 1 failing once; return what was raised and what the tree holds, then load again."""
    tree = make_tree(1, ERRORS[kind]("not now") if rank == 1 else None)
    old, new = find_facts(make_tree(1)), find_facts(make_tree(2))
    with holdfast.open(path) as store:
        try:
            store.load_into("x", tree, timeout_s=20, **options)
        except BaseException as error:  # noqa: BLE001 - for the test to look at
            raised = error
        else:
            raise AssertionError("nothing was raised")
        found = find_facts(tree)
        store.load_into("x", tree, timeout_s=20, **options)
    return {
        "type": type(raised).__name__,
        "text": "\n".join([str(raised), *getattr(raised, "__notes__", [])]),
        "overwritten": getattr(raised, "overwritten", ()),
        "partly": getattr(raised, "partly_written", ()),
        "new": [name for name in found if found[name] == new[name]],
        "old": [name for name in found if found[name] == old[name]],
        "again": find_facts(tree) == new,
    }


@pytest.mark.parametrize(("kind", "replicas"), pair_up(list(ERRORS), ["each", "broadcast"]))
def test_every_rank_is_told_what_was_overwritten_on_it(world: World, tmp_path: Path, kind: str, replicas: str) -> None:
    world(2)(save_tree, tmp_path)

    results = world(2)(load_failing, tmp_path, kind, {"replicas": replicas})

    assert [result["type"] for result in results] == [
        "RankError",
        "KeyboardInterrupt" if kind == "interrupt" else "RankError",
    ]
    for rank, result in enumerate(results):
        whole = set(result["overwritten"]) - set(result["partly"])
        assert whole <= set(result["new"])
        assert set(NAMES) - set(result["overwritten"]) <= set(result["old"])
        assert f"the load had written to the target of rank {rank}" in result["text"]
        assert result["again"]
    assert results[1]["partly"] == ("fragile",)
    assert set(results[1]["overwritten"]) == {"w", "model.weight", "model.bias", "step", "fragile"}
    assert set(results[0]["overwritten"]) >= {"w", "model.weight", "model.bias"}
    assert "target of rank 1" in results[0]["text"], "what the failed rank has written is told to the others"


@pytest.mark.parametrize(("kind", "replicas"), pair_up(list(ERRORS), ["each", "broadcast"]))
def test_an_atomic_load_that_fails_on_one_rank_changes_nothing_on_any(
    world: World, tmp_path: Path, kind: str, replicas: str
) -> None:
    world(2)(save_tree, tmp_path)

    results = world(2)(load_failing, tmp_path, kind, {"replicas": replicas, "atomic": True})

    for result in results:
        assert result["overwritten"] == ()
        assert result["old"] == NAMES
        assert result["again"]
    assert results[0]["type"] == "RankError"
