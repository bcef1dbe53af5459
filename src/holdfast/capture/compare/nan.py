"""Who made the first NaN or infinity of a run: something not finite that nothing but finite values went into."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final, Literal

import torch

from holdfast.capture.compare.classify import NOWHERE, Cause, Trail, Words, find_stage
from holdfast.capture.compare.result import ComparedInput, Origin, name_site
from holdfast.capture.compare.step_graph import Standing, StepGraph
from holdfast.capture.stored.events import Event
from holdfast.capture.stored.runs import Run
from holdfast.errors import NotFound
from holdfast.repo.format.record import Json

_WORDS: Final = Words(bad="is not finite", good="finite")
_MAX_ORIGINS: Final = 100
_TAKEN: Final = frozenset({"input", "buffer"})
"""What may hold infinities on purpose, such as a mask of attention."""

Health = Literal["finite", "infinite", "nan", "unknown"]

_STANDINGS: Final[Mapping[Health, Standing]] = {
    "finite": "equal",
    "unknown": "missing",
    "nan": "differs",
    "infinite": "differs",
}


@dataclass(frozen=True, slots=True)
class NonFinite:
    """What is not finite in a run, and where that began."""

    run: str
    origin: Origin | None
    """Who made the first NaN or infinity; None if all that is known is finite."""
    origins: tuple[Origin, ...] = ()
    """All who made one from finite values, in order."""
    nan: int = 0
    """How many tensors hold a NaN."""
    inf: int = 0
    """How many hold infinities and no NaN."""
    unknown: int = 0
    """Of how many it is not known, because only their digest was kept."""
    notes: tuple[str, ...] = ()

    @property
    def headline(self) -> str:
        """What a person wants to know, in a sentence."""
        if self.origin:
            return str(self.origin)
        if self.unknown:
            return (
                f"{self.run}: nothing is known to be NaN or infinite; of {self.unknown} tensors"
                " only the digest was kept: record again with level='stats'"
            )
        return f"{self.run}: nothing is NaN, and no infinity was made"

    def to_json(self) -> dict[str, Json]:
        """Return all of it as JSON."""
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
    """Find who made the first NaN or infinity of a run, from stored numbers or, where these are not, from values."""
    work = _Work(run)
    for step in run.steps:
        if steps is None or step in steps:
            work.look_at(step)
    origins = work.find_origins()
    return NonFinite(
        run=run.facts.name,
        origin=origins[0] if origins else None,
        origins=origins,
        nan=work.counts["nan"],
        inf=work.counts["infinite"],
        unknown=work.counts["unknown"],
        notes=(*run.facts.notes, *work.find_notes()),
    )


class _Work:
    """One search under way."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._trails = {rank: Trail(_WORDS) for rank in run.ranks}
        self._known: dict[bytes, Health] = {}
        self._meant: set[bytes] = set()
        self._order: list[tuple[tuple[int, ...], Origin]] = []
        self.counts: dict[Health, int] = {"finite": 0, "infinite": 0, "nan": 0, "unknown": 0}

    def look_at(self, step: int) -> None:
        """Look at all ranks of a step."""
        scenes = {rank: self._open(step, rank) for rank in self._run.ranks}
        stages = {rank: _find_stage(scene) for rank, scene in scenes.items()}
        for rank, scene in scenes.items():
            elsewhere = min((stage for other, stage in stages.items() if other != rank), default=NOWHERE)
            for place, found in self._trails[rank].judge(scene, elsewhere=elsewhere).items():
                if found.is_origin and len(self._order) < _MAX_ORIGINS:
                    self._keep(scene, place, found)

    def find_origins(self) -> tuple[Origin, ...]:
        """Return those who made something that is not finite, in order."""
        return tuple(origin for _, origin in sorted(self._order, key=lambda pair: pair[0]))

    def find_notes(self) -> list[str]:
        """Return what was taken to be meant."""
        count = len(self._meant)
        return [f"{count} infinite inputs or buffers gave finite results and are taken for masks"] if count else []

    def _open(self, step: int, rank: int) -> StepGraph:
        events = [event for event in self._run.events(step, rank) if not event.recompute]
        healths = [self._find_health(event) for event in events]
        for health in healths:
            self.counts[health] += 1
        scene = StepGraph(events)
        self._meant |= _find_intended_infinities(scene, healths)
        scene.settle([self._find_standing(*pair) for pair in zip(events, healths, strict=True)])
        return scene

    def _find_standing(self, event: Event, health: Health) -> Standing:
        if health == "infinite" and event.digest in self._meant and event.site.kind in _TAKEN:
            return "equal"
        return _STANDINGS[health]

    def _find_health(self, event: Event) -> Health:
        if event.stats is not None:
            return "nan" if event.stats.nan else "infinite" if event.stats.inf else "finite"
        if not _can_be_bad(event):
            return "finite"
        if event.digest not in self._known:
            self._known[event.digest] = self._read_health(event)
        return self._known[event.digest]

    def _read_health(self, event: Event) -> Health:
        try:
            tensor = self._run.read_tensor(event)
        except NotFound:
            return "unknown"
        tensor = tensor if tensor.is_complex() or tensor.dtype.itemsize > 1 else tensor.float()
        if bool(tensor.isfinite().all()):
            return "finite"
        return "nan" if bool(tensor.isnan().any()) else "infinite"

    def _keep(self, scene: StepGraph, place: int, found: Cause) -> None:
        event, standings = scene.events[place], scene.standings
        inputs = (ComparedInput(name_site(scene.events[each].site), standings[each]) for each in found.inputs)
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
        self._order.append(((found.step, find_stage(event), event.seq, event.rank), origin))

    def _describe(self, event: Event) -> str:
        if event.stats is not None:
            return f"{event.stats.nan} NaN, {event.stats.inf} infinite"
        try:
            tensor = self._run.read_tensor(event)
        except NotFound:
            return "how many is not known"
        return f"{int(tensor.isnan().sum())} NaN, {int(tensor.isinf().sum())} infinite of {tensor.numel()}"


def _can_be_bad(event: Event) -> bool:
    dtype = getattr(torch, event.dtype, None)
    return isinstance(dtype, torch.dtype) and (dtype.is_floating_point or dtype.is_complex) and 0 not in event.shape


def _find_intended_infinities(scene: StepGraph, healths: list[Health]) -> set[bytes]:
    """Return the bytes of infinite inputs and buffers from which a call made nothing but finite values."""
    meant = set()
    for call in scene.calls.values():
        results = {healths[place] for place in call.outputs}
        if results != {"finite"}:
            continue
        meant |= {scene.events[place].digest for place in call.inputs if healths[place] == "infinite"}
    for place, event in enumerate(scene.events):
        if event.site.kind == "buffer" and healths[place] == "infinite":
            calls = scene.find_calls(scene.find_owner(event.site.fqn) or "")
            if any({healths[out] for out in call.outputs} == {"finite"} for call in calls):
                meant.add(event.digest)
    return meant


def _find_stage(scene: StepGraph) -> int:
    bad = (find_stage(event) for place, event in enumerate(scene.events) if scene.is_bad(place))
    return min(bad, default=NOWHERE)
