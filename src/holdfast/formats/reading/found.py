"""What a reader finds in a source: a tree of placeholders and values, files to carry along, and what is left out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass, field
from typing import Any, Final, Literal, get_args

import torch

from holdfast.errors import BadFile
from holdfast.formats.reading.placeholders import Placeholders
from holdfast.formats.receipt import LeftOut
from holdfast.json_text import Json
from holdfast.repo.files import FileSource
from holdfast.trees.outline import MAX_TREE_DEPTH, TreePath, join_name

SourceFormat = Literal["safetensors", "hf", "torch", "dcp", "content-store", "deepspeed"]
_MAX_REPEATED: Final = 10_000
_MAX_REPEATED_SHARE: Final = 16
"""A container may be in the tree this many times on average, beyond the number above."""
SOURCE_FORMATS: Final[tuple[SourceFormat, ...]] = get_args(SourceFormat)


@dataclass(frozen=True, slots=True)
class FoundCheckpoint:
    """A checkpoint of another library, opened: no byte of a tensor has been read yet."""

    format: SourceFormat
    tree: Any
    placeholders: Placeholders
    metadata: Mapping[str, Json] = field(default_factory=dict)
    """What the files say about themselves, to be kept with the snapshot."""
    files: tuple[FileSource, ...] = ()
    """Other files of the folder, to be carried along."""
    left_out: tuple[LeftOut, ...] = ()


class _Visits:
    """Limits how often a walk meets the same containers: a few lists that share lists can stand for any number."""

    def __init__(self) -> None:
        self._known: set[int] = set()
        self._count = 0

    def add(self, container: object, path: TreePath) -> None:
        """Count a container; raises BadFile if it is nested too deep, or there are too many repetitions."""
        verify_depth(path)
        self._known.add(id(container))
        self._count += 1
        if self._count > _MAX_REPEATED + _MAX_REPEATED_SHARE * len(self._known):
            raise BadFile("the file has lists that contain the same lists again and again: it is damaged or hostile")


def iter_named_tensors(tree: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor of a tree with its name, in the order in which a save encodes them, repeated ones too."""
    for path, value in _iter_leaves(tree, (), _Visits()):
        if isinstance(value, torch.Tensor):
            yield join_name(path), value


def _iter_leaves(value: Any, path: TreePath, visits: _Visits) -> Iterator[tuple[TreePath, Any]]:
    if isinstance(value, dict):
        visits.add(value, path)
        for key, child in value.items():
            yield from _iter_leaves(child, (*path, key), visits)
    elif isinstance(value, list | tuple) and not isinstance(value, torch.Size):
        visits.add(value, path)
        for number, child in enumerate(value):
            yield from _iter_leaves(child, (*path, number), visits)
    else:
        yield path, value


Rename = Callable[[Mapping[Any, Any]], Mapping[str, str]]
"""Returns the new names of the keys of a dict, those that are texts."""


def map_tree(tree: Any, change: Callable[[Any], Any], *, rename: Rename = lambda found: {}) -> Any:
    """Return a copy of a tree with every leaf changed, and the keys of every dict renamed."""
    return _Mapping(change, rename).apply(tree, ())


class _Mapping:
    """A copy of a tree in progress."""

    def __init__(self, change: Callable[[Any], Any], rename: Rename) -> None:
        self._change, self._rename = change, rename
        self._visits = _Visits()

    def apply(self, value: Any, path: TreePath) -> Any:
        """Return the copy of a part of the tree."""
        if isinstance(value, dict):
            self._visits.add(value, path)
            names = self._rename(value)
            pairs = [(names.get(key, key), self.apply(child, (*path, key))) for key, child in value.items()]
            # A copy keeps the class, the factory of a defaultdict, and the attributes of an OrderedDict.
            copied = copy(value)
            copied.clear()
            copied.update(pairs)
            return copied
        if type(value) in (list, tuple):
            self._visits.add(value, path)
            return type(value)(self.apply(child, (*path, number)) for number, child in enumerate(value))
        return self._change(value)


def verify_depth(path: TreePath) -> None:
    """Raise BadFile if containers are nested too deep, or contain themselves."""
    if len(path) > MAX_TREE_DEPTH:
        raise BadFile("the file has containers that are nested too deep, or that contain themselves")
