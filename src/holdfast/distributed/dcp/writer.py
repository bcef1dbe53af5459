"""The storage writer for torch.distributed.checkpoint: each rank writes a part, the coordinator commits all parts."""

from __future__ import annotations

import copy
import functools
import io
import math
import os
import threading
import uuid
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any, Final

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.storage import StorageWriter as TorchStorageWriter
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future
from torch.utils._python_dispatch import _disable_current_modes

from holdfast.distributed.dcp.lazy_store import (
    CheckpointId,
    LazyStore,
    StoreLike,
    choose_name,
    clean_id,
    is_name,
    raising_picklable,
)
from holdfast.distributed.dcp.metadata import KEY, encode_metadata, find_box, is_covered
from holdfast.errors import HoldfastError, Mismatch, NameInUse, NotFound, NotShared, StoreError, Unsupported
from holdfast.json_text import Json
from holdfast.objects.protocol import ObjectStore
from holdfast.repo.format.boxes import Box, Coordinates, volume, whole
from holdfast.repo.format.chunk import cut
from holdfast.repo.format.entry import Entry
from holdfast.repo.format.layout import PartRef, manifest_key, parse_part
from holdfast.repo.format.source import BytesSource, Source
from holdfast.repo.handle.config import read_config
from holdfast.repo.handle.repository import Repository
from holdfast.repo.names.snapshots import CommittedSnapshot, NameState, read_name
from holdfast.repo.write.part_writer import MakeSources, PlacedSource, WrittenPart, end_lease, write_part
from holdfast.repo.write.transaction import Draft, ManifestPart, SnapshotContent, Transaction
from holdfast.repo.write.writer import Placement
from holdfast.snapshot.leaves import PAYLOAD, TENSOR
from holdfast.snapshot.pickled import find_refusal
from holdfast.snapshot.save import Digests, describe_environment, digest_sources
from holdfast.tensors.composite import has_own_bytes, verify_readable
from holdfast.tensors.shard_source import make_shard_source
from holdfast.tensors.sharding import LocalBox, LocalLeaf
from holdfast.tensors.spec import (
    TensorSpec,
    contiguous_stride,
    count_bytes,
    dtype_name,
    encode_spec,
    find_dtype,
    item_bytes,
    items_per_byte,
)
from holdfast.texts import list_some
from holdfast.trees.apply import apply_to_tensors
from holdfast.trees.outline import TREE

PAYLOAD_SPEC: Final[Json] = {"type": "torch_save"}
_ASSUMED_BYTES: Final = 4096
"""Assumed size of a bytes item that the planner has not serialised yet."""


@dataclass(slots=True)
class Written:
    """Facts that are known only after the planner has resolved its data."""

    notes_refused: bool = False
    sizes: dict[str, int] = field(default_factory=dict)
    """Sizes of bytes items, by name."""
    dtypes: dict[str, str] = field(default_factory=dict)
    """Dtypes of the tensors that the planner returned with another dtype than planned, by name."""
    refused: dict[str, str] = field(default_factory=dict)
    """What a weights-only load would refuse in bytes items, by name; noted only if `notes_refused` is set."""


def encode_tensor(shape: Coordinates, dtype: torch.dtype, *, requires_grad: bool) -> Json:
    """Return the spec of a tensor's entry."""
    # Torch's metadata may say requires_grad for any dtype, but only floating-point and complex tensors can require it.
    can_require = dtype.is_floating_point or dtype.is_complex
    return encode_spec(TensorSpec(dtype, shape, contiguous_stride(shape), requires_grad=requires_grad and can_require))


def name_piece(fqn: str, starts: Sequence[int]) -> str:
    """Return the entry name of one box of a tensor that was saved only in part."""
    return f"{fqn}@{','.join(map(str, starts))}"


def is_whole_here(items: Sequence[WriteItem]) -> bool:
    """Return whether the items of one tensor cover all of it, judged by their sizes."""
    data = [item.tensor_data for item in items if item.tensor_data is not None]
    if not data:
        return True
    boxes = {find_box(each.chunk) for each in data}
    return sum(map(volume, boxes)) >= volume(whole(tuple(data[0].size)))


def plan_groups(
    plan: SavePlan, planner: SavePlanner, written: Written, *, limit_bytes: int, is_only_rank: bool
) -> list[MakeSources]:
    """Divide a plan into groups of at most `limit_bytes`, or one tensor each, to be resolved one after the other.

    Other ranks complete the tensors of which this rank has a part. If it is the only rank, none does: then each box of
    an incomplete tensor is stored as an entry of its own.
    """
    by_name: dict[str, list[WriteItem]] = {}
    for item in plan.items:
        by_name.setdefault(item.index.fqn, []).append(item)
    makers = [
        (
            partial(_make_sources, items, planner, written, in_pieces=is_only_rank and not is_whole_here(items)),
            _measure(items),
        )
        for items in by_name.values()
    ]
    return [partial(_make_all, group) for group in _group(makers, limit_bytes)]


_Maker = Callable[[], Iterator[PlacedSource]]


def _group(makers: Sequence[tuple[_Maker, int]], limit_bytes: int) -> Iterator[list[_Maker]]:
    group: list[_Maker] = []
    group_bytes = 0
    for maker, size_bytes in makers:
        if group and group_bytes + size_bytes > limit_bytes:
            yield group
            group, group_bytes = [], 0
        group.append(maker)
        group_bytes += size_bytes
    if group:
        yield group


def _make_all(group: Sequence[_Maker]) -> list[PlacedSource]:
    return [placed for make in group for placed in make()]


def _measure(items: Sequence[WriteItem]) -> int:
    size = 0
    for item in items:
        if item.tensor_data is not None:
            size += volume(find_box(item.tensor_data.chunk)) * item_bytes(item.tensor_data.properties.dtype)
        else:
            planned = getattr(item, "bytes_io_data", None)  # some versions of torch do not plan the size
            size += planned.nbytes if planned else _ASSUMED_BYTES
    return size


def _make_sources(
    items: Sequence[WriteItem], planner: SavePlanner, written: Written, *, in_pieces: bool
) -> Iterator[PlacedSource]:
    fqn = items[0].index.fqn
    if items[0].type == WriteItemType.BYTE_IO:
        yield _make_payload(fqn, planner.resolve_data(items[0]), written)
        return
    # A box that occurs twice is stored once; several boxes of one tensor are pieces of one source.
    pieces = {piece.box: piece for piece in (_resolve(item, planner) for item in items)}
    data = _find_data(items[0])
    dtype = next(iter(pieces.values())).tensor.dtype
    if dtype != data.properties.dtype:
        written.dtypes[fqn] = dtype_name(dtype)
    if not in_pieces:
        yield _place(fqn, tuple(pieces.values()), tuple(data.size), dtype, data)
        return
    for box, piece in pieces.items():
        own = LocalBox(whole(box.sizes), piece.tensor)
        yield _place(name_piece(fqn, box.starts), (own,), box.sizes, dtype, data)


def _make_payload(fqn: str, data: torch.Tensor | io.BytesIO, written: Written) -> PlacedSource:
    if not isinstance(data, io.BytesIO):
        raise Unsupported(
            f"{fqn}: the planner returned a {type(data).__qualname__} for an item that it planned as bytes"
        )
    payload = data.getvalue()
    written.sizes[fqn] = len(payload)
    if written.notes_refused and (cause := find_refusal(payload)):
        written.refused[fqn] = cause
    boxes = [(start, stop - start) for start, stop in cut(len(payload))]
    return PlacedSource(BytesSource(fqn, payload, PAYLOAD_SPEC), Placement(len(payload), 1, boxes))


def _find_data(item: WriteItem) -> TensorWriteData:
    if item.tensor_data is None:
        raise Mismatch(f"{item.index.fqn}: the planner planned a tensor without tensor_data; fix the planner")
    return item.tensor_data


def _resolve(item: WriteItem, planner: SavePlanner) -> LocalBox:
    fqn, box = item.index.fqn, find_box(_find_data(item).chunk)
    tensor = planner.resolve_data(item)
    if not isinstance(tensor, torch.Tensor) or not has_own_bytes(tensor) or tensor.is_quantized:
        kind = type(tensor).__qualname__
        raise Unsupported(f"{fqn}: DCP saves only ordinary strided tensors, this is a {kind}; use Store.save")
    if items_per_byte(tensor.dtype) > 1:
        raise Unsupported(f"{fqn}: a tensor of {tensor.dtype} cannot be saved through DCP; use Store.save")
    try:
        verify_readable(tensor)
    except Unsupported as error:
        raise Unsupported(f"{fqn}: {error}") from error
    if tuple(tensor.shape) != box.sizes:
        raise Mismatch(f"{fqn}: the planner returned shape {tuple(tensor.shape)} for a box of shape {box.sizes}")
    return LocalBox(box, tensor.detach())


def _place(
    name: str, pieces: tuple[LocalBox, ...], shape: Coordinates, dtype: torch.dtype, data: TensorWriteData
) -> PlacedSource:
    leaf = LocalLeaf("shards", shape, dtype, tuple(piece for piece in pieces if volume(piece.box)))
    source = replace(
        make_shard_source(name, None, leaf),
        spec=encode_tensor(shape, dtype, requires_grad=data.properties.requires_grad),
    )
    dims = max(len(shape), 1)
    sizes = [stop - start for start, stop in pairwise((0, *source.cuts))]
    boxes = [_find_position(box, size, dims) for box, size in zip(source.boxes, sizes, strict=True)]
    return PlacedSource(source, Placement(source.whole_bytes, dims if boxes else 1, boxes))


def _find_position(box: Box, size_bytes: int, dims: int) -> tuple[int, ...]:
    """Return the position of a chunk in its entry: a box or, with at most one dim, its byte offset and size."""
    if dims > 1:
        return (*box.starts, *box.sizes)
    item = size_bytes // volume(box)
    return (box.starts[0] * item if box.starts else 0, size_bytes)


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


_MAX_NAMED: Final = 8
_BATCH_SHARE: Final = 4
"""A planner resolves at most budget / _BATCH_SHARE bytes at a time."""


class StorageWriter(TorchStorageWriter):
    """Lets `dcp.save` and `dcp.async_save` write to a store: deduplicated, verified, all or nothing.

    Use it for one save at a time. It can be pickled, for saves in another process. It is also an AsyncStager: it copies
    the state dict of an asynchronous save.
    """

    # The methods up to `close` make it an AsyncStager, because torch's default one loses conj and neg bits.
    _synchronize_after_execute: bool = False

    def __init__(
        self,
        store: StoreLike,
        name: CheckpointId | None = None,
        *,
        overwrite: bool = False,
        metadata: Mapping[str, Json] | None = None,
        weights_only: bool = True,
    ) -> None:
        """Configure a writer; the store is opened, and created if necessary, when the first save starts.

        Args:
            store: a `holdfast.Store`, a path or a URL.
            name: the name of the snapshot; a `checkpoint_id` passed to the save replaces it.
            overwrite: replace the snapshot of that name, atomically, after everything is written.
            metadata: stored with the snapshot.
            weights_only: warn of values that a `StorageReader` refuses to load without weights_only=False.
        """
        super().__init__()
        self._lazy_store = LazyStore(store)
        self._checkpoint_id = name
        self._overwrite = overwrite
        self._metadata = dict(metadata or {})
        self._weights_only = weights_only
        self._rank: int | None = None
        self._is_collective = True
        self._is_only_rank = False
        self._commit: Commit | None = None
        self._lease_id = ""
        self.save_id = _new_id()
        self.snapshot: CommittedSnapshot | None = None
        """The snapshot of the last save; set only on the rank that committed it."""

    def __repr__(self) -> str:
        """Show the name of the snapshot, if it is known yet."""
        return f"<StorageWriter {str(self._checkpoint_id)!r}>" if self._checkpoint_id else "<StorageWriter>"

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the state of a save in progress."""
        return self.__dict__ | {"_commit": None, "_lease_id": "", "snapshot": None}

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Copy a state dict, for an asynchronous save."""
        return _stage_state(state_dict)

    @property
    def should_synchronize_after_execute(self) -> bool:
        """Return False: the staged state dict is already a complete copy."""
        return self._synchronize_after_execute

    def synchronize_staging(self) -> None:
        """Do nothing: the staged state dict is already a complete copy."""

    def close(self) -> None:
        """Abandon a save that failed on another rank; torch does not report such failures to the writer."""
        if self._commit is not None:
            self._commit.abandon()
            self._commit = None
        if self._lease_id:
            end_lease(self._repository.store, self._lease_id)
            self._lease_id = ""

    @property
    def checkpoint_id(self) -> CheckpointId | None:
        """The name, as it was passed."""
        return self._checkpoint_id

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: CheckpointId) -> bool:
        """Return whether it can be the name of a snapshot."""
        return is_name(checkpoint_id)

    # Must not raise: torch calls it outside of its collectives, so the other ranks would wait for ever.
    def reset(self, checkpoint_id: CheckpointId | None = None) -> None:
        """Use another name for the next save."""
        if checkpoint_id is not None:
            self._checkpoint_id = checkpoint_id
        self.save_id = _new_id()

    def storage_meta(self) -> StorageMeta:
        """Return the ids of the next save."""
        return StorageMeta(checkpoint_id=self._checkpoint_id, save_id=self.save_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Begin a save; raise NameInUse, before anything is planned, if the name must not be overwritten."""
        with raising_picklable():
            self.close()
            self.snapshot = None
            self._rank = kwargs.get("rank")
            self._is_collective = kwargs.get("use_collectives", True)
            self._is_only_rank = not self._is_collective
            if is_coordinator or not self._is_collective:
                verify_free(self._repository.store, self._name, overwrite=self._overwrite)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Create the lease, on the coordinator, before the ranks begin to write."""
        # The lease id is not put into the plans: a planner that caches plans would reuse those of the first save.
        with raising_picklable():
            self._is_only_rank = len(plans) == 1
            self._commit = Commit(self._repository, self._name, overwrite=self._overwrite)
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's part of the checkpoint; the result refers to its manifest."""
        future: Future[list[WriteResult]] = Future()
        try:
            with raising_picklable():
                future.set_result([self._write(plan, planner)])
        except BaseException:
            self.close()
            raise
        return future

    def _write(self, plan: SavePlan, planner: SavePlanner) -> WriteResult:
        repo, written = self._repository, Written(notes_refused=self._weights_only)
        if read_config(repo.store) is None:
            raise NotShared(
                f"rank {self._rank} finds no store in {repo.store.url}, where the coordinator created one: the path is"
                " local to each node. Use a path that all ranks share"
            )
        repo.verify_may_write()
        limit_bytes = repo.budget_bytes // _BATCH_SHARE
        groups = plan_groups(plan, planner, written, limit_bytes=limit_bytes, is_only_rank=self._is_only_rank)
        purpose = f"save {self._name!r} for torch, rank {self._rank or 0}"
        part = write_part(repo, self._name, groups, purpose=purpose, find_digests=_find_digests)
        self._lease_id = part.lease_id
        _warn_of_refused(self._name, written.refused)
        return WriteResult(MetadataIndex(self._name), part.new_bytes, _describe_part(part, written))

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit the parts of all ranks; until then, the name keeps its previous snapshot."""
        with raising_picklable():
            commit, self._commit = self._commit, None
            if commit is None:
                raise Mismatch(
                    f"{self._name!r}: this save was abandoned when another one began with the same writer; use a writer"
                    " for each save"
                )
            try:
                self.snapshot = self._finish(commit, metadata, results)
            finally:
                commit.abandon()

    def _finish(self, commit: Commit, metadata: Metadata, results: list[list[WriteResult]]) -> CommittedSnapshot:
        parts = [result.storage_data for own in results for result in own]
        written = Written()
        for each in parts:
            written.sizes.update(each["sizes"])
            written.dtypes.update(each["dtypes"])
        ids: Json = {"checkpoint_id": clean_id(self._checkpoint_id or ""), "save_id": self.save_id}
        return commit.finish(
            make_root(metadata, written, is_only_rank=self._is_only_rank),
            [_parse_part(each["part"]) for each in parts],
            leases=[each["lease"] for each in parts],
            metadata=self._metadata,
            environment=describe_environment() | {KEY: ids},
        )

    @property
    def _repository(self) -> Repository:
        return self._lazy_store.repository

    @property
    def own_rank(self) -> int | None:
        """This rank, if each rank saves a snapshot of its own (without collectives); else None."""
        return None if self._is_collective else self._rank or 0

    @property
    def _name(self) -> str:
        return choose_name(self._checkpoint_id, self.own_rank)


def _new_id() -> str:
    return str(uuid.uuid4())


def _describe_part(part: WrittenPart, written: Written) -> dict[str, Any]:
    """Return what the coordinator needs for the commit, as plain data."""
    return {
        "part": part.ref.to_json(),
        "lease": part.lease_id,
        "sizes": written.sizes,
        "dtypes": written.dtypes,
    }


def _warn_of_refused(name: str, refused: Mapping[str, str]) -> None:
    if not refused:
        return
    shown = list_some([f"{fqn} ({cause})" for fqn, cause in refused.items()], _MAX_NAMED)
    warnings.warn(
        f"{name!r}: {shown} will be refused when this checkpoint is loaded, because loading such values can run"
        " any code. To load them, use holdfast.dcp.install(weights_only=False) or"
        " StorageReader(..., weights_only=False)",
        stacklevel=2,
    )


def _parse_part(value: Json) -> PartRef:
    return parse_part(value, where="a rank")


def _stage_state(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of a state dict on the CPU; training may continue to change the original."""
    staged: dict[str, Any] = BlockingAsyncStager().stage(apply_to_tensors(_copy_if_shared, state_dict))
    copied: dict[str, Any] = _copy_streams(staged)
    return copied


def _copy_streams(staged: Any) -> Any:
    """Return a staged state dict with its BytesIO objects copied, because torch's stager does not copy them."""
    if type(staged) is io.BytesIO:
        return copy.copy(staged)
    if isinstance(staged, dict):
        return {key: _copy_streams(value) for key, value in staged.items()}
    if type(staged) in (list, tuple):
        return type(staged)(_copy_streams(value) for value in staged)
    return staged


def _copy_if_shared(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of a tensor that torch's stager would not copy; else the tensor itself."""
    if isinstance(tensor, DTensor) and tensor.dim() == 0:
        return copy.deepcopy(tensor)
    if tensor.device.type == "cpu" and not does_stager_copy():
        return tensor.detach().clone()
    return tensor


@functools.cache
def does_stager_copy() -> bool:
    """Return whether the stager of this torch copies tensors that are on the CPU already."""
    # A mode for fake tensors would answer for itself.
    with _disable_current_modes():
        tensor = torch.ones(1, device="cpu")
        staged: dict[str, Any] = BlockingAsyncStager().stage({"tensor": tensor})
        return bool(staged["tensor"].data_ptr() != tensor.data_ptr())


def _find_digests(sources: Sequence[Source]) -> Digests:
    return digest_sources(enumerate(sources))
