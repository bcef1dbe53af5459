"""Causes that no tensor shows: named once, and not at all where they have no effect."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
import torch

from holdfast.capture.compare.compare import diff_runs
from holdfast.capture.compare.explain import find_scope
from holdfast.capture.compare.result import RunDiff
from holdfast.capture.record.options import make_options
from holdfast.capture.record.recorder import record
from holdfast.capture.stored.runs import Run, read_run
from holdfast.objects.memory import MemoryStore
from holdfast.repo.handle.repository import open_repository
from tests.kit.planted_faults import Tiny
from tests.kit.runs_in_memory import make_run

SGD = torch.optim.SGD
Loop = Callable[[Tiny, torch.optim.Optimizer, torch.Tensor], None]


def step(model: Tiny, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> None:
    optimizer.zero_grad()
    model(batch).square().mean().backward()
    optimizer.step()


def step_with_zeros(model: Tiny, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> None:
    optimizer.zero_grad(set_to_none=False)
    model(batch).square().mean().backward()
    optimizer.step()


def step_clipped(model: Tiny, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> None:
    optimizer.zero_grad()
    model(batch).square().mean().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    optimizer.step()


def do_nothing(model: Tiny) -> None:
    """Plant no fault."""


def train(
    name: str,
    plant: Callable[[Tiny], object] = do_nothing,
    *,
    loop: Loop = step,
    make: Callable[[Tiny], torch.optim.Optimizer] = lambda model: SGD(model.parameters(), lr=0.1),
    **choices: Any,
) -> Run:
    """Record two steps."""
    torch.manual_seed(0)
    model = Tiny()
    plant(model)
    optimizer = make(model)
    repo = open_repository(MemoryStore(), create=True)
    with record(repo, name, model, optimizer, make_options(**choices)):
        for number in range(2):
            loop(model, optimizer, torch.full((3, 4), 0.5 + number))
    return read_run(repo, name)


@cache
def train_well() -> Run:
    return train("good")


def name(diff: RunDiff) -> list[tuple[int, str, str]]:
    return [(origin.step, origin.cause, origin.fqn) for origin in diff.origins]


@pytest.mark.parametrize(
    ("names", "scope"),
    [
        (["a.b.weight"], "a.b.weight"),
        (["a.b.weight", "a.b.bias"], "a.b"),
        (["a.b.weight", "a.c.weight"], "a"),
        (["a.weight", "b.weight"], ""),
        (["weight", "bias"], ""),
        (["a.b.c.weight", "a.b.weight"], "a.b"),
    ],
)
def test_the_scope_of_parameters_is_the_innermost_module_around_them(names: Sequence[str], scope: str) -> None:
    assert find_scope(names) == scope


def test_a_module_that_changes_its_input_and_returns_something_else_is_named() -> None:
    def plant(model: Tiny) -> None:
        norm = model.layers[1].get_submodule("norm")
        forward = norm.forward

        def shift(x: torch.Tensor) -> torch.Tensor:
            # What the norm computes does not change with its input's mean; what is added to it later does.
            found: torch.Tensor = forward(x.clone())
            x.add_(1)
            return found

        norm.forward = shift

    diff = diff_runs(train_well(), train("bad", plant))

    assert name(diff) == [(0, "in-place change", "layers.1.norm")]
    assert diff.origin is not None
    assert diff.origin.why.startswith("it changes its input[0] in place in bad and not in good")
    assert diff.origin.notes[0].startswith("first seen in layers.1: output differs")


def test_what_two_runs_make_of_an_input_in_place_is_compared() -> None:
    def shift_by(number: float) -> Callable[[Tiny], None]:
        def plant(model: Tiny) -> None:
            norm = model.layers[1].get_submodule("norm")
            forward = norm.forward

            def shift(x: torch.Tensor) -> torch.Tensor:
                found: torch.Tensor = forward(x.clone())
                x.add_(number)
                return found

            norm.forward = shift

        return plant

    diff = diff_runs(train("good", shift_by(1)), train("bad", shift_by(2)))

    assert name(diff) == [(0, "in-place change", "layers.1.norm")]
    assert diff.origin is not None
    assert diff.origin.site.path == "#input[0]"
    assert diff.origin.why == "what it makes of its input[0] in place differs though its inputs were equal"


def test_gradients_that_are_zero_before_a_pass_are_no_cause() -> None:
    diff = diff_runs(train_well(), train("zeros", loop=step_with_zeros))

    assert diff.is_match
    assert diff.counts["origin"] == diff.counts["propagated"] == 0


def test_a_wrong_gradient_is_named_though_clipping_changes_all_others_with_it() -> None:
    def plant(model: Tiny) -> None:
        model.layers[1].get_parameter("up.bias").register_hook(lambda grad: grad * 2)  # type: ignore[no-untyped-call]  # torch's

    diff = diff_runs(train("good", loop=step_clipped), train("bad", plant, loop=step_clipped))

    assert name(diff) == [(0, "", "layers.1.up")]


def test_a_frozen_parameter_is_named_though_clipping_changes_all_gradients_with_it() -> None:
    def plant(model: Tiny) -> None:
        model.embed.requires_grad_(requires_grad=False)

    diff = diff_runs(train("good", loop=step_clipped), train("bad", plant, loop=step_clipped))

    assert name(diff) == [(0, "frozen", "embed")]
    assert diff.origin is not None
    assert "2 parameters (embed.weight, embed.bias) are trained in good and frozen in bad" in diff.origin.why


def test_parameters_that_no_optimizer_has_are_named() -> None:
    def leave_out_head(model: Tiny) -> torch.optim.Optimizer:
        return SGD([each for key, each in model.named_parameters() if "head" not in key], lr=0.1)

    diff = diff_runs(train("bad", make=leave_out_head), train_well())

    assert name(diff) == [(0, "trained", "head")]
    assert diff.origin is not None
    assert "are in no optimizer in bad and trained in good" in diff.origin.why


def make_groups(*names: str) -> Callable[[Tiny], torch.optim.Optimizer]:
    """Give parameters with one of these words in their names a group of their own, with a higher rate."""

    def make(model: Tiny) -> torch.optim.Optimizer:
        chosen = [each for key, each in model.named_parameters() if any(word in key for word in names)]
        others = [each for key, each in model.named_parameters() if not any(word in key for word in names)]
        groups: list[dict[str, Any]] = [{"params": others}, {"params": chosen, "lr": 0.2}]
        return SGD(groups, lr=0.1)

    return make


def test_a_parameter_in_another_group_is_named() -> None:
    diff = diff_runs(train("good", make=make_groups("bias")), train("bad", make=make_groups("bias", "head.weight")))

    assert name(diff) == [(0, "parameter group", "head.weight")]
    assert diff.origin is not None
    assert "head.weight is in param_groups.0 in good and in param_groups.1 in bad" in diff.origin.why


def test_another_number_of_groups_is_named() -> None:
    diff = diff_runs(train_well(), train("bad", make=make_groups("bias")))

    assert diff.origin is not None
    assert diff.origin.cause in ("parameter group", "optimizer setting")


def test_settings_of_two_groups_are_one_origin() -> None:
    def change(model: Tiny) -> torch.optim.Optimizer:
        optimizer = make_groups("bias")(model)
        for group in optimizer.param_groups:
            group["weight_decay"] = 0.5
        return optimizer

    diff = diff_runs(train("good", make=make_groups("bias")), train("bad", make=change))

    assert name(diff) == [(0, "optimizer setting", "param_groups.0")]


def test_the_settings_of_the_second_of_two_optimizers_are_named() -> None:
    def record_both(name: str, **settings: Any) -> Run:
        torch.manual_seed(0)
        model = Tiny()
        optimizers = [SGD(model.layers.parameters(), lr=0.1), SGD(model.head.parameters(), lr=0.1, **settings)]
        repo = open_repository(MemoryStore(), create=True)
        with record(repo, name, model, optimizers):
            for _ in range(2):
                model.zero_grad()
                model(torch.ones(3, 4)).square().mean().backward()
                for optimizer in optimizers:
                    optimizer.step()
        return read_run(repo, name)

    good = record_both("good")

    assert name(diff_runs(good, record_both("bad", weight_decay=0.5))) == [(0, "optimizer setting", "param_groups.1.0")]
    assert name(diff_runs(good, record_both("bad", maximize=True))) == [(0, "optimizer setting", "param_groups.1.0")]


def test_a_frozen_layer_is_named_if_no_optimizer_is_recorded() -> None:
    def record_bare(name: str, *, is_frozen: bool) -> Run:
        torch.manual_seed(0)
        model = Tiny()
        model.head.requires_grad_(not is_frozen)
        repo = open_repository(MemoryStore(), create=True)
        with record(repo, name, model) as recorder:
            for _ in range(2):
                model.zero_grad()
                model(torch.ones(3, 4)).square().mean().backward()
                with torch.no_grad():
                    for each in model.parameters():
                        each.sub_(torch.zeros_like(each) if each.grad is None else 0.1 * each.grad)
                recorder.step()
        return read_run(repo, name)

    diff = diff_runs(record_bare("good", is_frozen=False), record_bare("bad", is_frozen=True))

    assert name(diff) == [(0, "frozen", "head")]


def test_a_batch_norm_that_is_called_once_more_is_named_by_the_calls() -> None:
    def plant(model: Tiny) -> None:
        model.layers[0].norm = torch.nn.BatchNorm1d(8)

    def look_before(model: Tiny, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> None:
        with torch.no_grad():
            model(batch)
        step(model, optimizer, batch)

    diff = diff_runs(train("good", plant), train("bad", plant, loop=look_before))

    assert name(diff) == [(0, "calls", "")]
    assert diff.origin is not None
    assert diff.origin.why == "it is called 1 time in good and 2 times in bad"


def test_another_class_of_optimizer_with_the_same_results_is_no_origin() -> None:
    def make(kind: type[torch.optim.Optimizer]) -> Callable[[Tiny], torch.optim.Optimizer]:
        return lambda model: kind(model.parameters(), lr=0.1, weight_decay=0.0)  # type: ignore[call-arg]  # both have it

    diff = diff_runs(train("good", make=make(torch.optim.Adam)), train("bad", make=make(torch.optim.AdamW)))

    assert diff.is_match
    assert [change.what for change in diff.environment] == ["optimizers"]


def test_a_setting_without_effect_is_no_origin() -> None:
    def plant(model: Tiny) -> None:
        model.get_submodule("layers.0.drop").p = 0.75  # type: ignore[assignment]  # it is not in training mode

    diff = diff_runs(train_well(), train("other", plant))

    assert diff.is_equal


def test_a_run_of_an_earlier_version_is_compared_with_a_new_one() -> None:
    new = train("new")
    events = [each for number in new.steps for each in new.events(number)]
    old = make_run(train_well().facts, [each for each in events if "#" not in each.site.path and not each.form])

    assert diff_runs(old, new).is_equal
    assert diff_runs(new, old).is_equal
    other = train("bad", make=lambda model: SGD(model.parameters(), lr=0.1, nesterov=True, momentum=0.9))
    named = diff_runs(old, other).origin
    assert named is not None
    assert (named.fqn, named.cause) == ("param_groups.0", "")


def test_a_difference_within_the_tolerance_is_explained_where_it_begins() -> None:
    def plant(model: Tiny) -> None:
        model.get_submodule("layers.1.norm").eps = 1.01e-5  # type: ignore[assignment]

    def grow(model: Tiny, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        grad = model.head.bias.grad
        assert grad is not None
        # Amplifies the last digits.
        model.head.bias.grad = (grad * 1e6).sin()
        optimizer.step()

    diff = diff_runs(train("good", loop=grow, level="full"), train("bad", plant, loop=grow, level="full"))

    assert name(diff)[:1] == [(0, "module setting", "layers.1.norm")]
    assert diff.origin is not None
    assert diff.origin.why.startswith("eps is 1e-05 in good and 1.01e-05 in bad")
    assert "first beyond the tolerance" in diff.origin.notes[0]
