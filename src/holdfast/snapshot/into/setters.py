"""Puts values where a tree holds others, and can put the old ones back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from holdfast.tensors.sharding.sharded import PerRank

Undo = Callable[[], None]
"""Puts back what was there when it was made."""


class Put(Protocol):
    """One place of a tree that can hold another value."""

    def __call__(self, value: Any, /) -> None:
        """Put a value there."""

    def keep(self) -> Undo:
        """Return what puts the present value back."""


@dataclass(frozen=True, slots=True)
class Setter:
    """Puts a value into a dict or list."""

    container: Any
    key: Any

    def __call__(self, value: Any, /) -> None:
        """Put it there."""
        self.container[self.key] = value

    def keep(self) -> Undo:
        """Return what puts the present value back."""
        held = self.container[self.key]
        return lambda: self(held)


@dataclass(frozen=True, slots=True)
class FieldSetter:
    """Puts a value into a field of a dataclass."""

    owner: Any
    name: str

    def __call__(self, value: Any, /) -> None:
        """Put it there."""
        setattr(self.owner, self.name, value)

    def keep(self) -> Undo:
        """Return what puts the present value back."""
        held = getattr(self.owner, self.name)
        return lambda: self(held)


@dataclass(frozen=True, slots=True)
class PerRankSetter:
    """Puts a value where it is declared to be one rank's own, and declares it again."""

    inner: Put

    def __call__(self, value: Any, /) -> None:
        """Put it there."""
        self.inner(PerRank(value))

    def keep(self) -> Undo:
        """Return what puts the present value back."""
        return self.inner.keep()
