"""Saving a tree: every leaf becomes an entry, the tree itself the snapshot's spec."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from holdfast.progress import Progress
from holdfast.repo.record import Json
from holdfast.repo.repository import Repository
from holdfast.repo.writer import Request, SaveResult, save
from holdfast.snapshot.environment import describe_environment
from holdfast.snapshot.leaves import LeafWriter
from holdfast.snapshot.stateful import expand
from holdfast.trees.encoding import encode_tree
from holdfast.trees.outline import TREE
from holdfast.trees.registered import Types


@dataclass(frozen=True, slots=True)
class SaveOptions:
    """How to save a tree."""

    overwrite: bool = False
    metadata: Mapping[str, Json] = field(default_factory=dict)
    base: str | None = None
    allow_pickle: bool = False
    grads: bool = False
    environment: bool = True
    verify_reuse: bool = True


def make_request(name: str, tree: object, options: SaveOptions, types: Types) -> Request:
    """Turn a tree into what a repository can save; reads no tensor yet."""
    leaves = LeafWriter(types, allow_pickle=options.allow_pickle, grads=options.grads)
    node = encode_tree(expand(tree), types=types, encode_leaf=leaves.encode)
    return Request(
        name,
        leaves.make_sources(),
        spec={TREE: node},
        metadata=options.metadata,
        environment=describe_environment() if options.environment else {},
        base=options.base,
        overwrite=options.overwrite,
        verify_reuse=options.verify_reuse,
    )


def save_tree(
    repo: Repository,
    name: str,
    tree: object,
    options: SaveOptions,
    *,
    types: Types,
    progress: Progress | None = None,
) -> SaveResult:
    """Save a tree under a name; the tensors must not change until this returns."""
    return save(repo, make_request(name, tree, options, types), progress=progress)
