"""Saving a tree: every leaf becomes an entry, and the shape of the tree the snapshot's spec."""

from __future__ import annotations

import platform
import socket
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import NamedTuple

import torch

from holdfast.errors import Unsupported
from holdfast.json_text import EncodedJson, Json
from holdfast.progress import Progress
from holdfast.repo.format.source import Source
from holdfast.repo.handle.repository import Repository
from holdfast.repo.write.writer import Request, SaveResult, WriteOptions, save
from holdfast.snapshot.gc_pause import is_small, pause_gc
from holdfast.snapshot.leaves import LeafWriter
from holdfast.snapshot.save.device_digests import add_digests
from holdfast.snapshot.stateful import expand
from holdfast.tensors.sharding.shard_source import ShardSource
from holdfast.tensors.sharding.sharded import LocalLeaf
from holdfast.trees.encoding import encode_tree
from holdfast.trees.outline import TREE, join_name
from holdfast.trees.registered import Types


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveOptions(WriteOptions):
    """How a tree is saved."""

    allow_pickle: bool = False
    """Pickle values that the format cannot store. Loading them can run any code, and must be allowed, too."""
    grads: bool = False
    """Save the gradients of tensors as well."""


class Leaves(NamedTuple):
    """A tree that is ready to be saved: its encoded shape, and its leaves as sources of bytes."""

    spec: EncodedJson
    """The shape, as the spec of a snapshot. Decoded, it would take several times the memory."""
    sources: Sequence[Source]
    local_leaves: dict[int, LocalLeaf]
    """Entries, by number, that are shards or replicas of other ranks' tensors."""
    per_rank_entries: set[int]
    """Entries that are declared per rank."""
    per_rank_names: set[str]
    """Paths of plain values that are declared per rank."""


def make_leaves(tree: object, options: SaveOptions, types: Types) -> Leaves:
    """Split a tree into its shape and its leaves; reads no tensor yet."""
    leaves = LeafWriter(types, allow_pickle=options.allow_pickle, grads=options.grads)
    per_rank_names: set[str] = set()
    state = expand(tree, note_per_rank=lambda path: per_rank_names.add(join_name(path)))
    spec = leaves.encode_nodes({TREE: encode_tree(state, types=types, encode_leaf=leaves.encode)})
    return Leaves(spec, leaves.make_sources(), leaves.local_leaves, leaves.per_rank_entries, per_rank_names)


def verify_whole(leaves: Leaves, advice: str) -> None:
    """Raise Unsupported if this process has only a part of a tensor."""
    for number in leaves.local_leaves:
        source = leaves.sources[number]
        if isinstance(source, ShardSource) and not source.is_whole:
            has = f"this process has {source.size_bytes} of {source.whole_bytes} bytes of it"
            raise Unsupported(f"{source.name}: {has}; {advice}")


def make_request(name: str, tree: object, options: SaveOptions, types: Types) -> Request:
    """Return the request that saves a tree from one process; reads no tensor yet."""
    leaves = make_leaves(tree, options, types)
    verify_whole(leaves, "save on all ranks together, with torch.distributed initialised and without collective=False")
    return Request(name, leaves.sources, spec=leaves.spec, options=options)


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
        # One pause for everything, and the request is not bound to a name, so it is freed before the pause ends. A
        # collection before that would traverse all of it.
        pause.enter_context(pause_gc())
        return _save_request(repo, make_request(name, tree, options, types), pause, progress)


def _save_request(repo: Repository, request: Request, pause: ExitStack, progress: Progress | None) -> SaveResult:
    if not is_small(sum([source.size_bytes for source in request.sources]), len(request.sources)):
        pause.close()
    return save(repo, add_digests(request), progress=progress)


def describe_environment() -> dict[str, Json]:
    """Return host, versions and world size, which are stored with a snapshot for people who inspect it later."""
    is_distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    return {
        "host": socket.gethostname(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "platform": f"{sys.platform}-{platform.machine()}",
        "world_size": torch.distributed.get_world_size() if is_distributed else 1,
    }
