"""The result of a comparison: as JSON, and in one sentence."""

from __future__ import annotations

import json

import pytest
import torch
import torch.utils.checkpoint

from holdfast.capture.compare.compare import assert_runs_match, diff_runs
from tests.kit.made_runs import make_tensor_run
from tests.kit.planted_faults import train, train_well


def test_a_result_is_written_as_json() -> None:
    result = diff_runs(train_well(steps=2), train(lambda model: model.drop_out(on=True), name="bad", steps=2))

    data = json.loads(json.dumps(result.to_json(), allow_nan=False))

    assert data["schema"] == 1
    assert data["origin"]["fqn"] == "layers.0.drop"
    assert data["headline"] == result.headline
    assert sum(data["counts"].values()) >= len(data["rows"]) > 0
    assert [step["step"] for step in data["steps"]] == [0, 1]


def test_runs_without_a_common_step_do_not_match() -> None:
    a, b = (make_tensor_run([("", "input", torch.ones(1), {"step": step})]) for step in (0, 1))

    result = diff_runs(a, b)

    assert "no step in common" in result.headline
    assert not result.is_equal
    with pytest.raises(AssertionError, match="no step in common"):
        assert_runs_match(a, b)
