"""Puts a loaded value where a tree holds another: into a dict, a list or a dataclass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from holdfast.tensors.sharded import PerRank

Put = Callable[[Any], None] | None
"""Puts another value where the target's was; None where nothing can be put."""


@dataclass(frozen=True, slots=True)
class Setter:
    """Puts a value into a dict or list."""

    container: Any
    key: Any

    def __call__(self, value: Any) -> None:
        """Put it there."""
        self.container[self.key] = value


@dataclass(frozen=True, slots=True)
class FieldSetter:
    """Puts a value into a field of a dataclass."""

    owner: Any
    name: str

    def __call__(self, value: Any) -> None:
        """Put it there."""
        setattr(self.owner, self.name, value)


def declare(put: Put) -> Put:
    """Return what puts a value where it is declared to be one rank's own, and declares it again."""
    return None if put is None else lambda value: put(PerRank(value))
