"""Commits a DCP checkpoint on the coordinator: its lease, its root manifest with the tree, and the snapshot record."""

from __future__ import annotations

import math
import os
import threading
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, TensorStorageMetadata

from holdfast.distributed.dcp.items import PAYLOAD_SPEC, Written, encode_tensor, name_piece
from holdfast.distributed.dcp.metadata import KEY, encode_metadata, find_box, is_covered
from holdfast.errors import HoldfastError, Mismatch, NameInUse, NotFound, NotShared, StoreError
from holdfast.json_text import Json
from holdfast.objects.protocol import ObjectStore
from holdfast.repo.format.boxes import Coordinates, volume
from holdfast.repo.format.entry import Entry
from holdfast.repo.format.layout import PartRef, manifest_key
from holdfast.repo.handle.repository import Repository
from holdfast.repo.names.snapshots import CommittedSnapshot, NameState, read_name
from holdfast.repo.write.part_writer import end_lease
from holdfast.repo.write.transaction import Draft, ManifestPart, SnapshotContent, Transaction
from holdfast.snapshot.leaves import PAYLOAD, TENSOR
from holdfast.tensors.dtypes import find_dtype
from holdfast.tensors.spec import count_bytes
from holdfast.trees.outline import TREE

_KEEP_EVERY_S: Final = 10.0
"""How often the keeper thread checks whether the lease must be renewed and whether the `Commit` still exists."""


class Commit:
    """One checkpoint, from planning to commit. If it is dropped before `finish`, the checkpoint is abandoned.

    Its lease exists from before any rank writes until the snapshot exists, so collectors wait for the whole save.
    """

    def __init__(self, repo: Repository, name: str, *, overwrite: bool) -> None:
        """Create the lease; raise NameInUse if the name is in use and `overwrite` is False."""
        self._repo = repo
        repo.verify_may_write()
        self._state = verify_free(repo.store, name, overwrite=overwrite)
        self._transaction = Transaction(repo, purpose=f"save {name!r} for torch")
        self._transaction.__enter__()
        self._end = weakref.finalize(self, _end_transaction, self._transaction, os.getpid())
        self._stop = threading.Event()
        # Between steps the coordinator waits while other ranks write. The thread renews the lease during that time.
        keeper = threading.Thread(
            target=_keep_lease, args=(weakref.ref(self), self._stop), name="holdfast-keep-lease", daemon=True
        )
        self._keeper = keeper
        keeper.start()

    def keep_alive(self) -> None:
        """Renew the lease if that is due, so that collectors wait for this checkpoint."""
        with suppress(HoldfastError):  # the commit raises whatever is wrong with the lease
            self._transaction.keep_alive()

    def finish(
        self,
        root: ManifestPart,
        parts: Sequence[PartRef],
        *,
        leases: Sequence[str],
        metadata: Mapping[str, Json],
        environment: Mapping[str, Json],
    ) -> CommittedSnapshot:
        """Create the snapshot from the parts of all ranks; return when no collector can delete any of it."""
        self._stop_keeper()
        for rank, part in enumerate(parts):
            _verify_present(self._repo.store, part, rank)
        content = SnapshotContent(Draft(self._state, metadata, environment), root=root, others=parts)
        with self._transaction.sealing(content):
            pass  # the ranks have written everything but the root
        snapshot = self._transaction.commit(content)
        for lease_id in leases:
            end_lease(self._repo.store, lease_id)
        self._end()
        return snapshot

    def abandon(self) -> None:
        """Abandon the checkpoint unless it is finished; nothing of it becomes visible."""
        self._stop_keeper()
        with suppress(HoldfastError):
            self._end()

    def _stop_keeper(self) -> None:
        # Only one thread at a time may use a lease.
        self._stop.set()
        if threading.current_thread() is not self._keeper:
            self._keeper.join()


def verify_free(store: ObjectStore, name: str, *, overwrite: bool) -> NameState:
    """Return the state of a name; raise NameInUse if it has a snapshot and `overwrite` is False."""
    state = read_name(store, name)
    if state.snapshot and not overwrite:
        raise NameInUse(
            f"Checkpoint already exists: {name!r} is in use in {store.url}; nothing was written."
            " Choose another name, or pass overwrite=True",
            name=name,
        )
    return state


def _verify_present(store: ObjectStore, part: PartRef, rank: int) -> None:
    """Raise NotShared unless the manifest that a rank has written is visible to the coordinator."""
    try:
        is_visible = store.stat(manifest_key(part.manifest.manifest_id)).size_bytes == part.manifest.size_bytes
    except NotFound:
        is_visible = False
    if not is_visible:
        raise NotShared(
            f"the coordinator does not find the manifest that rank {rank} wrote to {store.url}: the path is local to"
            " each node. Use a path that all ranks share"
        )


def _end_transaction(transaction: Transaction, pid: int) -> None:
    # A forked child also drops its copy of the Commit. It must not end the parent's save.
    if os.getpid() == pid:
        with suppress(StoreError):
            transaction.__exit__(None, None, None)


def _keep_lease(reference: weakref.ref[Commit], stop: threading.Event) -> None:
    while not stop.wait(_KEEP_EVERY_S):
        commit = reference()
        if commit is None:
            return
        commit.keep_alive()
        del commit  # this thread must not keep a dropped Commit alive while it waits


def make_root(metadata: Metadata, written: Written, *, is_only_rank: bool) -> ManifestPart:
    """Return the root of a checkpoint; raise Mismatch if the ranks have not written everything that was planned."""
    builder = _Builder(written, is_only_rank=is_only_rank)
    nodes = {fqn: builder.add(fqn, stored) for fqn, stored in metadata.state_dict_metadata.items()}
    spec = {TREE: _nest(nodes, metadata.planner_data), KEY: encode_metadata(metadata)}
    return ManifestPart(spec, builder.entries)


class _Builder:
    """Collects the entries of a root."""

    def __init__(self, written: Written, *, is_only_rank: bool) -> None:
        self.entries: list[Entry] = []
        self._written = written
        self._is_only_rank = is_only_rank

    def add(self, fqn: str, stored: TensorStorageMetadata | BytesStorageMetadata) -> Json:
        """Add the entries of one name; return its node in the tree."""
        if isinstance(stored, BytesStorageMetadata):
            if fqn not in self._written.sizes:
                raise Mismatch(f"{fqn} was planned, but no rank has written it; nothing was committed")
            return [PAYLOAD, self._add_entry(fqn, self._written.sizes[fqn], PAYLOAD_SPEC)]
        if is_covered(stored):
            return [TENSOR, self._add_tensor(fqn, fqn, stored, tuple(stored.size))]
        if not self._is_only_rank:
            planned = sum(volume(find_box(chunk)) for chunk in stored.chunks)
            raise Mismatch(
                f"{fqn}: the ranks have planned {planned} of its {math.prod(stored.size)} items; nothing was committed."
                " Each rank must plan the shards that it holds"
            )
        node: list[Json] = ["dict"]
        for box in {find_box(chunk): None for chunk in stored.chunks}:
            name = name_piece(fqn, box.starts)
            node += [name.removeprefix(f"{fqn}@"), [TENSOR, self._add_tensor(fqn, name, stored, box.sizes)]]
        return node

    def _add_tensor(self, fqn: str, name: str, stored: TensorStorageMetadata, shape: Coordinates) -> int:
        dtype: torch.dtype = stored.properties.dtype
        if fqn in self._written.dtypes:
            dtype = find_dtype(self._written.dtypes[fqn])
        size_bytes = count_bytes(dtype, math.prod(shape))
        return self._add_entry(
            name, size_bytes, encode_tensor(shape, dtype, requires_grad=stored.properties.requires_grad)
        )

    def _add_entry(self, name: str, size_bytes: int, spec: Json) -> int:
        self.entries.append(Entry(name, size_bytes, (), spec, None, 1))
        return len(self.entries) - 1


def _nest(nodes: Mapping[str, Json], planner_data: Any) -> Json:
    """Return the tree of a state dict: nested as it was before the planner flattened it; flat if it did not."""
    tree: dict[Any, Any] = {}
    for fqn in _order(nodes, planner_data):
        if not _put(tree, _find_path(fqn, planner_data), _Leaf(nodes[fqn])):
            return ["dict", *(part for fqn, node in nodes.items() for part in (fqn, node))]
    return _encode(tree)


def _order(nodes: Mapping[str, Json], planner_data: Any) -> list[str]:
    """Return the names in the order of the state dict; the metadata orders them by the rank that writes them."""
    first = [fqn for fqn in planner_data if fqn in nodes] if isinstance(planner_data, dict) else []
    return list(dict.fromkeys([*first, *nodes]))


class _Leaf:
    """Wraps a node in nested dicts, because a node is itself a list."""

    def __init__(self, node: Json) -> None:
        self.node = node


def _find_path(fqn: str, planner_data: Any) -> tuple[str | int, ...]:
    path = planner_data.get(fqn) if isinstance(planner_data, dict) else None
    if isinstance(path, tuple) and path and type(path[0]) is str and all(type(key) in (str, int) for key in path):
        return path
    return (fqn,)


def _put(tree: dict[Any, Any], path: tuple[str | int, ...], leaf: _Leaf) -> bool:
    """Put a leaf into nested dicts, in which lists have int keys; return False if the path conflicts with another."""
    parent: Any = tree
    for key in path[:-1]:
        parent = parent.setdefault(key, {})
        if isinstance(parent, _Leaf):
            return False
    if path[-1] in parent:
        return False
    parent[path[-1]] = leaf
    return len({type(key) for key in parent}) == 1


def _encode(value: Any) -> Json:
    if isinstance(value, _Leaf):
        return value.node
    keys = list(value)
    if keys and type(keys[0]) is int and min(keys) >= 0:
        # A missing index was an empty dict. Torch also restores it as None.
        return ["list", *(_encode(value[number]) if number in value else None for number in range(max(keys) + 1))]
    return ["dict", *(part for key in keys for part in (key, _encode(value[key])))]
