"""The suite of recorded Hugging Face models compares CPU time with a plain step, and shows its limits."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.kit.hugging_face import MODELS
from bench.kit.measure import TINY, Timings
from bench.suites import recording
from bench.suites.capture import DEBUG_MODE
from bench.suites.recording import LEVELS, PLAIN, STEPS, Traffic, make_row, name_limit

TRAFFIC = Traffic(seen=(4_000_000, 2_000_000), new=(2_000_000,))
TIMINGS = {
    PLAIN: Timings((2.0, 1.5), (1.5, 1.6)),
    **{level: Timings((3.0, 4.0), (2.4, 2.1)) for level in LEVELS},
    **{name_limit(level): Timings((0.3,), (0.15,)) for level in LEVELS},
    DEBUG_MODE: Timings((9.0,), (9.0,)),
}


def test_a_row_compares_the_best_cpu_times_of_a_step() -> None:
    row = make_row("ViT", "stats", TIMINGS, TRAFFIC)

    assert (row.figure, row.limit) == (1e3 * 2.1 / STEPS, 1e3 * 1.5 / STEPS)
    assert row.ratio == pytest.approx(1.4)
    assert row.verdict == "pass"
    assert make_row("ViT", "digest", TIMINGS, TRAFFIC).verdict == "limit"
    assert row.note == "limit 1.10; by wall time 2.00"


def test_a_limit_is_a_plain_step_with_the_bare_work() -> None:
    row = make_row("ViT", name_limit("full"), TIMINGS, TRAFFIC)

    assert row.ratio == pytest.approx(1.1)
    assert row.note == "2 tensors, 6 MB; 1 new ones, 2 MB"


def test_without_transformers_there_are_no_rows(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(recording, "IS_INSTALLED", False)

    assert recording.run(TINY, tmp_path) == []
    assert "transformers is not installed" in capsys.readouterr().out


@pytest.mark.slow
def test_the_suite_measures_each_model_and_leaves_nothing(tmp_path: Path) -> None:
    pytest.importorskip("transformers")

    results = recording.run(TINY, tmp_path)

    ways = (*LEVELS, DEBUG_MODE, *(name_limit(level) for level in LEVELS))
    assert [result.workload for result in results] == [f"{model}, {way}" for model in MODELS for way in ways]
    assert all(result.figure > 0 for result in results)
    assert list(tmp_path.iterdir()) == []
