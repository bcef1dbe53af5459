"""The result of comparing two runs: origins, rows, counts by step; as objects and as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final, Literal

from holdfast.capture.compare.align import How
from holdfast.capture.compare.explain import Reason
from holdfast.capture.compare.measure import TensorDistance
from holdfast.capture.compare.step_graph import Standing
from holdfast.capture.stored.described import describe_site
from holdfast.capture.stored.events import Event, EventKind, Phase, Site
from holdfast.display.markup import Card, readable_repr, render_card
from holdfast.json_text import Json

Class = Literal["equal", "close", "origin", "propagated", "missing", "unknown"]
"""`missing`: only one run has the tensor. `unknown`: the digests are of different kinds, and nothing else was kept."""
CLASSES: Final[tuple[Class, ...]] = ("equal", "close", "origin", "propagated", "missing", "unknown")
SCHEMA: Final = 1


@dataclass(frozen=True, slots=True)
class ComparedInput:
    """An input or parameter that a tensor was computed from, and how it compares with the other run's."""

    name: str
    standing: Standing


@dataclass(frozen=True, slots=True)
class Origin:
    """Where two runs diverge: a tensor that differs although everything it was computed from is equal."""

    fqn: str
    """The module, parameter or state to inspect; for a gradient, the module whose backward pass computed it."""
    step: int
    phase: Phase
    kind: EventKind
    rank: int
    source: str
    why: str
    site: Site
    """Where the first tensor that differs was observed."""
    how: How = "exact"
    """Which pass of the alignment paired the two events."""
    inputs: tuple[ComparedInput, ...] = ()
    parameters: tuple[ComparedInput, ...] = ()
    measure: TensorDistance | None = None
    notes: tuple[str, ...] = ()
    world: int = 1
    cause: Reason = ""
    """What the cause is, in one or two words, such as "optimizer setting"; "" if only the place is known."""

    def __repr__(self) -> str:
        """Show the origin as a sentence."""
        return f"<Origin {self}>"

    def __str__(self) -> str:
        """Describe the origin in one sentence."""
        rank = f", rank {self.rank}" if self.world > 1 else ""
        source = f" ({self.source})" if self.source else ""
        return f"step {self.step}{rank}, {self.phase}, {self.fqn or 'the model'}: {self.why}{source}"

    def to_json(self) -> dict[str, Json]:
        """Return the origin as JSON."""
        return {
            "fqn": self.fqn,
            "step": self.step,
            "phase": self.phase,
            "kind": self.kind,
            "rank": self.rank,
            "source": self.source,
            "why": self.why,
            "cause": self.cause,
            "site": describe_site(self.site),
            "how": self.how,
            "inputs": [{"name": part.name, "standing": part.standing} for part in self.inputs],
            "parameters": [{"name": part.name, "standing": part.standing} for part in self.parameters],
            "measure": self.measure.to_json() if self.measure else None,
            "notes": list(self.notes),
        }


@dataclass(frozen=True, slots=True)
class EventRow:
    """One event of a comparison: a pair, or an event that only one run has."""

    cls: Class
    a: Event | None
    b: Event | None
    how: How | None = None
    measure: TensorDistance | None = None
    why: str = ""
    floor: float | None = None
    """The relative difference between the first run and its repetition here, if it was measured."""

    __repr__ = readable_repr

    @property
    def event(self) -> Event:
        """The first run's event; the second run's if the first has none."""
        found = self.a or self.b
        assert found is not None, "a row has an event"
        return found

    def to_json(self) -> dict[str, Json]:
        """Return the row as JSON."""
        event = self.event
        return {
            "class": self.cls,
            **describe_site(event.site),
            "seq": event.seq,
            "rank": event.rank,
            "module": event.module,
            "source": event.source,
            "how": self.how,
            "a": _describe_side(self.a),
            "b": _describe_side(self.b),
            "measure": self.measure.to_json() if self.measure else None,
            "floor": self.floor,
            "why": self.why,
        }


@dataclass(frozen=True, slots=True)
class StepDiff:
    """One step: the number of events of each class, and the largest difference."""

    step: int
    counts: Mapping[Class, int]
    largest: float = 0.0
    """The largest finite relative difference."""
    is_skipped: bool = False
    """Whether the step was skipped because its roots are equal; then its events are not counted."""

    def to_json(self) -> dict[str, Json]:
        """Return the step as JSON."""
        counts: dict[str, Json] = {name: self.counts.get(name, 0) for name in CLASSES}
        return {"step": self.step, "counts": counts, "largest": self.largest, "is_skipped": self.is_skipped}


@dataclass(frozen=True, slots=True)
class EnvironmentChange:
    """One difference between the environments of two runs; None where a run did not record the value."""

    what: str
    a: Json
    b: Json


@dataclass(frozen=True, slots=True)
class RunDiff:
    """The result of comparing two runs."""

    a: str
    b: str
    origin: Origin | None
    """The first origin; None if the runs match."""
    origins: tuple[Origin, ...] = ()
    """The first origin of each module, parameter or state, in order."""
    rows: tuple[EventRow, ...] = field(default=(), repr=False)
    """Events that are not equal, in order; equal events are only counted."""
    steps: tuple[StepDiff, ...] = field(default=(), repr=False)
    environment: tuple[EnvironmentChange, ...] = ()
    notes: tuple[str, ...] = ()
    left_out: int = 0
    """Number of rows that were counted but not kept in `rows`."""
    lost: str = ""
    """Since which step a run is not recorded, because other code had removed hooks; only earlier steps are compared."""

    def __repr__(self) -> str:
        """Show both names and the result in one sentence."""
        return f"<RunDiff {self.a!r} -> {self.b!r}: {self.headline}>"

    def _repr_html_(self) -> str:
        """Return the result as a card for notebooks: the sentence, the counts and the origins."""
        facts = [(name, str(number)) for name, number in self.counts.items() if number]
        rows = [[str(origin.step), origin.fqn or "the model", origin.phase, origin.why] for origin in self.origins]
        card = Card("Runs", f"{self.a} → {self.b}", facts, headers=("step", "where", "phase", "why"), rows=rows)
        return render_card(replace(card, right="step", note=self.headline))

    @property
    def is_match(self) -> bool:
        """Whether every tensor that both runs have is equal or close; False if one could not be compared."""
        return self.origin is None and not self.counts["unknown"] and not self.lost

    @property
    def is_equal(self) -> bool:
        """Whether both runs have the same events, bit for bit."""
        return self.is_match and not any(self.counts[name] for name in CLASSES if name != "equal") and bool(self.steps)

    @property
    def counts(self) -> Mapping[Class, int]:
        """Number of events by class; events of skipped steps are not counted."""
        total: Counter[Class] = Counter(dict.fromkeys(CLASSES, 0))
        for step in self.steps:
            total.update(step.counts)
        return total

    @property
    def headline(self) -> str:
        """The result in one sentence."""
        if self.origin:
            return str(self.origin)
        if self.lost:
            return f"{self.lost}; {replace(self, lost='').headline}"
        if not self.steps:
            return f"{self.a} and {self.b} have no step in common: nothing was compared"
        counts, steps = self.counts, len(self.steps)
        among = f"{steps} step{'s' if steps != 1 else ''}"
        if self.is_equal:
            return f"{self.a} and {self.b} are equal in {among}"
        if counts["unknown"]:
            return (
                f"{self.a} and {self.b}: no difference found in {among}, but {counts['unknown']} tensors could not be"
                " compared: their digests are of different kinds"
            )
        parts = [f"{counts['close']} tensors are close but not equal"] if counts["close"] else []
        parts += [f"{counts['missing']} are in one of them only"] if counts["missing"] else []
        return f"{self.a} and {self.b} match in {among}: {', '.join(parts)}"

    def to_json(self) -> dict[str, Json]:
        """Return the whole result as JSON; `schema` is the version of this format."""
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


def name_site(site: Site) -> str:
    """Return a readable name of a site: `output[1] of layers.0.attn, call 2`."""
    call = f", call {site.call}" if site.call else ""
    return f"{site.kind}{site.path} of {site.fqn or 'the model'}{call}"


def _describe_side(event: Event | None) -> Json:
    if event is None:
        return None
    return {
        "fqn": event.site.fqn,
        "seq": event.seq,
        "dtype": event.dtype,
        "shape": list(event.shape),
        "digest": event.digest.hex(),
        "blake3": event.blake3.hex(),
        "is_full": bool(event.leaf),
    }
