"""Gradients of parameters during the backward pass: what is left from before, and the sum after each pass."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from holdfast.capture.record.options import make_options
from holdfast.capture.record.recorder import Recorder, record
from holdfast.capture.stored.events import Event
from holdfast.capture.stored.runs import read_run
from tests.kit.recorded_training import new_repo, pick

STEPS = 2


def train(do_step: Callable[[int, nn.Linear, torch.optim.Optimizer], object], **choices: str) -> list[Event]:
    """Return the gradients of a weight in the last of two steps."""
    torch.manual_seed(0)
    model, repo = nn.Linear(2, 1), new_repo()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with record(repo, "run", model, optimizer, options=make_options(**choices)):  # type: ignore[arg-type]  # options by name
        for step in range(STEPS):
            do_step(step, model, optimizer)
            optimizer.step()
    return pick(read_run(repo, "run").events(STEPS - 1), "param_grad", "weight")


def back(model: nn.Module) -> None:
    model(torch.ones(1, 2)).sum().backward()


def list_paths(events: list[Event]) -> list[str]:
    return [event.site.path for event in events]


def test_the_gradient_after_each_backward_pass_is_recorded_and_what_the_optimizer_uses() -> None:
    def do_step(step: int, model: nn.Linear, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        back(model)
        back(model)

    events = train(do_step)

    assert list_paths(events) == ["#1", "#2", ""]
    assert events[0].digest != events[1].digest == events[2].digest


def test_a_gradient_that_was_not_cleared_is_recorded_as_left_from_before() -> None:
    events = train(lambda step, model, optimizer: back(model))

    assert list_paths(events) == ["#0", "#1", ""]


def test_gradients_that_were_changed_after_the_backward_pass_are_seen_before_and_after() -> None:
    def do_step(step: int, model: nn.Linear, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        back(model)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)

    events = train(do_step)

    assert list_paths(events) == ["#1", ""]
    assert events[0].digest != events[1].digest


def test_a_parameter_that_is_trained_from_a_later_step_on_is_observed_from_then_on() -> None:
    def do_step(step: int, model: nn.Linear, optimizer: torch.optim.Optimizer) -> None:
        model.weight.requires_grad_(step == 1)
        optimizer.zero_grad()
        back(model)

    assert list_paths(train(do_step)) == ["#1", ""]


def test_a_gradient_that_a_hook_of_the_user_has_consumed_is_not_observed() -> None:
    def do_step(step: int, model: nn.Linear, optimizer: torch.optim.Optimizer) -> None:
        if step == 0:
            model.weight.register_post_accumulate_grad_hook(lambda weight: setattr(weight, "grad", None))  # type: ignore[no-untyped-call]  # torch's
        optimizer.zero_grad()
        back(model)

    assert list_paths(train(do_step)) == []


@pytest.mark.parametrize(("kinds", "count"), [("param_grad", 2), ("output", 0)])
def test_hooks_are_only_on_what_is_recorded_and_are_removed(kinds: str, count: int) -> None:
    model = nn.Linear(2, 1)

    def count_hooks() -> int:
        return sum(len(each._post_accumulate_grad_hooks or ()) for each in model.parameters())

    recorder: Recorder
    with record(new_repo(), "run", model, options=make_options(kinds=kinds)) as recorder:
        back(model)
        during = count_hooks()
        recorder.step()

    assert (during, count_hooks()) == (count, 0)
