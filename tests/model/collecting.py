"""What a collector is asked to do, where it is, and one step of it about to be taken."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

from tests.model.world import Chain, LeaseFiles, Mark, Rules, Steps, World, move

EMPTY: Final[frozenset[str]] = frozenset()
NO_MARK: Final = -1
FLOOR: Final = -1
"""In a list of records to delete, instead of a name: raise the floor to this generation."""


@dataclass(frozen=True, slots=True)
class Collect:
    """What a collector is asked to do."""

    fences: bool = True
    """May fence at any moment: clocks decide when, never whether it is safe."""
    expires: bool = False
    """Fences leases before it looks for dead files, too: the files of a dead save are spared until somebody does."""
    adopts: bool = False
    """May go on with a mark that it finds, instead of making its own."""
    purges: bool = False
    """Removes dead records as well."""
    sweeps: bool = True
    """Without, it only purges."""
    withdraws: bool = False
    """Removes the mark that it swept though a file stays, if the lock says that nobody is at work."""
    clears: bool = False
    """Begins by removing the leases of dead saves, if the lock says that nobody is at work."""
    hurries: bool = False
    """Waits for nobody if the lock says that nobody is at work."""


class Collector(NamedTuple):
    """Where a collection is, and what it remembers."""

    at: str = "start"
    keys: frozenset[str] = EMPTY
    """Files listed, then candidates, then what is still to delete."""
    leases: frozenset[int] = frozenset()
    """Leases that were alive: first those whose files are spared, then those to wait for."""
    mark: int = NO_MARK
    """Whose mark it sweeps."""
    fencing: tuple[int, int] = (-1, -1)
    """The lease, and the generation that it tries to take."""
    names: tuple[Chain, ...] = ()
    lease_view: tuple[LeaseFiles, ...] = ()
    purge: tuple[tuple[int, int], ...] = ()
    is_unlocked: bool = False
    """It sweeps without the lock, which somebody else holds alone; only a mutant does."""


class Turn(NamedTuple):
    """One collector about to take one step."""

    world: World
    number: int
    order: Collect
    rules: Rules
    me: Collector

    def to(self, label: str, world: World | None = None, **changes: object) -> Steps:
        """Return the one step that this place allows."""
        return [(label, move(world or self.world, self.number, self.me._replace(**changes)))]  # type: ignore[arg-type]  # fields by name

    def after_sweep(self, label: str, world: World | None = None) -> Steps:
        after = Collector("purge list" if self.order.purges else "done")
        return [(label, move(world or self.world, self.number, after))]

    @property
    def before_fence(self) -> str:
        """Where it was when it took somebody for dead."""
        return "begin" if self.me.mark == NO_MARK else "wait"

    def find_mark(self) -> Mark | None:
        return next((mark for mark in self.world.marks if mark.owner == self.me.mark), None)
