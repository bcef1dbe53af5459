"""The compile benchmark: its rows, its tables and its picture say what was measured, and wrong results end the run."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

import pytest
import torch

from bench import picture
from bench.kit import tables
from bench.kit.compile_models import GPT2, digest_step, make_model, train_step
from bench.kit.measure import TINY, Result, WrongResult, write_json
from bench.kit.panels import plan_compile_panels, plan_panels, read_result
from bench.suites import compile as compile_suite
from bench.suites.compile import COLD, EAGER, MEGA, OWN, TRACED, WARM, WHOLE, Start, make_rows, verify

PLAIN: Final = Start(cpu=6.0, wall=9.0, digest="same", used_dynamo=True, compiler_runs=4)
STORED: Final = replace(PLAIN, cpu=3.0, wall=5.0, compiler_runs=0, hit=1, stages={"key": 0.0, "load": 0.05})
AS_A_WHOLE: Final = replace(STORED, cpu=1.5, used_dynamo=False)
OTHERWISE_ROUNDED: Final = replace(PLAIN, digest="rounded otherwise", compiler_runs=0)
FOUND: Final = {
    COLD: [replace(PLAIN, cpu=30.0)],
    WARM: [PLAIN, replace(PLAIN, cpu=8.0)],
    MEGA: [replace(PLAIN, cpu=18.0)],
    OWN: [replace(STORED, cpu=3.5), STORED],
    WHOLE: [AS_A_WHOLE, replace(AS_A_WHOLE, cpu=1.75)],
    TRACED: [replace(OTHERWISE_ROUNDED, cpu=2.5)],
    EAGER: [replace(OTHERWISE_ROUNDED, cpu=1.0)],
}
TRAINED: Final = {WARM: [PLAIN], WHOLE: [replace(AS_A_WHOLE, cpu=3.0)], EAGER: [PLAIN]}


@pytest.fixture
def results() -> list[Result]:
    return make_rows("MLP", FOUND, TRAINED)


@pytest.fixture
def written(results: list[Result], tmp_path: Path) -> Path:
    machine = {"cpu": "a chip", "cores": 2, "memory_bytes": 4 << 30, "filesystem": "ext4", "load": [0.5, 1, 1]}
    write_json(tmp_path / "compile.json", machine, results, {})
    return tmp_path / "compile.json"


def _rows(results: list[Result]) -> list[dict[str, Any]]:
    return [asdict(result) for result in results]


def test_the_best_rounds_are_compared_with_both_of_torchs_caches(results: list[Result]) -> None:
    warm, mega, whole, trained, clock = results

    assert (warm.figure, warm.limit, warm.verdict) == (3.0, 6.0, "pass")
    assert warm.note == "2.00 times as fast as torch, warm directory; dynamo alone 2.50 s, 2.40 times; load 50 ms"
    assert (mega.figure, mega.limit, mega.verdict) == (3.0, 18.0, "pass")
    assert (whole.figure, whole.limit, whole.verdict) == (1.5, 6.0, "pass")
    assert (trained.figure, trained.limit, trained.verdict) == (3.0, 6.0, "")
    assert (clock.figure, clock.limit, clock.verdict) == (5.0, 9.0, "")


def test_a_model_that_cannot_be_stored_as_a_whole_has_the_reason_and_no_goal() -> None:
    refused = replace(STORED, not_saved=("as a whole: it has hooks",))

    verify(GPT2, {**FOUND, WHOLE: [refused]})
    row = make_rows(GPT2, {**FOUND, WHOLE: [refused]}, TRAINED)[2]

    assert (row.verdict, row.note.partition("; ")[2]) == ("", "as a whole: it has hooks")


@pytest.mark.parametrize(
    ("way", "start", "reason"),
    [
        (MEGA, replace(PLAIN, digest="other"), "'Mega-cache' are not those of plain compiling"),
        (OWN, replace(STORED, hit=0), "0 hits"),
        (OWN, replace(STORED, compiler_runs=3), "ran the compiler 3 times"),
        (WHOLE, replace(AS_A_WHOLE, digest="other"), "'Holdfast, whole=True' are not those of plain compiling"),
        (WHOLE, replace(AS_A_WHOLE, hit=0), "0 hits"),
        (WHOLE, replace(AS_A_WHOLE, used_dynamo=True), "imported dynamo"),
        (WHOLE, replace(AS_A_WHOLE, not_saved=("it has hooks",)), "not stored as a whole: it has hooks"),
    ],
)
def test_wrong_results_and_hits_that_compile_end_the_run(way: str, start: Start, reason: str) -> None:
    verify("MLP", FOUND)
    with pytest.raises(WrongResult, match=reason):
        verify("MLP", {**FOUND, way: [start]})


def test_a_model_has_one_panel_with_ours_first(results: list[Result]) -> None:
    (panel,) = plan_compile_panels(_rows(results))

    assert (panel.title, panel.unit) == ("MLP", "s")
    assert [(bar.name, bar.value) for bar in panel.bars] == [
        ("whole=True", 1.5),
        ("Holdfast", 3.0),
        ("torch, warm", 6.0),
        ("Mega-cache", 18.0),
        ("cold", 30.0),
    ]
    assert plan_panels(_rows(results)) == []


def test_the_tables_have_a_line_for_each_model(written: Path) -> None:
    page = "<!-- figures of compile, by `make docs` -->\nstale\n<!-- end of figures -->\n"

    filled = tables.fill_figures(page, {"results": [], tables.COMPILE: read_result(written)})

    assert "| MLP | 1.0 s | 1.5 s (**4.0x**) | 3.0 s (**2.0x**) | 2.5 s | 6.0 s | 18.0 s | 30.0 s |" in filled
    assert "| MLP | 9.0 s | 5.0 s (**1.8x**) | 5.0 s (**1.8x**) | 9.0 s | 9.0 s | 9.0 s | 9.0 s |" in filled
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
@pytest.mark.timeout(600)
def test_all_ways_are_run(tmp_path: Path) -> None:
    results = compile_suite.run(TINY, tmp_path)

    assert len(results) == 5
    assert set(results[0].figures) == {COLD, EAGER, WARM, MEGA, OWN, WHOLE, TRACED}
