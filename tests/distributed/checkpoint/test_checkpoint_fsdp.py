"""Modules sharded by `fully_shard`, and their optimizers, are loaded in place on any number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

import holdfast
from tests.distributed.conftest import World
from tests.distributed.runs import Kind, new_model, train, whole, wrap
from tests.kit.capabilities import FSDP


def save(rank: int, path: Path, kind: Kind) -> Any:
    model = wrap(new_model(), kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    train(model, optimizer, range(3), kind)
    holdfast.open(path).save("x", {"model": model, "optim": optimizer})
    return whole({"model": model.state_dict(), "optim": optimizer.state_dict()})


def load(rank: int, path: Path, kind: Kind) -> list[tuple[Any, bool, set[str]]]:
    """Load into fresh objects, and into some that were used."""
    found = []
    for is_used in (False, True):
        model = wrap(new_model(seed=rank + 1), kind)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
        if is_used:
            train(model, optimizer, range(1), kind)
        parameters = list(model.parameters())
        places = [find_place(each) for each in parameters]
        holdfast.open(path).load_into("x", {"model": model, "optim": optimizer})
        is_same = list(map(id, model.parameters())) == list(map(id, parameters))
        is_same = is_same and [find_place(each) for each in parameters] == places
        kinds = {type(held["exp_avg"]).__name__ for held in optimizer.state.values()}
        found.append((whole({"model": model.state_dict(), "optim": optimizer.state_dict()}), is_same, kinds))
    return found


def find_place(tensor: torch.Tensor) -> int:
    return (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).data_ptr()


@FSDP
@pytest.mark.parametrize(
    ("before", "after"),
    [(2, 1), pytest.param(2, 3, marks=pytest.mark.slow), pytest.param(3, 2, marks=pytest.mark.slow)],
)
def test_a_sharded_module_and_its_optimizer_are_filled_in_place(
    world: World, tmp_path: Path, before: int, after: int
) -> None:
    saved = world(before)(save, tmp_path, "fsdp")

    found = [each for rank in world(after)(load, tmp_path, "fsdp") for each in rank]

    assert found == [(saved[0], True, {"DTensor"})] * 2 * after


@FSDP
@pytest.mark.slow  # two runs that train
def test_what_ranks_have_cut_is_loaded_whole_by_one_process_and_cut_again(world: World, tmp_path: Path) -> None:
    saved = world(2)(save, tmp_path, "fsdp")[0]

    found = load(0, tmp_path, "plain")

    assert found == [(saved, True, {"Tensor"})] * 2
    again = save(0, tmp_path / "other", "plain")
    found = [each for rank in world(3)(load, tmp_path / "other", "fsdp") for each in rank]
    assert found == [(again, True, {"DTensor"})] * 6


def load_counted(rank: int, path: Path) -> list[int]:
    """Return how much this rank reads for a fresh model and optimizer, and how much there is."""
    model = torch.nn.Linear(1000, 1200, bias=False)
    torch.distributed.fsdp.fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    store = holdfast.open(path)
    store.load_into("x", {"model": model, "optim": optimizer})
    return [store.statistics().stages["read"].size_bytes, 3 * 1000 * 1200 * 4]


def test_each_rank_reads_what_it_holds_and_no_more(world: World, tmp_path: Path) -> None:
    model = torch.nn.Linear(1000, 1200, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    torch.autograd.backward(model(torch.ones(1000)).sum())
    optimizer.step()
    holdfast.open(tmp_path).save("x", {"model": model, "optim": optimizer})

    found = world(3)(load_counted, tmp_path)

    # A third, and at its edges the rest of a chunk, of which there are five to a tensor.
    assert all(read <= total * 0.61 for read, total in found)


class WithNorm(torch.nn.Module):
    """Has buffers, and a layer of torch's that reads what older versions have saved."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(4)
        self.out = torch.nn.Linear(4, 3)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.out(self.norm(value))
        return out


def save_and_load_norm(rank: int, path: Path) -> tuple[Any, Any, list[bool]]:
    first, second = WithNorm(), WithNorm()
    for module in (first, second):
        torch.distributed.fsdp.fully_shard(module.norm)
        torch.distributed.fsdp.fully_shard(module)
    first(torch.randn(6, 4, generator=torch.Generator().manual_seed(1)))
    # Its parameters are gathered until the state is asked for.
    unshard: Any = second.unshard
    unshard()
    store = holdfast.open(path)
    store.save("x", first)
    places = [find_place(each) for each in second.state_dict().values()]
    store.load_into("x", second)
    is_same = [find_place(each) for each in second.state_dict().values()] == places
    return whole(first.state_dict()), whole(second.state_dict()), [is_same]


@FSDP
def test_buffers_and_layers_that_know_their_past_are_filled_in_place_too(world: World, tmp_path: Path) -> None:
    for saved, loaded, is_same in world(2)(save_and_load_norm, tmp_path):
        assert loaded == saved
        assert is_same == [True]


def save_and_load_cast(rank: int, path: Path) -> tuple[set[str], Any, Any]:
    """Load state of more precision than the parameters have, by way of an optimizer that has stepped."""
    model = wrap(new_model(dtype=torch.float32), "fsdp")
    optimizer = torch.optim.AdamW(model.parameters())
    train(model.double(), optimizer, range(1), "fsdp")
    store = holdfast.open(path)
    saved = whole(optimizer.state_dict())
    store.save("x", optimizer)
    other = wrap(new_model(dtype=torch.float32), "fsdp")
    fresh = torch.optim.AdamW(other.parameters())
    store.load_into("x", fresh)
    kinds = {type(held["exp_avg"]).__name__ for held in fresh.state.values()}
    return kinds, saved, whole(fresh.state_dict())


@FSDP
def test_state_of_more_precision_than_the_parameters_keeps_it(world: World, tmp_path: Path) -> None:
    for kinds, saved, loaded in world(2)(save_and_load_cast, tmp_path):
        assert kinds == {"DTensor"}
        assert loaded == saved


def translate_and_assign(rank: int, path: Path) -> list[Any]:
    """Load into a module that looks at what it gets, and put new parameters in the place of those of another."""
    store = holdfast.open(path)
    first, second, third = (wrap(new_model(seed), "fsdp") for seed in (0, 1, 2))
    store.save("x", first)

    def look(module: torch.nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        assert all(isinstance(value, DTensor) for value in state.values())

    hooks: Any = second
    hooks.register_load_state_dict_pre_hook(look)
    store.load_into("x", second)
    store.load_into("x", third, assign=True)
    train(third, torch.optim.SGD(third.parameters(), lr=0.0), range(1), "fsdp")
    return [whole(model.state_dict()) for model in (first, second, third)]


@FSDP
def test_hooks_and_assigning_get_what_the_rank_holds(world: World, tmp_path: Path) -> None:
    for first, second, third in world(2)(translate_and_assign, tmp_path):
        assert first == second == third
