"""Plans the pictures of a result, as bars and curves computed from its rows; draws nothing."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

Row = Mapping[str, Any]
Kind = Literal["own", "other", "limit"]

OWN: Final = "Holdfast"
STARTED: Final = "first step from process start, "
"""The workloads of starts; the model follows, and for some rows a comma and what is special about them."""
_STARTS: Final = {
    "Holdfast, whole=True": "whole=True",
    OWN: OWN,
    "torch, warm directory": "torch, warm",
    "Mega-cache": "Mega-cache",
    "cold": "cold",
}
_LIMITS: Final = {
    "raw write": "raw write",
    "raw read": "raw read",
    "raw read and BLAKE3": "raw read + BLAKE3",
    "copy, BLAKE3": "raw write + hashing",
    "BLAKE3 of memory": "BLAKE3, all cores",
    "XXH3 of memory": "XXH3, all cores",
    "memcpy to new memory": "copy",
    "memcpy to new memory and BLAKE3": "copy + BLAKE3",
}
SUMMARY: Final = (
    "first save, durable",
    "save again, nothing changed",
    "load, not in page cache",
    "load, in page cache",
)
"""The titles of the panels in the README."""
_NAMES: Final = {
    "Holdfast, verify='fast'": "Holdfast, fast",
    "Holdfast, unchanged, change hints": "Holdfast, hints",
    "torch.save": "torch.save",
    "safetensors": "safetensors",
    "DCP": "DCP",
    "content store": "content store",
    OWN: OWN,
}


@dataclass(frozen=True, slots=True)
class Bar:
    """One contestant's figure."""

    name: str
    value: float
    kind: Kind


@dataclass(frozen=True, slots=True)
class Panel:
    """The bars of one workload; more is better."""

    title: str
    unit: str
    bars: tuple[Bar, ...]


@dataclass(frozen=True, slots=True)
class Curve:
    """A figure at each size."""

    name: str
    points: tuple[tuple[float, float], ...]
    is_limit: bool = False


@dataclass(frozen=True, slots=True)
class Chart:
    """Curves over one axis."""

    title: str
    unit: str
    axis: str
    curves: tuple[Curve, ...]


def read_result(path: Path) -> dict[str, Any]:
    """Read the JSON file of a run."""
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def find_state(rows: Sequence[Row], ending: str) -> str:
    """Return the name of one kind of state in a run: `128 x 16 MiB`, `2000 mixed`, `20000 small`."""
    pattern = re.compile(rf"first save, (\d+ {ending})")
    return next((match[1] for row in rows if (match := pattern.fullmatch(row["workload"]))), "")


def plan_panels(rows: Sequence[Row]) -> list[Panel]:
    """Return the panels for which a run has rows."""
    large, small = find_state(rows, r"x .*"), find_state(rows, "small")
    count = small.split()[0] if small else ""
    wanted: list[tuple[str, list[str], str]] = [
        ("first save, durable", [f"first save, {large}"], "0"),
        (
            "save again, nothing changed",
            [f"save again, unchanged{how}, {large}" for how in ("", ", change hints")],
            "0",
        ),
        ("save again, 1 % changed", [f"save again, 1 % changed, {large}"], "0"),
        ("one tensor, not in page cache", ["one tensor, cold"], "0"),
        ("load, not in page cache", [f"cold load, {large}"], "0"),
        ("load, in page cache", [f"warm load{how}, {large}" for how in ("", ', verify="fast"')], "0"),
        (f"save {_group(count)} small tensors", [f"first save, {small}"], count),
        (f"load {_group(count)} small tensors", [f"warm load, {small}"], count),
    ]
    panels = [
        _plan_panel(title, [row for row in rows if row["workload"] in names], int(number))
        for title, names, number in wanted
        if number
    ]
    return [panel for panel in panels if panel.bars]


def list_started(rows: Sequence[Row]) -> dict[str, Row]:
    """Return the row of each model that was started, by the name of the model."""
    named = {row["workload"].removeprefix(STARTED): row for row in rows if row["workload"].startswith(STARTED)}
    return {name: row for name, row in named.items() if "," not in name}


def plan_compile_panels(rows: Sequence[Row]) -> list[Panel]:
    """Return a panel for each model that was started; less is better."""
    return [
        Panel(
            model,
            "s",
            tuple(
                Bar(shown, row["figures"][name], "own" if name.startswith(OWN) else "other")
                for name, shown in _STARTS.items()
                if name in row["figures"]
            ),
        )
        for model, row in list_started(rows).items()
    ]


def _group(count: str) -> str:
    return f"{int(count):,}" if count else ""


def _plan_panel(title: str, rows: Sequence[Row], count: int) -> Panel:
    """Join the rows of a workload; for many small tensors, show tensors per second, because bytes mean little there."""
    values: dict[str, float] = {}
    for row in rows:
        for name, figure in row["figures"].items():
            values[name] = count / min(row["samples"][name]) / 1000 if count else figure
    bars: dict[str, Bar] = {}
    for name, value in values.items():
        bar = _make_bar(name, value)
        # The time of many small tensors is not spent on hashing or writing bytes, so those limits are left out.
        if bar and not (count and bar.kind == "limit") and (bar.name not in bars or value > bars[bar.name].value):
            bars[bar.name] = bar
    order = {"own": 0, "other": 1, "limit": 2}
    # The default variant of Holdfast comes first.
    sorted_bars = sorted(bars.values(), key=lambda bar: (order[bar.kind], bar.name != OWN, -bar.value))
    return Panel(title, "thousand/s" if count else "GB/s", tuple(sorted_bars))


def _make_bar(name: str, value: float) -> Bar | None:
    """Return a bar under its display name, which all variants of one contestant share."""
    for beginning in sorted(_LIMITS, key=len, reverse=True):
        if name.startswith(beginning):
            return Bar(_LIMITS[beginning], value, "limit")
    for beginning in sorted(_NAMES, key=len, reverse=True):
        if name.startswith(beginning):
            return Bar(_NAMES[beginning], value, "own" if beginning.startswith(OWN) else "other")
    return None


def plan_charts(rows: Sequence[Row]) -> list[Chart]:
    """Return the charts of growing work for which a run has rows."""
    by_byte = ("save", "cold load", "raw write", "raw read")
    charts = [
        Chart(
            "time per byte",
            "seconds per GB",
            "size of the state",
            _find_curves(rows, {name: f"{name}, per byte, " for name in by_byte}),
        ),
        Chart(
            "time per tensor",
            "µs per tensor",
            "tensors in the state",
            _find_curves(rows, {name: f"{name}, per tensor, " for name in ("save", "load", "open and list")}),
        ),
        Chart(
            "time of one operation",
            "ms",
            "snapshots in the store",
            _find_curves(
                rows,
                {
                    "small save": "small save, same handle",
                    "read a record": "read one record",
                    "100 look-ups": "100 look-ups",
                },
            ),
        ),
    ]
    return [chart for chart in charts if chart.curves]


def _find_curves(rows: Sequence[Row], beginnings: Mapping[str, str]) -> tuple[Curve, ...]:
    found = []
    for name, beginning in beginnings.items():
        row = next((row for row in rows if row["workload"].startswith(beginning)), None)
        if row and row["figures"]:
            points = tuple((float(size), figure) for size, figure in row["figures"].items())
            found.append(Curve(name, points, name.startswith("raw")))
    return tuple(found)
