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


def iter_named_tensors(tree: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor of a tree with its name, in the order in which a save encodes them, repeated ones too."""
    for path, value in _iter_leaves(tree, ()):
        if isinstance(value, torch.Tensor):
            yield join_name(path), value


def _iter_leaves(value: Any, path: TreePath) -> Iterator[tuple[TreePath, Any]]:
    verify_depth(path)
    if isinstance(value, dict):
        for key, child in value.items():
            yield from _iter_leaves(child, (*path, key))
    elif isinstance(value, list | tuple) and not isinstance(value, torch.Size):
        for number, child in enumerate(value):
            yield from _iter_leaves(child, (*path, number))
    else:
        yield path, value


Rename = Callable[[Mapping[Any, Any]], Mapping[str, str]]
"""Returns the new names of the keys of a dict, those that are texts."""


def map_tree(tree: Any, change: Callable[[Any], Any], *, rename: Rename = lambda found: {}) -> Any:
    """Return a copy of a tree with every leaf changed, and the keys of every dict renamed."""
    return _map(tree, (), change, rename)


def _map(value: Any, path: TreePath, change: Callable[[Any], Any], rename: Rename) -> Any:
    verify_depth(path)
    if isinstance(value, dict):
        names = rename(value)
        pairs = [(names.get(key, key), _map(child, (*path, key), change, rename)) for key, child in value.items()]
        # A copy keeps the class, the factory of a defaultdict, and the attributes of an OrderedDict.
        copied = copy(value)
        copied.clear()
        copied.update(pairs)
        return copied
    if type(value) in (list, tuple):
        return type(value)(_map(child, (*path, number), change, rename) for number, child in enumerate(value))
    return change(value)


def verify_depth(path: TreePath) -> None:
    """Raise BadFile if containers are nested too deep, or contain themselves."""
    if len(path) > MAX_TREE_DEPTH:
        raise BadFile("the file has containers that are nested too deep, or that contain themselves")
