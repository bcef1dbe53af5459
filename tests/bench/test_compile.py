"""The compile benchmark: its rows, its table and its picture say what was measured, and wrong results end the run."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

import pytest
import torch

from bench import picture
from bench.kit import tables
from bench.kit.compile_models import digest_step, make_model, train_step
from bench.kit.measure import TINY, Result, WrongResult, write_json
from bench.kit.panels import plan_compile_panels, plan_panels, read_result
from bench.suites import compile as compile_suite
from bench.suites.compile import COLD, COLD_STORE, MEGA, OWN, TRACED, WARM, ProcessResult

ONE_RESULT: Final = ProcessResult(seconds=1.0, from_start=4.0, digest="same", compiler_runs=3, hit=0, stages={})
FOUND: Final = {
    COLD: [replace(ONE_RESULT, seconds=16.0)],
    COLD_STORE: [replace(ONE_RESULT, seconds=17.0)],
    WARM: [ONE_RESULT, replace(ONE_RESULT, seconds=2.0)],
    MEGA: [replace(ONE_RESULT, seconds=8.0)],
    OWN: [
        replace(ONE_RESULT, seconds=0.5, compiler_runs=0, hit=1),
        replace(ONE_RESULT, seconds=0.25, compiler_runs=0, hit=1, stages={"load": 0.05}),
    ],
    TRACED: [replace(ONE_RESULT, seconds=0.2, digest="rounded otherwise")],
}


@pytest.fixture
def results() -> list[Result]:
    return compile_suite._make_rows("MLP", FOUND)


@pytest.fixture
def written(results: list[Result], tmp_path: Path) -> Path:
    machine = {"cpu": "a chip", "cores": 2, "memory_bytes": 4 << 30, "filesystem": "ext4"}
    write_json(tmp_path / "compile.json", machine, results, {})
    return tmp_path / "compile.json"


def _rows(results: list[Result]) -> list[dict[str, Any]]:
    return [asdict(result) for result in results]


def test_the_best_rounds_are_compared_with_both_of_torchs_caches(results: list[Result]) -> None:
    warm, mega, start, parts = results

    assert (warm.figure, warm.limit, warm.verdict) == (0.25, 1.0, "pass")
    assert (mega.figure, mega.limit, mega.verdict) == (0.25, 8.0, "pass")
    assert (start.figure, start.limit, start.verdict) == (4.0, 4.0, "")
    assert (parts.figure, parts.limit, parts.verdict) == (0.25, 0.2, "")
    assert parts.note == "above it torch's warm directory takes 0.80 s and Holdfast 0.05: load 50 ms"


@pytest.mark.parametrize(
    ("way", "result", "reason"),
    [
        (MEGA, replace(ONE_RESULT, digest="other"), "'Mega-cache' are not those of plain compiling"),
        (OWN, replace(ONE_RESULT, compiler_runs=0), "0 hits"),
        (OWN, replace(ONE_RESULT, hit=1), "the compiler ran 3 times"),
    ],
)
def test_wrong_results_and_hits_that_compile_end_the_run(way: str, result: ProcessResult, reason: str) -> None:
    with pytest.raises(WrongResult, match=reason):
        compile_suite._verify("MLP", {**FOUND, way: [result]})


def test_a_model_has_one_panel_with_ours_first(results: list[Result]) -> None:
    (panel,) = plan_compile_panels(_rows(results))

    assert (panel.title, panel.unit) == ("MLP", "s")
    assert [(bar.name, bar.value) for bar in panel.bars] == [
        ("Holdfast", 0.25),
        ("torch, warm", 1.0),
        ("Mega-cache", 8.0),
        ("cold", 16.0),
    ]
    assert plan_panels(_rows(results)) == []


def test_the_table_has_a_line_for_each_model(written: Path) -> None:
    page = "<!-- figures of compile, by `make docs` -->\nstale\n<!-- end of figures -->\n"

    filled = tables.fill_figures(page, {"results": [], tables.COMPILE: read_result(written)})

    assert "| MLP | 16.0 s | 1.00 s (**4.0x**) | 8.00 s (**32.0x**) | 0.25 s | 0.20 s |" in filled
    assert "Best of 2 rounds; Mega-cache 1, cold 1." in filled
    assert "stale" not in filled


def test_the_picture_is_drawn_for_light_and_dark_pages(written: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")

    drawn = picture.draw_all(written, tmp_path / "out", prefix="")

    assert [path.name for path in drawn] == ["compile-light.png", "compile-dark.png"]


def test_a_training_step_is_deterministic() -> None:
    first, second = (digest_step(model, train_step(model, x)) for model, x in (make_model("MLP"), make_model("MLP")))
    model, x = make_model("MLP")

    assert first == second
    assert digest_step(model, train_step(model, torch.zeros_like(x))) != first


@pytest.mark.slow
def test_all_ways_are_run(tmp_path: Path) -> None:
    results = compile_suite.run(TINY, tmp_path)

    assert len(results) == 4
    assert set(results[0].figures) == {COLD, COLD_STORE, WARM, MEGA, OWN, TRACED}
