"""The actions `run events` and `run tensor`: list the tensors of a run, print one tensor with its histogram."""

from __future__ import annotations

import math
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Final

from holdfast.capture.stored.described import describe_event, label_site, name_level
from holdfast.capture.stored.events import KINDS, PHASES, Event
from holdfast.cli.lookup import open_to_read
from holdfast.cli.output import Output
from holdfast.cli.verb import add_json, add_verb, document
from holdfast.errors import AmbiguousName, NotFound
from holdfast.json_text import Json

if TYPE_CHECKING:
    from holdfast.capture.compare.measure import TensorDistance
    from holdfast.capture.stored.runs import Run
    from holdfast.capture.stored.statistics import TensorSummary
    from holdfast.cli.verb import Verbs

_MAX_LINES: Final = 100
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
    parser.add_argument("--all", action="store_true", help=f"print every line, not only the first {_MAX_LINES}")
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
        if options.all or len(rows) < _MAX_LINES:
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
    from holdfast.capture.compare.distances import TensorPair
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
