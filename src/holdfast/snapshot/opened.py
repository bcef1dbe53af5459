"""An open snapshot: its reader, its tree, and its leaves by name and by path."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from types import TracebackType
from typing import Final, NamedTuple

from typing_extensions import Self

from holdfast.errors import AmbiguousName, Corrupt, NotFound
from holdfast.json_text import Json, canonical_json
from holdfast.repo.format.entry import Entry
from holdfast.repo.read.reader import SnapshotReader
from holdfast.snapshot.gc_pause import pause_gc_if_small
from holdfast.trees.outline import TREE, Leaf, iter_leaves, share_tags

_COMPARED: Final = 5000
"""How many names are compared with a missing one, to suggest a similar one."""

Encode = Callable[[object], Json]


class EntryRef(NamedTuple):
    """An entry by its number. Takes 64 bytes, where an Entry takes about 490; the Entry is created on demand."""

    opened: Opened
    number: int

    def find(self) -> Entry:
        """Return the entry from the current manifest."""
        return self.opened.entry(self.number)

    @property
    def name(self) -> str:
        """The name of the entry."""
        return self.opened.reader.manifest.names[self.number]


def find_saved_device(entry: Entry) -> str | None:
    """Return the device that a tensor was on when it was saved; None for the CPU."""
    saved = entry.note.get("device") if isinstance(entry.note, dict) else None
    return saved if isinstance(saved, str) else None


@dataclass(frozen=True, slots=True)
class FoundLeaves:
    """The result of looking up a name or path: one leaf, or all leaves below it."""

    name: str
    leaves: tuple[Leaf, ...]
    is_leaf: bool


class Opened:
    """A snapshot of a tree; any other snapshot, for example of files, is a dict of bytes."""

    def __init__(self, reader: SnapshotReader) -> None:
        """Take ownership of the reader."""
        self.reader = reader
        self.name = reader.snapshot.name
        spec = reader.manifest.spec
        if isinstance(spec, dict) and TREE in spec:
            self.tree: Json = spec[TREE]
            share_tags(self.tree)
        else:
            self.tree = ["dict"]
            for number, name in enumerate(reader.manifest.names):
                self.tree += [name, ["@bytes", number]]

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the reader."""
        self.reader.__exit__(kind, error, trace)

    def pausing_gc(self) -> AbstractContextManager[None]:
        """Pause Python's garbage collector during a load of many small entries."""
        return pause_gc_if_small(self.reader.snapshot.logical_bytes, len(self.reader.manifest))

    @cached_property
    def leaves(self) -> tuple[Leaf, ...]:
        """All leaves, in the order of the tree."""
        return tuple(iter_leaves(self.tree))

    @cached_property
    def _by_name(self) -> dict[str, list[Leaf]]:
        found: dict[str, list[Leaf]] = {}
        for leaf in self.leaves:
            found.setdefault(leaf.name, []).append(leaf)
        return found

    def find(self, name: str) -> FoundLeaves:
        """Return the leaf with that name, or all leaves whose names begin with it and a dot."""
        named = self._by_name.get(name, [])
        if len(named) > 1:
            paths = tuple(leaf.path_json for leaf in named)
            raise AmbiguousName(
                f"{len(named)} leaves of {self.name!r} have the name {name!r}; ask by path:"
                f" {' or '.join(str(path) for path in paths)}",
                paths=paths,
            )
        if named:
            return FoundLeaves(name, tuple(named), is_leaf=True)
        below = tuple(leaf for leaf in self.leaves if leaf.name.startswith(name + "."))
        if not below:
            close = difflib.get_close_matches(name, list(islice(self._by_name, _COMPARED)), n=1)
            hint = f"did you mean {close[0]!r}? " if close else ""
            advice = f"{hint}`holdfast show {self.name}` lists them"
            raise NotFound(f"no leaf {name!r} in {self.name!r}; {advice}", name=name)
        return FoundLeaves(name, below, is_leaf=False)

    def find_path(self, path: Sequence[object], encode: Encode) -> FoundLeaves:
        """Return what is at a path of keys."""
        keys = [canonical_json(encode(key)) for key in path]
        found = [leaf for leaf in self.leaves if [*map(canonical_json, leaf.path_json[: len(keys)])] == keys]
        if not found:
            raise NotFound(f"nothing at path {tuple(path)!r} in {self.name!r}", name=str(tuple(path)))
        is_leaf = len(found[0].path_json) == len(keys)
        name = found[0].name if is_leaf else ".".join(str(key) for key in path)
        return FoundLeaves(name, tuple(found), is_leaf=is_leaf)

    def entry(self, number: int) -> Entry:
        """Return an entry by the number in a node."""
        self._verify_number(number)
        return self.reader.manifest.entry(number)

    def find_facts(self, number: int) -> tuple[Json, int, int]:
        """Return the spec, size in bytes and alias of an entry by the number in a node."""
        self._verify_number(number)
        return self.reader.manifest.find_facts(number)

    def _verify_number(self, number: int) -> None:
        if not 0 <= number < len(self.reader.manifest):
            raise Corrupt(f"{self.name!r}: its tree names entry {number}, which does not exist; run `holdfast check`")
