"""How two runs are compared: what is close, which notes are given, and what is left out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.utils.checkpoint

from holdfast.capture.compare.compare import DiffOptions, diff_runs
from holdfast.capture.compare.measure import EXACT
from holdfast.capture.stored.events import Event
from holdfast.capture.stored.runs import Run, RunFacts
from tests.kit.made_runs import Observation, make_tensor_run
from tests.kit.planted_faults import Tiny, leave_dropout_on, name, train, train_well


@pytest.mark.parametrize("seed", range(20))
def test_two_runs_without_a_fault_match(seed: int) -> None:
    result = diff_runs(*(train(seed=seed, steps=2, level="digest") for _ in range(2)))

    assert result.origin is None
    assert result.is_equal
    assert all(step.is_skipped for step in result.steps)


def test_drift_after_the_origin_is_no_origin() -> None:
    def plant(model: Tiny) -> None:
        with torch.no_grad():
            model.layers[1].get_parameter("down.weight")[3, 2] += 1e-3

    result = diff_runs(train_well(steps=3), train(plant))

    assert [(row.event.site.kind, row.event.site.fqn) for row in result.rows if row.cls == "origin"] == [
        ("parameter", "layers.1.down.weight")
    ]


def test_compiled_code_matches_within_tolerance_and_is_named_exactly_if_none_is_given() -> None:
    def round_otherwise(model: Tiny) -> None:
        # Stands for what a compiler does: the same numbers, added up in another order.
        down: Any = model.layers[1].get_submodule("down")
        down.forward = lambda x: (x.double() @ down.weight.double().T + down.bias.double()).float()

    good, bad = train_well(), train(round_otherwise, steps=1)

    close, exact = diff_runs(good, bad), diff_runs(good, bad, tolerance=EXACT)

    assert close.origin is None
    assert close.counts["close"] > 0
    assert not close.is_equal
    assert exact.origin is not None
    assert name(exact.origin) == (0, "forward", "layers.1.down", "output")


def test_what_only_one_run_has_is_listed_and_stops_nothing() -> None:
    def plant(model: Tiny) -> None:
        model.layers[2].get_submodule("norm").register_module("extra", torch.nn.Identity())
        norm, extra = model.layers[2].get_submodule("norm"), model.layers[2].get_submodule("norm.extra")
        forward = norm.forward
        norm.forward = lambda x: extra(forward(x))

    result = diff_runs(train_well(steps=3), train(plant, name="bad"))

    assert result.origin is None
    assert result.counts["missing"] == 3 * 3
    assert {row.event.site.fqn for row in result.rows} == {"layers.2.norm.extra"}
    assert "match in 3 steps: 9 are in one of them only" in result.headline


def test_activations_that_are_computed_again_change_nothing() -> None:
    def plant(model: Tiny) -> None:
        layer = model.layers[1]
        forward = layer.forward
        layer.forward = lambda x: torch.utils.checkpoint.checkpoint(forward, x, use_reentrant=False)

    result = diff_runs(train_well(), train(plant, steps=1))

    assert result.origin is None
    assert result.counts["missing"] == 0
    assert any("recomputed for the backward pass are left out" in note for note in result.notes)


def test_an_origin_that_is_one_by_tolerance_only_says_so() -> None:
    def plant(model: Tiny) -> None:
        model.layers[0].mix = lambda x: torch.relu(x) * (1 + 2e-6)  # type: ignore[assignment]
        model.layers[2].mix = lambda x: torch.relu(x) * 1.01  # type: ignore[assignment]

    result = diff_runs(train_well(), train(plant, steps=1))

    assert result.origin is not None
    assert result.origin.fqn == "layers.2"
    assert "equal within tolerance" in result.origin.why
    assert any("tolerance 'exact' shows where they began to differ" in note for note in result.notes)


def test_kinds_that_were_not_recorded_leave_the_first_difference_as_the_origin() -> None:
    good, bad = (train(plant, steps=1, kinds="output") for plant in (lambda model: None, leave_dropout_on))

    result = diff_runs(good, bad)

    assert result.origin is not None
    assert result.origin.fqn == "layers.1.drop"
    assert result.counts["origin"] == 1


def test_steps_that_only_one_run_has_are_noted() -> None:
    result = diff_runs(train_well(steps=3), train_well(steps=2))

    assert result.origin is None
    assert "good: steps 2 are not in good" in result.notes


def test_a_note_of_both_runs_is_given_once() -> None:
    good, again = (
        Run(RunFacts(name, notes=("never called: spare", f"only {name}")), run._source)
        for name, run in (("a", train_well(steps=1)), ("b", train_well(steps=1)))
    )

    notes = diff_runs(good, again).notes

    assert notes == ("both runs: never called: spare", "a: only a", "b: only b")


def test_environments_are_compared_first() -> None:
    a = make_tensor_run(
        [("", "input", torch.ones(1))], environment={"torch": "2", "flags": {"tf32": True}, "host": "x"}
    )
    b = make_tensor_run(
        [("", "input", torch.ones(1))], environment={"torch": "2", "flags": {"tf32": False}, "extra": 1}
    )

    found = diff_runs(a, b).environment

    assert [(change.what, change.a, change.b) for change in found] == [
        ("flags.tf32", True, False),
        ("host", "x", None),
        ("extra", None, 1),
    ]


def test_rows_beyond_the_limit_are_counted() -> None:
    result = diff_runs(train_well(), train(leave_dropout_on, steps=1), options=DiffOptions(max_rows=10))

    assert len(result.rows) == 10
    assert result.left_out == sum(result.counts.values()) - result.counts["equal"] - 10


def test_another_dtype_at_the_same_site_is_an_origin() -> None:
    def observed(dtype: torch.dtype) -> list[Observation]:
        x = torch.tensor([1.0, 1 / 3])
        return [("", "input", x), ("a", "input", x), ("a", "output", x.to(dtype)), ("", "output", x)]

    origin = diff_runs(make_tensor_run(observed(torch.float32)), make_tensor_run(observed(torch.bfloat16))).origin

    assert origin is not None
    assert origin.fqn == "a"
    assert origin.measure is not None
    assert origin.measure.note == "dtypes differ: float32 against bfloat16"


def test_steps_with_equal_roots_are_not_read() -> None:
    class Watched(Run):
        def events(self, step: int, rank: int | None = None) -> Sequence[Event]:
            read.append(step)
            return super().events(step, rank)

    read: list[int] = []
    observed: list[list[Observation]] = [
        [("", "input", torch.full((1,), float(step == 4 and side)), {"step": step}) for step in range(6)]
        for side in range(2)
    ]
    a, b = (make_tensor_run(each) for each in observed)

    found = diff_runs(Watched(a.facts, a._source), b)

    assert found.origin is not None
    assert found.origin.step == 4
    # The first and the one before tell what was there; after the first difference all are looked at.
    assert {*read} == {0, 3, 4, 5}
