"""Globs for names: `*`, `?` and `[...]` match within one part of a name, `**` matches any number of parts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import translate
from functools import cached_property
from typing import Final

_MAGIC: Final = re.compile(r"[*?\[]")
_ANY_PARTS: Final = "**"


def is_glob(text: str) -> bool:
    """Return whether a text contains a character that is special in a glob."""
    return bool(_MAGIC.search(text))


def split_literal(text: str) -> str:
    """Return the start of a glob that every match begins with; the whole text if it is no glob."""
    found = _MAGIC.search(text)
    return text[: found.start()] if found else text


@dataclass(frozen=True)
class Glob:
    """A pattern for whole names. `[*]` matches a star itself."""

    pattern: str

    def matches(self, name: str) -> bool:
        """Return whether the whole name matches."""
        # The positions in the pattern that the parts so far can have reached: linear in both, without backtracking.
        reached = self._skip({0})
        for part in name.split("/"):
            reached = self._skip({after for at in reached for after in self._step(at, part)})
            if not reached:
                return False
        return len(self._parts) in reached

    @cached_property
    def _parts(self) -> Sequence[re.Pattern[str] | None]:
        """One pattern for each part of a name; None for `**`."""
        parts = self.pattern.split("/")
        # `run/**` matches what is below `run`, and not `run` itself.
        parts += ["*"] if parts[-1] == _ANY_PARTS else []
        return [None if part == _ANY_PARTS else re.compile(translate(part)) for part in parts]

    def _step(self, at: int, part: str) -> Sequence[int]:
        if at == len(self._parts):
            return ()
        expected = self._parts[at]
        if expected is None:
            return (at,)
        return (at + 1,) if expected.match(part) else ()

    def _skip(self, reached: set[int]) -> set[int]:
        """Add the positions behind each `**`, which may match no part at all."""
        for at, part in enumerate(self._parts):
            if part is None and at in reached:
                reached.add(at + 1)
        return reached
