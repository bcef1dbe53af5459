"""The verb `run`: lists and compares recorded runs, finds NaN and diverging ranks, and writes reports."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Final, TypeVar

from holdfast.capture.compare.compare import Ways, diff_runs
from holdfast.capture.compare.measure import TensorDistance
from holdfast.capture.compare.nan import find_nonfinite
from holdfast.capture.compare.rank_diffs import Replica, diff_ranks
from holdfast.capture.compare.result import CLASSES, EventRow, Origin, RunDiff
from holdfast.capture.compare.verdicts import parse_tolerance
from holdfast.capture.record.options import parse_steps
from holdfast.capture.report.gather import ReportLimits, gather, spell
from holdfast.capture.report.html import write_html
from holdfast.capture.stored.runs import Run, RunFacts, iter_runs, read_run
from holdfast.capture.stored.unshard import Dim
from holdfast.cli.lookup import open_to_read
from holdfast.cli.output import Output, count, format_time, format_utc
from holdfast.cli.verbs.run_tensor import format_measure, run_events, run_tensor
from holdfast.errors import BadName
from holdfast.json_text import Json
from holdfast.repo.format.layout import natural_order
from holdfast.repo.handle.repository import Repository

Read = TypeVar("Read")

_MAX_LINES: Final = 30
_NOTE_CHARS: Final = 60
_UNKNOWN: Final = "-"
_HEADERS: Final = ("CLASS", "STEP", "PHASE", "KIND", "NAME", "REL", "MAX", "COS", "ULP", "OVER")
_DIMS: Final[Mapping[str, Dim]] = {"replicate": "replicate", "partial": "partial"}


def run_run(options: Namespace, url: str, output: Output) -> int:
    """Run one of the actions on recorded runs."""
    return _ACTIONS[options.action](options, open_to_read(url, output), output)


def _run_ls(options: Namespace, repo: Repository, output: Output) -> int:
    found = sorted(iter_runs(repo), key=lambda facts: natural_order(facts.name))
    if options.json:
        output.json([_describe_facts(facts) for facts in found])
        return 0
    rows = [
        [facts.name, facts.status, str(facts.world), format_time(facts.started_s), _shorten(facts.notes)]
        for facts in found
    ]
    if not rows:
        output.note(f"no run was recorded yet in {repo.store.url}")
    else:
        output.table(["NAME", "STATUS", "RANKS", "STARTED", "NOTES"], rows, right="RANKS")
    return 0


def _shorten(notes: Iterable[str]) -> str:
    text = "; ".join(notes)
    return text if len(text) <= _NOTE_CHARS else f"{text[: _NOTE_CHARS - 3]}..."


def _describe_facts(facts: RunFacts) -> dict[str, Json]:
    return {
        "name": facts.name,
        "status": facts.status,
        "world": facts.world,
        "started": format_utc(facts.started_s),
        "environment": dict(facts.environment),
        "notes": list(facts.notes),
    }


def _run_diff(options: Namespace, repo: Repository, output: Output) -> int:
    *_, diff = _compare(options, repo)
    if options.json:
        output.json(diff.to_json())
    else:
        _print_diff(diff, output, is_all=options.all)
    return _find_code(diff)


def _run_report(options: Namespace, repo: Repository, output: Output) -> int:
    folder = os.path.dirname(os.path.abspath(options.file))
    if not os.path.isdir(folder):
        raise BadName(f"{options.file} cannot be written: there is no directory {folder}; create it first")
    a, b, diff = _compare(options, repo)
    limits = ReportLimits(rows=max(1, options.rows))
    report = gather(a, b, diff, tolerance=_describe_tolerance(options), limits=limits, dims=_parse_dims(options.dim))
    write_html(report, options.file)
    output.line(diff.headline)
    output.line(f"{options.file}: {count(len(report.rows), 'row')}")
    return _find_code(diff)


def _compare(options: Namespace, repo: Repository) -> tuple[Run, Run, RunDiff]:
    tolerance = _read_option("--tolerance", options.tolerance, parse_tolerance)
    names = dict(_split_pair(text, "--map") for text in options.map)
    a, b = read_run(repo, options.a), read_run(repo, options.b)
    noise, reference = (read_run(repo, name) if name else None for name in (options.noise, options.reference))
    ways = Ways(names=names, dims=_parse_dims(options.dim), steps=_find_steps(options.steps, [*a.steps, *b.steps]))
    return a, b, diff_runs(a, b, noise=noise, reference=reference, tolerance=tolerance, ways=ways)


def _find_code(diff: RunDiff) -> int:
    if not diff.steps:
        # No step was compared: neither exit code, equal or different, would be right.
        raise BadName(diff.headline)
    return 0 if diff.is_match else 1


def _split_pair(text: str, option: str) -> tuple[str, str]:
    left, equals, right = text.partition("=")
    if not equals or not right:
        raise BadName(f"{option} takes NAME=VALUE, not {text!r}")
    return left, right


def _parse_dims(texts: Iterable[str]) -> dict[str, Dim]:
    found: dict[str, Dim] = {}
    for text in texts:
        pattern, dim = _split_pair(text, "--dim")
        if dim not in _DIMS and not dim.lstrip("-").isdigit():
            raise BadName(f"--dim takes PATTERN=DIM where DIM is a number, replicate or partial, not {text!r}")
        found[pattern] = _DIMS[dim] if dim in _DIMS else int(dim)
    return found


def _find_steps(text: str | None, steps: Iterable[int]) -> Collection[int] | None:
    return None if text is None else frozenset(filter(_read_option("--steps", text, parse_steps), steps))


def _read_option(option: str, text: str, parse: Callable[[str], Read]) -> Read:
    try:
        return parse(text)
    except ValueError as error:
        raise BadName(f"{option}: {error}") from error


def _describe_tolerance(options: Namespace) -> str:
    said = {"table": "torch.testing's table for each dtype", "exact": "none, every bit must be equal"}
    text = f"Tolerance: {said.get(options.tolerance, options.tolerance)}"
    text += f"; noise measured with {options.noise}" if options.noise else ""
    return text + (f"; compared with the reference {options.reference}" if options.reference else "") + "."


def _print_diff(diff: RunDiff, output: Output, *, is_all: bool) -> None:
    output.line(f"{diff.a} -> {diff.b}")
    changes = [[change.what, f"{spell(change.a)} -> {spell(change.b)}"] for change in diff.environment]
    output.columns([["environment", *change] for change in changes])
    for note in diff.notes:
        output.line(f"note: {note}")
    output.line(f"origin: {diff.headline}" if diff.origin else diff.headline)
    if diff.origin:
        _print_origin(diff.origin, output)
    # There are many close tensors, and they are seldom of interest.
    rows = diff.rows if is_all else [row for row in diff.rows if row.cls != "close"][:_MAX_LINES]
    if rows:
        output.line()
        output.table(_HEADERS, [_format_row(row) for row in rows], right="STEP REL MAX COS ULP OVER")
    if len(rows) < len(diff.rows):
        output.line(f"... and {len(diff.rows) - len(rows)} more; --all shows them")
    output.line(", ".join(f"{diff.counts[name]} {name}" for name in CLASSES) + _describe_skipped(diff))


def _describe_skipped(diff: RunDiff) -> str:
    skipped = sum(step.is_skipped for step in diff.steps)
    return f"; {count(skipped, 'step')} equal as a whole" if skipped else ""


def _print_origin(origin: Origin, output: Output, *, good: str = "equal") -> None:
    for title, parts in (("inputs", origin.inputs), ("parameters", origin.parameters)):
        if parts:
            said = ((part.name, good if part.standing == "equal" else part.standing) for part in parts)
            output.line(f"  {title}: " + ", ".join(f"{name} {standing}" for name, standing in said))
    if origin.measure:
        output.line(f"  {format_measure(origin.measure)}")
    for note in origin.notes:
        output.line(f"  {note}")


def _format_row(row: EventRow) -> list[str]:
    site, measure = row.event.site, row.measure or TensorDistance("digest")
    name = f"{site.fqn or '(the model)'}{site.path}" + (f" #{site.call}" if site.call else "")
    name += f" [{row.why}]" if row.cls == "missing" else ""
    percent = measure.percent
    numbers = [
        _format(measure.relative_l2, ".2e"),
        _format(measure.max_abs, ".2e"),
        _format(measure.cosine, ".6f"),
        _format(measure.max_ulp, "d"),
        _UNKNOWN if percent is None else f"{percent:.3g}%",
    ]
    return [row.cls.upper(), str(site.step), site.phase, site.kind, name, *numbers]


def _format(value: float | None, form: str) -> str:
    return _UNKNOWN if value is None else format(value, form)


def _run_nan(options: Namespace, repo: Repository, output: Output) -> int:
    run = read_run(repo, options.run)
    found = find_nonfinite(run, steps=_find_steps(options.steps, run.steps))
    if options.json:
        output.json(found.to_json())
        return 1 if found.origin else 0
    output.line(found.headline)
    if found.origin:
        _print_origin(found.origin, output, good="finite")
    for origin in found.origins[1:6]:
        output.line(f"also: {origin}")
    for note in found.notes:
        output.line(f"note: {note}")
    if found.nan or found.inf:
        output.line(f"{count(found.nan, 'tensor')} with NaN, {found.inf} with Inf")
    return 1 if found.origin else 0


def _run_ranks(options: Namespace, repo: Repository, output: Output) -> int:
    run = read_run(repo, options.run)
    found = diff_ranks(run, steps=_find_steps(options.steps, run.steps))
    if options.json:
        output.json(found.to_json())
        return 1 if found.findings else 0
    output.line(found.headline)
    shown = found.findings if options.all else found.findings[:_MAX_LINES]
    if shown:
        output.line()
        output.table(["STEP", "PHASE", "KIND", "NAME", "RANKS", "REL", "MAX"], [*map(_format_replica, shown)])
    if len(found.findings) > len(shown):
        output.line(f"... and {len(found.findings) - len(shown)} more; --all shows them")
    for note in found.notes:
        output.line(f"note: {note}")
    return 1 if found.findings else 0


def _format_replica(replica: Replica) -> list[str]:
    site, measure = replica.site, replica.measure or TensorDistance("digest")
    groups = " / ".join(",".join(map(str, group)) for group in replica.groups)
    numbers = [_format(measure.relative_l2, ".2e"), _format(measure.max_abs, ".2e")]
    return [str(site.step), site.phase, site.kind, f"{site.fqn}{site.path}", groups, *numbers]


_ACTIONS: Final[Mapping[str, Callable[[Namespace, Repository, Output], int]]] = {
    "ls": _run_ls,
    "diff": _run_diff,
    "nan": _run_nan,
    "ranks": _run_ranks,
    "events": run_events,
    "tensor": run_tensor,
    "report": _run_report,
}
