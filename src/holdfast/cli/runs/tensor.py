"""The actions of `run` about single tensors: listing the events of a run, and one tensor with its histogram."""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from fnmatch import fnmatchcase
from typing import Final

from holdfast.capture.compare.measure import Distance
from holdfast.capture.compare.result import name_site, spell_site
from holdfast.capture.compare.verdicts import measure_events
from holdfast.capture.report.model import TensorSummary
from holdfast.capture.report.tensor_summary import copy_summary, find_ends, format_values, summarize_tensor
from holdfast.capture.stored.events import Event
from holdfast.capture.stored.runs import Run, read_run
from holdfast.cli.output import Output
from holdfast.cli.runs.histogram import format_histogram
from holdfast.cli.runs.measures import format_measure
from holdfast.errors import AmbiguousName, NotFound
from holdfast.repo.format.record import Json
from holdfast.repo.handle.repository import Repository

_MAX_LINES: Final = 100
_MAX_VALUES: Final = 10_000
_MAX_BINS: Final = 1_000


def run_events(options: Namespace, repo: Repository, output: Output) -> int:
    """List the tensors of a run."""
    run = read_run(repo, options.run)
    found = _iter_events(run, options)
    if options.json:
        output.json([_describe(event) for event in found])
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
        output.note(f"no tensor of {options.run!r} fits; `holdfast run events {options.run}` lists them all")
    if left:
        output.line(f"... and {left} more; --all shows them")
    return 0


def _iter_events(run: Run, options: Namespace) -> Iterator[Event]:
    steps = run.steps if options.step is None else [step for step in run.steps if step == options.step]
    for step in steps:
        yield from (event for event in run.events(step) if _fits(event, options))


def _fits(event: Event, options: Namespace) -> bool:
    return (
        options.phase in (None, event.site.phase)
        and options.kind in (None, event.site.kind)
        and options.rank in (None, event.rank)
        and fnmatchcase(event.site.fqn, options.pattern)
    )


def _format_event(event: Event) -> list[str]:
    site = event.site
    name = f"{site.fqn or '(the model)'}{site.path}" + (f" #{site.call}" if site.call else "")
    name += " (again)" if event.recompute else ""
    tensor = f"{event.dtype} {event.shape}"
    return [str(site.step), str(event.rank), site.phase, site.kind, name, tensor, _find_level(event), _shorten(event)]


def _shorten(event: Event) -> str:
    return event.digest.hex()[:12]


def _find_level(event: Event) -> str:
    return "full" if event.leaf else "stats" if event.stats else "digest"


def _describe(event: Event) -> dict[str, Json]:
    return {
        **spell_site(event.site),
        "rank": event.rank,
        "seq": event.seq,
        "dtype": event.dtype,
        "shape": list(event.shape),
        "digest": event.digest.hex(),
        "level": _find_level(event),
        "module": event.module,
        "source": event.source,
        "recompute": event.recompute,
        "placement": event.placement,
    }


def run_tensor(options: Namespace, repo: Repository, output: Output) -> int:
    """Print a tensor and its histogram, beside another run's if asked."""
    run = read_run(repo, options.run)
    other = read_run(repo, options.against) if options.against is not None else None
    event = _find_event(run, options)
    theirs = _find_partner(other, event) if other else None
    is_equal = theirs is None or (event.digest, event.dtype, event.shape) == (theirs.digest, theirs.dtype, theirs.shape)
    bins = min(max(1, options.bins), _MAX_BINS)
    portraits = _draw(run, event, other, theirs, bins=bins)
    tensor = run.read_tensor(event) if event.leaf else None
    measure = measure_events(run, event, other, theirs) if other and theirs and not is_equal else None
    if options.json:
        values = tensor.tolist() if tensor is not None and tensor.numel() <= _MAX_VALUES else None
        output.json(_describe_tensor(event, values, portraits, measure))
        return 0 if is_equal else 1
    output.line(f"step {event.site.step}, {event.site.phase}, rank {event.rank}: {name_site(event.site)}")
    told = "" if event.leaf else f", recorded at level {_find_level(event)}: its values were not kept"
    output.line(f"{event.dtype} {event.shape}, digest {event.digest.hex()}{told}")
    if event.source:
        output.line(f"{event.module} at {event.source}")
    if tensor is not None:
        for line in format_values(tensor):
            output.line(line)
    _print_portraits(portraits, [run, *([other] if other else [])], output)
    if theirs:
        output.line("equal" if is_equal else "differs  " + (format_measure(measure) if measure else ""))
    return 0 if is_equal else 1


def _find_event(run: Run, options: Namespace) -> Event:
    """Return the one event that is meant; of several steps and ranks, the first."""
    found: list[Event] = []
    for step in run.steps if options.step is None else [options.step]:
        found = [event for event in run.events(step) if _is_meant(event, options)]
        if found:
            break
    if not found:
        at = "" if options.step is None else f" in step {options.step}"
        raise NotFound(
            f"run {options.run!r} has no such tensor of {options.name!r}{at};"
            f" `holdfast run events {options.run}` lists what is there",
            name=options.name,
        )
    first = found[0]
    others = [event for event in found if event.rank == first.rank and event.site != first.site]
    if others:
        raise AmbiguousName(
            f"{options.name!r} has several tensors in step {first.site.step}: {_list_places([first, *others])};"
            " choose by --kind, --phase, --call or --path"
        )
    return first


def _list_places(events: Sequence[Event]) -> str:
    shown = [f"{event.site.phase} {name_site(event.site)}" for event in events[:6]]
    return "; ".join(shown) + ("; ..." if len(events) > len(shown) else "")


def _is_meant(event: Event, options: Namespace) -> bool:
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
    for other in run.events(event.site.step):
        if other.site == event.site and other.rank == event.rank and not other.recompute:
            return other
    raise NotFound(
        f"run {run.facts.name!r} has no {name_site(event.site)} in step {event.site.step}, rank {event.rank};"
        f" `holdfast run events {run.facts.name}` lists what is there",
        name=event.site.fqn,
    )


def _draw(run: Run, event: Event, other: Run | None, theirs: Event | None, *, bins: int) -> list[TensorSummary]:
    """Return a portrait for each side, over the same bins where the values are there."""
    try:
        tensors = [run.read_tensor(event), *([other.read_tensor(theirs)] if other and theirs else [])]
    except NotFound:
        return [copy_summary(each.stats) for each in (event, theirs) if each and each.stats]
    ends = find_ends(*tensors)
    return [summarize_tensor(tensor, ends=ends, bins=bins) for tensor in tensors]


def _print_portraits(portraits: Sequence[TensorSummary], runs: Sequence[Run], output: Output) -> None:
    for portrait, run in zip(portraits, runs, strict=False):
        name = f"{run.facts.name}: " if len(runs) > 1 else ""
        output.line(
            f"{name}min {portrait.minimum:.6g}  max {portrait.maximum:.6g}  mean {portrait.mean:.6g}"
            f"  norm {portrait.norm:.6g}  zero {portrait.zero}  NaN {portrait.nan}  Inf {portrait.inf}"
        )
    drawn = [portrait for portrait in portraits if portrait.histogram]
    if len({(portrait.low, portrait.high, len(portrait.histogram)) for portrait in drawn}) == 1:
        sides = [portrait.histogram for portrait in drawn]
        for line in format_histogram(drawn[0].low, drawn[0].high, sides):
            output.line(line)
        return
    for portrait in drawn:
        output.line()
        for line in format_histogram(portrait.low, portrait.high, [portrait.histogram]):
            output.line(line)


def _describe_tensor(
    event: Event, values: object, portraits: Sequence[TensorSummary], measure: Distance | None
) -> dict[str, Json]:
    return {
        **_describe(event),
        "values": _spell(values),
        "portraits": [{name: _spell(value) for name, value in asdict(portrait).items()} for portrait in portraits],
        "measure": measure.to_json() if measure else None,
    }


def _spell(value: object) -> Json:
    """Return values as JSON has them: those that are not finite, or complex, as text."""
    if isinstance(value, list | tuple):
        return [_spell(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if isinstance(value, bool | int | float | str) or value is None else str(value)
