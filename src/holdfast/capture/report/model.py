"""What a report shows, as plain data: the rows of its table, the numbers of its plots, and pictures of tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class TensorSummary:
    """The values of one tensor in numbers, taken over those that are finite."""

    minimum: float
    maximum: float
    mean: float
    norm: float
    zero: int
    nan: int
    inf: int
    low: float
    """Where the first bin begins."""
    high: float
    """Where the last bin ends."""
    histogram: tuple[int, ...] = ()
    """Counts of equal bins."""


@dataclass(frozen=True, slots=True)
class Detail:
    """What a report says of a tensor beside its row."""

    at: tuple[int, ...] | None = None
    """Where the two sides are furthest apart."""
    values: tuple[str, str] | None = None
    """What they hold there, as text: numbers may be complex."""
    a: TensorSummary | None = None
    b: TensorSummary | None = None


@dataclass(frozen=True, slots=True)
class ReportRow:
    """One tensor of a step, paired or not; a number that is not known is None."""

    verdict: str
    """A class, in capitals: ORIGIN, PROPAGATED, CLOSE, MISSING, EQUAL."""
    step: int
    rank: int
    phase: str
    kind: str
    fqn: str
    call: int = 0
    path: str = ""
    dtype: str = ""
    shape: str = ""
    module: str = ""
    source: str = ""
    pairing: str = ""
    """By what the two sides were found to belong together."""
    note: str = ""
    bad: str = ""
    """How many values are NaN or infinite on each side; nothing if none is."""
    rel: float | None = None
    abs: float | None = None
    cos: float | None = None
    sqnr: float | None = None
    ulp: float | None = None
    mismatch: float | None = None
    """Percent."""


@dataclass(frozen=True, slots=True)
class RunSide:
    """One of the two runs."""

    name: str
    steps: tuple[int, ...] = ()
    world: int = 1
    status: str = "complete"
    started_s: float = 0.0
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Report:
    """A comparison of two runs as a page shows it."""

    a: RunSide
    b: RunSide
    headline: str
    is_equal: bool
    rows: tuple[ReportRow, ...] = ()
    """In the order of the run: causes come before effects."""
    origin: int | None = None
    """Which row is the first that differs by itself."""
    inputs: tuple[str, ...] = ()
    """What went into the origin, a text each."""
    parameters: tuple[str, ...] = ()
    counts: Mapping[str, int] = field(default_factory=dict)
    """How many tensors are of each class; those of steps that are equal as a whole have no row."""
    environment: tuple[tuple[str, str, str], ...] = ()
    """What differs: a name, and how it is on each side."""
    tolerance: str = ""
    """By which measure tensors count as close."""
    notes: tuple[str, ...] = ()
    details: Mapping[int, Detail] = field(default_factory=dict)
    """By the number of the row."""
