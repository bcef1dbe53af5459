"""Pictures and tables show what a result says, and a page or picture of another result is found."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench import picture
from bench.kit import panels, sections, tables
from bench.kit.measure import EXPLANATION, Goal, Result, write_json
from docs.generate import ROOT, WITH_FIGURES, find_old_pictures

_MACHINE = {"cpu": "a chip", "cores": 2, "memory_bytes": 4 << 30, "filesystem": "ext4"}


def _row(workload: str, figures: dict[str, float], own: str = "Holdfast") -> Result:
    against = next(name for name in figures if name != own)
    samples = dict.fromkeys(figures, (2.0, 1.0))
    return Result(workload, figures[own], "GB/s", against, figures[against], samples=samples, figures=figures)


_ROWS = [
    _row("first save, 4 x 1 MiB", {"Holdfast": 1.5, "DCP": 0.5, "DCP, 2 threads": 1.0, "torch.save": 0.75}),
    _row("first save, 4 x 1 MiB", {"Holdfast": 1.5, "raw write, direct, 2 threads": 2.0, "raw write, buffered": 1.0}),
    _row("first save, 500 small", {"Holdfast": 0.1, "safetensors": 0.2}),
    _row("warm load, 4 x 1 MiB", {"Holdfast": 3.0, "torch.save": 6.0}),
    _row(
        'warm load, verify="fast", 4 x 1 MiB',
        {"Holdfast, verify='fast'": 5.0, "torch.save": 6.0, "memcpy to new memory": 10.0},
        "Holdfast, verify='fast'",
    ),
    Result(
        "save, per byte, 4 MiB",
        1.0,
        "s/GB",
        "median",
        1.0,
        Goal("ratio", "<=", 1.25),
        figures={"1048576": 2, "4194304": 1},
    ),
    Result("save, per tensor, 40 tensors", 9.0, "us", "at 20", 8.0, figures={"10": 9.0, "40": 300.0}),
]


@pytest.fixture
def result(tmp_path: Path) -> Path:
    rows = [
        replace(row, why=sections.find_section("scale" if "per" in row.workload else "state", row.workload))
        for row in _ROWS
    ]
    write_json(tmp_path / "run.json", _MACHINE, rows, {"state": 1.0})
    return tmp_path / "run.json"


def _read(path: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = panels.read_result(path)["results"]
    return rows


def test_a_panel_shows_the_best_way_of_each_contestant_and_the_limit_last(result: Path) -> None:
    first = panels.plan_panels(_read(result))[0]

    assert [(bar.name, bar.value, bar.kind) for bar in first.bars] == [
        ("Holdfast", 1.5, "own"),
        ("DCP", 1.0, "other"),
        ("torch.save", 0.75, "other"),
        ("raw write", 2.0, "limit"),
    ]


def test_small_tensors_are_shown_by_number_and_not_by_bytes(result: Path) -> None:
    small = next(panel for panel in panels.plan_panels(_read(result)) if "small" in panel.title)

    assert (small.title, small.unit) == ("save 500 small tensors", "thousand/s")
    assert [bar.value for bar in small.bars] == [0.5, 0.5]


def test_a_chart_has_a_point_for_each_size(result: Path) -> None:
    by_byte, by_tensor = panels.plan_charts(_read(result))

    assert by_byte.curves[0].points == ((1048576.0, 2.0), (4194304.0, 1.0))
    assert by_tensor.curves[0].points == ((10.0, 9.0), (40.0, 300.0))


def test_a_summary_has_a_line_for_each_panel_and_each_way_of_ours(result: Path) -> None:
    text = tables.render_summary(panels.read_result(result))

    assert "| first save, durable | 1.5 GB/s | DCP 1 | **1.50x** | 0.75 of raw write |" in text
    assert '| load, in page cache, `verify="fast"` | 5 GB/s | torch.save 6 | **0.83x** | 0.50 of copy |' in text
    assert "State: 4 x 1 MiB of random float32. Machine: a chip, 2 cores, 4 GiB, ext4." in text


def test_a_block_of_a_page_gets_the_rows_of_its_section(result: Path) -> None:
    page = "a\n<!-- figures of large-states, by `make docs` -->\nold\n<!-- end of figures -->\nb\n"

    filled = tables.fill_figures(page, panels.read_result(result))

    assert "| save, per byte, 4 MiB | 1 s/GB | median: 1 | 1 | ratio <= 1.25 | pass |" in filled
    assert "old" not in filled
    assert "first save" not in filled
    assert tables.fill_figures(filled, panels.read_result(result)) == filled


def test_a_picture_of_another_result_is_found(tmp_path: Path) -> None:
    (tmp_path / "new.png").write_bytes(b"..." + b"d1" * 32)
    (tmp_path / "old.png").write_bytes(b"..." + b"d2" * 32)

    assert tables.find_stale_pictures(tmp_path, "d1" * 32) == ["old.png"]


def test_pictures_are_drawn_for_light_and_dark_pages_and_carry_their_source(result: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")

    drawn = picture.draw_all(result, tmp_path / "out", prefix="")

    names = ("speed", "summary", "growth")
    assert [path.name for path in drawn] == [f"{name}-{theme}.png" for theme in ("light", "dark") for name in names]
    assert tables.find_stale_pictures(tmp_path / "out", picture.digest_result(result)) == []


def test_no_picture_is_drawn_where_matplotlib_is_not_installed(
    result: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("bench.picture.util.find_spec", lambda name: None)

    assert picture.draw_all(result, tmp_path / "out") == []
    assert "matplotlib is not installed" in capsys.readouterr().err


def test_the_explanation_has_a_section_and_figures_for_every_row() -> None:
    page = (ROOT / EXPLANATION).read_text(encoding="utf-8")
    headings = {line[3:].strip().lower().replace(" ", "-") for line in page.splitlines() if line.startswith("## ")}

    assert headings >= sections.ANCHORS
    assert set(tables.find_blocks(page)) == sections.ANCHORS | {tables.SUMMARY}


def test_the_pages_that_have_figures_have_blocks_for_them() -> None:
    assert all(tables.find_blocks((ROOT / page).read_text(encoding="utf-8")) for page in WITH_FIGURES)


def test_the_pictures_show_the_result_that_is_checked_in() -> None:
    assert find_old_pictures(ROOT) == []
