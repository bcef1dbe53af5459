"""A report on a comparison as one HTML file: rows, details, no network; text from users never becomes markup."""

from __future__ import annotations

import hashlib
import html
import json
import math
import os
import re
import time
from base64 import b64encode
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Final

from holdfast.capture.compare.measure import TensorDistance
from holdfast.capture.compare.result import CLASSES, ComparedInput, EventRow, Origin, RunDiff
from holdfast.capture.stored.events import Event
from holdfast.capture.stored.runs import Run, RunFacts
from holdfast.capture.stored.statistics import TensorSummary, copy_summary, find_ends, summarize_tensor
from holdfast.capture.stored.unshard import Dims, gather_run
from holdfast.errors import NotFound
from holdfast.json_text import Json
from holdfast.objects.url import verify_path

MAX_ROWS: Final = 50_000
_DETAIL_ORDER: Final[Mapping[str, int]] = {
    "ORIGIN": 0,
    "PROPAGATED": 1,
    "MISSING": 2,
    "CLOSE": 3,
    "UNKNOWN": 4,
    "EQUAL": 5,
}
"""Which classes get details first; their number is limited."""
_BASES: Final[Mapping[str, str]] = {
    "stats": "Computed from recorded statistics: the real differences may be larger.",
    "digest": "Only the digest was recorded: the tensor differs, but by how much is not known.",
}


@dataclass(frozen=True, slots=True)
class ReportLimits:
    """Limits for the size of a report and for the work to build it."""

    rows: int = MAX_ROWS
    details: int = 5_000
    """Number of tensors that get details, such as recorded statistics."""
    summaries: int = 200
    """Number of tensors that are read for their histograms, the origin first."""
    summary_bytes: int = 1 << 30
    """Limit for the bytes of these tensors, both runs together."""


@dataclass(frozen=True, slots=True)
class Detail:
    """Details of a tensor that are not in its row."""

    at: tuple[int, ...] | None = None
    """Index of the largest difference."""
    values: tuple[str, str] | None = None
    """Both values at that index, as text: numbers may be complex."""
    a: TensorSummary | None = None
    b: TensorSummary | None = None


@dataclass(frozen=True, slots=True)
class ReportRow:
    """One tensor of a step, paired or not; None for numbers that are not known."""

    verdict: str
    """The class in capitals: ORIGIN, PROPAGATED, CLOSE, MISSING, UNKNOWN or EQUAL."""
    step: int
    rank: int
    phase: str
    kind: str
    fqn: str
    call: int = 0
    path: str = ""
    dtype: str = ""
    shape: str = ""
    module: str = ""
    source: str = ""
    pairing: str = ""
    """How the two events were paired."""
    note: str = ""
    bad: str = ""
    """Number of NaN and infinite values in each run; "" if there are none."""
    rel: float | None = None
    abs: float | None = None
    cos: float | None = None
    sqnr: float | None = None
    ulp: float | None = None
    mismatch: float | None = None
    """Percentage of values outside the tolerance."""


@dataclass(frozen=True, slots=True)
class Report:
    """A comparison of two runs as the page shows it."""

    a: RunFacts
    b: RunFacts
    diff: RunDiff
    steps: tuple[Sequence[int], Sequence[int]] = ((), ())
    """The steps of both runs."""
    rows: tuple[ReportRow, ...] = ()
    """In the order of the run: causes come before effects."""
    origin: int | None = None
    """Index of the origin's row."""
    tolerance: str = ""
    """A text that says when tensors count as close."""
    notes: tuple[str, ...] = ()
    """Notes on the comparison; those of a single run are in its facts."""
    details: Mapping[int, Detail] = field(default_factory=dict)
    """By index of the row."""


@dataclass(frozen=True, slots=True)
class _Entry:
    """A row and its events."""

    row: ReportRow
    a: Event | None
    b: Event | None
    measure: TensorDistance | None = None


def make_report(
    a: Run,
    b: Run,
    diff: RunDiff,
    *,
    tolerance: str = "",
    limits: ReportLimits | None = None,
    dims: Dims | None = None,
) -> Report:
    """Return the report on a comparison of two runs; `dims` must be those of the comparison."""
    limits = limits or ReportLimits()
    facts, steps = (a.facts, b.facts), (a.steps, b.steps)
    if _is_gathered(a, b, diff):
        a, b = (gather_run(run, dims=dims)[0] for run in (a, b))
    entries = _list_entries(a, b, diff, limits)
    origin = _find_origin(entries, diff.origin)
    return Report(
        *facts,
        diff,
        steps,
        rows=tuple(entry.row for entry in entries),
        origin=origin,
        tolerance=tolerance,
        notes=tuple(_iter_notes(facts, diff, limits)),
        details=_make_details(a, b, entries, origin, limits),
    )


def _iter_notes(facts: Sequence[RunFacts], diff: RunDiff, limits: ReportLimits) -> Iterator[str]:
    # Notes of a single run are shown beside its name.
    shown = {f"{name}: {note}" for each in facts for note in each.notes for name in (each.name, "both runs")}
    yield from (note for note in diff.notes if note not in shown)
    if len(diff.rows) > limits.rows:
        yield f"{len(diff.rows) - limits.rows} more tensors differ; the table has the first {limits.rows}."
    if skipped := sum(step.is_skipped for step in diff.steps):
        yield f"Steps that are entirely equal: {skipped}; their tensors are not counted."


def format_setting(value: Json) -> str:
    """Return a value of an environment as readable text."""
    if value is None:
        return "(not recorded)"
    return value if isinstance(value, str) else json.dumps(value)


def _is_gathered(a: Run, b: Run, diff: RunDiff) -> bool:
    """Return whether the ranks of each run were gathered before the comparison."""
    if a.facts.world != b.facts.world:
        return True
    return a.facts.world > 1 and not all(_has_own(a, found.a) and _has_own(b, found.b) for found in diff.rows)


def _has_own(run: Run, event: Event | None) -> bool:
    if event is None:
        return True
    events = run.events(event.site.step, event.rank)
    # Event numbers increase by one, so the index usually follows from the number.
    at = event.seq - events[0].seq if events else 0
    return event in events[at : at + 1] or event in events


def _list_entries(a: Run, b: Run, diff: RunDiff, limits: ReportLimits) -> list[_Entry]:
    entries = [_make_entry(found, b) for found in diff.rows[: limits.rows]]
    room = limits.rows - len(entries)
    for event in _iter_equal(a, diff):
        if room <= 0:
            break
        entries.append(_Entry(_make_row(event, "EQUAL"), event, None))
        room -= 1
    # In the order of the first run; events of the second run only are sorted in by their own numbers.
    entries.sort(key=lambda entry: (entry.row.step, _find_seq(entry), entry.row.rank))
    return entries


def _find_seq(entry: _Entry) -> int:
    event = entry.a or entry.b
    assert event is not None, "a row has an event"
    return event.seq


def _iter_equal(a: Run, diff: RunDiff) -> Iterator[Event]:
    """Yield the equal events of the compared steps, those of the origin's step first."""
    unequal = {(found.a.rank, found.a.seq) for found in diff.rows if found.a}
    steps = [step.step for step in diff.steps if not step.is_skipped]
    first = diff.origin.step if diff.origin else None
    for step in sorted(steps, key=lambda step: (step != first, step)):
        # If some rows were left out, an event without a row may differ too.
        is_whole = not diff.left_out or any(found.event.site.step > step for found in diff.rows[-1:])
        if is_whole:
            yield from (event for event in a.events(step) if (event.rank, event.seq) not in unequal)


def _make_entry(found: EventRow, b: Run) -> _Entry:
    notes = [found.why, _note_side(found, b), _note_measure(found.measure), _note_floor(found.floor)]
    row = _make_row(found.event, found.cls.upper(), pairing=found.how or "", notes=notes, measure=found.measure)
    return _Entry(row, found.a, found.b, found.measure)


def _make_row(
    event: Event,
    verdict: str,
    *,
    pairing: str = "exact",
    notes: Sequence[str] = (),
    measure: TensorDistance | None = None,
) -> ReportRow:
    site, known = event.site, measure or TensorDistance("digest")
    return ReportRow(
        verdict=verdict,
        step=site.step,
        rank=event.rank,
        phase=site.phase,
        kind=site.kind,
        fqn=site.fqn,
        call=site.call,
        path=site.path,
        dtype=event.dtype,
        shape=str(event.shape),
        module=event.module,
        source=event.source,
        pairing=pairing,
        note=" ".join(filter(None, (_end_sentence(note) for note in notes))),
        bad=_format_nonfinite(known),
        rel=known.relative_l2,
        abs=known.max_abs,
        cos=known.cosine,
        sqnr=known.sqnr_db,
        ulp=known.max_ulp,
        mismatch=known.percent,
    )


def _end_sentence(note: str) -> str:
    return f"{note[0].upper()}{note[1:]}{'' if note.endswith('.') else '.'}" if note else ""


def _note_side(found: EventRow, b: Run) -> str:
    if found.a is None or found.b is None:
        return ""
    other = [found.b.site.fqn] if found.b.site.fqn != found.a.site.fqn else []
    other += [found.b.dtype] if found.b.dtype != found.a.dtype else []
    other += [str(found.b.shape)] if found.b.shape != found.a.shape else []
    return f"in {b.facts.name} it is {' '.join(other)}" if other else ""


def _note_measure(measure: TensorDistance | None) -> str:
    if measure is None:
        return ""
    return measure.note or _BASES.get(measure.basis, "")


def _note_floor(floor: float | None) -> str:
    return "" if floor is None else f"the repeated run differs by {floor:.2g} here"


def _format_nonfinite(measure: TensorDistance) -> str:
    both = (("NaN", measure.nan), ("Inf", measure.inf))
    return " ".join(f"{name} {before}/{after}" for name, (before, after) in both if before or after)


def _find_origin(entries: Sequence[_Entry], origin: Origin | None) -> int | None:
    """Return the row that the headline is about; if there is none, the first origin."""
    if origin is None:
        return None
    origins = [at for at, entry in enumerate(entries) if entry.row.verdict == "ORIGIN"]
    for at in origins:
        event = entries[at].a or entries[at].b
        if event and event.site == origin.site and event.rank == origin.rank:
            return at
    return origins[0] if origins else None


def _make_details(
    a: Run, b: Run, entries: Sequence[_Entry], origin: int | None, limits: ReportLimits
) -> dict[int, Detail]:
    made: dict[int, Detail] = {}
    left, left_bytes = limits.summaries, limits.summary_bytes
    order = sorted(
        range(len(entries)), key=lambda at: (at != origin, _DETAIL_ORDER.get(entries[at].row.verdict, 9), at)
    )
    for at in order[: limits.details]:
        entry = entries[at]
        size_bytes = _count_bytes(entry)
        detail = None
        if left > 0 and size_bytes <= left_bytes and entry.row.verdict != "EQUAL":
            detail = _read_detail(a, b, entry)
        if detail:
            left, left_bytes = left - 1, left_bytes - size_bytes
        detail = detail or _copy_detail(entry)
        if detail:
            made[at] = detail
    return made


def _count_bytes(entry: _Entry) -> int:
    """Return the memory that a row's tensors need, at 8 bytes an item."""
    return sum(8 * math.prod(event.shape) for event in (entry.a, entry.b) if event and event.leaf)


def _read_detail(a: Run, b: Run, entry: _Entry) -> Detail | None:
    """Return summaries of the tensors themselves, over the same bins; None if they were not kept."""
    try:
        tensors = [run.read_tensor(event) if event else None for run, event in ((a, entry.a), (b, entry.b))]
    except NotFound:
        return None
    ends = find_ends(*(tensor for tensor in tensors if tensor is not None))
    summaries = [None if tensor is None else summarize_tensor(tensor, ends=ends) for tensor in tensors]
    return Detail(*_find_place(entry.measure), *summaries)


def _copy_detail(entry: _Entry) -> Detail | None:
    taken = [copy_summary(event.stats) if event and event.stats else None for event in (entry.a, entry.b)]
    if entry.row.verdict == "EQUAL":
        taken[1] = taken[0]
    place = _find_place(entry.measure)
    return Detail(*place, *taken) if any(taken) or place[0] is not None else None


def _find_place(measure: TensorDistance | None) -> tuple[tuple[int, ...] | None, tuple[str, str] | None]:
    if measure is None or measure.at is None or measure.values is None:
        return None, None
    first, second = (_format_value(value) for value in measure.values)
    return measure.at, (first, second)


def _format_value(value: complex) -> str:
    return f"{value:.9g}"


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
