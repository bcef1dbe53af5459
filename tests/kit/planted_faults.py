"""A tiny model that trains a few steps while it is recorded, and the places where a fault can be put into it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from holdfast.capture.compare.compare import diff_runs
from holdfast.capture.compare.result import Origin
from holdfast.capture.record.options import LevelName, make_options
from holdfast.capture.record.recorder import record
from holdfast.capture.stored.runs import Run, read_run
from holdfast.objects.memory import MemoryStore
from holdfast.repo.handle.repository import open_repository

Plant = Callable[["Tiny"], None]
Optimizer = torch.optim.Optimizer


class Block(torch.nn.Module):
    """A residual block, with operations of its own around those of its modules."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.up = torch.nn.Linear(width, width)
        self.drop = torch.nn.Dropout(0.5)
        self.down = torch.nn.Linear(width, width)
        self.mix = torch.relu

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.mix(self.up(self.norm(x)))
        found: torch.Tensor = x + self.down(self.drop(hidden))
        return found


class Tiny(torch.nn.Module):
    """Three blocks between two layers."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.embed = torch.nn.Linear(4, width)
        self.layers = torch.nn.ModuleList(Block(width) for _ in range(3))
        self.head = torch.nn.Linear(width, 2)
        self.order = [0, 1, 2]
        self.drop_out()

    def drop_out(self, *, on: bool = False) -> None:
        for layer in self.layers:
            layer.get_submodule("drop").train(on)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for number in self.order:
            x = self.layers[number](x)
        found: torch.Tensor = self.head(x)
        return found


def nothing(model: Tiny) -> None:
    """Plant no fault."""


def train(
    plant: Plant = nothing,
    *,
    name: str = "run",
    first: int = 0,
    steps: int = 3,
    seed: int = 0,
    level: LevelName = "full",
    before_step: Callable[[int, Tiny, Optimizer], None] = lambda step, model, optimizer: None,
    loss: Callable[[torch.Tensor], torch.Tensor] = lambda found: found.square().mean(),
    **choices: Any,
) -> Run:
    """Record a few steps of training, from the same start for each seed; `first` of them are passed over."""
    torch.manual_seed(seed)
    model = Tiny()
    plant(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    data = torch.Generator().manual_seed(seed + 1)
    batches = [torch.randn(5, 4, generator=data) for _ in range(steps)]
    repo = open_repository(MemoryStore(), create=True)
    with record(repo, name, model, optimizer, make_options(level=level, **choices)):
        for step, batch in [*enumerate(batches)][first:]:
            before_step(step, model, optimizer)
            optimizer.zero_grad()
            loss(model(batch)).backward()  # type: ignore[no-untyped-call]  # torch's
            optimizer.step()
    return read_run(repo, name)


@cache
def train_well(*, steps: int = 1, level: LevelName = "full") -> Run:
    """Record a run without a fault, once for all tests: a run is only read."""
    return train(name="good", steps=steps, level=level)


def find_origin(plant: Plant, *, steps: int = 1, level: LevelName = "full", **choices: Any) -> Origin:
    good = train_well(steps=steps, level=level)
    found = diff_runs(good, train(plant, name="bad", steps=steps, level=level, **choices)).origin
    assert found is not None
    return found


def name(origin: Origin) -> tuple[int, str, str, str]:
    """Return what an origin is named by."""
    return (origin.step, origin.phase, origin.fqn, origin.kind)


def leave_dropout_on(model: Tiny) -> None:
    model.layers[1].get_submodule("drop").train()
