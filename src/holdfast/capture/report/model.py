"""The content of a report as plain data: table rows, numbers for plots, and tensor summaries."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class TensorSummary:
    """Statistics and histogram of a tensor's finite values."""

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
    """Counts in equal bins."""


@dataclass(frozen=True, slots=True)
class Detail:
    """Details of a tensor that are not in its row."""

    at: tuple[int, ...] | None = None
    """Index of the largest difference."""
    values: tuple[str, str] | None = None
    """Both values at that index, as text: numbers may be complex."""
    a: TensorSummary | None = None
    b: TensorSummary | None = None


@dataclass(frozen=True, slots=True)
class ReportRow:
    """One tensor of a step, paired or not; None for numbers that are not known."""

    verdict: str
    """The class in capitals: ORIGIN, PROPAGATED, CLOSE, MISSING or EQUAL."""
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
    """How the two events were paired."""
    note: str = ""
    bad: str = ""
    """Number of NaN and infinite values in each run; "" if there are none."""
    rel: float | None = None
    abs: float | None = None
    cos: float | None = None
    sqnr: float | None = None
    ulp: float | None = None
    mismatch: float | None = None
    """Percentage of values outside the tolerance."""


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
    """A comparison of two runs as the page shows it."""

    a: RunSide
    b: RunSide
    headline: str
    is_equal: bool
    rows: tuple[ReportRow, ...] = ()
    """In the order of the run: causes come before effects."""
    origin: int | None = None
    """Index of the origin's row."""
    inputs: tuple[str, ...] = ()
    """Inputs of the origin, a text each."""
    parameters: tuple[str, ...] = ()
    counts: Mapping[str, int] = field(default_factory=dict)
    """Number of tensors of each class; tensors of skipped steps are not counted."""
    environment: tuple[tuple[str, str, str], ...] = ()
    """Differences of the environment: name, value in the first run, value in the second."""
    tolerance: str = ""
    """A text that says when tensors count as close."""
    notes: tuple[str, ...] = ()
    details: Mapping[int, Detail] = field(default_factory=dict)
    """By index of the row."""
