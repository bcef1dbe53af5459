"""Planted faults are named exactly: module, step and phase."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint

from holdfast.capture.compare.compare import DiffOptions, diff_runs
from holdfast.capture.stored.runs import Run, RunFacts
from tests.kit.planted_faults import Optimizer, Tiny, find_origin, leave_dropout_on, name, train, train_well
from tests.kit.runs_in_memory import make_run


def test_a_weight_that_is_off_by_a_millionth_is_named() -> None:
    def plant(model: Tiny) -> None:
        with torch.no_grad():
            model.layers[1].get_parameter("down.weight")[3, 2] += 1e-6

    origin = find_origin(plant)

    assert name(origin) == (0, "forward", "layers.1.down.weight", "parameter")
    assert origin.measure is not None
    assert origin.measure.at == (3, 2)
    assert origin.why == "parameter differs by itself"


def test_a_weight_that_changes_between_two_steps_is_named_with_the_step() -> None:
    def disturb(step: int, model: Tiny, optimizer: Optimizer) -> None:
        if step == 2:
            with torch.no_grad():
                model.embed.bias[0] += 1e-6

    origin = diff_runs(train_well(steps=3), train(steps=3, before_step=disturb)).origin

    assert origin is not None
    assert name(origin) == (2, "forward", "embed.bias", "parameter")


def test_a_module_that_computes_in_bfloat16_is_named() -> None:
    def plant(model: Tiny) -> None:
        down: Any = model.layers[1].get_submodule("down")
        down.forward = lambda x: torch.nn.functional.linear(
            x.bfloat16(), down.weight.bfloat16(), down.bias.bfloat16()
        ).float()

    origin = find_origin(plant)

    assert name(origin) == (0, "forward", "layers.1.down", "output")
    assert origin.why == "output differs though inputs and parameters are equal"
    assert {part.standing for part in (*origin.inputs, *origin.parameters)} == {"equal"}
    assert [part.name for part in origin.parameters] == ["layers.1.down.weight", "layers.1.down.bias"]
    assert origin.source.startswith("planted_faults.py:")
    assert str(origin).startswith(
        "step 0, forward, layers.1.down: output differs though inputs and parameters are equal ("
    )


def test_an_operation_between_modules_is_named_by_the_module_that_does_it() -> None:
    def plant(model: Tiny) -> None:
        model.layers[2].mix = lambda x: torch.relu(x.bfloat16()).float()  # type: ignore[assignment]

    origin = find_origin(plant)

    assert name(origin) == (0, "forward", "layers.2", "input")
    assert origin.site.fqn == "layers.2.drop"
    assert "what it passes to layers.2.drop differs" in origin.why


def test_an_operation_is_named_where_the_module_was_drilled() -> None:
    def plant(model: Tiny) -> None:
        model.layers[2].mix = lambda x: torch.relu(x * 1.001)  # type: ignore[assignment]

    def plant_none(model: Tiny) -> None:
        model.layers[2].mix = lambda x: torch.relu(x * 1.0)  # type: ignore[assignment]

    good, bad = (train(each, steps=1, drill="layers.2") for each in (plant_none, plant))
    origin = diff_runs(good, bad).origin

    assert origin is not None
    assert origin.site.fqn == "layers.2/aten.mul.Tensor"
    assert name(origin) == (0, "forward", "layers.2", "op")


def test_swapped_layers_are_named_by_the_first_that_has_moved() -> None:
    def plant(model: Tiny) -> None:
        model.order = [0, 2, 1]

    origin = find_origin(plant)

    assert name(origin) == (0, "forward", "layers.1", "input")
    assert "calls come in another order: it is called after layers.2 in bad" in origin.why


def test_swapped_weights_are_named_and_found_where_they_are() -> None:
    def plant(model: Tiny) -> None:
        first, second = model.layers[1], model.layers[2]
        model.layers[1], model.layers[2] = second, first

    origin = find_origin(plant)

    assert name(origin) == (0, "forward", "layers.1.up.weight", "parameter")
    assert "it has the bytes in bad that layers.2.up.weight has in good" in origin.notes


def test_dropout_that_was_left_on_is_named() -> None:
    result = diff_runs(train_well(steps=2), train(leave_dropout_on, steps=2))

    assert result.origin is not None
    assert name(result.origin) == (0, "forward", "layers.1.drop", "output")
    assert result.counts["origin"] == 1


def test_another_seed_of_the_random_numbers_is_named_before_what_follows_from_it() -> None:
    def disturb(step: int, model: Tiny, optimizer: Optimizer) -> None:
        if step == 1:
            torch.manual_seed(5)

    def plant(model: Tiny) -> None:
        model.drop_out(on=True)

    origin = diff_runs(train(plant, steps=2), train(plant, steps=2, before_step=disturb)).origin

    assert origin is not None
    assert name(origin) == (1, "forward", "cpu", "rng")


class _WrongBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return grads[0] * 1.01


def with_wrong_backward(x: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = _WrongBackward.apply(x)  # type: ignore[no-untyped-call]
    return found


def wrap(module: torch.nn.Module, *, inside: bool) -> None:
    """Let the backward pass of a module be wrong on the side of its inputs; `inside`, also for its parameters."""
    forward = module.forward
    module.forward = (
        (lambda x: with_wrong_backward(forward(x))) if inside else (lambda x: forward(with_wrong_backward(x)))
    )


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("fqn", ["layers.1.down", "layers.1.norm", "layers.2.up", "head"])
def test_a_wrong_backward_pass_is_named_by_the_module_whose_it_is(fqn: str, inside: bool) -> None:
    origin = find_origin(lambda model: wrap(model.get_submodule(fqn), inside=inside))

    assert (origin.step, origin.phase, origin.fqn) == (0, "backward", fqn)
    assert origin.source.startswith("planted_faults.py:")


def test_a_wrong_backward_pass_of_an_operation_is_named_by_the_module_that_does_it() -> None:
    def plant(model: Tiny) -> None:
        model.layers[0].mix = lambda x: with_wrong_backward(torch.relu(x))  # type: ignore[assignment]

    origin = find_origin(plant)

    assert (origin.step, origin.phase, origin.fqn) == (0, "backward", "layers.0")


def test_an_operation_after_the_last_module_is_named_by_the_model() -> None:
    def plant(model: Tiny) -> None:
        model.register_forward_hook(lambda module, args, output: with_wrong_backward(output))

    origin = find_origin(plant)

    assert (origin.step, origin.phase, origin.fqn) == (0, "backward", "")
    assert "gradient that it gives to head differs though that of its outputs is equal" in origin.why


def test_another_loss_is_named_by_the_gradient_that_comes_in() -> None:
    origin = find_origin(lambda model: None, loss=lambda found: found.square().mean() * 1.01)

    assert (origin.step, origin.phase, origin.fqn) == (0, "backward", "")
    assert "gradient that comes from outside differs" in origin.why


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")  # of the recorder, and of torch's compiler
def test_a_compiled_module_that_computes_something_else_is_named() -> None:
    def miscompile(graph: torch.fx.GraphModule, inputs: object) -> Callable[..., Any]:
        return lambda *args: tuple(result * 1.001 for result in graph(*args))

    def plant(model: Tiny) -> None:
        model.layers[1].compile(backend=miscompile)

    origin = find_origin(plant)

    assert name(origin) == (0, "forward", "layers.1", "output")


def test_a_lost_state_of_the_optimizer_is_named() -> None:
    def lose(step: int, model: Tiny, optimizer: Optimizer) -> None:
        if step == 2:
            optimizer.state.clear()

    origin = diff_runs(train_well(steps=3), train(steps=3, before_step=lose)).origin

    assert origin is not None
    assert name(origin) == (2, "optimizer", "embed.weight", "optimizer")
    counts = "the optimizer counts 3 steps in the first run and 1 in the second: its state was lost or replaced"
    assert counts in origin.notes


def test_another_learning_rate_is_named() -> None:
    def change(step: int, model: Tiny, optimizer: Optimizer) -> None:
        if step == 1:
            optimizer.param_groups[0]["lr"] = 0.0101

    origin = diff_runs(train_well(steps=2), train(steps=2, before_step=change)).origin

    assert origin is not None
    assert name(origin) == (1, "optimizer", "param_groups.0", "optimizer")


def test_another_batch_is_named_by_the_input_of_the_model() -> None:
    def disturb(model: Tiny) -> None:
        model.register_forward_pre_hook(lambda module, args: (args[0] + 1e-6,))

    origin = find_origin(disturb)

    assert name(origin) == (0, "forward", "", "input")
    assert origin.why == "input differs by itself"


def test_the_second_call_of_a_module_is_distinguished_from_the_first() -> None:
    def repeat(model: Tiny) -> None:
        model.order = [0, 1, 1, 2]

    def plant(model: Tiny) -> None:
        repeat(model)
        calls = iter([1.0, 1.01])
        model.layers[1].mix = lambda x: torch.relu(x * next(calls))  # type: ignore[assignment]

    origin = diff_runs(train(repeat, steps=1), train(plant, steps=1)).origin

    assert origin is not None
    assert name(origin) == (0, "forward", "layers.1", "input")
    assert (origin.site.fqn, origin.site.call) == ("layers.1.drop", 1)


@pytest.mark.parametrize("number", [0, 1])
def test_the_backward_pass_of_either_call_of_a_module_is_named(number: int) -> None:
    def repeat(model: Tiny) -> None:
        model.order = [0, 1, 1, 2]

    def plant(model: Tiny) -> None:
        repeat(model)
        factors = iter([with_wrong_backward if number == each else torch.clone for each in range(2)])
        up = model.layers[1].get_submodule("up")
        forward = up.forward
        up.forward = lambda x: forward(next(factors)(x))

    origin = diff_runs(train(repeat, steps=1), train(plant, steps=1)).origin

    assert origin is not None
    assert (origin.phase, origin.fqn, origin.site.call) == ("backward", "layers.1.up", number)


def resume(*, loses_state: bool) -> Run:
    """Record the last two steps of a training of four, begun again from what was saved after two."""
    state: dict[str, Any] = {}

    def save(step: int, model: Tiny, optimizer: Optimizer) -> None:
        if step == 2:
            kept = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "rng": torch.get_rng_state()}
            state.update(copy.deepcopy(kept))

    def load(step: int, model: Tiny, optimizer: Optimizer) -> None:
        if step == 2:
            model.load_state_dict(state["model"])
            torch.set_rng_state(state["rng"])
            if not loses_state:
                optimizer.load_state_dict(state["optimizer"])

    train(steps=4, level="digest", before_step=save)
    return train(name="resumed", steps=4, first=2, before_step=load)


def test_a_resume_that_has_lost_the_state_of_the_optimizer_is_named() -> None:
    origin = diff_runs(train_well(steps=4), resume(loses_state=True), options=DiffOptions(shift=2)).origin

    assert origin is not None
    assert name(origin) == (2, "optimizer", "embed.weight", "optimizer")
    counts = "the optimizer counts 3 steps in the first run and 1 in the second: its state was lost or replaced"
    assert counts in origin.notes


def test_a_resume_that_has_lost_nothing_matches() -> None:
    result = diff_runs(train_well(steps=4), resume(loses_state=False), options=DiffOptions(shift=2))

    assert result.is_equal
    assert [step.step for step in result.steps] == [2, 3]


def test_one_rank_with_another_seed_is_named_with_its_rank() -> None:
    def run(seeds: tuple[int, int]) -> Run:
        events = []
        for rank, seed in enumerate(seeds):

            def plant(model: Tiny, seed: int = seed) -> None:
                model.drop_out(on=True)
                torch.manual_seed(seed)

            recorded = train(plant, steps=1, level="digest", kinds="input output grad param_grad parameter")
            events += [event._replace(rank=rank) for event in recorded.events(0)]
        return make_run(RunFacts("run", world=2), events)

    origin = diff_runs(run((1, 2)), run((1, 3))).origin

    assert origin is not None
    assert (origin.rank, *name(origin)) == (1, 0, "forward", "layers.0.drop", "output")


def test_a_wrong_backward_pass_at_the_edge_of_a_container_is_the_containers() -> None:
    def contain(model: Tiny) -> None:
        model.head = torch.nn.Sequential(model.head, torch.nn.Identity(), torch.nn.Flatten())  # type: ignore[assignment]

    def plant(model: Tiny) -> None:
        contain(model)
        model.head.register_forward_hook(lambda module, args, output: with_wrong_backward(output))

    origin = diff_runs(train(contain, steps=1), train(plant, steps=1)).origin

    assert origin is not None
    assert (origin.phase, origin.fqn) == ("backward", "head")


def test_a_wrong_backward_pass_of_what_gives_its_input_unchanged_is_its_own() -> None:
    def contain(model: Tiny) -> None:
        model.head = torch.nn.Sequential(model.head, torch.nn.Identity(), torch.nn.Identity())  # type: ignore[assignment]

    def plant(model: Tiny) -> None:
        contain(model)
        model.get_submodule("head.2").forward = with_wrong_backward

    origin = diff_runs(train(contain, steps=1), train(plant, steps=1)).origin

    assert origin is not None
    assert origin.phase == "backward"
    assert "head.2" in (origin.fqn, *" ".join(origin.notes).replace(",", "").split())


def test_where_a_backward_pass_cannot_be_distinguished_from_the_next_both_are_named() -> None:
    origin = find_origin(lambda model: wrap(model.layers[1].get_submodule("drop"), inside=False))

    assert (origin.phase, origin.fqn) == ("backward", "layers.1")
    assert origin.notes == ("the origin may also be the backward pass of layers.1.drop",)
