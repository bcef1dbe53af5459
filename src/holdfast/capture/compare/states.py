"""What is known of parameters, buffers and states of optimizers while a run is gone through: how each was last seen."""

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
    """When a state was last seen, and how it was."""

    kind: EventKind
    standing: Standing
    step: int
    phase: Phase


class States:
    """How each state of one rank was last seen, and which modules have some that differ."""

    def __init__(self) -> None:
        """Know of nothing."""
        self._seen: dict[str, LastState] = {}
        self._updated: dict[str, LastState] = {}
        """Seen in the optimizer phase of this step: what it is after the update, not before."""
        self._bad_below: Counter[str] = Counter()
        """By module, how many of the parameters and buffers in it differ."""
        self._bad: dict[str, None] = {}
        self._of_parameter: defaultdict[str, dict[str, None]] = defaultdict(dict)

    def find(self, name: str) -> LastState | None:
        """Return how a state was last seen."""
        return self._updated.get(name) or self._seen.get(name)

    def find_before(self, name: str) -> LastState | None:
        """Return how a state was before the optimizer of this step."""
        return self._seen.get(name)

    def find_of_parameter(self, parameter: str) -> list[LastState]:
        """Return how the optimizer's states of a parameter were before its step."""
        return [self._seen[name] for name in self._of_parameter.get(parameter, ()) if name in self._seen]

    def find_below(self, module: str) -> tuple[tuple[str, Standing], ...]:
        """Return the parameters and buffers of a module and of all below it."""
        return tuple(
            (name, seen.standing) for name, seen in self._seen.items() if seen.kind in _USED and is_below(name, module)
        )

    def has_bad(self, module: str = "") -> bool:
        """Tell whether a parameter or buffer in a module differs; in any, if none is named."""
        return self._bad_below[module] > 0

    def iter_bad(self) -> Iterator[str]:
        """Yield the parameters and buffers that differ."""
        yield from self._bad

    def note(self, event: Event, standing: Standing) -> None:
        """Take over how a state is now; what the optimizer has made counts from the next step on."""
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
        """Let what the optimizer has made count."""
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
        """Return the parameter that a state of the optimizer belongs to: what it is called by, or begins with."""
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
    """Tell whether an event is a number of a group of parameters, such as the learning rate: set, not computed."""
    return event.site.kind == "optimizer" and event.site.fqn.startswith(_GROUPS) and bool(event.site.path)


def find_name(event: Event) -> str:
    """Return the name of a state: with its path, if it has one."""
    return event.site.fqn + event.site.path
