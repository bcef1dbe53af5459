"""Where two runs part: goes down the steps that differ, pairs their events, and finds which of them are origins."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypedDict

from holdfast.capture.compare.align import Alignment, NameMap, Pair, align
from holdfast.capture.compare.classify import NOWHERE, Cause, Trail, find_stage
from holdfast.capture.compare.hints import PairHints
from holdfast.capture.compare.measure import Tolerance
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
from holdfast.capture.compare.step_graph import Standing, StepGraph
from holdfast.capture.compare.verdicts import Bounds, Judge, Verdict
from holdfast.capture.stored.events import Event
from holdfast.capture.stored.runs import Run
from holdfast.capture.stored.shift import shift_run
from holdfast.capture.stored.unshard import Dims, Gathering, gather_run, is_sharded
from holdfast.repo.format.record import Json

_MAX_ROWS: Final = 100_000
_MAX_ORIGINS: Final = 100


@dataclass(frozen=True, slots=True)
class Ways:
    """How two runs are compared."""

    bounds: Bounds = field(default_factory=Bounds)
    names: NameMap = field(default_factory=dict)
    """What modules of the first run are called in the second."""
    dims: Dims = field(default_factory=dict)
    """How the tensors of many ranks lie together where they do not say so themselves."""
    steps: Collection[int] | None = None
    shift: int = 0
    """How many steps the first run had behind it when the second began: that one was resumed, and counts from 0."""
    max_rows: int = _MAX_ROWS


class DiffChoices(TypedDict, total=False):
    """How a caller may have two runs compared; see `Ways` and `Bounds`."""

    tolerance: tuple[float, float] | None
    """rtol and atol, for all dtypes."""
    factor: float
    margin: float
    names: NameMap
    dims: Dims
    steps: Collection[int] | None
    shift: int


def make_ways(choices: DiffChoices) -> Ways:
    """Return what a caller has chosen; raises TypeError for what there is not."""
    known = DiffChoices.__annotations__
    if unknown := sorted(choices.keys() - known.keys()):
        raise TypeError(f"diff_runs() has no option {', '.join(unknown)}; it has {', '.join(known)}")
    given: dict[str, Any] = dict(choices)
    bounds = {name: given.pop(name) for name in ("tolerance", "factor", "margin") if name in given}
    if bounds.get("tolerance") is not None:
        bounds["tolerance"] = Tolerance(*bounds["tolerance"])
    return Ways(bounds=Bounds(**bounds), **given)


def diff_runs(
    a: Run,
    b: Run,
    *,
    noise: Run | None = None,
    reference: Run | None = None,
    tolerance: Tolerance | None = None,
    ways: Ways | None = None,
) -> RunDiff:
    """Find where run `b` parts from run `a`.

    Tensors are close if they are within torch.testing's tolerances, or `tolerance`; with `noise`, a repetition of
    `a`, if they are no farther apart than a few times what these two are; with `reference`, if `b` is about as near
    to it as `a`. What is given rather than computed - the model's input, parameters before the first step, random
    states - has to be equal.
    """
    chosen = ways or Ways()
    bounds = chosen.bounds if tolerance is None else Bounds(tolerance, chosen.bounds.factor, chosen.bounds.margin)
    runs, gatherings = _gather_all(a, shift_run(b, chosen.shift), noise, reference, chosen.dims)
    ours, theirs = runs[0], runs[1]
    assert ours is not None and theirs is not None, "both were given"  # noqa: PT018  # one thing is meant
    judge = Judge(ours, theirs, bounds, noise=runs[2], reference=runs[3], names=chosen.names)
    work = _Work(ours, theirs, judge, chosen)
    for step in _find_steps(ours, theirs, chosen.steps):
        work.compare_step(step)
    notes = (*_iter_notes(ours, theirs), *work.iter_notes(), *(note for each in gatherings for note in each.notes))
    return RunDiff(
        a=a.facts.name,
        b=b.facts.name,
        origin=work.origins[0] if work.origins else None,
        origins=tuple(work.origins),
        rows=tuple(work.rows),
        steps=tuple(work.steps),
        environment=tuple(iter_changes(a.facts.environment, b.facts.environment)),
        notes=notes,
        left_out=work.left_out,
    )


def iter_changes(a: Mapping[str, Json], b: Mapping[str, Json]) -> Iterator[EnvironmentChange]:
    """Yield in what two environments differ, by dotted name."""
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
    """Return the runs as they can be compared: as if of one rank each, unless all ranks are alike."""
    runs = [a, b, noise, reference]
    given = [run for run in runs if run is not None]
    if not dims and len({run.facts.world for run in given}) == 1 and len({_has_shards(run) for run in given}) == 1:
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
    for run, other in ((a, b), (b, a)):
        yield from (f"{run.facts.name}: {note}" for note in run.facts.notes)
        if run.facts.status != "complete":
            yield f"{run.facts.name}: the recording was not finished"
        alone = sorted(set(run.steps) - set(other.steps))
        if alone:
            yield f"{run.facts.name}: steps {_show_steps(alone)} are not in {other.facts.name}"


def _show_steps(steps: Sequence[int]) -> str:
    """Return rising numbers as ranges."""
    runs: list[list[int]] = []
    for step in steps:
        if runs and step == runs[-1][1] + 1:
            runs[-1][1] = step
        else:
            runs.append([step, step])
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)


@dataclass(slots=True)
class _Rank:
    """One rank's share of a step under comparison."""

    rank: int
    scene: StepGraph
    alignment: Alignment
    pairs: dict[int, tuple[Pair, Verdict]]
    """By place in the scene, what is paired."""

    @property
    def stage(self) -> int:
        """How early something differs."""
        bad = (find_stage(event) for place, event in enumerate(self.scene.events) if self.scene.is_bad(place))
        return min(bad, default=NOWHERE)


class _Work:
    """One comparison under way."""

    def __init__(self, a: Run, b: Run, judge: Judge, ways: Ways) -> None:
        self._a, self._b, self._judge, self._ways = a, b, judge, ways
        self._ranks = sorted({*a.ranks, *b.ranks})
        self._trails: dict[int, Trail] = {}
        self._first_step: int | None = None
        self._skipped: int | None = None
        self._recomputed = 0
        self._order: list[tuple[tuple[int, ...], Origin]] = []
        self.rows: list[EventRow] = []
        self.steps: list[StepDiff] = []
        self.left_out = 0

    @property
    def origins(self) -> list[Origin]:
        """The first one of each module, parameter or state, in order."""
        found: dict[tuple[str, str, int], Origin] = {}
        for _, origin in sorted(self._order, key=lambda pair: pair[0]):
            found.setdefault((origin.fqn, origin.phase, origin.rank), origin)
        return [*found.values()][:_MAX_ORIGINS]

    def iter_notes(self) -> Iterator[str]:
        """Yield what a reader should know of how it was compared."""
        if self._is_near:
            yield "what the origin comes from is close but not equal: tolerance 'exact' shows where that began"
        if self._recomputed:
            yield f"{self._recomputed} tensors that were computed again for the backward pass are left out"
        if self.left_out:
            yield f"{self.left_out} rows beyond the first {self._ways.max_rows} are only counted"

    @property
    def _is_near(self) -> bool:
        """Whether the first origin has its class by tolerance only."""
        origin = next(iter(self.origins), None)
        return origin is not None and any(part.standing == "close" for part in (*origin.inputs, *origin.parameters))

    def compare_step(self, step: int) -> None:
        """Compare one step, unless its roots say that nothing in it differs and nothing has differed before."""
        self._first_step = step if self._first_step is None else self._first_step
        if not self._trails and all(self._a.root(step, rank) == self._b.root(step, rank) for rank in self._ranks):
            self.steps.append(StepDiff(step, {}, is_skipped=True))
            self._skipped = step
            return
        if not self._trails:
            self._begin()
        ranks = [self._open(step, rank) for rank in self._ranks]
        stages = {rank.rank: rank.stage for rank in ranks}
        counts: Counter[Class] = Counter()
        largest = 0.0
        for rank in ranks:
            elsewhere = min((stage for number, stage in stages.items() if number != rank.rank), default=NOWHERE)
            found = self._trails[rank.rank].judge(rank.scene, elsewhere=elsewhere)
            for row in self._iter_rows(rank, found):
                counts[row.cls] += 1
                largest = max(largest, _find_relative(row))
                if row.cls != "equal":
                    self._keep(row)
        self.steps.append(StepDiff(step, counts, largest))

    def _begin(self) -> None:
        """Learn what was there before the first step that differs: from the first one, and the one before."""
        for rank in self._ranks:
            trail = self._trails[rank] = Trail()
            steps = [self._first_step, self._skipped] if self._skipped is not None else []
            for step in dict.fromkeys(steps):
                if step is not None:
                    trail.judge(StepGraph([event for event in self._a.events(step, rank) if not event.recompute]))

    def _open(self, step: int, rank: int) -> _Rank:
        ours, theirs = (self._read(run, step, rank) for run in (self._a, self._b))
        alignment = align(ours, theirs, names=self._ways.names)
        scene = StepGraph(ours)
        places = {event.seq: place for place, event in enumerate(ours)}
        trail = self._trails[rank]
        pairs: dict[int, tuple[Pair, Verdict]] = {}
        standings: list[Standing] = ["missing"] * len(ours)
        for pair in alignment.pairs:
            place = places[pair.a.seq]
            is_same = pair.a.digest == pair.b.digest
            verdict = self._judge.judge(pair, is_given=not is_same and trail.is_given(scene, place))
            pairs[place] = (pair, verdict)
            standings[place] = verdict.standing
        scene.settle(standings)
        return _Rank(rank, scene, alignment, pairs)

    def _read(self, run: Run, step: int, rank: int) -> list[Event]:
        events = run.events(step, rank)
        kept = [event for event in events if not event.recompute]
        self._recomputed += len(events) - len(kept)
        return kept

    def _iter_rows(self, rank: _Rank, found: Mapping[int, Cause]) -> Iterator[EventRow]:
        hints = PairHints(rank.alignment, names=(self._a.facts.name, self._b.facts.name))
        for place, event in enumerate(rank.scene.events):
            if place not in rank.pairs:
                yield EventRow("missing", event, None, why=f"only in {self._a.facts.name}")
                continue
            pair, verdict = rank.pairs[place]
            cls: Class = "equal"
            why = ""
            if place in found:
                cls, why = ("origin" if found[place].is_origin else "propagated"), found[place].why
                if found[place].is_origin:
                    self._keep_origin(rank, place, found[place], hints)
            elif verdict.standing == "close":
                cls = "close"
            yield EventRow(cls, pair.a, pair.b, pair.how, verdict.measure, why, verdict.floor)
        for event in rank.alignment.only_b:
            yield EventRow("missing", None, event, why=f"only in {self._b.facts.name}")

    def _keep(self, row: EventRow) -> None:
        if len(self.rows) < self._ways.max_rows:
            self.rows.append(row)
        else:
            self.left_out += 1

    def _keep_origin(self, rank: _Rank, place: int, found: Cause, hints: PairHints) -> None:
        pair, verdict = rank.pairs[place]
        # Hints cost a look at the whole step each, and nobody reads hundreds of them.
        has_hints = len(self._order) < _MAX_ORIGINS * len(self._ranks)
        moved = hints.find_reordered(pair) if has_hints else ""
        events, standings = rank.scene.events, rank.scene.standings
        inputs = (ComparedInput(name_site(events[each].site), standings[each]) for each in found.inputs)
        origin = Origin(
            # Where calls come in another order, it is the call that has moved, not what is around it.
            fqn=pair.a.site.fqn if moved and found.kind == "input" else found.fqn,
            step=found.step,
            phase=found.phase,
            kind=found.kind,
            rank=rank.rank,
            source=found.source,
            why=moved if moved and found.kind == "input" else found.why,
            site=pair.a.site,
            how=pair.how,
            inputs=tuple(inputs),
            parameters=tuple(ComparedInput(name, standing) for name, standing in found.parameters),
            measure=verdict.measure,
            notes=(*_iter_guesses(found), *_iter_counts(rank, found, pair), *hints.iter_notes(pair))
            if has_hints
            else (),
            world=max(self._a.facts.world, self._b.facts.world),
        )
        self._order.append(((found.step, find_stage(pair.a), pair.a.seq, rank.rank), origin))


def _iter_counts(rank: _Rank, found: Cause, origin: Pair) -> Iterator[str]:
    """Yield how many steps an optimizer has taken, if that differs: then a state was lost, or is another's."""
    if found.kind != "optimizer":
        return
    for pair, verdict in rank.pairs.values():
        site = pair.a.site
        is_count = site.kind == "optimizer" and site.fqn == origin.a.site.fqn and site.path == "['step']"
        if is_count and verdict.measure and verdict.measure.values:
            ours, theirs = verdict.measure.values
            yield f"the optimizer counts {ours:g} steps in the first run and {theirs:g} in the second: a state was lost"


def _iter_guesses(found: Cause) -> Iterator[str]:
    """Yield where else to look: no gradient was recorded between these and what was named."""
    if found.maybe:
        yield f"it may as well be the backward pass of {', '.join(name or 'the model' for name in found.maybe)}"


def _find_relative(row: EventRow) -> float:
    relative = row.measure.relative_l2 if row.measure else None
    return relative if relative is not None and math.isfinite(relative) else 0.0


def describe_mismatch(result: RunDiff, *, max_rows: int = 10) -> str:
    """Return why two runs do not match, for people."""
    lines = [result.headline]
    lines += [f"  {note}" for note in (result.origin.notes if result.origin else ())]
    lines += [f"  environment: {change.what}: {change.a} -> {change.b}" for change in result.environment]
    lines += [
        f"  {row.cls}: step {row.event.site.step}, {name_site(row.event.site)}" for row in _pick(result.rows, max_rows)
    ]
    return "\n".join(lines)


def _pick(rows: Iterable[EventRow], limit: int) -> list[EventRow]:
    return [row for row in rows if row.cls in ("origin", "propagated")][:limit]
