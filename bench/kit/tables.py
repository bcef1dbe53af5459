"""Renders a result as Markdown: a summary of all panels, and the rows of each section of the documentation."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from bench.kit.panels import OWN, STARTED, Bar, Panel, Row, find_state, list_started, plan_panels
from bench.kit.roofline import render_counts, render_projection
from bench.kit.sections import PARTS

SUMMARY: Final = "summary"
COMPILE: Final = "compile"
"""The block, and the key in the combined result, for the figures of the separate compile run."""
DEVICE: Final = "device"
"""The key in the combined result for facts about compiled kernels."""
_DEVICE_BLOCKS: Final = {"device-kernels": render_counts, "device-limits": render_projection}
_BLOCK: Final = re.compile(
    r"<!-- figures of (?P<what>[a-z-]+), by `make docs` -->\n.*?<!-- end of figures -->", re.DOTALL
)
_LIMIT_OF: Final = {
    ("first save, durable", "Holdfast"): "raw write",
    ("save again, nothing changed", "Holdfast"): "BLAKE3, all cores",
    ("save again, nothing changed", "Holdfast, hints"): "XXH3, all cores",
    ("load, not in page cache", "Holdfast"): "raw read",
    ("load, in page cache", "Holdfast"): "copy + BLAKE3",
    ("load, in page cache", "Holdfast, fast"): "copy",
}
_HOW: Final = {"Holdfast, hints": ", change hints", "Holdfast, fast": ', `verify="fast"`'}


def fill_figures(page: str, result: Mapping[str, Any]) -> str:
    """Return a page with the figures of a result in each of its blocks."""
    return _BLOCK.sub(lambda match: _fill_block(match["what"], result), page)


def find_blocks(page: str) -> list[str]:
    """Return the names of the blocks of a page: the summary, or sections."""
    return [match["what"] for match in _BLOCK.finditer(page)]


def find_stale_pictures(folder: Path, *digests: str) -> list[str]:
    """Return the pictures of a folder that were not drawn from the results with these digests."""
    return [
        path.name
        for path in sorted(folder.glob("*.png"))
        if not any(digest.encode() in path.read_bytes() for digest in digests)
    ]


def _fill_block(what: str, result: Mapping[str, Any]) -> str:
    if what == SUMMARY:
        text = render_summary(result)
    elif what == COMPILE:
        text = render_compiled(result[COMPILE]) if COMPILE in result else ""
    elif what in _DEVICE_BLOCKS:
        text = _DEVICE_BLOCKS[what](result[DEVICE]) if DEVICE in result else ""
    else:
        rows = [row for row in result["results"] if row["why"] == what]
        text = render_parts(rows) if what == PARTS else render_rows(rows)
    return f"<!-- figures of {what}, by `make docs` -->\n{text}<!-- end of figures -->"


def render_summary(result: Mapping[str, Any]) -> str:
    """Return one line for each panel of the picture, and a description of the machine."""
    rows: Sequence[Row] = result["results"]
    head = "| | Holdfast | fastest other | ratio | of the limit |\n| --- | --- | --- | --- | --- |\n"
    lines = [line for panel in plan_panels(rows) for line in _render_panel(panel)]
    machine = result["machine"]
    memory = f"{machine['memory_bytes'] / (1 << 30):.0f} GiB"
    facts = f"{machine['cpu']}, {machine['cores']} cores, {memory}, {machine['filesystem']}"
    return (
        f"{head}{''.join(lines)}\nState: {find_state(rows, 'x .*')} of random float32. Machine: {facts}. Best rounds.\n"
    )


def render_compiled(result: Mapping[str, Any]) -> str:
    """Return two tables with a line for each model: CPU seconds of each way to start, and seconds by the clock."""
    rows = {row["workload"]: row for row in result["results"]}
    started = list_started(result["results"])
    clock = {model: rows[f"{STARTED}{model}, by the clock"] for model in started}
    machine = result["machine"]
    samples = next(iter(started.values()))["samples"]
    rounds = f"Best of {len(samples[OWN])} rounds; Mega-cache {len(samples['Mega-cache'])}, cold 1"
    return (
        f"{_render_starts('CPU time', started)}\n{_render_starts('by the clock', clock)}\n"
        f"Machine: {machine['cpu']}, {machine['cores']} cores, load {machine['load'][0]} before the run. {rounds}.\n"
    )


def _render_starts(title: str, rows: Mapping[str, Row]) -> str:
    warm = "torch, warm directory"
    ways = ("eager", "Holdfast, whole=True", OWN, "dynamo alone", warm, "Mega-cache", "cold")
    lines = [f"| {title} | {' | '.join(ways)} |\n", "| --- " * (len(ways) + 1) + "|\n"]
    for model, row in rows.items():
        seconds = row["figures"]
        times = {way: f" (**{seconds[warm] / seconds[way]:.1f}x**)" for way in ways if way.startswith(OWN)}
        cells = [f"{seconds[way]:.1f} s{times.get(way, '')}" for way in ways]
        lines.append(f"| {model} | {' | '.join(cells)} |\n")
    return "".join(lines)


def _render_panel(panel: Panel) -> list[str]:
    own = [bar for bar in panel.bars if bar.kind == "own"]
    other = next((bar for bar in panel.bars if bar.kind == "other"), None)
    limits = {bar.name: bar for bar in panel.bars if bar.kind == "limit"}
    # The default variant comes first, even if another one is faster.
    return [
        _render_line(panel, bar, other, limits.get(_LIMIT_OF.get((panel.title, bar.name), "")))
        for bar in sorted(own, key=lambda bar: bar.name)
    ]


def _render_line(panel: Panel, own: Bar, other: Bar | None, limit: Bar | None) -> str:
    cells = [
        f"{panel.title}{_HOW.get(own.name, '')}",
        f"{_format_figure(own.value)} {panel.unit}",
        f"{other.name} {_format_figure(other.value)}" if other else "",
        f"**{own.value / other.value:.2f}x**" if other else "",
        f"{own.value / limit.value:.2f} of {limit.name}" if limit else "",
    ]
    return f"| {' | '.join(cells)} |\n"


def render_rows(rows: Sequence[Row]) -> str:
    """Return the rows of a section: figure, what it is compared with, goal and verdict."""
    head = "| workload | figure | against | ratio | goal | |\n| --- | --- | --- | --- | --- | --- |\n"
    return head + "".join(map(_render_row, rows))


def _render_row(row: Row) -> str:
    unit, goal, limit = row["unit"], row["goal"], row["limit"]
    cells = [
        row["workload"],
        f"{_format_figure(row['figure'])} {unit}".strip(),
        f"{row['against']}: {_format_figure(limit)}" if limit is not None else "",
        _format_figure(row["ratio"]) if row["ratio"] is not None else "",
        f"{goal['of']} {goal['relation']} {goal['value']:.3g}" if goal else "",
        row["verdict"],
    ]
    return f"| {' | '.join(cells)} |\n"


def render_parts(rows: Sequence[Row]) -> str:
    """Return the rows without goals: figure, lower limit, and CPU time by part."""
    head = "| workload | figure | lower limit | ratio | CPU time |\n| --- | --- | --- | --- | --- |\n"
    return head + "".join(map(_render_part, rows))


def _render_part(row: Row) -> str:
    cells = [
        row["workload"],
        f"{_format_figure(row['figure'])} {row['unit']}",
        f"{row['against']}: {_format_figure(row['limit'])}" if row["limit"] is not None else "",
        _format_figure(row["ratio"]) if row["ratio"] is not None else "",
        row["note"],
    ]
    return f"| {' | '.join(cells)} |\n"


def _format_figure(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) or value >= 1000 else f"{value:.3g}"
