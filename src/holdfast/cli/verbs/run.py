"""The verb `run`: lists and compares recorded runs, prints tensors, finds NaN and diverging ranks, writes reports."""

from __future__ import annotations

import math
import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Final, TypeVar

from holdfast.capture.record.options import parse_steps
from holdfast.capture.stored.described import describe_event, describe_run, label_site, name_level
from holdfast.capture.stored.events import KINDS, PHASES, Event
from holdfast.cli.lookup import open_to_read
from holdfast.cli.output import Output, count, format_time
from holdfast.cli.verb import add_json, add_verb, document
from holdfast.errors import AmbiguousName, BadName, NotFound
from holdfast.files.keep import verify_target
from holdfast.json_text import Json
from holdfast.objects.url import verify_path
from holdfast.progress import Silent
from holdfast.repo.format.layout import natural_order
from holdfast.repo.handle.repository import Repository
from holdfast.texts import shorten

if TYPE_CHECKING:
    from holdfast.capture.compare.measure import TensorDistance
    from holdfast.capture.compare.rank_diffs import Replica
    from holdfast.capture.compare.result import EventRow, Origin, RunDiff
    from holdfast.capture.stored.runs import Run
    from holdfast.capture.stored.statistics import TensorSummary
    from holdfast.capture.stored.unshard import Dim
    from holdfast.cli.verb import Verbs

_MAX_EVENTS: Final = 100
_MAX_VALUES: Final = 10_000
_MAX_BINS: Final = 1_000
_EIGHTHS: Final = " ▏▎▍▌▋▊▉█"
_WIDTH: Final = 40


def declare_events(actions: Verbs) -> None:
    """Declare the action `run events`."""
    parser = add_verb(actions, "events", "list the tensors of a run")
    examples = ["holdfast run events good", "holdfast run events good 'layers.3.*' --step 0 --kind output"]
    document(parser, examples=examples)
    parser.add_argument("run", metavar="RUN", help="a run")
    parser.add_argument("pattern", metavar="PATTERN", nargs="?", default="*", help="only modules whose names match")
    _add_filters(parser)
    parser.add_argument("--all", action="store_true", help=f"print every line, not only the first {_MAX_EVENTS}")
    add_json(parser)
    parser.set_defaults(run_verb=_run_events)


def declare_tensor(actions: Verbs) -> None:
    """Declare the action `run tensor`."""
    parser = add_verb(actions, "tensor", "print a tensor and its histogram")
    more = (
        "--step defaults to the first step that has the tensor. A tensor that was not\n"
        "recorded with level='full' has no values; its statistics are shown if there are\n"
        "any."
    )
    examples = [
        "holdfast run tensor good layers.3.mlp --kind output --step 3",
        "holdfast run tensor good layers.3.mlp --kind output --step 3 --against bad",
    ]
    document(parser, more, examples=examples)
    parser.add_argument("run", metavar="RUN", help="a run")
    parser.add_argument("name", metavar="NAME", help="the name, as `holdfast run events` lists it")
    _add_filters(parser)
    parser.add_argument("--call", metavar="N", type=int, help="only this call of the module within the step")
    parser.add_argument("--path", metavar="PATH", help="only this argument or result, such as [1]")
    parser.add_argument("--against", metavar="RUN", help="compare with the same tensor of this run")
    parser.add_argument("--bins", metavar="N", type=int, default=20, help="lines of the histogram (default: 20)")
    add_json(parser)
    parser.set_defaults(run_verb=_run_tensor)


def _add_filters(parser: ArgumentParser) -> None:
    parser.add_argument("--step", metavar="N", type=int, help="only this step")
    phases, kinds = ", ".join(PHASES), ", ".join(KINDS)
    parser.add_argument("--phase", metavar="PHASE", choices=PHASES, help=f"only this phase: {phases}")
    parser.add_argument("--kind", metavar="KIND", choices=KINDS, help=f"only this kind: {kinds}")
    parser.add_argument("--rank", metavar="N", type=int, help="only this rank")


def _run_events(options: Namespace, url: str, output: Output) -> int:
    from holdfast.capture.stored.runs import read_run

    run = read_run(open_to_read(url, output), options.run)
    found = _iter_events(run, options)
    if options.json:
        output.json([describe_event(event) for event in found])
        return 0
    rows: list[list[str]] = []
    left = 0
    for event in found:
        if options.all or len(rows) < _MAX_EVENTS:
            rows.append(_format_event(event))
        else:
            left += 1
    if rows:
        output.table(["STEP", "RANK", "PHASE", "KIND", "NAME", "TENSOR", "LEVEL", "DIGEST"], rows, right="STEP RANK")
    else:
        output.note(f"no tensor of {options.run!r} matches; `holdfast run events {options.run}` lists them all")
    output.cut(left)
    return 0


def _iter_events(run: Run, options: Namespace) -> Iterator[Event]:
    steps = run.steps if options.step is None else [step for step in run.steps if step == options.step]
    for step in steps:
        yield from (event for event in run.events(step) if _matches(event, options))


def _matches(event: Event, options: Namespace) -> bool:
    return (
        options.phase in (None, event.site.phase)
        and options.kind in (None, event.site.kind)
        and options.rank in (None, event.rank)
        and fnmatchcase(event.site.fqn, options.pattern)
    )


def _format_event(event: Event) -> list[str]:
    site = event.site
    name = label_site(site) + (" (again)" if event.recompute else "")
    tensor = f"{event.dtype} {event.shape}"
    return [str(site.step), str(event.rank), site.phase, site.kind, name, tensor, name_level(event), _shorten(event)]


def _shorten(event: Event) -> str:
    return event.identity.hex()[:12]


def _run_tensor(options: Namespace, url: str, output: Output) -> int:
    """Print a tensor and its histogram; with --against, beside the same tensor of another run."""
    from holdfast.capture.compare.measure import TensorPair
    from holdfast.capture.compare.result import name_site
    from holdfast.capture.stored.runs import read_run
    from holdfast.capture.stored.statistics import format_values

    repo = open_to_read(url, output)
    run = read_run(repo, options.run)
    other = read_run(repo, options.against) if options.against is not None else None
    event = _find_event(run, options)
    theirs = _find_partner(other, event) if other else None
    is_equal = theirs is None or (
        (event.dtype, event.shape) == (theirs.dtype, theirs.shape) and event.has_bytes_of(theirs)
    )
    bins = min(max(1, options.bins), _MAX_BINS)
    summaries = _summarize(run, event, other, theirs, bins=bins)
    tensor = run.read_tensor(event) if event.leaf else None
    measure = TensorPair(run, event, other, theirs).measure(None) if other and theirs and not is_equal else None
    if options.json:
        values = tensor.tolist() if tensor is not None and tensor.numel() <= _MAX_VALUES else None
        output.json(_describe_tensor(event, values, summaries, measure))
        return 0 if is_equal else 1
    output.line(f"step {event.site.step}, {event.site.phase}, rank {event.rank}: {name_site(event.site)}")
    level_note = "" if event.leaf else f", recorded at level {name_level(event)}: its values were not recorded"
    output.line(f"{event.dtype} {event.shape}, digest {event.identity.hex()}{level_note}")
    if event.source:
        output.line(f"{event.module} at {event.source}")
    if tensor is not None:
        for line in format_values(tensor):
            output.line(line)
    _print_summaries(summaries, [run, *([other] if other else [])], output)
    if theirs:
        output.line("equal" if is_equal else _describe_difference(is_equal, measure))
    return 0 if is_equal else 1


def _describe_difference(is_equal: bool | None, measure: TensorDistance | None) -> str:
    """Return a line on two tensors that are not equal; None for `is_equal` means that their bytes are not known."""
    if is_equal is None and (measure is None or measure.basis == "digest"):
        return "cannot be compared: the digests are of different kinds, and neither values nor statistics were kept"
    return "differs  " + (format_measure(measure) if measure else "")


def _find_event(run: Run, options: Namespace) -> Event:
    """Return the event that the options select; of several steps and ranks, the first."""
    found: list[Event] = []
    for step in run.steps if options.step is None else [options.step]:
        found = [event for event in run.events(step) if _is_selected(event, options)]
        if found:
            break
    if not found:
        at = "" if options.step is None else f" in step {options.step}"
        raise NotFound(
            f"run {options.run!r} has no matching tensor of {options.name!r}{at};"
            f" `holdfast run events {options.run}` lists its tensors",
            name=options.name,
        )
    first = found[0]
    others = [event for event in found if event.rank == first.rank and event.site != first.site]
    if others:
        raise AmbiguousName(
            f"{options.name!r} has several tensors in step {first.site.step}: {_list_sites([first, *others])};"
            " choose by --kind, --phase, --call or --path"
        )
    return first


def _list_sites(events: Sequence[Event]) -> str:
    from holdfast.capture.compare.result import name_site

    shown = [f"{event.site.phase} {name_site(event.site)}" for event in events[:6]]
    return "; ".join(shown) + ("; ..." if len(events) > len(shown) else "")


def _is_selected(event: Event, options: Namespace) -> bool:
    site = event.site
    return (
        site.fqn == options.name
        and options.phase in (None, site.phase)
        and options.kind in (None, site.kind)
        and options.rank in (None, event.rank)
        and options.call in (None, site.call)
        and options.path in (None, site.path)
        and not event.recompute
    )


def _find_partner(run: Run, event: Event) -> Event:
    from holdfast.capture.compare.result import name_site

    for other in run.events(event.site.step):
        if other.site == event.site and other.rank == event.rank and not other.recompute:
            return other
    raise NotFound(
        f"run {run.facts.name!r} has no {name_site(event.site)} in step {event.site.step}, rank {event.rank};"
        f" `holdfast run events {run.facts.name}` lists its tensors",
        name=event.site.fqn,
    )


def _summarize(run: Run, event: Event, other: Run | None, theirs: Event | None, *, bins: int) -> list[TensorSummary]:
    """Return a summary of each side; both use the same bins if values were recorded."""
    from holdfast.capture.stored.statistics import copy_summary, find_ends, summarize_tensor

    try:
        tensors = [run.read_tensor(event), *([other.read_tensor(theirs)] if other and theirs else [])]
    except NotFound:
        return [copy_summary(each.stats) for each in (event, theirs) if each and each.stats]
    ends = find_ends(*tensors)
    return [summarize_tensor(tensor, ends=ends, bins=bins) for tensor in tensors]


def _print_summaries(summaries: Sequence[TensorSummary], runs: Sequence[Run], output: Output) -> None:
    for summary, run in zip(summaries, runs, strict=False):
        name, stats = f"{run.facts.name}: " if len(runs) > 1 else "", summary.stats
        output.line(
            f"{name}min {stats.minimum:.6g}  max {stats.maximum:.6g}  mean {stats.mean:.6g}"
            f"  norm {stats.norm:.6g}  zero {stats.zero}  NaN {stats.nan}  Inf {stats.inf}"
        )
    with_histogram = [summary for summary in summaries if summary.stats.histogram]
    if len({(summary.low, summary.high, len(summary.stats.histogram)) for summary in with_histogram}) == 1:
        sides = [summary.stats.histogram for summary in with_histogram]
        for line in format_histogram(with_histogram[0].low, with_histogram[0].high, sides):
            output.line(line)
        return
    for summary in with_histogram:
        output.line()
        for line in format_histogram(summary.low, summary.high, [summary.stats.histogram]):
            output.line(line)


def _describe_tensor(
    event: Event, values: object, summaries: Sequence[TensorSummary], measure: TensorDistance | None
) -> dict[str, Json]:
    return {
        **describe_event(event),
        "values": _spell(values),
        "portraits": [_describe_summary(summary) for summary in summaries],
        "measure": measure.to_json() if measure else None,
    }


def _describe_summary(summary: TensorSummary) -> dict[str, Json]:
    found = {**asdict(summary.stats), "low": summary.low, "high": summary.high}
    return {name: _spell(value) for name, value in found.items()}


def _spell(value: object) -> Json:
    """Return values as JSON; non-finite and complex numbers become text."""
    if isinstance(value, list | tuple):
        return [_spell(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if isinstance(value, bool | int | float | str) or value is None else str(value)


def format_measure(measure: TensorDistance) -> str:
    """Return the difference between two tensors as one line."""
    found = [f"rel {measure.relative_l2:.3g}"] if measure.relative_l2 is not None else []
    if measure.max_abs is not None:
        at = f" at {measure.at}: {_pair_values(measure)}" if measure.at is not None else ""
        found.append(f"max abs {measure.max_abs:.3g}{at}")
    found += [f"cos {measure.cosine:.9g}"] if measure.cosine is not None else []
    found += [f"{measure.ulp_text} ulp"] if measure.ulp_text else []
    found += [f"{measure.percent:.3g} % over the tolerance"] if measure.percent is not None else []
    for name, (before, after) in (("NaN", measure.nan), ("Inf", measure.inf)):
        if before or after:
            found.append(f"{name} {before} -> {after}")
    found += [measure.note] if measure.note else []
    return "  ".join(found) or "size of the difference unknown: record with level='full'"


def _pair_values(measure: TensorDistance) -> str:
    return " against ".join(f"{value:.9g}" for value in measure.values or ())


def format_histogram(low: float, high: float, sides: Sequence[Sequence[int]], *, width: int = _WIDTH) -> list[str]:
    """Return a line for each bin: its lower edge, then a bar and a count for each side; all bars have one scale."""
    bins = max((len(side) for side in sides), default=0)
    most = max((count for side in sides for count in side), default=0)
    edges = [f"{low + (high / bins - low / bins) * at:.4g}" for at in range(bins)]
    # A bin ends where the next one begins, so one number per line is enough.
    wide = max(map(len, edges), default=0)
    digits = len(str(most))
    each = width // max(1, len(sides))
    lines = []
    for at, edge in enumerate(edges):
        cells = [f"{_draw(side[at], most, each)} {side[at]:>{digits}}" for side in sides]
        lines.append(f"{edge.rjust(wide)} | " + "  | ".join(cells))
    return lines


def _draw(count: int, most: int, width: int) -> str:
    eighths = round(8 * width * count / most) if most else 0
    if count and not eighths:
        eighths = 1
    if not _can_draw_blocks():
        return ("#" * ((eighths + 7) // 8)).ljust(width)
    return (_EIGHTHS[8] * (eighths // 8) + _EIGHTHS[eighths % 8].strip()).ljust(width)


def _can_draw_blocks() -> bool:
    return (sys.stdout.encoding or "").lower().replace("-", "").startswith("utf")


Read = TypeVar("Read")

_MAX_LINES: Final = 30
_MAX_ALSO: Final = 5
"""Number of further origins to print."""
_NOTE_CHARS: Final = 60
_UNKNOWN: Final = "-"
_HEADERS: Final = ("CLASS", "STEP", "PHASE", "KIND", "NAME", "REL", "MAX", "COS", "ULP", "OVER")
_DIMS: Final[Mapping[str, Dim]] = {"replicate": "replicate", "partial": "partial"}


def declare_run(parser: ArgumentParser) -> None:
    """Declare the verb `run` and its actions."""
    more = (
        "`store.record(...)` in Python records a run. All actions load torch. diff, nan,\n"
        "ranks, report and tensor --against exit with 1 if they find a difference, a NaN\n"
        "or an Inf, and with 2 on an error."
    )
    examples = ["holdfast run ls", "holdfast run diff good bad", "holdfast run report good bad diff.html"]
    document(parser, more, examples=examples)
    actions = parser.add_subparsers(dest="action", metavar="ACTION", title="actions", required=True)
    _declare_ls(actions)
    _declare_diff(actions)
    _declare_nan(actions)
    _declare_ranks(actions)
    declare_events(actions)
    declare_tensor(actions)
    _declare_report(actions)


def _add_steps(parser: ArgumentParser) -> None:
    parser.add_argument("--steps", metavar="STEPS", help="only these steps: 0-9,20 or 100:1000:100")


def _add_comparison(parser: ArgumentParser) -> None:
    parser.add_argument("a", metavar="A", help="a run")
    parser.add_argument("b", metavar="B", help="another run")
    parser.add_argument(
        "--noise", metavar="RUN", help="a repetition of A: differences of about this size count as close"
    )
    parser.add_argument(
        "--reference", metavar="RUN", help="a more exact run to compare A and B with, such as one in float64"
    )
    parser.add_argument(
        "--tolerance",
        metavar="WHAT",
        default="table",
        help="table (of torch.testing, by dtype), exact, or RTOL,ATOL (default: table)",
    )
    parser.add_argument(
        "--map",
        metavar="A=B",
        action="append",
        default=[],
        help="module A is named B in the second run; may be repeated",
    )
    parser.add_argument(
        "--dim",
        metavar="PATTERN=DIM",
        action="append",
        default=[],
        help="how ranks share matching tensors: split along DIM, or replicate, or partial; may be repeated",
    )
    _add_steps(parser)


def _declare_ls(actions: Verbs) -> None:
    parser = add_verb(actions, "ls", "list runs")
    document(parser, examples=["holdfast run ls", "holdfast run ls --json"])
    add_json(parser)
    parser.set_defaults(run_verb=_run_ls)


def _run_ls(options: Namespace, url: str, output: Output) -> int:
    from holdfast.capture.stored.runs import iter_runs

    repo = open_to_read(url, output)
    found = sorted(iter_runs(repo), key=lambda facts: natural_order(facts.name))
    if options.json:
        output.json([describe_run(facts) for facts in found])
        return 0
    rows = [
        [
            facts.name,
            facts.status,
            str(facts.world),
            format_time(facts.started_s),
            shorten("; ".join(facts.notes), _NOTE_CHARS),
        ]
        for facts in found
    ]
    if not rows:
        output.note(f"no run was recorded yet in {repo.store.url}")
    else:
        output.table(["NAME", "STATUS", "RANKS", "STARTED", "NOTES"], rows, right="RANKS")
    return 0


def _declare_diff(actions: Verbs) -> None:
    parser = add_verb(actions, "diff", "find where two runs diverge")
    more = (
        "Names the first tensor that differs although all its inputs are equal: the\n"
        "ORIGIN. A tensor that differs because its inputs do is PROPAGATED, one within\n"
        "the tolerance is CLOSE, one that only one run has is MISSING. REL is the norm of\n"
        "the difference divided by that of A, MAX the largest difference, COS the cosine,\n"
        "OVER the share of values outside the tolerance. ULP is the largest difference in\n"
        "units in the last place: a few are rounding, > 1000 is more than that. --json\n"
        "has the exact number. Exits with 1 if there is an ORIGIN."
    )
    examples = ["holdfast run diff good bad", "holdfast run diff good bad --noise good-2 --steps 0-9"]
    document(parser, more, examples=examples)
    _add_comparison(parser)
    parser.add_argument("--all", action="store_true", help=f"print every line, not only the first {_MAX_LINES}")
    add_json(parser)
    parser.set_defaults(run_verb=_run_diff)


def _run_diff(options: Namespace, url: str, output: Output) -> int:
    *_, diff = _compare(options, open_to_read(url, output), output)
    if options.json:
        output.json(diff.to_json())
    else:
        _print_diff(diff, output, is_all=options.all)
    return _find_exit_code(diff)


def _declare_report(actions: Verbs) -> None:
    parser = add_verb(actions, "report", "write an HTML report on where two runs diverge")
    more = (
        "Writes one HTML file that needs no network: the differences, plots over steps\n"
        "and within a step, and every tensor with its histogram. Compares as diff does,\n"
        "with the same exit codes."
    )
    document(parser, more, examples=["holdfast run report good bad diff.html"])
    _add_comparison(parser)
    parser.add_argument("file", metavar="FILE", help="the HTML file; replaced if it exists")
    parser.add_argument("--rows", metavar="N", type=int, default=50_000, help="write at most N rows (default: 50000)")
    add_json(parser)
    parser.set_defaults(run_verb=_run_report)


def _run_report(options: Namespace, url: str, output: Output) -> int:
    from holdfast.capture.report.report import ReportLimits, make_report, write_html

    folder = os.path.dirname(os.path.abspath(verify_path(options.file)))
    if not os.path.isdir(folder):
        raise BadName(f"{options.file} cannot be written: there is no directory {folder}; create it first")
    repo = open_to_read(url, output)
    verify_target(repo, options.file)
    a, b, diff = _compare(options, repo, output)
    limits = ReportLimits(rows=max(1, options.rows))
    report = make_report(
        a, b, diff, tolerance=_describe_tolerance(options), limits=limits, dims=_parse_dims(options.dim)
    )
    write_html(report, options.file)
    if options.json:
        output.json({"file": options.file, "rows": len(report.rows), "headline": diff.headline})
    else:
        output.line(diff.headline)
        output.line(f"{options.file}: {count(len(report.rows), 'row')}")
    return _find_exit_code(diff)


def _compare(options: Namespace, repo: Repository, output: Output) -> tuple[Run, Run, RunDiff]:
    from holdfast.capture.compare.align import parse_tolerance
    from holdfast.capture.compare.compare import DiffOptions, diff_runs
    from holdfast.capture.stored.runs import read_run

    tolerance = _read_option("--tolerance", options.tolerance, parse_tolerance)
    names = dict(_split_pair(text, "--map") for text in options.map)
    a, b = read_run(repo, options.a), read_run(repo, options.b)
    noise, reference = (read_run(repo, name) if name else None for name in (options.noise, options.reference))
    chosen = DiffOptions(
        names=names,
        dims=_parse_dims(options.dim),
        steps=_find_steps(options.steps, [*a.steps, *b.steps]),
        budget_bytes=repo.budget_bytes,
        progress=Silent() if options.json else output.progress(),
    )
    return a, b, diff_runs(a, b, noise=noise, reference=reference, tolerance=tolerance, options=chosen)


def _find_exit_code(diff: RunDiff) -> int:
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
    texts = {"table": "torch.testing's table for each dtype", "exact": "none, every bit must be equal"}
    text = f"Tolerance: {texts.get(options.tolerance, options.tolerance)}"
    text += f"; noise measured with {options.noise}" if options.noise else ""
    return text + (f"; compared with the reference {options.reference}" if options.reference else "") + "."


def _print_diff(diff: RunDiff, output: Output, *, is_all: bool) -> None:
    from holdfast.capture.compare.result import CLASSES
    from holdfast.capture.report.report import format_setting

    output.line(f"{diff.a} -> {diff.b}")
    changes = [
        [change.what, f"{format_setting(change.a)} -> {format_setting(change.b)}"] for change in diff.environment
    ]
    output.columns([["environment", *change] for change in changes])
    output.line(f"origin: {diff.headline}" if diff.origin else diff.headline)
    if diff.origin:
        _print_origin(diff.origin, output)
    for origin in diff.origins[1 : 1 + _MAX_ALSO]:
        output.line(f"also: {origin}")
    for note in diff.notes:
        output.line(f"note: {note}")
    # There are many of these, and they are seldom of interest.
    rows = diff.rows if is_all else [row for row in diff.rows if row.cls not in ("close", "unknown")][:_MAX_LINES]
    if rows:
        output.line()
        output.table(_HEADERS, [_format_row(row) for row in rows], right="STEP REL MAX COS ULP OVER")
    output.cut(len(diff.rows) - len(rows))
    shown = [name for name in CLASSES if name != "unknown" or diff.counts[name]]
    output.line(", ".join(f"{diff.counts[name]} {name}" for name in shown) + _describe_skipped(diff))


def _describe_skipped(diff: RunDiff) -> str:
    skipped = sum(step.is_skipped for step in diff.steps)
    return f"; {count(skipped, 'step')} equal as a whole" if skipped else ""


def _print_origin(origin: Origin, output: Output, *, good: str = "equal") -> None:
    if origin.cause:
        output.line(f"  cause: {origin.cause}")
    for title, parts in (("inputs", origin.inputs), ("parameters", origin.parameters)):
        if parts:
            states = ((part.name, good if part.standing == "equal" else part.standing) for part in parts)
            output.line(f"  {title}: " + ", ".join(f"{name} {state}" for name, state in states))
    if origin.measure:
        output.line(f"  {format_measure(origin.measure)}")
    for note in origin.notes:
        output.line(f"  {note}")


def _format_row(row: EventRow) -> list[str]:
    site, measure = row.event.site, row.measure
    name = label_site(site) + (f" [{row.why}]" if row.cls == "missing" else "")
    numbers = [_UNKNOWN] * 3
    if measure:
        over = _UNKNOWN if measure.percent is None else f"{measure.percent:.3g}%"
        numbers = [_format(measure.cosine, ".6f"), measure.ulp_text or _UNKNOWN, over]
    numbers = [*_format_size(measure), *numbers]
    return [row.cls.upper(), str(site.step), site.phase, site.kind, name, *numbers]


def _format_size(measure: TensorDistance | None) -> list[str]:
    """Return the cells of the columns REL and MAX."""
    if measure is None:
        return [_UNKNOWN] * 2
    return [_format(measure.relative_l2, ".2e"), _format(measure.max_abs, ".2e")]


def _format(value: float | None, form: str) -> str:
    return _UNKNOWN if value is None else format(value, form)


def _declare_nan(actions: Verbs) -> None:
    parser = add_verb(actions, "nan", "find the first NaN or Inf")
    more = (
        "Names the module that computed it from finite values, not the modules that\n"
        "received it. Exits with 1 if there is one."
    )
    document(parser, more, examples=["holdfast run nan bad"])
    parser.add_argument("run", metavar="RUN", help="a run")
    _add_steps(parser)
    add_json(parser)
    parser.set_defaults(run_verb=_run_nan)


def _run_nan(options: Namespace, url: str, output: Output) -> int:
    from holdfast.capture.compare.nan import find_nonfinite
    from holdfast.capture.stored.runs import read_run

    run = read_run(open_to_read(url, output), options.run)
    found = find_nonfinite(run, steps=_find_steps(options.steps, run.steps))
    if options.json:
        output.json(found.to_json())
        return 1 if found.origin else 0
    output.line(found.headline)
    if found.origin:
        _print_origin(found.origin, output, good="finite")
    for origin in found.origins[1 : 1 + _MAX_ALSO]:
        output.line(f"also: {origin}")
    for note in found.notes:
        output.line(f"note: {note}")
    if found.nan or found.inf:
        output.line(f"{count(found.nan, 'tensor')} with NaN, {found.inf} with Inf")
    return 1 if found.origin else 0


def _declare_ranks(actions: Verbs) -> None:
    parser = add_verb(actions, "ranks", "compare the replicas of a run")
    more = "Compares parameters, buffers and reduced gradients between ranks. Exits with 1\nif one differs."
    document(parser, more, examples=["holdfast run ranks good --steps 3"])
    parser.add_argument("run", metavar="RUN", help="a run")
    _add_steps(parser)
    parser.add_argument("--all", action="store_true", help=f"print every line, not only the first {_MAX_LINES}")
    add_json(parser)
    parser.set_defaults(run_verb=_run_ranks)


def _run_ranks(options: Namespace, url: str, output: Output) -> int:
    from holdfast.capture.compare.rank_diffs import diff_ranks
    from holdfast.capture.stored.runs import read_run

    run = read_run(open_to_read(url, output), options.run)
    found = diff_ranks(run, steps=_find_steps(options.steps, run.steps))
    if options.json:
        output.json(found.to_json())
        return 1 if found.findings else 0
    output.line(found.headline)
    shown = found.findings if options.all else found.findings[:_MAX_LINES]
    if shown:
        output.line()
        output.table(["STEP", "PHASE", "KIND", "NAME", "RANKS", "REL", "MAX"], [*map(_format_replica, shown)])
    output.cut(len(found.findings) - len(shown))
    for note in found.notes:
        output.line(f"note: {note}")
    return 1 if found.findings else 0


def _format_replica(replica: Replica) -> list[str]:
    site = replica.site
    groups = " / ".join(",".join(map(str, group)) for group in replica.groups)
    sizes = _format_size(replica.measure)
    return [str(site.step), site.phase, site.kind, f"{site.fqn}{site.path}", groups, *sizes]
