"""Small models and their training, for tests of recordings."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from holdfast.capture.record.options import make_options
from holdfast.capture.record.recorder import Recorder, record
from holdfast.capture.stored.events import Event, EventKind
from holdfast.capture.stored.runs import Run, read_run
from holdfast.objects.memory import MemoryStore
from holdfast.repo.handle.repository import Repository, open_repository


class Block(nn.Module):
    """Two layers around an activation that works in place."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.activation = nn.ReLU(inplace=True)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        grown: torch.Tensor = x + scale * self.down(self.activation(self.up(x)))
        return grown


class Model(nn.Module):
    """Blocks in a list, a norm with buffers, and a dropout that draws."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(width), Block(width)])
        self.norm = nn.BatchNorm1d(width)
        self.dropout = nn.Dropout(0.25)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, scale=0.5)
        dropped: torch.Tensor = self.dropout(self.norm(x))
        return dropped


def new_repo() -> Repository:
    return open_repository(MemoryStore(), create=True)


@dataclass(slots=True)
class Training:
    """A model, its optimizer and a batch, the same each time."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    batch: torch.Tensor

    def step(self) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss: torch.Tensor = self.model(self.batch).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]  # torch's
        self.optimizer.step()
        return loss.detach()

    def record(self, repo: Repository, name: str = "run", **choices: Any) -> Recorder:
        return record(repo, name, self.model, self.optimizer, make_options(**choices))


def new_training(make: Callable[[], nn.Module] = Model, *, seed: int = 0) -> Training:
    torch.manual_seed(seed)
    model = make()
    return Training(model, torch.optim.AdamW(model.parameters(), lr=0.01), torch.randn(3, 4))


def record_steps(
    repo: Repository,
    name: str = "run",
    *,
    training: Training | None = None,
    count: int = 2,
    **choices: Any,
) -> Run:
    """Record a few steps; each waits until what was sealed is written, so that failures come in their turn."""
    training = training or new_training()
    with training.record(repo, name, **choices) as rec:
        for _ in range(count):
            training.step()
            rec._spool.wait()
    return read_run(repo, name)


def pick(events: Iterable[Event], kind: EventKind, fqn: str | None = None) -> list[Event]:
    return [event for event in events if event.site.kind == kind and fqn in (None, event.site.fqn)]


def leave_out_settings(events: Iterable[Event]) -> list[Event]:
    """Return the events of tensors: settings have neither statistics nor copies."""
    return [event for event in events if event.site.kind != "setting"]


def count_hooks(model: nn.Module) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())
