"""Replaces values in a tree, and restores the old ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from holdfast.tensors.sharding.sharded import PerRank

Undo = Callable[[], None]
"""Restores the value that was there when it was created."""


class Put(Protocol):
    """A position in a tree that can be assigned."""

    def __call__(self, value: Any, /) -> None:
        """Assign a value."""

    def keep(self) -> Undo:
        """Return a function that restores the current value."""


@dataclass(frozen=True, slots=True)
class Setter:
    """Assigns an item of a dict or list."""

    container: Any
    key: Any

    def __call__(self, value: Any, /) -> None:
        """Assign a value."""
        self.container[self.key] = value

    def keep(self) -> Undo:
        """Return a function that restores the current value."""
        held = self.container[self.key]
        return lambda: self(held)


@dataclass(frozen=True, slots=True)
class FieldSetter:
    """Assigns a field of a dataclass."""

    owner: Any
    name: str

    def __call__(self, value: Any, /) -> None:
        """Assign a value."""
        setattr(self.owner, self.name, value)

    def keep(self) -> Undo:
        """Return a function that restores the current value."""
        held = getattr(self.owner, self.name)
        return lambda: self(held)


@dataclass(frozen=True, slots=True)
class PerRankSetter:
    """Assigns a value that is declared per rank, and declares the new one."""

    inner: Put

    def __call__(self, value: Any, /) -> None:
        """Assign a value."""
        self.inner(PerRank(value))

    def keep(self) -> Undo:
        """Return a function that restores the current value."""
        return self.inner.keep()
