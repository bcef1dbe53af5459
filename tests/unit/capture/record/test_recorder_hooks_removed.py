"""Other code removes hooks of a recording: the run says since which step, and comparisons end before it."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, Final

import pytest
import torch

from holdfast.capture.compare.compare import diff_runs
from holdfast.capture.compare.nan import find_nonfinite
from holdfast.capture.record.observer import RecordingWarning
from holdfast.capture.stored.runs import Run, read_run
from tests.kit.recorded_training import Training, count_hooks, new_repo, new_training

Removal = Callable[[Training, torch.Tensor], object]
LOST: Final = 2
"""The step in which hooks are removed."""


def clear_all(training: Training, _: torch.Tensor) -> None:
    def clear(module: torch.nn.Module) -> None:
        module._forward_hooks.clear()
        module._forward_pre_hooks.clear()

    training.model.apply(clear)


def clear_table(fqn: str, table: str) -> Removal:
    return lambda training, _: getattr(training.model.get_submodule(fqn), table).clear()


def replace_table(fqn: str, table: str) -> Removal:
    kept: list[object] = []

    def act(training: Training, _: torch.Tensor) -> None:
        module = training.model.get_submodule(fqn)
        kept.append(getattr(module, table))  # whoever restores the hooks later keeps them
        setattr(module, table, OrderedDict())

    return act


def clear_optimizer(table: str) -> Removal:
    return lambda training, _: getattr(training.optimizer, table).clear()


def drop_parameter_hooks(training: Training, _: torch.Tensor) -> None:
    parameter: Any = training.model.get_parameter("layers.0.up.weight")
    parameter._post_accumulate_grad_hooks = None


def clear_output_hooks(_: Training, output: torch.Tensor) -> None:
    assert output._backward_hooks is not None
    output._backward_hooks.clear()


def drop_output_hooks(_: Training, output: torch.Tensor) -> None:
    output._backward_hooks = None


def replace_forward(training: Training, _: torch.Tensor) -> None:
    module: Any = training.model.get_submodule("layers.1")
    module.forward = type(module).forward.__get__(module)


def delete_forward(training: Training, _: torch.Tensor) -> None:
    del training.model.get_submodule("layers.1").forward


def compile_norm(training: Training, _: torch.Tensor) -> None:
    training.model.get_submodule("norm").compile(backend="eager")


REMOVALS: Final[dict[str, tuple[Removal, str]]] = {
    "all hooks of all modules": (clear_all, "the model, layers.0"),
    "the hooks of one module": (clear_table("layers.1.up", "_forward_hooks"), "layers.1.up"),
    "the pre-hooks of one module": (clear_table("norm", "_forward_pre_hooks"), "norm"),
    "the hooks of the model": (clear_table("", "_forward_pre_hooks"), "the model"),
    "a table of hooks, replaced": (replace_table("norm", "_forward_hooks"), "norm"),
    "pre-hooks of the optimizer": (clear_optimizer("_optimizer_step_pre_hooks"), "the optimizer"),
    "post-hooks of the optimizer": (clear_optimizer("_optimizer_step_post_hooks"), "the optimizer"),
    "hooks of a parameter": (drop_parameter_hooks, "layers.0.up.weight"),
    "hooks of an output": (clear_output_hooks, "dropout, the model"),
    "hooks of an output, dropped": (drop_output_hooks, "dropout, the model"),
    "a forward that is replaced": (replace_forward, "layers.1"),
    "a module that is compiled": (compile_norm, "norm"),
    "a forward that is deleted": (delete_forward, "layers.1"),
}


def iter_steps(training: Training, count: int) -> Iterator[tuple[int, torch.Tensor]]:
    """Train; yields each output before the backward pass."""
    for step in range(count):
        training.optimizer.zero_grad()
        output = training.model(training.batch)
        yield step, output
        output.square().mean().backward()
        training.optimizer.step()


def record_with(removal: Removal, *, level: Any = "digest") -> tuple[Run, list[str]]:
    """Record five steps; hooks are removed before the backward pass of one. Returns the run and the warnings."""
    repo, training = new_repo(), new_training()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with training.record(repo, "cleared", level=level, drill="layers.1"):
            for step, output in iter_steps(training, 5):
                if step == LOST:
                    removal(training, output)
    assert count_hooks(training.model) == 0
    assert "forward" not in vars(training.model.get_submodule("layers.1")) or removal is replace_forward
    return read_run(repo, "cleared"), [
        str(each.message) for each in caught if issubclass(each.category, RecordingWarning)
    ]


def record_cleared(act: Callable[[int, Training, torch.Tensor], None], *, seed: int = 0) -> Run:
    """Record a few steps; `act` is called before the first one, as step -1, and before each backward pass."""
    repo, training = new_repo(), new_training(seed=seed)
    act(-1, training, training.batch)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RecordingWarning)
        with training.record(repo, "cleared"):
            for step, output in iter_steps(training, 4):
                act(step, training, output)
    return read_run(repo, "cleared")


def record_well() -> Run:
    repo, training = new_repo(), new_training()
    with training.record(repo, "good", drill="layers.1"):
        for _ in iter_steps(training, 5):
            pass
    return read_run(repo, "good")


@pytest.mark.parametrize("title", REMOVALS)
def test_a_hook_that_is_removed_ends_the_recording_and_the_verdicts(title: str) -> None:
    removal, names = REMOVALS[title]

    run, told = record_with(removal)

    assert len(told) == len(run.facts.notes) == 1, told
    assert f"not recorded since step {LOST}: hooks were removed from {names}" in run.facts.notes[0]
    assert run.facts.lost_step == LOST
    for pair in ((record_well(), run), (run, record_well())):
        result = diff_runs(*pair)
        assert result.origin is None, result.headline
        assert result.headline.startswith(f"cleared is not recorded since step {LOST}: hooks were removed; ")
        assert [step.step for step in result.steps] == [0, 1]
        assert not result.is_match
        assert run.facts.notes[0] in "".join(result.notes)


@pytest.mark.parametrize("level", ["digest", "stats"])
def test_a_search_for_nan_says_since_when_it_cannot_know(level: str) -> None:
    run, _ = record_with(clear_all, level=level)

    assert find_nonfinite(run).headline.startswith(f"cleared is not recorded since step {LOST}: hooks were removed")


def test_hooks_that_are_removed_between_two_steps_lose_the_second_one() -> None:
    def remove(step: int, training: Training, output: torch.Tensor) -> None:
        if step == LOST - 1:
            training.optimizer.register_step_post_hook(lambda *_: clear_all(training, output))

    run = record_cleared(remove)

    assert run.facts.lost_step == LOST
    assert list(run.steps) == [0, 1]


def test_a_difference_before_the_hooks_were_removed_is_still_found() -> None:
    def remove(step: int, training: Training, output: torch.Tensor) -> None:
        if step == LOST:
            clear_all(training, output)

    origin = diff_runs(record_well(), record_cleared(remove, seed=1)).origin

    assert origin is not None
    assert origin.step == 0


def test_a_compiled_module_that_is_compiled_again_is_not_recorded_any_more() -> None:
    again: list[tuple[torch.nn.Module, object]] = []

    def compile_again(step: int, training: Training, output: torch.Tensor) -> None:
        if step in (-1, LOST):
            training.model.compile(backend="eager")
            again.append((training.model, training.model._compiled_call_impl))

    run = record_cleared(compile_again)

    assert run.facts.lost_step == LOST
    assert "hooks were removed from the model" in run.facts.notes[-1]
    model, call = again[-1]
    assert model._compiled_call_impl is call, "what other code has put there stays"
