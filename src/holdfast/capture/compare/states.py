"""The states of a run as last observed: parameters, buffers, optimizer state and RNG state keep their values."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from holdfast.capture.compare.step_graph import Standing, is_below, iter_modules
from holdfast.capture.stored.events import Event, EventKind, Phase

_SEPARATORS: Final = ".:/["
"""Characters that may follow the name of a parameter in the name of an optimizer state."""
_GROUPS: Final = "param_groups."
"""Prefix of the names of parameter groups."""
STATE: Final = frozenset({"parameter", "buffer", "optimizer", "rng"})
"""Kinds of events that keep their value from one step to the next."""
_USED: Final = frozenset({"parameter", "buffer"})
"""Kinds of state that a forward pass computes with."""


@dataclass(frozen=True, slots=True)
class LastState:
    """When a state was last observed, and how it compared with the other run's."""

    kind: EventKind
    standing: Standing
    step: int
    phase: Phase


class States:
    """How each state of one rank was last observed, and which modules contain states that differ."""

    def __init__(self) -> None:
        self._last: dict[str, LastState] = {}
        self._updated: dict[str, LastState] = {}
        """States observed in the optimizer phase of this step: their values after the update."""
        self._bad_below: Counter[str] = Counter()
        """By module, the number of parameters and buffers in it that differ."""
        self._bad: dict[str, frozenset[str]] = {}
        """The parameters and buffers that differ, each with the modules that contain it under any of its names."""
        self._tied: defaultdict[str, list[str]] = defaultdict(list)
        self._of_parameter: defaultdict[str, dict[str, None]] = defaultdict(dict)

    def set_tied(self, tied: Mapping[str, str]) -> None:
        """Set the other names of parameters, each with the name that has the state."""
        self._tied.clear()
        for other, name in tied.items():
            self._tied[name].append(other)

    def find_names(self, name: str) -> tuple[str, ...]:
        """Return all names of a parameter."""
        return (name, *self._tied.get(name, ()))

    def find(self, name: str) -> LastState | None:
        """Return how a state was last observed."""
        return self._updated.get(name) or self._last.get(name)

    def find_before(self, name: str) -> LastState | None:
        """Return how a state was observed before the optimizer of this step ran."""
        return self._last.get(name)

    def find_of_parameter(self, parameter: str) -> list[LastState]:
        """Return how the optimizer's states of a parameter were observed before this step."""
        return [self._last[name] for name in self._of_parameter.get(parameter, ()) if name in self._last]

    def find_below(self, module: str) -> tuple[tuple[str, Standing], ...]:
        """Return the parameters and buffers in a module and everything below it."""
        return tuple(
            (each, last.standing)
            for name, last in self._last.items()
            if last.kind in _USED
            for each in self.find_names(name)
            if is_below(each, module)
        )

    def has_bad(self, module: str = "") -> bool:
        """Return whether a parameter or buffer in a module differs; by default, in the whole model."""
        return self._bad_below[module] > 0

    def iter_bad(self) -> Iterator[str]:
        """Yield the parameters and buffers that differ, under all of their names."""
        for name in self._bad:
            yield from self.find_names(name)

    def note(self, event: Event, standing: Standing) -> None:
        """Remember how a state was observed; a value after the optimizer's update counts only from the next step on."""
        site = event.site
        name = find_name(event)
        if site.kind == "optimizer":
            self._of_parameter[self.find_parameter(event)][name] = None
        last = LastState(site.kind, standing, site.step, site.phase)
        if site.phase == "optimizer":
            self._updated[name] = last
        else:
            self._keep(name, last)

    def end_step(self) -> None:
        """Make the values after the optimizer's update the last known ones."""
        for name, last in self._updated.items():
            self._keep(name, last)
        self._updated = {}

    def _keep(self, name: str, last: LastState) -> None:
        self._last[name] = last
        is_bad = last.kind in _USED and last.standing == "differs"
        if is_bad == (name in self._bad):
            return
        if is_bad:
            self._bad[name] = frozenset(module for each in self.find_names(name) for module in iter_modules(each))
            self._bad_below.update(self._bad[name])
        else:
            self._bad_below.subtract(self._bad.pop(name))

    def find_parameter(self, event: Event) -> str:
        """Return the parameter that an optimizer state belongs to: its name, or a prefix of it."""
        fqn = name = event.site.fqn
        if event.site.path:
            return fqn
        while name:
            last = self.find(name)
            if last and last.kind == "parameter":
                return name
            name = name[: max(0, *(name.rfind(sign) for sign in _SEPARATORS))]
        return fqn.rpartition(".")[0] or fqn


def is_setting(event: Event) -> bool:
    """Return whether an event is a setting of a parameter group, such as the learning rate: set, not computed."""
    return event.site.kind == "optimizer" and event.site.fqn.startswith(_GROUPS) and bool(event.site.path)


def find_optimizer(event: Event) -> str:
    """Return the number of the optimizer that a setting belongs to; "" if there is only one."""
    return event.site.fqn.removeprefix(_GROUPS).rpartition(".")[0]


def find_name(event: Event) -> str:
    """Return the name of a state, including its path."""
    return event.site.fqn + event.site.path
