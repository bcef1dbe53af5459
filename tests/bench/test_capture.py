"""The capture suite compares each level of recording with the bare step."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from bench.kit.measure import TINY, WrongResult
from bench.suites import capture as capture_suite


def test_the_capture_suite_measures_each_workload_and_leaves_nothing(tmp_path: Path) -> None:
    results = capture_suite.run(TINY, tmp_path)

    assert [result.workload for result in results] == [
        "a training step, digest",
        "a training step, stats",
        "a training step, full",
        "a training step, DebugMode with hashes",
        "stored by the same run again, full",
    ]
    assert all(result.figure > 0 for result in results)
    assert list(tmp_path.iterdir()) == []


def test_a_recording_that_changes_the_training_is_no_result(tmp_path: Path) -> None:
    training = capture_suite._Training(capture_suite._find_shape(TINY))
    expected = [torch.zeros(capture_suite._STEPS)]
    contestant = capture_suite.stepping(training, nullcontext, expected, tmp_path)

    with pytest.raises(WrongResult, match="are not those of the first"):
        contestant.verify(contestant.run())
