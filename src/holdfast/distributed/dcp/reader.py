"""The storage reader for torch.distributed.checkpoint: loads DCP checkpoints, and snapshots of `Store.save`."""

from __future__ import annotations

import dataclasses
import io
import uuid
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader as TorchStorageReader
from torch.futures import Future

from holdfast.distributed.dcp.lazy_store import (
    CheckpointId,
    LazyStore,
    StoreLike,
    choose_name,
    is_name,
    raising_picklable,
)
from holdfast.distributed.dcp.metadata import (
    KEY,
    decode_metadata,
    is_covered,
    make_metadata,
    make_storage_meta,
)
from holdfast.distributed.dcp.writer import name_piece
from holdfast.errors import Mismatch, NotFound, Unsupported
from holdfast.json_text import Json
from holdfast.repo.format.boxes import Box, Coordinates, add, slices, subtract
from holdfast.repo.format.entry import Entry
from holdfast.repo.format.manifest import Manifest
from holdfast.repo.names.snapshots import CommittedSnapshot, read_snapshot
from holdfast.repo.read.read_plan import Region
from holdfast.repo.read.reader import SnapshotReader, Verify, open_snapshot, verify_mode
from holdfast.snapshot.batches import FilledPart, LoadOptions
from holdfast.snapshot.entries import verify_on_devices
from holdfast.snapshot.into.in_place import mark_written
from holdfast.snapshot.leaves import GRAD, PARTS, TENSOR
from holdfast.snapshot.load import load_node
from holdfast.snapshot.opened import Opened
from holdfast.snapshot.pickled import dump_payload, load_payload
from holdfast.snapshot.slices import read_slice
from holdfast.tensors.composite import has_own_bytes
from holdfast.tensors.fakes import has_values
from holdfast.tensors.spec import SpecDecoder, TensorSpec, contiguous_stride, decode_spec
from holdfast.tensors.storage import tensor_bytes
from holdfast.texts import list_some
from holdfast.trees.outline import PAIRS_START, key_text
from holdfast.trees.registered import Types

_MAX_NAMED: Final = 8
_TENSORS: Final = (TENSOR, PARTS, GRAD)
_FlatPath = tuple[str | int, ...]


class _Checkpoint(NamedTuple):
    """A checkpoint that was opened for a load."""

    snapshot: CommittedSnapshot
    manifest: Manifest
    metadata: Metadata
    nodes: dict[str, Json] | None
    """Tree nodes by name if `Store.save` wrote the snapshot; None if `StorageWriter` did."""


class _Wanted(NamedTuple):
    """A box of an entry, and the tensor to read it into."""

    item: ReadItem
    entry: Entry
    spec: TensorSpec
    box: Box
    target: torch.Tensor


class StorageReader(TorchStorageReader):
    """Lets `dcp.load` read from a store: checkpoints of `StorageWriter`, and snapshots of `Store.save`.

    As in torch, regions that were not saved are left unchanged, dtypes are cast, and names that no rank requests are
    skipped. A warning reports each.
    """

    def __init__(
        self,
        store: StoreLike,
        name: CheckpointId | None = None,
        *,
        weights_only: bool = True,
        verify: Verify = "full",
    ) -> None:
        """Configure a reader; the store is opened when the first load starts.

        Args:
            store: a `holdfast.Store`, a path or a URL.
            name: the name of the snapshot; a `checkpoint_id` passed to the load replaces it.
            weights_only: refuse values, other than tensors, that are not plain data: loading them can run any code.
            verify: "full" checks BLAKE3 digests; "fast" checks XXH3, which finds only accidental damage; False checks
                nothing. "device" is "full", and compares whole chunks on accelerators once more, after the copy.
        """
        super().__init__()
        verify_mode(verify)
        self._lazy_store = LazyStore(store)
        self._checkpoint_id = name
        self._weights_only = weights_only
        self._verify: Verify = verify
        self._checkpoint: _Checkpoint | None = None
        self.load_id = str(uuid.uuid4())

    def __repr__(self) -> str:
        """Show the name of the snapshot, if it is known yet."""
        return f"<StorageReader {str(self._checkpoint_id)!r}>" if self._checkpoint_id else "<StorageReader>"

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
        """Use another name for the next load."""
        if checkpoint_id is not None:
            self._checkpoint_id = checkpoint_id
        self._checkpoint = None
        self.load_id = str(uuid.uuid4())

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read the metadata of the checkpoint; with `rank=`, of the one that this rank saved without collectives."""
        with raising_picklable():
            repo = self._lazy_store.repository
            record = read_snapshot(repo.store, choose_name(self._checkpoint_id, kwargs.get("rank")))
            with open_snapshot(repo, record) as reader:
                self._checkpoint = _open(reader, self.load_id)
            return self._checkpoint.metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing: `read_metadata` has opened the snapshot."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Add to the plan which snapshot this rank has opened, for the coordinator to compare."""
        found = self._opened
        identity = (found.snapshot.name, found.snapshot.generation, found.snapshot.digest.hex())
        # Without collectives each rank has a snapshot of its own.
        is_shared = found.snapshot.name == choose_name(self._checkpoint_id, None)
        return dataclasses.replace(plan, storage_data=identity if is_shared else None)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Check, on the coordinator, that all ranks load the same snapshot; warn of names that no rank requests."""
        with raising_picklable():
            seen = {rank: plan.storage_data for rank, plan in enumerate(plans) if plan.storage_data is not None}
            if len(set(seen.values())) > 1:
                names = [f"rank {rank} {each[0]!r} (generation {each[1]})" for rank, each in seen.items()]
                raise Mismatch(f"the ranks have opened different snapshots: {list_some(names, _MAX_NAMED)}. Load again")
            requested = {item.storage_index.fqn for plan in plans for item in plan.items}
            stored = self._opened.metadata.state_dict_metadata
            # Planners do not request tensors without items: there is nothing to read.
            skipped = [fqn for fqn in stored if fqn not in requested and not _is_empty(stored[fqn])]
            _warn(self._opened, skipped, "saved, but not requested by any rank")
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read all items of the plan into the planner's tensors."""
        future: Future[None] = Future()
        with raising_picklable():
            found = self._opened
            repo = self._lazy_store.repository
            with SnapshotReader(
                repo, found.snapshot, verify=self._verify, manifest=found.manifest, cache=repo.store.cache, keep=True
            ) as reader:
                load = _Load(reader, found, planner, weights_only=self._weights_only)
                load.run(plan.items, on_devices=self._verify == "device")
            future.set_result(None)
        return future

    @property
    def _opened(self) -> _Checkpoint:
        if self._checkpoint is None:
            raise Mismatch("this reader has not opened a checkpoint; call read_metadata first")
        return self._checkpoint

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the state of a load in progress."""
        return self.__dict__ | {"_checkpoint": None}


def _open(reader: SnapshotReader, load_id: str) -> _Checkpoint:
    record, manifest = reader.snapshot, reader.manifest
    ids = record.environment.get(KEY)
    if isinstance(manifest.spec, dict) and KEY in manifest.spec:
        metadata = decode_metadata(manifest.spec[KEY], ids=ids, load_id=load_id, what=repr(record.name))
        return _Checkpoint(record, manifest, metadata, None)
    metadata, nodes = _describe_tree(Opened(reader), ids=ids, load_id=load_id)
    return _Checkpoint(record, manifest, metadata, nodes)


class _Load:
    """Reads the items of one rank in one load."""

    def __init__(self, reader: SnapshotReader, found: _Checkpoint, planner: LoadPlanner, *, weights_only: bool) -> None:
        self._reader = reader
        self._checkpoint = found
        self._planner = planner
        self._weights_only = weights_only
        self._opened = Opened(reader)
        self._known: dict[str, tuple[Entry, TensorSpec]] = {}
        self._cast: list[str] = []

    def run(self, items: Sequence[ReadItem], *, on_devices: bool = False) -> None:
        """Read tensors, in batches that fit into the memory budget, then bytes; verify them on their devices too."""
        tensors = [item for item in items if item.type == LoadItemType.TENSOR]
        for batch in self._batch(tensors):
            self._read_tensors(batch)
            if on_devices:
                verify_on_devices(self._iter_parts(batch), self._opened, SpecDecoder(self._opened.name))
            for wanted in batch:
                self._planner.commit_tensor(wanted.item, wanted.target)
        for item in items:
            if item.type != LoadItemType.TENSOR:
                self._planner.load_bytes(item, io.BytesIO(self._read_payload(item.storage_index.fqn)))
        _warn(self._checkpoint, self._cast, "cast to another dtype")
        stored = self._checkpoint.metadata.state_dict_metadata
        names = dict.fromkeys(item.storage_index.fqn for item in tensors)
        found = [(fqn, stored[fqn]) for fqn in names]
        partial = [fqn for fqn, each in found if isinstance(each, TensorStorageMetadata) and not is_covered(each)]
        _warn(self._checkpoint, partial, "saved in part, the rest is left unchanged")

    def _batch(self, items: Sequence[ReadItem]) -> Iterator[list[_Wanted]]:
        batch: list[_Wanted] = []
        batch_bytes = 0
        for item in items:
            wanted = self._find(item)
            if batch and batch_bytes + wanted.target.nbytes > self._reader.budget_bytes // 2:
                yield batch
                batch, batch_bytes = [], 0
            batch.append(wanted)
            batch_bytes += wanted.target.nbytes
        if batch:
            yield batch

    def _find(self, item: ReadItem) -> _Wanted:
        fqn = item.storage_index.fqn
        lengths = tuple(item.lengths)
        offset = tuple(item.storage_index.offset or (0,) * len(lengths))
        entry, spec, origin = self._find_entry(fqn, offset)
        box = Box(subtract(add(offset, tuple(item.storage_offsets)), origin), lengths)
        target = self._planner.resolve_tensor(item).detach()
        if tuple(target.shape) != lengths:
            raise Mismatch(f"{fqn}: the planner returned shape {tuple(target.shape)} for a box of shape {lengths}")
        return _Wanted(item, entry, spec, box, target)

    def _find_entry(self, fqn: str, offset: Coordinates) -> tuple[Entry, TensorSpec, Coordinates]:
        """Return the entry that contains a box of a tensor, its spec, and the position of the entry in the tensor."""
        if self._checkpoint.nodes is not None:
            found = _find_tensor(self._opened, self._checkpoint.nodes.get(fqn))
            if found is None:
                raise Mismatch(f"{fqn}: no ordinary tensor is stored under this name in {self._opened.name!r}")
            return self._opened.entry(found[0]), found[1], (0,) * len(offset)
        try:
            return *self._decode(fqn), (0,) * len(offset)
        except NotFound:
            return *self._decode(name_piece(fqn, offset)), offset

    def _decode(self, name: str) -> tuple[Entry, TensorSpec]:
        if name not in self._known:
            entry = self._reader.find_entry(name)
            spec = decode_spec(entry.spec, size_bytes=entry.size_bytes, what=f"{self._opened.name!r}, {name}")
            self._known[name] = (entry, spec)
        return self._known[name]

    def _read_tensors(self, batch: Sequence[_Wanted]) -> None:
        regions: list[tuple[Entry, Region, memoryview]] = []
        copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        for item, entry, spec, box, target in batch:
            if target.dtype != spec.dtype:
                self._cast.append(f"{item.storage_index.fqn} ({spec.dtype} to {target.dtype})")
            if not target.numel() or not has_values(target):
                continue
            if not _is_in_order(spec):
                copies.append((target, read_slice(self._reader, entry, spec, slices(box))))
                continue
            memory = target if _is_plain(target, spec) else torch.empty(box.sizes, dtype=spec.dtype)
            if memory is not target:
                copies.append((target, memory))
            region = Region(box, spec.shape, memory.element_size())
            regions.append((entry, region, tensor_bytes(memory, memory.nbytes)))
        try:
            self._reader.read_regions(regions)
            with torch.no_grad():
                for target, memory in copies:
                    target.copy_(memory)
        finally:
            mark_written([wanted.target for wanted in batch])

    def _iter_parts(self, batch: Sequence[_Wanted]) -> Iterator[FilledPart]:
        """Yield the targets on devices whose bytes are those of a box of an entry."""
        numbers = {name: number for number, name in enumerate(self._reader.manifest.names)}
        for _, entry, spec, box, target in batch:
            is_raw = has_values(target) and has_own_bytes(target) and _is_in_order(spec) and target.dtype == spec.dtype
            if is_raw and not target.is_cpu:
                yield FilledPart(numbers[entry.name], target, target.nbytes, box)

    def _read_payload(self, fqn: str) -> bytes:
        """Return a value as bytes for torch's planners, loaded and pickled again so that they get only checked data."""
        what = f"{self._opened.name!r}, {fqn}"
        if self._checkpoint.nodes is not None:
            options = LoadOptions(allow_pickle=not self._weights_only)
            return dump_payload(load_node(self._opened, self._checkpoint.nodes[fqn], options, Types(())))
        data = bytes(self._reader.read_entry(fqn))
        return dump_payload(load_payload(data, what=what, weights_only=True)) if self._weights_only else data


def _is_empty(stored: object) -> bool:
    return isinstance(stored, TensorStorageMetadata) and stored.size.numel() == 0


def _is_in_order(spec: TensorSpec) -> bool:
    """Return whether the bytes of an entry are exactly the items of the tensor in C order."""
    is_plain = not (spec.packed or spec.conj or spec.neg or spec.offset)
    return is_plain and spec.stride == contiguous_stride(spec.shape)


def _is_plain(target: torch.Tensor, spec: TensorSpec) -> bool:
    """Return whether bytes can be read directly into the memory of a target."""
    is_here = type(target) is torch.Tensor and target.is_cpu and target.is_contiguous()
    return is_here and target.dtype == spec.dtype and not (target.is_conj() or target.is_neg())


def _warn(found: _Checkpoint, names: Sequence[str], what: str) -> None:
    if names:
        warnings.warn(f"{found.snapshot.name!r}: {what}: {list_some(names, _MAX_NAMED)}", stacklevel=3)


def _describe_tree(opened: Opened, *, ids: Json, load_id: str) -> tuple[Metadata, dict[str, Json]]:
    """Return the DCP metadata of a snapshot of a tree, and its tree node for each name."""
    if not _is_mapping(opened.tree):
        raise Unsupported(f"{opened.name!r} is not a dict, so DCP cannot load it; use Store.load")
    nodes: dict[str, Json] = {}
    paths: dict[str, _FlatPath] = {}
    for path, node in _iter_flat((), opened.tree):
        fqn = ".".join(map(str, path))
        if fqn in nodes:
            raise Unsupported(f"{opened.name!r} contains two values that torch would name {fqn!r}; use Store.load")
        nodes[fqn], paths[fqn] = node, path
    stored = {fqn: _describe_node(opened, node) for fqn, node in nodes.items()}
    return make_metadata(stored, paths, make_storage_meta(ids, load_id)), nodes


def _find_tensor(opened: Opened, node: Json) -> tuple[int, TensorSpec] | None:
    """Return entry number and spec of an ordinary tensor with values; None for any other node."""
    if isinstance(node, list) and node[0] == GRAD:
        node = node[1]
    if not isinstance(node, list) or node[0] != TENSOR:
        return None
    entry = opened.entry(node[1])
    spec = decode_spec(entry.spec, size_bytes=entry.size_bytes, what=f"{opened.name!r}, {entry.name}")
    return None if spec.meta or spec.quantizer is not None else (node[1], spec)


def _describe_node(opened: Opened, node: Json) -> TensorStorageMetadata | BytesStorageMetadata:
    found = _find_tensor(opened, node)
    if found is None:
        return BytesStorageMetadata()
    spec = found[1]
    size = torch.Size(spec.shape)
    chunk = ChunkStorageMetadata(torch.Size([0] * len(size)), size)
    return TensorStorageMetadata(TensorProperties(spec.dtype, requires_grad=spec.requires_grad), size, [chunk])


def _iter_flat(path: _FlatPath, node: Json) -> Iterator[tuple[_FlatPath, Json]]:
    """Yield the leaves as torch's planners see them: they walk dicts, and lists that contain a tensor or a dict."""
    if _is_mapping(node):
        for key, child in _pairs(node):
            yield from _iter_flat((*path, key_text(key)), child)
    elif _is_walked(node):
        for number, child in enumerate(node[1:]):
            yield from _iter_flat((*path, number), child)
    else:
        yield path, node


def _is_mapping(node: Json) -> bool:
    return isinstance(node, list) and node[0] in PAIRS_START


def _pairs(node: list[Any]) -> Iterator[tuple[Json, Json]]:
    start = PAIRS_START[node[0]]
    return zip(node[start::2], node[start + 1 :: 2], strict=True)


def _is_walked(node: Json) -> bool:
    if not isinstance(node, list) or node[0] != "list":
        return False
    return any(_is_mapping(child) or _is_walked(child) or _is_tensor(child) for child in node[1:])


def _is_tensor(node: Json) -> bool:
    return isinstance(node, list) and node[0] in _TENSORS
