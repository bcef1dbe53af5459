"""The suite of exports measures what it claims."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import holdfast
from bench.kit.measure import TINY, WrongResult
from bench.kit.steps import step_while
from bench.suites import exports


def test_every_format_is_compared_with_a_load_of_the_same_bytes(tmp_path: Path) -> None:
    with holdfast.open(tmp_path / "store") as store:
        store.save("m", {"x": torch.randn(1000)})

        rows = exports._measure_speed(store, tmp_path, 4000, TINY)

    assert [row.workload for row in rows] == [f"export, {name}" for name in ("safetensors", "hf", "torch", "dcp")]
    assert {row.against for row in rows} == {"load of the same snapshot"}


def test_an_export_of_other_bytes_ends_the_run(tmp_path: Path) -> None:
    with holdfast.open(tmp_path / "store") as store:
        store.save("m", {"x": torch.randn(1000)})

        with pytest.raises(WrongResult, match="does not have all bytes"):
            exports._measure_speed(store, tmp_path, 4001, TINY)


def test_steps_are_taken_while_the_export_runs() -> None:
    answers = iter([True, True, False])

    assert step_while(lambda: 0.5, lambda: next(answers)) == [0.5] * 3
