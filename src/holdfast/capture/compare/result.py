"""What a comparison of two runs has found: the origin, the rows, counts by step, and all of it as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from holdfast.capture.compare.align import How
from holdfast.capture.compare.measure import Distance
from holdfast.capture.compare.step_graph import Standing
from holdfast.capture.stored.events import Event, EventKind, Phase, Site
from holdfast.repo.format.record import Json

Class = Literal["equal", "close", "origin", "propagated", "missing"]
CLASSES: Final[tuple[Class, ...]] = ("equal", "close", "origin", "propagated", "missing")
SCHEMA: Final = 1


@dataclass(frozen=True, slots=True)
class ComparedInput:
    """Something that a tensor was made from or with, and how it is to the other run's."""

    name: str
    standing: Standing


@dataclass(frozen=True, slots=True)
class Origin:
    """Where two runs part: something that differs though nothing that it comes from does."""

    fqn: str
    """The module, parameter or state to look at: in the backward pass the one whose backward pass it is."""
    step: int
    phase: Phase
    kind: EventKind
    rank: int
    source: str
    why: str
    site: Site
    """Where the first tensor that differs was seen."""
    how: How = "exact"
    """Which pass has paired it."""
    inputs: tuple[ComparedInput, ...] = ()
    parameters: tuple[ComparedInput, ...] = ()
    measure: Distance | None = None
    notes: tuple[str, ...] = ()
    world: int = 1

    def __str__(self) -> str:
        """Say it in a sentence."""
        rank = f", rank {self.rank}" if self.world > 1 else ""
        source = f" ({self.source})" if self.source else ""
        return f"step {self.step}{rank}, {self.phase}, {self.fqn or 'the model'}: {self.why}{source}"

    def to_json(self) -> dict[str, Json]:
        """Return it as JSON."""
        return {
            "fqn": self.fqn,
            "step": self.step,
            "phase": self.phase,
            "kind": self.kind,
            "rank": self.rank,
            "source": self.source,
            "why": self.why,
            "site": spell_site(self.site),
            "how": self.how,
            "inputs": [{"name": part.name, "standing": part.standing} for part in self.inputs],
            "parameters": [{"name": part.name, "standing": part.standing} for part in self.parameters],
            "measure": self.measure.to_json() if self.measure else None,
            "notes": list(self.notes),
        }


@dataclass(frozen=True, slots=True)
class EventRow:
    """One event that is not equal in both runs, or that only one of them has."""

    cls: Class
    a: Event | None
    b: Event | None
    how: How | None = None
    measure: Distance | None = None
    why: str = ""
    floor: float | None = None
    """How far two runs that should be the same are apart here, where it was measured."""

    @property
    def event(self) -> Event:
        """The first run's, or else the second's."""
        found = self.a or self.b
        assert found is not None, "a row has an event"
        return found

    def to_json(self) -> dict[str, Json]:
        """Return it as JSON."""
        event = self.event
        return {
            "class": self.cls,
            **spell_site(event.site),
            "seq": event.seq,
            "rank": event.rank,
            "module": event.module,
            "source": event.source,
            "how": self.how,
            "a": _spell_side(self.a),
            "b": _spell_side(self.b),
            "measure": self.measure.to_json() if self.measure else None,
            "floor": self.floor,
            "why": self.why,
        }


@dataclass(frozen=True, slots=True)
class StepDiff:
    """One step: how many events stand how, and the largest difference."""

    step: int
    counts: Mapping[Class, int]
    largest: float = 0.0
    """Of the relative differences that are finite."""
    is_skipped: bool = False
    """Whether the roots are equal, so that no event was looked at."""

    def to_json(self) -> dict[str, Json]:
        """Return it as JSON."""
        counts: dict[str, Json] = {name: self.counts.get(name, 0) for name in CLASSES}
        return {"step": self.step, "counts": counts, "largest": self.largest, "is_skipped": self.is_skipped}


@dataclass(frozen=True, slots=True)
class EnvironmentChange:
    """One thing in which the environments of two runs differ; None where a run does not say."""

    what: str
    a: Json
    b: Json


@dataclass(frozen=True, slots=True)
class RunDiff:
    """What a comparison of two runs has found."""

    a: str
    b: str
    origin: Origin | None
    """The first one; None if the runs match."""
    origins: tuple[Origin, ...] = ()
    """The first one of each module, parameter or state, in order."""
    rows: tuple[EventRow, ...] = field(default=(), repr=False)
    """What is not equal, in order; what is equal is only counted."""
    steps: tuple[StepDiff, ...] = field(default=(), repr=False)
    environment: tuple[EnvironmentChange, ...] = ()
    notes: tuple[str, ...] = ()
    left_out: int = 0
    """How many rows there are beyond those that are kept."""

    @property
    def is_match(self) -> bool:
        """Whether nothing that both runs have is apart."""
        return self.origin is None

    @property
    def is_equal(self) -> bool:
        """Whether both runs have the same events, to the last bit."""
        return self.is_match and not any(self.counts[name] for name in CLASSES if name != "equal") and bool(self.steps)

    @property
    def counts(self) -> Mapping[Class, int]:
        """How many events stand how; those of steps with equal roots are not counted."""
        total: Counter[Class] = Counter(dict.fromkeys(CLASSES, 0))
        for step in self.steps:
            total.update(step.counts)
        return total

    @property
    def headline(self) -> str:
        """What a person wants to know, in a sentence."""
        if self.origin:
            return str(self.origin)
        if not self.steps:
            return f"{self.a} and {self.b} have no step in common: nothing was compared"
        counts, steps = self.counts, len(self.steps)
        among = f"{steps} step{'s' if steps != 1 else ''}"
        if self.is_equal:
            return f"{self.a} and {self.b} are equal in {among}"
        parts = [f"{counts['close']} tensors are close but not equal"] if counts["close"] else []
        parts += [f"{counts['missing']} are in one of them only"] if counts["missing"] else []
        return f"{self.a} and {self.b} match in {among}: {', '.join(parts)}"

    def to_json(self) -> dict[str, Json]:
        """Return all of it as JSON; `schema` counts its versions."""
        return {
            "schema": SCHEMA,
            "a": self.a,
            "b": self.b,
            "headline": self.headline,
            "is_match": self.is_match,
            "is_equal": self.is_equal,
            "origin": self.origin.to_json() if self.origin else None,
            "origins": [origin.to_json() for origin in self.origins],
            "counts": {name: self.counts[name] for name in CLASSES},
            "environment": [{"what": change.what, "a": change.a, "b": change.b} for change in self.environment],
            "steps": [step.to_json() for step in self.steps],
            "rows": [row.to_json() for row in self.rows],
            "left_out": self.left_out,
            "notes": list(self.notes),
        }


def spell_site(site: Site) -> dict[str, Json]:
    """Return a site as JSON."""
    return {
        "step": site.step,
        "phase": site.phase,
        "kind": site.kind,
        "fqn": site.fqn,
        "call": site.call,
        "path": site.path,
    }


def name_site(site: Site) -> str:
    """Return a site for people: `output[1] of layers.0.attn, call 2`."""
    call = f", call {site.call}" if site.call else ""
    return f"{site.kind}{site.path} of {site.fqn or 'the model'}{call}"


def _spell_side(event: Event | None) -> Json:
    if event is None:
        return None
    return {
        "fqn": event.site.fqn,
        "seq": event.seq,
        "dtype": event.dtype,
        "shape": list(event.shape),
        "digest": event.digest.hex(),
        "is_full": bool(event.leaf),
    }
