"""Training steps of a small model, to measure what other work costs them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final

import torch

STEPS: Final = 100
"""How many steps are measured alone, before and after the other work."""


def step_while(step: Callable[[], float], is_busy: Callable[[], bool]) -> Sequence[float]:
    """Return how long each step took while other work was busy; at least one."""
    found = [step()]
    while is_busy():
        found.append(step())
    return found


def make_step() -> Callable[[], float]:
    """Return a training step of a small model on one thread, which returns how many seconds it took."""
    # One thread: the other cores are free for the export, as they are while a GPU computes the step.
    torch.set_num_threads(1)
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters())
    data = torch.randn(32, 256)

    def step() -> float:
        started = time.perf_counter()
        optimizer.zero_grad()
        model(data).square().mean().backward()
        optimizer.step()
        return time.perf_counter() - started

    for _ in range(STEPS):
        step()
    return step
