"""Events: one tensor seen at one place of a run, as data; what a recorder writes and a comparison reads."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final, Literal, NamedTuple

Phase = Literal["forward", "backward", "optimizer", "custom"]
EventKind = Literal["input", "output", "grad", "parameter", "buffer", "param_grad", "optimizer", "rng", "op", "log"]
"""What the tensor is to its module: `grad` is that of an output, `op` one of the results of an operation inside."""

PHASES: Final[tuple[Phase, ...]] = ("forward", "backward", "optimizer", "custom")
KINDS: Final[tuple[EventKind, ...]] = (
    "input",
    "output",
    "grad",
    "parameter",
    "buffer",
    "param_grad",
    "optimizer",
    "rng",
    "op",
    "log",
)


class Level(Enum):
    """How much of a tensor is kept: each level keeps what those before it keep."""

    OFF = "off"
    DIGEST = "digest"
    STATS = "stats"
    FULL = "full"


@dataclass(frozen=True, slots=True)
class Stats:
    """A tensor in numbers, taken over its finite values; NaN and infinities are counted apart."""

    minimum: float
    maximum: float
    mean: float
    norm: float
    nan: int
    inf: int
    zero: int
    histogram: tuple[int, ...] = ()
    """Counts of equal bins from minimum to maximum; of a large tensor, those of an even sample."""


class Site(NamedTuple):
    """Where in a run a tensor was seen: the same in two runs that do the same."""

    step: int
    phase: Phase
    kind: EventKind
    fqn: str
    """The module's name from the root, without wrappers; a parameter's or optimizer state's own full name."""
    call: int
    """Which call of this module in this step and phase, from 0."""
    path: str
    """Where in the arguments or results: "", "[1]", ".hidden", "['mask']"."""


@dataclass(frozen=True, slots=True)
class Event:
    """One tensor at one site, on one rank."""

    seq: int
    """The order in which the rank saw it: causes come before effects."""
    site: Site
    rank: int
    dtype: str
    """As torch says it, without `torch.`: "float32"."""
    shape: tuple[int, ...]
    """Of what this rank holds."""
    digest: bytes
    """XXH3-128 of the bytes in C order: equal bytes have equal digests in every run, process and machine."""
    module: str = ""
    """The class of the module, or the name of the operation."""
    parent: str = ""
    """The fqn of the module call that it lies in, for operations."""
    recompute: bool = False
    """Seen while activations were computed again for the backward pass."""
    source: str = ""
    """Where the user's code is: "model.py:212"."""
    alias: int = -1
    """The same for tensors of one step that share memory."""
    placement: str = ""
    """How a sharded tensor lies on its mesh, as DTensor says it: "Shard(dim=0)"; nothing for a plain one."""
    global_shape: tuple[int, ...] = ()
    """Of the whole, if it is sharded."""
    offsets: tuple[int, ...] = ()
    """Of this rank's part in the whole, if it is sharded."""
    stats: Stats | None = None
    leaf: str = ""
    """Under which name the segment keeps its bytes; nothing if only the digest is known."""
    form: str = ""
    """How the arguments of a call are arranged around their tensors, as JSON; on the first input of the call."""
