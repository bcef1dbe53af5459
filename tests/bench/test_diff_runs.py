"""The suite of comparisons compares the same tensors in each way, and refuses a wrong origin."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.kit.measure import TINY, WrongResult
from bench.suites import diff_runs as suite
from holdfast.capture.compare.result import RunDiff


def test_the_suite_measures_each_contestant(tmp_path: Path) -> None:
    results = suite.run(TINY, tmp_path)

    assert [result.against for result in results] == [suite._PEER, suite._BARE, suite._BARE]
    assert all(result.figure > 0 and result.limit for result in results)
    assert results[-1].workload.endswith("for each CPU second")


def test_another_origin_is_no_result() -> None:
    with pytest.raises(WrongResult, match=r"layers\.1\.linear1\.weight in step 1"):
        suite._verify(RunDiff("a", "b", None))
    with pytest.raises(WrongResult, match="close"):
        suite._verify_count(0)
