"""Write a report as one HTML file: no network, no libraries; text from users never becomes markup."""

from __future__ import annotations

import hashlib
import html
import json
import math
import os
import re
import time
from base64 import b64encode
from collections.abc import Iterable, Sequence
from importlib.resources import files
from typing import Final

from holdfast.capture.compare.result import CLASSES, ComparedInput
from holdfast.capture.report.report import Detail, Report, ReportRow, format_setting
from holdfast.capture.stored.runs import RunFacts
from holdfast.capture.stored.statistics import TensorSummary
from holdfast.json_text import Json
from holdfast.objects.url import verify_path

_SCRIPTS: Final = (
    *("elements.js", "theme.js", "histogram.js", "cursor.js", "rows.js"),
    *("data.js", "table.js", "plots.js", "charts.js", "detail.js", "main.js"),
)
"""In the order of their dependencies."""
_TEXTS: Final = (
    "phase",
    "kind",
    "fqn",
    "path",
    "verdict",
    "dtype",
    "shape",
    "module",
    "source",
    "pairing",
    "note",
    "bad",
)
_COUNTS: Final = ("step", "rank", "call")
_NUMBERS: Final = ("rel", "abs", "sqnr", "ulp", "mismatch")
_DIGITS: Final = 9
"""More digits than a plot or table shows, and half of what a float64 would take in the file."""
_MODULE_WORDS: Final = re.compile(r"^import .*;\n|^export (?=class|const|function)", re.MULTILINE)
_PLACEHOLDER: Final = re.compile(r"@(policy|title|headline|style|data|script)@")


def render_html(report: Report) -> bytes:
    """Return the page, in ASCII."""
    style, script = _read_parts()
    parts = {
        "policy": _make_policy(style, script),
        "title": html.escape(f"{report.a.name} and {report.b.name}: a comparison of runs"),
        "headline": html.escape(report.diff.headline),
        "style": style,
        "data": _encode_json(describe(report)),
        "script": script,
    }
    # In one pass: a replacement may itself contain a placeholder.
    page = _PLACEHOLDER.sub(lambda found: parts[found[1]], _read("page.html"))
    return page.encode("ascii", "xmlcharrefreplace")


def make_policy() -> str:
    """Return the content security policy of every report: only its own style and script, and no loading."""
    return _make_policy(*_read_parts())


def _read_parts() -> tuple[str, str]:
    """Return the style and the script of the page."""
    return _read("page.css"), '"use strict";\n' + "\n".join(map(_read_script, _SCRIPTS))


def write_html(report: Report, path: str | os.PathLike[str]) -> None:
    """Write the page to a file, atomically."""
    target = verify_path(os.fspath(path))
    temporary = f"{target}.{os.getpid()}.tmp"
    try:
        with open(temporary, "wb") as file:
            file.write(render_html(report))
        os.replace(temporary, target)
    except BaseException:
        if os.path.exists(temporary):
            os.unlink(temporary)
        raise


def _read(name: str) -> str:
    return (files("holdfast.capture.report") / "page" / name).read_text(encoding="utf-8")


def _read_script(name: str) -> str:
    """Return a script for a page that has only one: without the imports and exports of a module."""
    return _MODULE_WORDS.sub("", _read(name))


def _make_policy(style: str, script: str) -> str:
    """Return a content security policy that allows only this style and this script, and no loading."""
    allowed = [f"{kind}-src '{_digest(text)}'" for kind, text in (("style", style), ("script", script))]
    return "; ".join(["default-src 'none'", *allowed, "base-uri 'none'", "form-action 'none'"])


def _digest(text: str) -> str:
    return "sha256-" + b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _encode_json(value: Json) -> str:
    # ASCII, without characters that could end the script element or open a comment in it.
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def describe(report: Report) -> dict[str, Json]:
    """Return a report as the page's script reads it: rows as columns, each text once."""
    diff = report.diff
    numbers: dict[str, int] = {}
    columns: dict[str, Json] = {
        name: [numbers.setdefault(getattr(row, name), len(numbers)) for row in report.rows] for name in _TEXTS
    }
    columns |= {name: [getattr(row, name) for row in report.rows] for name in _COUNTS}
    columns |= {name: _describe_column(report.rows, name) for name in _NUMBERS}
    # Not rounded: a cosine near 1 is shown as its distance from 1.
    columns["cos"] = [row.cos if row.cos is not None and math.isfinite(row.cos) else None for row in report.rows]
    return {
        "schema": 1,
        "a": _describe_side(report.a, report.steps[0]),
        "b": _describe_side(report.b, report.steps[1]),
        "headline": diff.headline,
        "equal": diff.is_match,
        "undecided": diff.origin is None and not diff.is_match,
        "origin": -1 if report.origin is None else report.origin,
        "cause": diff.origin.cause if diff.origin else "",
        "hints": list(diff.origin.notes) if diff.origin else [],
        "inputs": _describe_inputs(diff.origin.inputs if diff.origin else ()),
        "parameters": _describe_inputs(diff.origin.parameters if diff.origin else ()),
        "counts": {name.upper(): diff.counts[name] for name in CLASSES},
        "environment": [
            [change.what, format_setting(change.a), format_setting(change.b)] for change in diff.environment
        ],
        "tolerance": report.tolerance,
        "notes": list(report.notes),
        "strings": list(numbers),
        "columns": columns,
        "details": {str(at): _describe_detail(detail) for at, detail in report.details.items()},
    }


def _describe_column(rows: Iterable[ReportRow], name: str) -> list[Json]:
    return [_describe_number(getattr(row, name)) for row in rows]


def _describe_number(value: float | None) -> Json:
    """Return a number for JSON: infinity as text, NaN as null (not known)."""
    if value is None or math.isnan(value):
        return None
    if math.isinf(value):
        return "Infinity" if value > 0 else "-Infinity"
    return value if isinstance(value, int) else float(f"{value:.{_DIGITS}g}")


def _describe_inputs(inputs: Iterable[ComparedInput]) -> list[Json]:
    return [f"{each.name} ({each.standing})" for each in inputs]


def _describe_side(facts: RunFacts, steps: Sequence[int]) -> dict[str, Json]:
    return {
        "name": facts.name,
        "steps": list(steps),
        "world": facts.world,
        "status": facts.status,
        "started": _describe_time(facts.started_s),
        "notes": list(facts.notes),
    }


def _describe_time(time_s: float) -> str:
    if not time_s:
        return ""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(time_s))
    except (OverflowError, ValueError, OSError):
        # A record can contain any number; not every number is a date.
        return f"@{time_s:g}"


def _describe_detail(detail: Detail) -> dict[str, Json]:
    found: dict[str, Json] = {}
    if detail.at is not None and detail.values is not None:
        found |= {"at": list(detail.at), "values": list(detail.values)}
    if detail.a is not None:
        found["a"] = _describe_summary(detail.a)
    if detail.b is not None:
        found["b"] = _describe_summary(detail.b)
    return found


def _describe_summary(summary: TensorSummary) -> dict[str, Json]:
    stats = summary.stats
    return {
        "min": _describe_number(stats.minimum),
        "max": _describe_number(stats.maximum),
        "mean": _describe_number(stats.mean),
        "norm": _describe_number(stats.norm),
        "zero": stats.zero,
        "nan": stats.nan,
        "inf": stats.inf,
        "low": _describe_number(summary.low),
        "high": _describe_number(summary.high),
        "histogram": list(stats.histogram),
    }
