"""Many strings in little memory: the names of a manifest's entries."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import overload


class PackedNames(Sequence[str]):
    """A sequence of strings, stored as one string; items are created when they are read."""

    def __init__(self, names: Sequence[str]) -> None:
        self._text = "".join(names)
        self._ends = array("Q", accumulate(map(len, names)))

    def __len__(self) -> int:
        """Return the number of names."""
        return len(self._ends)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        """Return a name, or a list of them for a slice."""
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        number = index if index >= 0 else len(self) + index
        return self._text[self._ends[number - 1] if number > 0 else 0 : self._ends[number]]

    def __iter__(self) -> Iterator[str]:
        """Yield all names."""
        start = 0
        for end in self._ends:
            yield self._text[start:end]
            start = end
