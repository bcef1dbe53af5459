"""The origin of the first NaN is distinguished from modules that pass it on."""

from __future__ import annotations

import json
import math

import pytest
import torch

from holdfast.capture.compare.nan import find_nonfinite
from holdfast.capture.record.options import LevelName
from tests.kit.made_runs import Observation, make_tensor_run
from tests.kit.planted_faults import Optimizer, Tiny, train, train_well

FINE, NAN, INF = torch.ones(2), torch.tensor([1.0, math.nan]), torch.tensor([0.0, -math.inf])


@pytest.mark.parametrize("level", ["full", "stats"])
@pytest.mark.parametrize("number", [0, 2])
def test_a_logarithm_of_zero_is_named_by_its_module(level: LevelName, number: int) -> None:
    def plant(model: Tiny) -> None:
        drop = model.layers[number].get_submodule("drop")
        drop.forward = lambda x: torch.log(torch.relu(x) * 0)

    found = find_nonfinite(train(plant, steps=1, level=level))

    assert found.origin is not None
    assert (found.origin.step, found.origin.phase, found.origin.fqn) == (0, "forward", f"layers.{number}.drop")
    assert found.origin.why.startswith("output is not finite though inputs are finite")
    assert "40 infinite" in found.headline
    assert found.nan > 0


def test_a_gradient_that_is_not_finite_is_named_by_the_module_whose_backward_made_it() -> None:
    def plant(model: Tiny) -> None:
        drop = model.layers[1].get_submodule("drop")
        drop.forward = lambda x: torch.sqrt(x * 0)

    found = find_nonfinite(train(plant, steps=1)).origin

    assert found is not None
    assert (found.phase, found.fqn) == ("backward", "layers.1")


def test_a_parameter_that_becomes_nan_between_steps_is_named() -> None:
    def disturb(step: int, model: Tiny, optimizer: Optimizer) -> None:
        if step == 1:
            with torch.no_grad():
                model.embed.weight[0, 0] = math.nan

    found = find_nonfinite(train(steps=2, before_step=disturb)).origin

    assert found is not None
    assert (found.step, found.fqn, found.kind) == (1, "embed.weight", "parameter")


def test_a_step_of_the_optimizer_that_makes_nan_is_named() -> None:
    def disturb(step: int, model: Tiny, optimizer: Optimizer) -> None:
        if step == 1:
            optimizer.state[model.head.weight]["exp_avg_sq"].fill_(-1.0)

    found = find_nonfinite(train(steps=2, before_step=disturb)).origin

    assert found is not None
    assert (found.step, found.phase, found.fqn, found.kind) == (1, "optimizer", "head.weight", "optimizer")


def test_a_run_that_is_finite_has_no_origin() -> None:
    found = find_nonfinite(train_well())

    assert found.origin is None
    assert found.headline == "good: no NaN found, and no infinity was produced"


def test_a_mask_of_infinities_is_no_fault_and_excuses_none() -> None:
    observed: list[Observation] = [
        ("", "input", FINE),
        ("", "input", INF, {"path": "['mask']"}),
        ("a", "input", FINE),
        ("a", "input", INF, {"path": "['mask']"}),
        ("a", "output", FINE * 2),
        ("b", "input", FINE * 2),
        ("b", "input", INF, {"path": "['mask']"}),
        ("b", "output", NAN),
        ("", "output", NAN),
    ]

    found = find_nonfinite(make_tensor_run(observed))

    assert found.origin is not None
    assert found.origin.fqn == "b"
    assert found.notes == ("1 infinite inputs or buffers gave finite results and are treated as masks",)


def test_an_infinite_input_that_makes_nan_is_itself_the_origin() -> None:
    observed: list[Observation] = [("", "input", INF), ("a", "input", INF), ("a", "output", NAN), ("", "output", NAN)]

    found = find_nonfinite(make_tensor_run(observed))

    assert found.origin is not None
    assert (found.origin.fqn, found.origin.kind) == ("", "input")


def test_digests_alone_give_no_answer_and_the_text_says_what_to_do() -> None:
    found = find_nonfinite(train_well(level="digest"))

    assert found.origin is None
    assert found.unknown > 0
    assert "record again with level='stats'" in found.headline


def test_what_was_found_is_json() -> None:
    found = find_nonfinite(make_tensor_run([("", "input", NAN)]))

    assert json.loads(json.dumps(found.to_json(), allow_nan=False))["origin"]["kind"] == "input"
