"""The processes of a save: a single one, or the ranks of a group, which do each step together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, Protocol


@dataclass(slots=True)
class GatherStep:
    """The values of one step of all ranks."""

    given: Any = None
    """The value of this rank, to be set in the `with`."""
    values: list[Any] = field(default_factory=list)
    """The values of all ranks, in the order of the ranks, once the `with` has ended."""


class Ranks(Protocol):
    """The ranks of one save. All ranks MUST call each step, in the same order, with plain data as values.

    An error on one rank MUST end the step on every rank, with a RankError. If its `failures` name other ranks but not
    the rank that raises it, no rank, not even the coordinator, may have got a result of that step. If `failures` is
    empty, or names the raising rank, other ranks may have got a result.
    """

    @property
    def rank(self) -> int:
        """The rank of this process, from 0."""

    @property
    def world_size(self) -> int:
        """The number of ranks."""

    @property
    def coordinator(self) -> int:
        """The rank that commits for all ranks."""

    @property
    def is_coordinator(self) -> bool:
        """Whether this rank is the coordinator."""

    def broadcast(self, step: str, map: Callable[[], Any]) -> Any:
        """Call `map` on the coordinator and return its value on every rank."""

    def all_gather(self, step: str, map: Callable[[], Any]) -> list[Any]:
        """Call `map` on every rank and return all values, in the order of the ranks."""

    def gathering(self, step: str) -> AbstractContextManager[GatherStep]:
        """Make the body of the `with` a step of all ranks; at its end, each rank has the values of all."""

    def beat(self) -> None:
        """Show the other ranks that this one is alive; cheap enough to call for every chunk."""

    def check_failures(self) -> None:
        """Raise RankError if another rank has failed since; as cheap as `beat`."""


class SingleProcess:
    """A single process: every step is a plain call."""

    rank: Final = 0
    world_size: Final = 1
    coordinator: Final = 0
    is_coordinator: Final = True

    def broadcast(self, step: str, map: Callable[[], Any]) -> Any:
        """Return the value of `map`."""
        return map()

    def all_gather(self, step: str, map: Callable[[], Any]) -> list[Any]:
        """Return the value of `map` in a list."""
        return [map()]

    @contextmanager
    def gathering(self, step: str) -> Iterator[GatherStep]:
        """Yield a gathering of one rank."""
        gathering = GatherStep()
        yield gathering
        gathering.values = [gathering.given]

    def beat(self) -> None:
        """Do nothing: no other rank waits."""

    def check_failures(self) -> None:
        """Do nothing: no other rank can fail."""


SINGLE_PROCESS: Final = SingleProcess()
