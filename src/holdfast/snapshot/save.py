"""Saving a tree: every leaf becomes an entry, the tree itself the snapshot's spec."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field

from holdfast.progress import Progress
from holdfast.repo.record import Json
from holdfast.repo.repository import Repository
from holdfast.repo.writer import Request, SaveResult, save
from holdfast.snapshot.environment import describe_environment
from holdfast.snapshot.gc_pause import is_small, pause_gc
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
    state = expand(tree)
    with pause_gc():
        node = encode_tree(state, types=types, encode_leaf=leaves.encode)
        sources = leaves.make_sources()
    return Request(
        name,
        sources,
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
    with ExitStack() as pause:
        # One pause for all, and no name for the request, which is gone when it ends: a collection that came earlier
        # would walk over all that the request is made of.
        pause.enter_context(pause_gc())
        return _save_request(repo, make_request(name, tree, options, types), pause, progress)


def _save_request(repo: Repository, request: Request, pause: ExitStack, progress: Progress | None) -> SaveResult:
    if not is_small(sum([source.size_bytes for source in request.sources]), len(request.sources)):
        pause.close()
    return save(repo, request, progress=progress)
