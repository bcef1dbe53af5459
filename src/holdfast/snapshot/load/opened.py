"""An open snapshot: its reader, its tree, and its leaves by name and by path."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from types import TracebackType
from typing import Final, NamedTuple, Self

from holdfast.errors import AmbiguousName, Corrupt, NotFound
from holdfast.repo.format.entry import Entry
from holdfast.repo.format.record import Json, canonical_json
from holdfast.repo.read.reader import SnapshotReader
from holdfast.snapshot.gc_pause import pause_gc_if_small
from holdfast.trees.outline import TREE, Leaf, iter_leaves, share_tags

_COMPARED: Final = 5000
"""How many names are compared with one that is not there, to say which was meant."""

Encode = Callable[[object], Json]


class EntryAt(NamedTuple):
    """An entry by its number: 64 bytes, where the entry itself takes about 490. It is made when it is asked for."""

    opened: Opened
    number: int

    def find(self) -> Entry:
        """Return the entry, as the manifest has it that is in use now."""
        return self.opened.entry(self.number)

    @property
    def name(self) -> str:
        """The name of the entry."""
        return self.opened.reader.manifest.names[self.number]


@dataclass(frozen=True, slots=True)
class Found:
    """What a name or path leads to: one leaf, or all leaves below it."""

    name: str
    leaves: tuple[Leaf, ...]
    is_leaf: bool


class Opened:
    """A snapshot that holds a tree; whatever it holds else, files put there for example, is a dict of bytes."""

    def __init__(self, reader: SnapshotReader) -> None:
        """Take the reader over."""
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

    def resting(self) -> AbstractContextManager[None]:
        """Hold Python's collector back while this is loaded, if it is many small things."""
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

    def find(self, name: str) -> Found:
        """Return what has that name: a leaf, or all that begins with it and a dot."""
        named = self._by_name.get(name, [])
        if len(named) > 1:
            paths = tuple(leaf.path_json for leaf in named)
            raise AmbiguousName(
                f"{len(named)} leaves of {self.name!r} have the name {name!r}; ask by path:"
                f" {' or '.join(str(path) for path in paths)}",
                paths=paths,
            )
        if named:
            return Found(name, tuple(named), is_leaf=True)
        below = tuple(leaf for leaf in self.leaves if leaf.name.startswith(name + "."))
        if not below:
            close = difflib.get_close_matches(name, list(islice(self._by_name, _COMPARED)), n=1)
            hint = f"did you mean {close[0]!r}? " if close else ""
            advice = f"{hint}`holdfast show {self.name}` lists them"
            raise NotFound(f"no leaf {name!r} in {self.name!r}; {advice}", name=name)
        return Found(name, below, is_leaf=False)

    def find_path(self, path: Sequence[object], encode: Encode) -> Found:
        """Return what lies at a path of keys."""
        keys = [canonical_json(encode(key)) for key in path]
        found = [leaf for leaf in self.leaves if [*map(canonical_json, leaf.path_json[: len(keys)])] == keys]
        if not found:
            raise NotFound(f"nothing at path {tuple(path)!r} in {self.name!r}", name=str(tuple(path)))
        is_leaf = len(found[0].path_json) == len(keys)
        name = found[0].name if is_leaf else ".".join(str(key) for key in path)
        return Found(name, tuple(found), is_leaf=is_leaf)

    def entry(self, number: int) -> Entry:
        """Return an entry by the number that a node gives."""
        self._verify_number(number)
        return self.reader.manifest.entry(number)

    def find_facts(self, number: int) -> tuple[Json, int, int]:
        """Return the spec, the size in bytes and the alias of an entry by the number that a node gives."""
        self._verify_number(number)
        return self.reader.manifest.find_facts(number)

    def _verify_number(self, number: int) -> None:
        if not 0 <= number < len(self.reader.manifest):
            raise Corrupt(f"{self.name!r}: its tree names entry {number}, which is not there; run `holdfast check`")
