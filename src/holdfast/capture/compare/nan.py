"""Find the origin of NaN and infinity in a run: tensors that are not finite although their inputs are."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Final, Literal

import torch

from holdfast.capture.compare.classify import NOWHERE, Cause, OriginFinder, Words, find_first_stage, find_stage
from holdfast.capture.compare.measure import recognize_fill
from holdfast.capture.compare.result import ComparedInput, Origin, name_site
from holdfast.capture.compare.step_graph import Standing, StepGraph
from holdfast.capture.stored.events import Event
from holdfast.capture.stored.runs import Run, find_lost
from holdfast.errors import NotFound
from holdfast.json_text import Json

_WORDS: Final = Words(bad="is not finite", good="finite")
_MAX_ORIGINS: Final = 100
_MAY_BE_INFINITE: Final = frozenset({"input", "buffer"})
"""Kinds of tensors that may contain infinities on purpose, such as attention masks."""

Health = Literal["finite", "infinite", "nan", "unknown"]

_STANDINGS: Final[Mapping[Health, Standing]] = {
    "finite": "equal",
    "unknown": "missing",
    "nan": "differs",
    "infinite": "differs",
}
_FILLS: Final[Mapping[str, Health]] = {"NaN": "nan", "infinite": "infinite", "": "unknown"}


@dataclass(frozen=True, slots=True)
class NonFinite:
    """Where NaN and infinity first appear in a run, and how many tensors contain them."""

    run: str
    origin: Origin | None
    """What produced the first NaN or infinity; None if every tensor that is known is finite."""
    origins: tuple[Origin, ...] = ()
    """Everything that produced NaN or infinity from finite inputs, in order."""
    nan: int = 0
    """Number of tensors that contain NaN."""
    inf: int = 0
    """Number of tensors that contain infinities but no NaN."""
    unknown: int = 0
    """Number of tensors of which only the digest was kept, so their values are not known."""
    notes: tuple[str, ...] = ()
    lost: str = ""
    """Since which step the run is not recorded, as other code had removed hooks; only earlier steps are searched."""

    @property
    def headline(self) -> str:
        """The result in one sentence."""
        if self.origin:
            return str(self.origin)
        if self.lost:
            return f"{self.lost}; before, {replace(self, lost='').headline}"
        if self.unknown:
            return (
                f"{self.run}: no NaN or infinity found, but {self.unknown} tensors were recorded by digest only;"
                " record again with level='stats' to check them"
            )
        return f"{self.run}: no NaN found, and no infinity was produced"

    def to_json(self) -> dict[str, Json]:
        """Return the whole result as JSON."""
        return {
            "run": self.run,
            "headline": self.headline,
            "origin": self.origin.to_json() if self.origin else None,
            "origins": [origin.to_json() for origin in self.origins],
            "nan": self.nan,
            "inf": self.inf,
            "unknown": self.unknown,
            "notes": list(self.notes),
        }


def find_nonfinite(run: Run, *, steps: Collection[int] | None = None) -> NonFinite:
    """Find what produced the first NaN or infinity of a run.

    Reads the recorded statistics; where a tensor has none, its values. `steps` limits the search.
    """
    search = _Search(run)
    lost_step, lost = find_lost(run)
    for step in run.steps:
        if (steps is None or step in steps) and (lost_step is None or step < lost_step):
            search.check_step(step)
    origins = search.find_origins()
    return NonFinite(
        run=run.facts.name,
        origin=origins[0] if origins else None,
        origins=origins,
        nan=search.counts["nan"],
        inf=search.counts["infinite"],
        unknown=search.counts["unknown"],
        notes=(*run.facts.notes, *search.find_notes()),
        lost=lost,
    )


class _Search:
    """The state of one search."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._finders = {rank: OriginFinder(_WORDS) for rank in run.ranks}
        self._known: dict[bytes, Health] = {}
        self._intended: set[bytes] = set()
        self._found: list[tuple[tuple[int, ...], Origin]] = []
        self.counts: dict[Health, int] = {"finite": 0, "infinite": 0, "nan": 0, "unknown": 0}

    def check_step(self, step: int) -> None:
        """Check all ranks of a step."""
        graphs = {rank: self._make_graph(step, rank) for rank in self._run.ranks}
        stages = {rank: find_first_stage(graph) for rank, graph in graphs.items()}
        for rank, graph in graphs.items():
            elsewhere = min((stage for other, stage in stages.items() if other != rank), default=NOWHERE)
            for index, found in self._finders[rank].classify(graph, elsewhere=elsewhere).items():
                if found.is_origin and len(self._found) < _MAX_ORIGINS:
                    self._keep(graph, index, found)

    def find_origins(self) -> tuple[Origin, ...]:
        """Return the origins found so far, in order."""
        return tuple(origin for _, origin in sorted(self._found, key=lambda pair: pair[0]))

    def find_notes(self) -> list[str]:
        """Return a note on the infinities that were treated as masks."""
        count = len(self._intended)
        return [f"{count} infinite inputs or buffers gave finite results and are treated as masks"] if count else []

    def _make_graph(self, step: int, rank: int) -> StepGraph:
        events = [event for event in self._run.events(step, rank) if not event.recompute]
        healths = [self._find_health(event) for event in events]
        for health in healths:
            self.counts[health] += 1
        graph = StepGraph(events)
        self._intended |= _find_intended_infinities(graph, healths)
        graph.set_standings([self._find_standing(*pair) for pair in zip(events, healths, strict=True)])
        return graph

    def _find_standing(self, event: Event, health: Health) -> Standing:
        if health == "infinite" and event.identity in self._intended and event.site.kind in _MAY_BE_INFINITE:
            return "equal"
        return _STANDINGS[health]

    def _find_health(self, event: Event) -> Health:
        if event.stats is not None:
            return "nan" if event.stats.nan else "infinite" if event.stats.inf else "finite"
        if not _can_be_bad(event):
            return "finite"
        if event.identity not in self._known:
            self._known[event.identity] = self._read_health(event)
        return self._known[event.identity]

    def _read_health(self, event: Event) -> Health:
        try:
            tensor = self._run.read_tensor(event)
        except NotFound:
            return _FILLS[recognize_fill(event)]
        tensor = tensor if tensor.is_complex() or tensor.dtype.itemsize > 1 else tensor.float()
        if bool(tensor.isfinite().all()):
            return "finite"
        return "nan" if bool(tensor.isnan().any()) else "infinite"

    def _keep(self, graph: StepGraph, index: int, found: Cause) -> None:
        event, standings = graph.events[index], graph.standings
        inputs = (ComparedInput(name_site(graph.events[each].site), standings[each]) for each in found.inputs)
        origin = Origin(
            fqn=found.fqn,
            step=found.step,
            phase=found.phase,
            kind=found.kind,
            rank=event.rank,
            source=found.source,
            why=f"{found.why}: {self._describe(event)}",
            site=event.site,
            inputs=tuple(inputs),
            parameters=tuple(ComparedInput(name, standing) for name, standing in found.parameters),
            world=self._run.facts.world,
        )
        self._found.append(((found.step, find_stage(event), event.seq, event.rank), origin))

    def _describe(self, event: Event) -> str:
        if event.stats is not None:
            return f"{event.stats.nan} NaN, {event.stats.inf} infinite"
        try:
            tensor = self._run.read_tensor(event)
        except NotFound:
            return f"all values are {recognize_fill(event)}"
        return f"{int(tensor.isnan().sum())} NaN, {int(tensor.isinf().sum())} infinite of {tensor.numel()}"


def _can_be_bad(event: Event) -> bool:
    dtype = getattr(torch, event.dtype, None)
    return isinstance(dtype, torch.dtype) and (dtype.is_floating_point or dtype.is_complex) and 0 not in event.shape


def _find_intended_infinities(graph: StepGraph, healths: list[Health]) -> set[bytes]:
    """Return the digests of infinite inputs and buffers from which a call computed only finite outputs."""
    intended = set()
    for call in graph.calls.values():
        results = {healths[index] for index in call.outputs}
        if results != {"finite"}:
            continue
        intended |= {graph.events[index].identity for index in call.inputs if healths[index] == "infinite"}
    for index, event in enumerate(graph.events):
        if event.site.kind == "buffer" and healths[index] == "infinite":
            calls = graph.find_calls(graph.find_owner(event.site.fqn) or "")
            if any({healths[out] for out in call.outputs} == {"finite"} for call in calls):
                intended.add(event.identity)
    return intended
