"""One step of one rank as a scene: which calls there are, what lies in them, and who takes what they give."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from holdfast.capture.stored.events import Event

Standing = Literal["equal", "close", "differs", "missing"]
"""How an event is to its partner in the other run; `missing` has none."""

_LATER: Final = frozenset({"backward", "optimizer"})


def is_below(fqn: str, module: str) -> bool:
    """Tell whether a name is that of something inside of a module; all names are, for the model itself."""
    return fqn != module and (not module or fqn.startswith(f"{module}."))


@dataclass(slots=True)
class ModuleCall:
    """One call of a module; events are meant by their places in the step."""

    fqn: str
    number: int
    module: str
    inputs: list[int] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)

    def holds(self, place: int) -> bool:
        """Tell whether an event lies between the inputs and the outputs; never, if no input was recorded."""
        return bool(self.inputs) and self.inputs[-1] < place and (not self.outputs or place < self.outputs[0])


class StepGraph:
    """The events of one step of one rank in order, and how each is to its partner."""

    def __init__(self, events: Sequence[Event]) -> None:
        """Find the calls; nothing differs yet."""
        self.events = events
        self.standings: Sequence[Standing] = ["equal"] * len(events)
        self.calls: dict[tuple[str, int], ModuleCall] = {}
        self.grads: defaultdict[tuple[str, int], list[int]] = defaultdict(list)
        self.param_grads: defaultdict[str, list[int]] = defaultdict(list)
        self.first_output = len(events)
        """Where the first result of any call stands."""
        self._by_fqn: defaultdict[str, list[ModuleCall]] = defaultdict(list)
        self._takers: defaultdict[tuple[bytes, tuple[int, ...]], list[ModuleCall]] = defaultdict(list)
        self._bad: list[int] = []
        for place, event in enumerate(events):
            self._add(place, event)

    def _add(self, place: int, event: Event) -> None:
        site = event.site
        if site.kind in ("input", "output") and site.phase not in _LATER:
            call = self.calls.get((site.fqn, site.call))
            if call is None:
                call = self.calls[site.fqn, site.call] = ModuleCall(site.fqn, site.call, event.module)
                self._by_fqn[site.fqn].append(call)
            if site.kind == "output":
                self.first_output = min(self.first_output, place)
            (call.inputs if site.kind == "input" else call.outputs).append(place)
            if site.kind == "input" and 0 not in event.shape:
                self._takers[event.digest, event.shape].append(call)
        elif site.kind == "grad":
            self.grads[site.fqn, site.call].append(place)
        elif site.kind == "param_grad":
            self.param_grads[site.fqn].append(place)

    def settle(self, standings: Sequence[Standing]) -> None:
        """Take over how each event is to its partner."""
        self.standings = standings
        self._bad = [place for place, standing in enumerate(standings) if standing == "differs"]

    def is_bad(self, place: int) -> bool:
        """Tell whether an event differs."""
        return self.standings[place] == "differs"

    def iter_bad(self, start: int, stop: int) -> Iterator[int]:
        """Yield the places from `start` to before `stop` that differ."""
        for index in range(bisect_left(self._bad, start), bisect_left(self._bad, stop)):
            yield self._bad[index]

    def find_enclosing(self, place: int) -> ModuleCall | None:
        """Return the innermost call around an event, by name and by order."""
        event = self.events[place]
        name = event.parent if event.site.kind == "op" else _find_parent(event.site.fqn)
        while name is not None:
            for call in self._by_fqn.get(name, ()):
                if call.holds(place):
                    return call
            name = _find_parent(name)
        return None

    def find_owner(self, name: str) -> str | None:
        """Return the module that has calls and that a parameter belongs to, by name; the innermost one."""
        parent = _find_parent(name)
        while parent is not None and parent not in self._by_fqn:
            parent = _find_parent(parent)
        return parent

    def find_calls(self, fqn: str) -> Sequence[ModuleCall]:
        """Return the calls of a module in order."""
        return self._by_fqn.get(fqn, ())

    def find_output(self, place: int) -> int | None:
        """Return the output that a gradient belongs to."""
        site = self.events[place].site
        call = self.calls.get((site.fqn, site.call))
        # A gradient that arrives for the second time says so in its path.
        path = site.path.partition("#")[0]
        found = [out for out in call.outputs if self.events[out].site.path == path] if call else []
        return found[0] if found else None

    def find_takers(self, place: int) -> list[ModuleCall]:
        """Return the calls that take an output, inner ones first: an input of theirs comes later and has its bytes.

        Bytes rather than identity: a tensor that is passed on unchanged is the same one in any recording.
        """
        event = self.events[place]
        takers = [call for call in self._takers.get((event.digest, event.shape), ()) if call.inputs[-1] > place]
        inner = keep_innermost(takers)
        return inner + [call for call in takers if call not in inner]

    def find_later(self, place: int, around: ModuleCall) -> list[ModuleCall]:
        """Return the innermost calls inside of a call that come after an event."""
        found = (
            call
            for call in self.calls.values()
            if call.inputs
            and call.inputs[0] > place
            and around.holds(call.inputs[0])
            and is_below(call.fqn, around.fqn)
        )
        return keep_innermost(list(found))


def keep_innermost(calls: Sequence[ModuleCall]) -> list[ModuleCall]:
    """Leave out calls that have another one of these inside."""
    kept = {(call.fqn, call.number): call for call in calls}
    return [
        call
        for call in kept.values()
        if not any(is_below(inner.fqn, call.fqn) and call.holds(inner.inputs[0]) for inner in kept.values())
    ]


def _find_parent(fqn: str) -> str | None:
    return (fqn.rpartition(".")[0]) if fqn else None
