"""Who takes part in a save: one process alone, or the ranks of a group that do each step together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Protocol


class Ranks(Protocol):
    """The ranks of one save. Each step MUST be called by all of them, in the same order, with plain data as values.

    What a rank raises in a step MUST end that step on every rank, by a RankError. If its `failures` name ranks, and
    not the one that it is raised on, then no rank, the coordinator included, MUST have had a result of that step. If
    they are empty, or name the rank itself, others may have had one.
    """

    @property
    def rank(self) -> int:
        """Which of them this process is."""

    @property
    def world_size(self) -> int:
        """How many there are."""

    @property
    def is_coordinator(self) -> bool:
        """Tell whether this one commits for all."""

    def broadcast(self, step: str, map: Callable[[], Any]) -> Any:
        """Call `map` on the coordinator and return its value everywhere."""

    def all_gather(self, step: str, map: Callable[[], Any]) -> list[Any]:
        """Call `map` everywhere and return the values of all ranks, in their order."""

    def beat(self) -> None:
        """Show the others that this rank is alive; cheap enough to be called for every bit of work."""

    def check_failures(self) -> None:
        """Raise RankError if another rank has failed meanwhile; as cheap."""


class Alone:
    """A world of one: every step is a call."""

    rank: Final = 0
    world_size: Final = 1
    is_coordinator: Final = True

    def broadcast(self, step: str, map: Callable[[], Any]) -> Any:
        """Return the value."""
        return map()

    def all_gather(self, step: str, map: Callable[[], Any]) -> list[Any]:
        """Return the value, in a list."""
        return [map()]

    def beat(self) -> None:
        """Do nothing: nobody waits."""

    def check_failures(self) -> None:
        """Do nothing: there is nobody else."""


ALONE: Final = Alone()
