"""Checkpoints that torch's planners have written are loaded in place by the store, or refused as a whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_state_dict

import holdfast
from holdfast.dcp import StorageWriter
from holdfast.distributed.checkpoint.training import training_state
from holdfast.errors import Mismatch, Unsupported
from tests.distributed.conftest import World
from tests.distributed.dcp_states import dcp
from tests.distributed.dcp_trees import Odd
from tests.distributed.runs import Kind, new_model, train, whole, wrap
from tests.kit.capabilities import FSDP


def make_run(kind: Kind, seed: int = 0) -> tuple[torch.nn.Module, Any, Any]:
    model = wrap(new_model(seed), kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.125)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2)


def save_by_torch(rank: int, path: Path, kind: Kind) -> list[float]:
    """Save a run after two steps; return the losses of the next two."""
    model, optimizer, scheduler = make_run(kind)
    train(model, optimizer, range(2), kind)
    scheduler.step()
    states = get_state_dict(model, optimizer)
    state = {"model": states[0], "optimizer": states[1], "scheduler": scheduler.state_dict(), "step": 2}
    dcp.save(state, storage_writer=StorageWriter(path, "run"))
    return train(model, optimizer, range(2, 4), kind)


def go_on(rank: int, path: Path, kind: Kind) -> tuple[Any, list[float]]:
    model, optimizer, scheduler = make_run(kind, seed=1)
    state = training_state(model, optimizer, scheduler, rng=False, step=0)
    holdfast.open(path).load_into("run", state)
    return (state.step, scheduler.last_epoch), train(model, optimizer, range(2, 4), kind)


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        (("plain", 1), ("plain", 1)),
        pytest.param(("fsdp", 2), ("fsdp", 3), marks=[FSDP, pytest.mark.slow]),
        pytest.param(("fsdp", 2), ("plain", 1), marks=FSDP),
    ],
)
def test_a_run_that_torch_has_saved_goes_on(
    world: World, tmp_path: Path, saved: tuple[Kind, int], loaded: tuple[Kind, int]
) -> None:
    (wanted, *_) = world(saved[1])(save_by_torch, tmp_path, saved[0])

    found = world(loaded[1])(go_on, tmp_path, loaded[0])

    for outcome, losses in found:
        assert outcome == (2, 1)
        assert losses == pytest.approx(wanted, rel=1e-9)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_an_optimizer_of_other_groups_is_refused_and_nothing_changes(tmp_path: Path) -> None:
    save_by_torch(0, tmp_path, "plain")
    model = new_model(seed=1)
    optimizer = torch.optim.AdamW(list(model.parameters())[:-1])
    before = whole(model.state_dict())

    with pytest.raises(Mismatch, match=r"optimizer\.param_groups: 3\.bias is in group 0 of the snapshot only"):
        holdfast.open(tmp_path).load_into("run", {"model": model, "optimizer": _name(model, optimizer)}, strict=False)

    assert whole(model.state_dict()) == before


def _name(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    return training_state(model, optimizer)["optimizer"]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_an_optimizer_by_numbers_is_compared_as_well(tmp_path: Path) -> None:
    model, optimizer, _ = make_run("plain")
    train(model, optimizer, range(1), "plain")
    dcp.save({"optimizer": optimizer.state_dict()}, storage_writer=StorageWriter(tmp_path, "run"))
    fewer = torch.optim.AdamW(list(new_model().parameters())[1:])

    with pytest.raises(Mismatch, match="parameter groups of 5 in the target, of 6 in the snapshot"):
        holdfast.open(tmp_path).load_into("run", {"optimizer": fewer})


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_what_is_more_than_plain_data_is_refused_before_anything_changes(tmp_path: Path) -> None:
    model, optimizer, _ = make_run("plain")
    train(model, optimizer, range(1), "plain")
    optimizer.param_groups[0]["odd"] = Odd()
    states = get_state_dict(model, optimizer)
    writer = StorageWriter(tmp_path, "run", weights_only=False)
    dcp.save({"model": states[0], "optimizer": states[1]}, storage_writer=writer)
    other = new_model(seed=1)
    before = whole(other.state_dict())
    state = training_state(other, torch.optim.AdamW(other.parameters()), rng=False)

    with pytest.raises(Unsupported, match=r"param_groups.*allow_pickle=True"):
        holdfast.open(tmp_path).load_into("run", state, strict=False)

    assert whole(other.state_dict()) == before
