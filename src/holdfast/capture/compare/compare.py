"""Compare two runs: reads the steps that differ, pairs their events, and finds the origins of the differences."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Final, NamedTuple

from typing_extensions import Self

from holdfast.capture.compare.align import Alignment, Bounds, Judge, NameMap, Pair, Verdict, align, make_bounds
from holdfast.capture.compare.classify import NOWHERE, Cause, OriginFinder, find_first_stage, find_stage
from holdfast.capture.compare.explain import StepEvidence, find_step_with
from holdfast.capture.compare.measure import (
    UNKNOWN,
    Measurer,
    Tolerance,
    describe_fill,
    describe_nonfinite,
    iter_unknown,
)
from holdfast.capture.compare.result import (
    Class,
    ComparedInput,
    EnvironmentChange,
    EventRow,
    Origin,
    RunDiff,
    StepDiff,
    name_site,
)
from holdfast.capture.compare.step_graph import Standing, StepGraph, is_below
from holdfast.capture.stored.events import Event, is_settings, keep_shared, read_settings
from holdfast.capture.stored.runs import Run, find_lost, shift_run
from holdfast.capture.stored.unshard import Dims, Gathering, gather_run, is_sharded
from holdfast.json_text import Json
from holdfast.progress import Progress, Silent
from holdfast.repo.handle.repository import DEFAULT_BUDGET_BYTES
from holdfast.snapshot.gc_pause import pause_gc
from holdfast.tensors.spec import find_dtype
from holdfast.texts import list_some

_MAX_ROWS: Final = 100_000
_MAX_ORIGINS: Final = 100
_NEAR_STEPS: Final = 16
"""Number of steps that are searched for an input: batches in another order come from later steps."""
_MAX_NAMED: Final = 3
"""Number of modules that a hint names."""


@dataclass(frozen=True, slots=True)
class DiffOptions:
    """How two runs are compared."""

    bounds: Bounds = field(default_factory=Bounds)
    names: NameMap = field(default_factory=dict)
    """Names of the first run to names of the second, for modules that were renamed."""
    dims: Dims = field(default_factory=dict)
    """How to combine the tensors of many ranks that are not DTensors, by name pattern."""
    steps: Collection[int] | None = None
    shift: int = 0
    """Added to the step numbers of the second run: for a resumed run whose steps count from 0."""
    max_rows: int = _MAX_ROWS
    budget_bytes: int = DEFAULT_BUDGET_BYTES
    """Memory for the tensors that are compared at a time; a pair that is larger is compared alone."""
    progress: Progress = field(default_factory=Silent)


def diff_runs(
    a: Run,
    b: Run,
    *,
    noise: Run | None = None,
    reference: Run | None = None,
    tolerance: Tolerance | None = None,
    options: DiffOptions | None = None,
) -> RunDiff:
    """Find where run `b` diverges from run `a`.

    Two tensors are close if they are within `tolerance`; the default is that of `torch.testing.assert_close` for
    their dtype. With `noise`, a repetition of `a`, they are close if their difference is at most a few times the
    difference between `a` and `noise`. With `reference`, they are close if `b` is about as near to the reference as
    `a` is. Tensors that were not computed in the run must be equal: the model's inputs, the parameters before the
    first step, and the RNG state.

    Tensors are read and compared on all cores. The result does not depend on the number of cores.
    """
    chosen = options or DiffOptions()
    bounds = chosen.bounds if tolerance is None else Bounds(tolerance, chosen.bounds.factor, chosen.bounds.margin)
    runs, gatherings = _gather_all(a, shift_run(b, chosen.shift), noise, reference, chosen.dims)
    ours, theirs = runs[0], runs[1]
    assert ours is not None and theirs is not None, "both were passed"  # noqa: PT018  # one condition
    judge = Judge(ours, theirs, bounds, noise=runs[2], reference=runs[3], names=chosen.names)
    lost_step, lost = find_lost(ours, theirs)
    steps = [step for step in _find_steps(ours, theirs, chosen.steps) if lost_step is None or step < lost_step]
    sizes = {step: ours.find_size_bytes(step) + theirs.find_size_bytes(step) for step in steps}
    with (
        _StepProgress(chosen.progress, f"compare {a.facts.name} with {b.facts.name}", sizes) as done,
        Measurer(bounds.tolerance, budget_bytes=chosen.budget_bytes, advance=done.advance) as measurer,
    ):
        comparison = _Comparison(ours, theirs, judge, measurer, chosen)
        for step in steps:
            with pause_gc():  # a step has thousands of events, and all of them stay until it is compared
                comparison.compare_step(step)
            done.end_step(step)
    notes = (
        *_iter_notes(ours, theirs),
        *comparison.iter_notes(),
        *(note for each in gatherings for note in each.notes),
    )
    return RunDiff(
        a=a.facts.name,
        b=b.facts.name,
        origin=comparison.origins[0] if comparison.origins else None,
        origins=tuple(comparison.origins),
        rows=tuple(comparison.rows),
        steps=tuple(comparison.steps),
        environment=tuple(iter_changes(a.facts.environment, b.facts.environment)),
        notes=notes,
        left_out=comparison.left_out,
        lost=lost,
    )


def iter_changes(a: Mapping[str, Json], b: Mapping[str, Json]) -> Iterator[EnvironmentChange]:
    """Yield the differences of two environments, by dotted name."""
    ours, theirs = dict(_iter_flat(a, "")), dict(_iter_flat(b, ""))
    for what in dict.fromkeys((*ours, *theirs)):
        if ours.get(what) != theirs.get(what):
            yield EnvironmentChange(what, ours.get(what), theirs.get(what))


def _iter_flat(facts: Mapping[str, Json], prefix: str) -> Iterator[tuple[str, Json]]:
    for key, value in facts.items():
        if isinstance(value, Mapping) and value:
            yield from _iter_flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _gather_all(
    a: Run, b: Run, noise: Run | None, reference: Run | None, dims: Dims
) -> tuple[list[Run | None], list[Gathering]]:
    """Return the runs unchanged if world size and sharding agree; otherwise gathered into one rank each."""
    runs = [a, b, noise, reference]
    passed = [run for run in runs if run is not None]
    if not dims and len({run.facts.world for run in passed}) == 1 and len({_has_shards(run) for run in passed}) == 1:
        return list(runs), []
    gatherings: list[Gathering] = []
    gathered: list[Run | None] = []
    for run in runs:
        if run is None:
            gathered.append(None)
            continue
        whole, gathering = gather_run(run, dims=dims)
        gathered.append(whole)
        gatherings.append(gathering)
    return gathered, gatherings


def _has_shards(run: Run) -> bool:
    return bool(run.steps) and run.facts.world > 1 and any(map(is_sharded, run.events(run.steps[0])))


def _find_steps(a: Run, b: Run, only: Collection[int] | None) -> list[int]:
    theirs = set(b.steps)
    return [step for step in a.steps if step in theirs and (only is None or step in only)]


def _iter_notes(a: Run, b: Run) -> Iterator[str]:
    shared = [note for note in a.facts.notes if note in b.facts.notes]
    yield from (f"both runs: {note}" for note in shared)
    for run, other in ((a, b), (b, a)):
        yield from (f"{run.facts.name}: {note}" for note in run.facts.notes if note not in shared)
        if run.facts.status != "complete":
            yield f"{run.facts.name}: the recording was not finished"
        extra = sorted(set(run.steps) - set(other.steps))
        if extra:
            yield f"{run.facts.name}: steps {_show_steps(extra)} are not in {other.facts.name}"


def _show_steps(steps: Sequence[int]) -> str:
    """Return sorted step numbers as ranges: "0-3, 7"."""
    runs: list[list[int]] = []
    for step in steps:
        if runs and step == runs[-1][1] + 1:
            runs[-1][1] = step
        else:
            runs.append([step, step])
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)


class _StepProgress:
    """Reports the bytes of each step: those that are compared when they are, the rest when the step ends."""

    def __init__(self, progress: Progress, task: str, sizes: Mapping[int, int]) -> None:
        self._progress, self._task, self._sizes = progress, task, sizes
        self._done_bytes = 0

    def __enter__(self) -> Self:
        self._progress.begin(self._task, sum(self._sizes.values()))
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.end()

    def advance(self, num_bytes: int) -> None:
        self._done_bytes += num_bytes
        self._progress.advance(num_bytes)

    def end_step(self, step: int) -> None:
        rest = self._sizes.get(step, 0) - self._done_bytes
        self._done_bytes = 0
        if rest > 0:
            self._progress.advance(rest)


class _PairedEvents(NamedTuple):
    """One rank's events of a step in both runs, and which of them belong together."""

    ours: Sequence[Event]
    theirs: Sequence[Event]
    alignment: Alignment


@dataclass(slots=True)
class _RankStep:
    """One rank's events of a step, paired."""

    rank: int
    graph: StepGraph
    alignment: Alignment
    pairs: dict[int, tuple[Pair, Verdict]]
    """By index of the event in the graph, its pair and the verdict."""
    evidence: StepEvidence


class _Comparison:
    """The state of one comparison."""

    def __init__(self, a: Run, b: Run, judge: Judge, measurer: Measurer, options: DiffOptions) -> None:
        self._a, self._b, self._judge, self._measurer, self._options = a, b, judge, measurer, options
        self._ranks = sorted({*a.ranks, *b.ranks})
        self._finders: dict[int, OriginFinder] = {}
        self._first_step: int | None = None
        self._skipped: int | None = None
        """The last step that was skipped."""
        self._recomputed = 0
        self._unknown: Counter[bool] = Counter()
        """Tensors whose digests are of different kinds, by whether the first run has those of the host."""
        self._found: list[tuple[tuple[int, ...], Origin]] = []
        """Origins, each with a key that sorts them: step, stage, event number, rank."""
        self._has_order = False
        """Whether an origin is that batches come in another order."""
        self.rows: list[EventRow] = []
        self.steps: list[StepDiff] = []
        self.left_out = 0

    @property
    def origins(self) -> list[Origin]:
        """The first origin of each module, parameter or state, in order."""
        found: dict[tuple[str, str, int], Origin] = {}
        for _, origin in sorted(self._found, key=lambda pair: pair[0]):
            found.setdefault((origin.fqn, origin.phase, origin.rank), origin)
        return [*found.values()][:_MAX_ORIGINS]

    def iter_notes(self) -> Iterator[str]:
        """Yield notes on how the runs were compared."""
        if self._has_close_inputs:
            yield "the inputs of the origin are close but not equal: tolerance 'exact' shows where they began to differ"
        if self._recomputed:
            yield f"{self._recomputed} tensors that were recomputed for the backward pass are left out"
        yield from self._iter_kinds()
        if self.left_out:
            yield f"{self.left_out} rows after the first {self._options.max_rows} are counted but not listed"

    def _iter_kinds(self) -> Iterator[str]:
        """Yield which run has digests of which kind, if they could not be compared."""
        for is_host, number in sorted(self._unknown.items()):
            host, device = (self._a, self._b) if is_host else (self._b, self._a)
            yield (
                f"digests are of different kinds: {device.facts.name} hashed {number} tensors on an accelerator"
                f" (BLAKE3), {host.facts.name} on the host (XXH3); these were not compared. Record both runs at level"
                " 'stats' or 'full' to compare them by statistics or values, or one of them with hashes='both' to"
                " compare them bit for bit"
            )

    @property
    def _has_close_inputs(self) -> bool:
        """Whether the first origin is one only because of the tolerance: an input of it is close, not equal."""
        origin = next(iter(self.origins), None)
        return origin is not None and any(part.standing == "close" for part in (*origin.inputs, *origin.parameters))

    def compare_step(self, step: int) -> None:
        """Compare one step; skip it if its roots are equal and no step before it differs."""
        self._first_step = step if self._first_step is None else self._first_step
        if not self._finders and all(self._a.root(step, rank) == self._b.root(step, rank) for rank in self._ranks):
            self.steps.append(StepDiff(step, {}, is_skipped=True))
            self._skipped = step
            return
        if not self._finders:
            self._begin()
        paired = {rank: self._pair_events(step, rank) for rank in self._ranks}
        self._judge.measure_ahead((pair for each in paired.values() for pair in each.alignment.pairs), self._measurer)
        rank_steps = [self._judge_pairs(step, rank, each) for rank, each in paired.items()]
        stages = {each.rank: find_first_stage(each.graph) for each in rank_steps}
        counts: Counter[Class] = Counter()
        largest = 0.0
        for rank_step in rank_steps:
            elsewhere = min((stage for number, stage in stages.items() if number != rank_step.rank), default=NOWHERE)
            found = self._finders[rank_step.rank].classify(
                rank_step.graph, elsewhere=elsewhere, evidence=rank_step.evidence
            )
            for row in self._iter_rows(rank_step, found):
                counts[row.cls] += 1
                largest = max(largest, _find_relative(row))
                if row.cls != "equal":
                    self._keep(row)
        self.steps.append(StepDiff(step, counts, largest))

    def _begin(self) -> None:
        """Read the state before the first step that differs: from the very first step and the last equal one."""
        for rank in self._ranks:
            finder = self._finders[rank] = OriginFinder()
            steps = [self._first_step, self._skipped] if self._skipped is not None else []
            for step in dict.fromkeys(steps):
                if step is not None:
                    events = self._a.events(step, rank)
                    graph = StepGraph([event for event in events if not event.recompute and not is_settings(event)])
                    finder.classify(graph, evidence=StepEvidence(ours=read_settings(events)))

    def _pair_events(self, step: int, rank: int) -> _PairedEvents:
        ours, theirs = keep_shared(*(self._read(run, step, rank) for run in (self._a, self._b)))
        return _PairedEvents(ours, theirs, align(ours, theirs, names=self._options.names))

    def _judge_pairs(self, step: int, rank: int, paired: _PairedEvents) -> _RankStep:
        ours, theirs, alignment = paired
        graph = StepGraph(ours)
        indices = {event.seq: index for index, event in enumerate(ours)}
        finder = self._finders[rank]
        pairs: dict[int, tuple[Pair, Verdict]] = {}
        standings: list[Standing] = ["missing"] * len(ours)
        for pair in alignment.pairs:
            index = indices[pair.a.seq]
            is_other = pair.a.has_bytes_of(pair.b) is False
            verdict = self._judge.judge(pair, is_given=is_other and finder.is_given(graph, index))
            pairs[index] = (pair, verdict)
            standings[index] = verdict.standing
        graph.set_standings(standings)
        names = (self._a.facts.name, self._b.facts.name)
        settings = [read_settings(run.events(step, rank)) for run in (self._a, self._b)]
        return _RankStep(rank, graph, alignment, pairs, StepEvidence(names, settings[0], settings[1], theirs))

    def _read(self, run: Run, step: int, rank: int) -> list[Event]:
        events = run.events(step, rank)
        kept = [event for event in events if not event.recompute]
        self._recomputed += len(events) - len(kept)
        return [event for event in kept if not is_settings(event)]

    def _iter_rows(self, rank_step: _RankStep, found: Mapping[int, Cause]) -> Iterator[EventRow]:
        hints = PairHints(rank_step.alignment, names=(self._a.facts.name, self._b.facts.name))
        for index, event in enumerate(rank_step.graph.events):
            if index not in rank_step.pairs:
                yield EventRow("missing", event, None, why=f"only in {self._a.facts.name}")
                continue
            pair, verdict = rank_step.pairs[index]
            cls: Class = "equal"
            why = ""
            if index in found:
                cause = self._add_doubt(found[index])
                cls, why = ("origin" if cause.is_origin else "propagated"), cause.why
                if cause.is_origin:
                    self._keep_origin(rank_step, index, cause, hints)
            elif verdict.standing == "close":
                cls = "close"
            elif verdict.standing == "missing":
                cls, why = "unknown", "its digests are of different kinds"
                self._unknown[bool(pair.a.digest)] += 1
            yield EventRow(cls, pair.a, pair.b, pair.how, verdict.measure, why, verdict.floor)
        for event in rank_step.alignment.only_b:
            yield EventRow("missing", None, event, why=f"only in {self._b.facts.name}")

    def _add_doubt(self, found: Cause) -> Cause:
        """Return an origin whose text says that tensors before it are unknown, if there are any."""
        number = self._unknown.total()
        if not found.is_origin or not number:
            return found
        before = f"{number} tensors before it" if number > 1 else "a tensor before it"
        return replace(found, why=f"{found.why}; but {before} could not be compared, so it may follow from there")

    def _keep(self, row: EventRow) -> None:
        if len(self.rows) < self._options.max_rows:
            self.rows.append(row)
        else:
            self.left_out += 1

    def _keep_origin(self, rank_step: _RankStep, index: int, found: Cause, hints: PairHints) -> None:
        pair, verdict = rank_step.pairs[index]
        found = self._find_order(found, pair, rank_step.rank)
        # Each hint scans the whole step, and hundreds of hints are of no use to a reader.
        has_hints = len(self._found) < _MAX_ORIGINS * len(self._ranks)
        moved = hints.find_reordered(pair) if has_hints else ""
        nonfinite = self._describe_nonfinite(rank_step, index)
        unknown = () if nonfinite or found.reason else iter_unknown(verdict.measure, pair.a)
        notes = chain(_iter_guesses(found), _iter_counts(rank_step, found, pair), hints.iter_notes(pair), unknown)
        events, standings = rank_step.graph.events, rank_step.graph.standings
        inputs = (ComparedInput(name_site(events[each].site), standings[each]) for each in found.inputs)
        origin = Origin(
            # If calls come in another order, the origin is the call that moved, not the module around it.
            fqn=pair.a.site.fqn if moved and found.kind == "input" else found.fqn,
            step=found.step,
            phase=found.phase,
            kind=found.kind,
            rank=rank_step.rank,
            source=found.source,
            why=moved if moved and found.kind == "input" else f"{found.why}{nonfinite}",
            site=pair.a.site,
            how=pair.how,
            inputs=tuple(inputs),
            parameters=tuple(ComparedInput(name, standing) for name, standing in found.parameters),
            measure=verdict.measure,
            cause=found.reason,
            notes=tuple(notes) if has_hints else (),
            world=max(self._a.facts.world, self._b.facts.world),
        )
        self._found.append(((found.step, find_stage(pair.a), pair.a.seq, rank_step.rank), origin))

    def _describe_nonfinite(self, rank_step: _RankStep, index: int) -> str:
        """Return what follows the text of an origin if it is NaN or infinite; digests tell only if all values are."""
        names = (self._a.facts.name, self._b.facts.name)
        pair, verdict = rank_step.pairs[index]
        measure = verdict.measure
        if measure is None or pair.a.shape != pair.b.shape:
            return ""
        text = describe_nonfinite(measure, names) or describe_fill(pair.a, pair.b, names)
        if text or measure.basis != "digest" or not find_dtype(pair.a.dtype).is_floating_point:
            return f"; {text}" if text else ""
        for later, (each, found) in rank_step.pairs.items():
            if (
                later > index
                and found.standing == "differs"
                and (text := describe_fill(each.a, each.b, names, of=name_site(each.a.site)))
            ):
                return f"; {UNKNOWN}; later, {text}"
        return ""

    def _find_order(self, found: Cause, pair: Pair, rank: int) -> Cause:
        """Return the cause of a different input: batches come in another order, if the first run has it elsewhere."""
        if found.reason != "data" or self._has_order:
            return found
        at = self._a.steps.index(found.step)
        near = self._a.steps[max(0, at - 1) : at + _NEAR_STEPS + 1]
        step = find_step_with(pair.b, near, lambda step: self._a.events(step, rank))
        if step is None:
            return found
        self._has_order = True
        a, b = self._a.facts.name, self._b.facts.name
        why = f"{found.why}: {b} has the input that {a} has in step {step}, so batches come in another order"
        return replace(found, reason="data order", why=why)


def _iter_counts(rank_step: _RankStep, found: Cause, origin: Pair) -> Iterator[str]:
    """Yield the step counts of an optimizer if they differ: then its state was lost or mixed up."""
    if found.kind != "optimizer":
        return
    for pair, verdict in rank_step.pairs.values():
        site = pair.a.site
        is_count = site.kind == "optimizer" and site.fqn == origin.a.site.fqn and site.path == "['step']"
        if is_count and verdict.measure and verdict.measure.values:
            ours, theirs = verdict.measure.values
            yield (
                f"the optimizer counts {ours:g} steps in the first run and {theirs:g} in the second:"
                " its state was lost or replaced"
            )


def _iter_guesses(found: Cause) -> Iterator[str]:
    """Yield where a cause shows first, and other modules that may be the origin for want of gradients between them."""
    if found.seen:
        yield found.seen
    if found.maybe:
        yield f"the origin may also be the backward pass of {', '.join(name or 'the model' for name in found.maybe)}"


def _find_relative(row: EventRow) -> float:
    relative = row.measure.relative_l2 if row.measure else None
    return relative if relative is not None and math.isfinite(relative) else 0.0


def describe_mismatch(result: RunDiff, *, max_rows: int = 10) -> str:
    """Return a text that says where two runs diverge, with notes, environment changes and the first rows."""
    lines = [result.headline]
    lines += [f"  {note}" for note in (result.origin.notes if result.origin else ())]
    lines += [f"  environment: {change.what}: {change.a} -> {change.b}" for change in result.environment]
    lines += [
        f"  {row.cls}: step {row.event.site.step}, {name_site(row.event.site)}"
        for row in _find_unequal(result.rows, max_rows)
    ]
    return "\n".join(lines)


def _find_unequal(rows: Iterable[EventRow], limit: int) -> list[EventRow]:
    return [row for row in rows if row.cls in ("origin", "propagated")][:limit]


class PairHints:
    """Finds hints for a pair in the other events of its step and rank."""

    def __init__(self, alignment: Alignment, *, names: tuple[str, str]) -> None:
        """Search in `alignment`; `names` are the names of both runs, for the texts."""
        self._alignment = alignment
        self._a, self._b = names
        self._calls = [pair for pair in alignment.pairs if pair.a.site.kind == pair.b.site.kind == "input"]

    def find_reordered(self, pair: Pair) -> str:
        """Return a text on calls that come before this one in one run and after it in the other; "" if none do."""
        if pair.a.site.kind != "input":
            return ""
        fqn = pair.a.site.fqn
        beside = [each for each in self._calls if not _is_related(each.a.site.fqn, fqn)]
        late = [each.a.site.fqn for each in beside if each.a.seq > pair.a.seq and each.b.seq < pair.b.seq]
        early = [each.a.site.fqn for each in beside if each.a.seq < pair.a.seq and each.b.seq > pair.b.seq]
        if not late and not early:
            return ""
        parts = [f"after {_name_outermost(late)} in {self._b} and before in {self._a}"] if late else []
        parts += [f"before {_name_outermost(early)} in {self._b} and after in {self._a}"] if early else []
        return f"calls come in another order: it is called {', and '.join(parts)}"

    def iter_notes(self, pair: Pair) -> Iterator[str]:
        """Yield further hints on a pair."""
        if pair.how != "exact":
            yield f"paired by {pair.how} with {pair.b.site.fqn or 'the model'} in {self._b}"
        for events, run, seq in (
            (self._alignment.only_a, self._a, pair.a.seq),
            (self._alignment.only_b, self._b, pair.b.seq),
        ):
            before = [event.site.fqn for event in events if event.seq < seq and event.site.kind in ("input", "output")]
            if before:
                yield f"only {run} calls {_name_outermost(before)} before it"
            same = [event for event in events if event.site.kind == "param_grad" and event.site.fqn == pair.a.site.fqn]
            if same:
                yield f"only {run} has a gradient of {same[0].site.fqn}"
        yield from self._iter_moved(pair)

    def _iter_moved(self, pair: Pair) -> Iterator[str]:
        if 0 in pair.a.shape:
            return
        other = _find_elsewhere(pair.b, [each.a for each in self._alignment.pairs])
        if other:
            yield f"it has the bytes in {self._b} that {other} has in {self._a}"


def _find_elsewhere(event: Event, others: Sequence[Event]) -> str:
    """Return the name of another event of the same kind that has the bytes of an event; "" if none has."""
    same = (event.dtype, event.shape, event.site.kind)
    names = [
        other.site.fqn
        for other in others
        if (other.dtype, other.shape, other.site.kind) == same
        and other.has_bytes_of(event)
        and other.site.fqn != event.site.fqn
    ]
    return names[0] if names else ""


def _is_related(fqn: str, other: str) -> bool:
    return fqn == other or is_below(fqn, other) or is_below(other, fqn)


def _name_outermost(names: Sequence[str]) -> str:
    """Return the outermost of the names, at most a few of them."""
    kept = [name for name in dict.fromkeys(names) if not any(is_below(name, other) for other in names)]
    return list_some(kept, _MAX_NAMED)


def assert_runs_match(
    a: Run,
    b: Run,
    *,
    noise: Run | None = None,
    reference: Run | None = None,
    tolerance: tuple[float, float] | None = None,
    factor: float = 4.0,
    margin: float = 2.0,
    names: NameMap | None = None,
    dims: Dims | None = None,
    steps: Collection[int] | None = None,
    shift: int = 0,
) -> RunDiff:
    """Compare two runs like `Store.diff_runs`; raises AssertionError that says where they diverge.

    The options are those of `Store.diff_runs`.
    """
    __tracebackhide__ = True
    options = DiffOptions(
        bounds=make_bounds(tolerance, factor, margin), names=names or {}, dims=dims or {}, steps=steps, shift=shift
    )
    result = diff_runs(a, b, noise=noise, reference=reference, options=options)
    if not result.steps:
        raise AssertionError(result.headline)
    if not result.is_match:
        raise AssertionError(describe_mismatch(result))
    return result
