"""Events: one tensor observed at one site of a run; and the settings of a step as they are recorded."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache
from typing import Any, Final, Literal, NamedTuple, TypeAlias, cast

from holdfast.errors import Corrupt
from holdfast.json_text import Json

Phase = Literal["forward", "backward", "optimizer", "custom"]
EventKind = Literal[
    "input", "output", "grad", "parameter", "buffer", "param_grad", "optimizer", "rng", "op", "log", "setting"
]
"""The role of a tensor: `grad` is the gradient of an output, `op` a result of an operation inside a module.

`param_grad` is the gradient of a parameter as the optimizer uses it. With the path "#1", "#2" it is the gradient after
the first, second backward pass of the step, and with "#0" what was there before. An `output` with the path "#input[0]"
is an input that the module has changed in place. The bytes of a `setting` are its text, which `Event.form` has too.
"""

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
    "setting",
)


class Level(Enum):
    """How much of a tensor is kept; each level includes the ones before it."""

    OFF = "off"
    DIGEST = "digest"
    STATS = "stats"
    FULL = "full"


@dataclass(frozen=True, slots=True)
class Stats:
    """Statistics of a tensor's finite values; NaN and infinities are counted separately."""

    minimum: float
    maximum: float
    mean: float
    norm: float
    nan: int
    inf: int
    zero: int
    histogram: tuple[int, ...] = ()
    """Counts in equal bins from minimum to maximum; of a large tensor, those of an even sample."""


class Site(NamedTuple):
    """Where in a run a tensor was observed; two runs of the same code have the same sites."""

    step: int
    phase: Phase
    kind: EventKind
    fqn: str
    """The full name of the module, without wrappers; for a parameter or optimizer state, its own full name."""
    call: int
    """Which call of this module in this step and phase, from 0."""
    path: str
    """Path in the arguments or results: "", "[1]", ".hidden", "['mask']"."""


class Event(NamedTuple):
    """One tensor observed at one site, on one rank."""

    seq: int
    """Number in the order in which the rank observed its tensors: causes come before effects."""
    site: Site
    rank: int
    dtype: str
    """Name of the dtype in torch, without `torch.`: "float32"."""
    shape: tuple[int, ...]
    """Shape of this rank's tensor or shard."""
    digest: bytes
    """XXH3-128 of the bytes in C order: equal bytes have equal digests in every run, process and machine.

    b"" if the bytes were hashed on their device alone; then `blake3` has their digest.
    """
    module: str = ""
    """The class of the module, or the name of the operation."""
    parent: str = ""
    """For operations, the name of the module whose call they are in."""
    recompute: bool = False
    """Whether it was observed while activations were recomputed for the backward pass."""
    source: str = ""
    """Line of the user's code: "model.py:212"."""
    alias: int = -1
    """A number that tensors of one step have in common if they share memory; -1 if not known."""
    placement: str = ""
    """The placements of a DTensor: "Shard(dim=0)"; "" for a plain tensor."""
    global_shape: tuple[int, ...] = ()
    """Shape of the whole tensor, if it is sharded."""
    offsets: tuple[int, ...] = ()
    """Offsets of this rank's shard in the whole, if it is sharded."""
    stats: Stats | None = None
    leaf: str = ""
    """Name of its bytes in the segments of the run; "" if they were not kept."""
    form: str = ""
    """The form of the call's arguments as JSON, only on the first input of the call; of settings, their text."""
    blake3: bytes = b""
    """BLAKE3-256 of the bytes in C order, of tensors on an accelerator or with `hashes="both"`; otherwise b""."""

    @property
    def identity(self) -> bytes:
        """The digest by which tensors of one run are compared: BLAKE3 if there is one, otherwise XXH3."""
        return self.blake3 or self.digest

    def has_bytes_of(self, other: Event) -> bool | None:
        """Return whether two tensors have the same bytes; None if they have no digest of the same kind."""
        if self.blake3 and other.blake3:
            return self.blake3 == other.blake3
        if self.digest and other.digest:
            return self.digest == other.digest
        return None

    def __repr__(self) -> str:
        """Show where it was observed, what it is, and its digest."""
        site = self.site
        where = f"step {site.step} {site.phase}: {site.kind}{site.path} of {site.fqn or 'the model'}"
        return f"<Event {where}, {self.dtype} {tuple(self.shape)}, {self.identity.hex()[:12]}>"


def find_common_digests(events: Sequence[Event]) -> list[bytes] | None:
    """Return one digest of each event, all of the same kind; None if there is no kind that all of them have."""
    for found in ([event.blake3 for event in events], [event.digest for event in events]):
        if all(found):
            return found
    return None


@dataclass(slots=True, eq=False)
class EventFacts:
    """What an event has in common with the same event of other steps; the fields are those of `Event` and `Site`."""

    phase: Phase
    kind: EventKind
    fqn: str
    call: int
    path: str
    dtype: str
    shape: tuple[int, ...]
    module: str = ""
    parent: str = ""
    recompute: bool = False
    source: str = ""
    placement: str = ""
    global_shape: tuple[int, ...] = ()
    offsets: tuple[int, ...] = ()
    text: str = field(init=False)
    """What the root of a step covers, after the number of the step."""

    def __post_init__(self) -> None:
        """Compute the text once: it is needed in every step."""
        # ascii() gives the same text in every version of Python.
        self.text = ascii((self.phase, self.kind, self.fqn, self.call, self.path, self.dtype, self.shape))[1:]


@dataclass(slots=True, eq=False)
class Measured:
    """The statistics of bytes that several events may have; None until they are measured, or if there are none."""

    stats: Stats | None = None


class ObservedEvent(NamedTuple):
    """An event as the recorder collects it."""

    seq: int
    step: int
    facts: EventFacts
    digest: bytes
    alias: int = -1
    measured: Measured | None = None
    leaf: str = ""
    form: str = ""
    blake3: bytes | int = b""
    """The index of its digest among those that the devices are computing, until these are known."""


EventFields: TypeAlias = tuple[int, int, EventFacts, bytes, int, Measured | None, str, str, bytes | int]
"""The fields of an `ObservedEvent` as a plain tuple."""


class ObservedEvents:
    """Observed events in the order of observation, as one flat list of their fields.

    Python's garbage collector counts every tuple that stays alive, and a full collection in a process with torch takes
    longer than a recorded step. A flat list of numbers, texts and shared facts adds nothing for it to count.
    """

    __slots__ = ("flat",)

    def __init__(self, events: Iterable[EventFields] = ()) -> None:
        self.flat: list[Any] = []
        """The fields of one event after those of the other; add to it with `flat += fields`."""
        for event in events:
            self.flat += event

    def __len__(self) -> int:
        """Return the number of events."""
        return len(self.flat) // len(ObservedEvent._fields)

    def __iter__(self) -> Iterator[EventFields]:
        """Yield the fields of each event."""
        fields = [iter(self.flat)] * len(ObservedEvent._fields)
        return cast(Iterator[EventFields], zip(*fields, strict=True))

    def iter_columns(self) -> Iterator[list[Any]]:
        """Yield all values of one field after those of the other."""
        count = len(ObservedEvent._fields)
        return (self.flat[start::count] for start in range(count))

    def set_blake3(self, digests: Sequence[bytes]) -> None:
        """Replace the indices of digests by the digests themselves."""
        count = len(ObservedEvent._fields)
        for at in range(count - 1, len(self.flat), count):
            if isinstance(self.flat[at], int):
                self.flat[at] = digests[self.flat[at]]

    def drop_blake3(self) -> None:
        """Drop digests that are not known yet, and events that have no other."""
        events = [ObservedEvent(*fields) for fields in self]
        self.flat = []
        for event in events:
            if not isinstance(event.blake3, int):
                self.flat += event
            elif event.digest:
                self.flat += event._replace(blake3=b"")

    def keep_last(self, count: int) -> None:
        """Drop all events but the last `count`."""
        del self.flat[: max(0, len(self) - count) * len(ObservedEvent._fields)]


_KEPT: Final = 64
"""Number of decoded texts to cache: most steps have the settings of the step before."""


@dataclass(frozen=True, slots=True)
class ParameterSettings:
    """What an optimizer does with a parameter."""

    requires_grad: bool
    group: str
    """Its parameter group: "0", or "1.0" for the first group of the second of several optimizers; "" if in none."""


@dataclass(frozen=True, slots=True)
class OptimizerSettings:
    """The class and the settings of an optimizer."""

    class_name: str
    groups: tuple[Mapping[str, Json], ...]


@dataclass(frozen=True, slots=True)
class StepSettings:
    """The settings of one step of one rank; empty if none were recorded."""

    modules: Mapping[str, Mapping[str, Json]] = field(default_factory=dict)
    """By name of the module, its class, its mode and its plain attributes."""
    parameters: Mapping[str, ParameterSettings] = field(default_factory=dict)
    tied: Mapping[str, str] = field(default_factory=dict)
    """Other names of a parameter, and the name under which it is recorded."""
    optimizers: Mapping[str, OptimizerSettings] = field(default_factory=dict)
    """By number, "0", "1"; "" if there is only one."""


def encode_model(
    modules: Mapping[str, Mapping[str, Json]], parameters: Mapping[str, ParameterSettings], tied: Mapping[str, str]
) -> str:
    """Return the settings of a model as text."""
    flags = {name: [each.requires_grad, each.group] for name, each in parameters.items()}
    return json.dumps({"modules": modules, "parameters": flags, "tied": tied}, separators=(",", ":"))


def encode_optimizer(settings: OptimizerSettings) -> str:
    """Return the settings of an optimizer as text."""
    return json.dumps({"class": settings.class_name, "groups": settings.groups}, separators=(",", ":"))


def is_settings(event: Event) -> bool:
    """Return whether an event is settings, which explain differences and are not compared like tensors."""
    return event.site.kind == "setting"


def keep_shared(ours: Sequence[Event], theirs: Sequence[Event]) -> tuple[Sequence[Event], Sequence[Event]]:
    """Leave out gradients during the backward pass if only one run has any: earlier versions did not record them."""
    if any(map(_is_during_backward, ours)) == any(map(_is_during_backward, theirs)):
        return ours, theirs
    first, second = ([event for event in side if not _is_during_backward(event)] for side in (ours, theirs))
    return first, second


def _is_during_backward(event: Event) -> bool:
    return event.site.kind == "param_grad" and event.site.path.startswith("#")


def read_settings(events: Iterable[Event]) -> StepSettings:
    """Return the settings among the events of a step; raises Corrupt if their text is invalid."""
    found: dict[str, Any] = {}
    optimizers: dict[str, OptimizerSettings] = {}
    for event in events:
        if event.site.kind != "setting":
            continue
        try:
            if event.site.phase == "optimizer":
                optimizers[event.site.path] = _decode_optimizer(event.form)
            else:
                found = _decode_model(event.form)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise Corrupt(f"the settings of step {event.site.step} are invalid: {error!r}") from error
    return StepSettings(**found, optimizers=optimizers)


@lru_cache(maxsize=_KEPT)
def _decode_model(text: str) -> dict[str, Any]:
    found = json.loads(text)
    parameters = {name: ParameterSettings(*flags) for name, flags in found["parameters"].items()}
    return {"modules": dict(found["modules"]), "parameters": parameters, "tied": dict(found["tied"])}


@lru_cache(maxsize=_KEPT)
def _decode_optimizer(text: str) -> OptimizerSettings:
    found = json.loads(text)
    return OptimizerSettings(found["class"], tuple(dict(group) for group in found["groups"]))
