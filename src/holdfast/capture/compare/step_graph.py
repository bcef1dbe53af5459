"""One step of one rank as a graph: its module calls, the events inside them, and which calls consume an output."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from holdfast.capture.stored.events import Event

Standing = Literal["equal", "close", "differs", "missing"]
"""How an event compares with its partner in the other run; `missing` if it has none, or the two cannot be compared."""

_LATER: Final = frozenset({"backward", "optimizer"})


def is_below(fqn: str, module: str) -> bool:
    """Return whether a name is inside a module; every name is inside the model, whose name is ""."""
    return fqn != module and (not module or fqn.startswith(f"{module}."))


def iter_modules(name: str) -> Iterator[str]:
    """Yield the modules that contain a name, the innermost first and the model last."""
    while name:
        name = name.rpartition(".")[0]
        yield name


@dataclass(slots=True)
class ModuleCall:
    """One call of a module; its inputs and outputs are indices of events in the step."""

    fqn: str
    number: int
    module: str
    inputs: list[int] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)

    def contains(self, index: int) -> bool:
        """Return whether an event is between the inputs and the outputs; False if no input was recorded."""
        return bool(self.inputs) and self.inputs[-1] < index and (not self.outputs or index < self.outputs[0])


class StepGraph:
    """The events of one step of one rank in order, and how each compares with its partner."""

    def __init__(self, events: Sequence[Event]) -> None:
        """Find the calls in `events`; until `set_standings`, all events count as equal."""
        self.events = events
        self.standings: Sequence[Standing] = ["equal"] * len(events)
        self.calls: dict[tuple[str, int], ModuleCall] = {}
        self.grads: defaultdict[tuple[str, int], list[int]] = defaultdict(list)
        self.param_grads: defaultdict[str, list[int]] = defaultdict(list)
        self.first_output = len(events)
        """Index of the first output of any call."""
        self._by_fqn: defaultdict[str, list[ModuleCall]] = defaultdict(list)
        self._consumers: defaultdict[tuple[bytes, tuple[int, ...]], list[ModuleCall]] = defaultdict(list)
        self._bad: list[int] = []
        for index, event in enumerate(events):
            self._add(index, event)

    def _add(self, index: int, event: Event) -> None:
        site = event.site
        if site.kind in ("input", "output") and site.phase not in _LATER:
            call = self.calls.get((site.fqn, site.call))
            if call is None:
                call = self.calls[site.fqn, site.call] = ModuleCall(site.fqn, site.call, event.module)
                self._by_fqn[site.fqn].append(call)
            if site.kind == "output":
                self.first_output = min(self.first_output, index)
            (call.inputs if site.kind == "input" else call.outputs).append(index)
            if site.kind == "input" and 0 not in event.shape:
                self._consumers[event.identity, event.shape].append(call)
        elif site.kind == "grad":
            self.grads[site.fqn, site.call].append(index)
        elif site.kind == "param_grad":
            self.param_grads[site.fqn].append(index)

    def set_standings(self, standings: Sequence[Standing]) -> None:
        """Set how each event compares with its partner."""
        self.standings = standings
        self._bad = [index for index, standing in enumerate(standings) if standing == "differs"]

    def is_bad(self, index: int) -> bool:
        """Return whether an event differs."""
        return self.standings[index] == "differs"

    def iter_bad(self, start: int, stop: int) -> Iterator[int]:
        """Yield the indices of events that differ, from `start` to before `stop`."""
        for index in range(bisect_left(self._bad, start), bisect_left(self._bad, stop)):
            yield self._bad[index]

    def find_enclosing(self, index: int) -> ModuleCall | None:
        """Return the innermost call that contains an event, by name and order."""
        event = self.events[index]
        name = event.parent if event.site.kind == "op" else _find_parent(event.site.fqn)
        while name is not None:
            for call in self._by_fqn.get(name, ()):
                if call.contains(index):
                    return call
            name = _find_parent(name)
        return None

    def find_owner(self, name: str) -> str | None:
        """Return the innermost called module that contains a parameter, by name."""
        parent = _find_parent(name)
        while parent is not None and parent not in self._by_fqn:
            parent = _find_parent(parent)
        return parent

    def find_calls(self, fqn: str) -> Sequence[ModuleCall]:
        """Return the calls of a module in order."""
        return self._by_fqn.get(fqn, ())

    def find_output(self, index: int) -> int | None:
        """Return the index of the output that a gradient belongs to."""
        site = self.events[index].site
        call = self.calls.get((site.fqn, site.call))
        # The path of a gradient that arrives a second time ends with "#2".
        path = site.path.partition("#")[0]
        found = [out for out in call.outputs if self.events[out].site.path == path] if call else []
        return found[0] if found else None

    def find_consumers(self, index: int) -> list[ModuleCall]:
        """Return the calls that consume an output, inner ones first: a later input of theirs has the same bytes.

        Bytes rather than identity, because recordings contain only bytes.
        """
        event = self.events[index]
        consumers = [call for call in self._consumers.get((event.identity, event.shape), ()) if call.inputs[-1] > index]
        inner = keep_innermost(consumers)
        return inner + [call for call in consumers if call not in inner]

    def find_later(self, index: int, around: ModuleCall) -> list[ModuleCall]:
        """Return the innermost calls inside the call `around` that come after an event."""
        found = (
            call
            for call in self.calls.values()
            if call.inputs
            and call.inputs[0] > index
            and around.contains(call.inputs[0])
            and is_below(call.fqn, around.fqn)
        )
        return keep_innermost(list(found))


def keep_innermost(calls: Sequence[ModuleCall]) -> list[ModuleCall]:
    """Leave out calls that contain another of these calls."""
    kept = {(call.fqn, call.number): call for call in calls}
    return [
        call
        for call in kept.values()
        if not any(is_below(inner.fqn, call.fqn) and call.contains(inner.inputs[0]) for inner in kept.values())
    ]


def _find_parent(fqn: str) -> str | None:
    return (fqn.rpartition(".")[0]) if fqn else None
