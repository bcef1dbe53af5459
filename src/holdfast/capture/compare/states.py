"""Tracks parameters, buffers, optimizer state and RNG state over the steps of a run: how each was last observed."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from holdfast.capture.compare.step_graph import Standing, is_below
from holdfast.capture.stored.events import Event, EventKind, Phase

_SEPARATORS: Final = ".:/["
_GROUPS: Final = "param_groups."
STATE: Final = frozenset({"parameter", "buffer", "optimizer", "rng"})
_USED: Final = frozenset({"parameter", "buffer"})


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
        self._seen: dict[str, LastState] = {}
        self._updated: dict[str, LastState] = {}
        """States observed in the optimizer phase of this step: their values after the update."""
        self._bad_below: Counter[str] = Counter()
        """By module, the number of parameters and buffers in it that differ."""
        self._bad: dict[str, None] = {}
        self._of_parameter: defaultdict[str, dict[str, None]] = defaultdict(dict)

    def find(self, name: str) -> LastState | None:
        """Return how a state was last observed."""
        return self._updated.get(name) or self._seen.get(name)

    def find_before(self, name: str) -> LastState | None:
        """Return how a state was observed before the optimizer of this step ran."""
        return self._seen.get(name)

    def find_of_parameter(self, parameter: str) -> list[LastState]:
        """Return how the optimizer's states of a parameter were observed before this step."""
        return [self._seen[name] for name in self._of_parameter.get(parameter, ()) if name in self._seen]

    def find_below(self, module: str) -> tuple[tuple[str, Standing], ...]:
        """Return the parameters and buffers in a module and everything below it."""
        return tuple(
            (name, seen.standing) for name, seen in self._seen.items() if seen.kind in _USED and is_below(name, module)
        )

    def has_bad(self, module: str = "") -> bool:
        """Return whether a parameter or buffer in a module differs; by default, in the whole model."""
        return self._bad_below[module] > 0

    def iter_bad(self) -> Iterator[str]:
        """Yield the parameters and buffers that differ."""
        yield from self._bad

    def note(self, event: Event, standing: Standing) -> None:
        """Store the current state; what the optimizer updated counts only from the next step on."""
        site = event.site
        name = find_name(event)
        if site.kind == "optimizer":
            self._of_parameter[self.find_parameter(event)][name] = None
        seen = LastState(site.kind, standing, site.step, site.phase)
        if site.phase == "optimizer":
            self._updated[name] = seen
        else:
            self._keep(name, seen)

    def end_step(self) -> None:
        """Let the updates of the optimizer count."""
        for name, seen in self._updated.items():
            self._keep(name, seen)
        self._updated = {}

    def _keep(self, name: str, seen: LastState) -> None:
        self._seen[name] = seen
        is_bad = seen.kind in _USED and seen.standing == "differs"
        if is_bad == (name in self._bad):
            return
        if is_bad:
            self._bad[name] = None
        else:
            del self._bad[name]
        module = name
        while module:
            module = module.rpartition(".")[0]
            self._bad_below[module] += 1 if is_bad else -1

    def find_parameter(self, event: Event) -> str:
        """Return the parameter that an optimizer state belongs to: its name, or a prefix of it."""
        fqn = name = event.site.fqn
        if event.site.path:
            return fqn
        while name:
            seen = self.find(name)
            if seen and seen.kind == "parameter":
                return name
            name = name[: max(0, *(name.rfind(sign) for sign in _SEPARATORS))]
        return fqn.rpartition(".")[0] or fqn


def is_setting(event: Event) -> bool:
    """Return whether an event is a setting of a parameter group, such as the learning rate: set, not computed."""
    return event.site.kind == "optimizer" and event.site.fqn.startswith(_GROUPS) and bool(event.site.path)


def find_name(event: Event) -> str:
    """Return the name of a state, including its path."""
    return event.site.fqn + event.site.path
