"""Writes folders that `torch.distributed.checkpoint.load` reads, on any number of ranks."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, groupby
from typing import Any, Final

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from holdfast.distributed.dcp.metadata import Stored, make_metadata, make_storage_meta
from holdfast.errors import Unsupported
from holdfast.formats.receipt import LeftOut
from holdfast.formats.writing.copying import Copied, ExportWork, WrittenExport, make_receipt_tensor
from holdfast.formats.writing.pickle_text import PickleText, PlainTree, TensorRef
from holdfast.formats.writing.plan import PlannedTensor
from holdfast.formats.writing.snapshot_tensor import SnapshotTensor, iter_slabs
from holdfast.formats.writing.torch_file import StorageJob, TorchArchive, encode_single, plan_archive
from holdfast.objects.blocks import PAGE_BYTES
from holdfast.repo.format.boxes import Box, volume, whole
from holdfast.snapshot.pickled import pickle_value

_METADATA: Final = ".metadata"
_FILE: Final = "__0_{number}.distcp"
_NO_BOX: Final = Box((), ())
CHUNK_BYTES: Final = 128 << 20
"""A reader of DCP loads at least one chunk at a time into memory."""

FlatPath = tuple[str | int, ...]
"""The keys that lead to a value; DCP has strings for the keys of dicts, and positions in lists."""


@dataclass(frozen=True, slots=True)
class DcpItem:
    """One item of a DCP folder: a box of a tensor, or a value, and where it is written."""

    archive: TorchArchive
    file: str
    base: int
    """The offset of the item in its file."""
    box: Box
    """The items of the tensor; empty for a value."""
    is_last: bool = True
    """Whether it is the last box of its tensor."""


class ItemPlacer:
    """Gives items their places, one after the other, in files of at most a given size (or one item)."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._number = 0
        self._end = 0

    def place(self, archive: TorchArchive, *, box: Box = _NO_BOX, is_last: bool = True) -> DcpItem:
        """Return an item at the next free place; it begins with a page, as its archive expects."""
        base = self._end + -self._end % PAGE_BYTES if archive.storages else self._end
        if base and base + archive.layout.size_bytes > self._limit:
            self._number, base = self._number + 1, 0
        self._end = base + archive.layout.size_bytes
        return DcpItem(archive, _FILE.format(number=self._number), base, box, is_last)


@dataclass(slots=True)
class FlatState:
    """A state dict as DCP flattens it: values by their keys joined with dots."""

    values: dict[str, Any] = field(default_factory=dict)
    paths: dict[str, FlatPath] = field(default_factory=dict)
    left_out: list[LeftOut] = field(default_factory=list)

    def add(self, value: Any, path: FlatPath) -> None:
        """Add a value, and everything in it that DCP stores as items of their own."""
        name = ".".join(map(str, path))
        if isinstance(value, dict):
            if not value:
                self.left_out.append(LeftOut(name, "an empty dict: DCP has values only"))
            for key, child in value.items():
                self.add(child, (*path, str(key)))
        elif isinstance(value, list | tuple) and _has_items(value):
            if isinstance(value, tuple):
                self.left_out.append(LeftOut(name, "a tuple of tensors, written as a list"))
            for at, child in enumerate(value):
                self.add(child, (*path, at))
        elif name in self.values:
            raise Unsupported(f"two values would both be called {name!r} in DCP; rename or exclude one of them")
        else:
            self.values[name], self.paths[name] = value, path


def _has_items(value: Any) -> bool:
    """Return whether DCP stores the members of a list as items: if one is a tensor, a dict, or such a list.

    It does not look into tuples. Those that contain tensors are treated as lists.
    """
    if isinstance(value, tuple):
        return _has_tensors(value)
    return any(
        isinstance(each, TensorRef | dict) or (isinstance(each, list | tuple) and _has_items(each)) for each in value
    )


def _has_tensors(value: Any) -> bool:
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return isinstance(value, TensorRef) or any(map(_has_tensors, children))


def export_dcp(work: ExportWork, _: str) -> WrittenExport:
    """Write all tensors and plain values as a checkpoint of one rank; large tensors are written as several chunks."""
    plain = PlainTree(work.opened, work.tree)
    state, root = FlatState(), plain.convert()
    for key, value in (root if isinstance(root, dict) else {work.tree.find_own_name(""): root}).items():
        state.add(value, (str(key),))
    by_number = {each.tensor.number: each for each in work.plan.tensors.values()}
    tensors = {fqn: by_number[ref.number] for fqn, ref in state.values.items() if isinstance(ref, TensorRef)}
    placer = ItemPlacer(work.max_shard_bytes)
    # Tensors that are the same memory are written once.
    boxes: dict[Hashable, list[DcpItem]] = {}
    for each in tensors.values():
        if each.tie not in boxes:
            boxes[each.tie] = list(_iter_boxes(each.tensor, work, placer))
    values = {
        fqn: placer.place(plan_archive(PickleText(_refuse).encode(value), [], work.copier))
        for fqn, value in state.values.items()
        if fqn not in tensors
    }
    written = _write_items(work, boxes, list(values.values()))
    lines = [
        make_receipt_tensor(each, written[each.tie], boxes[each.tie][0].file, fqn) for fqn, each in tensors.items()
    ]
    _write_metadata(work, state.paths, {fqn: (each, boxes[each.tie]) for fqn, each in tensors.items()}, values)
    return WrittenExport(lines, [*work.plan.left_out, *plain.left_out, *state.left_out])


def _refuse(ref: TensorRef) -> bytes:
    raise AssertionError(f"entry {ref.number} is a tensor, which is an item of its own")


def _iter_boxes(tensor: SnapshotTensor, work: ExportWork, placer: ItemPlacer) -> Iterator[DcpItem]:
    boxes = list(iter_slabs(whole(tensor.spec.shape), tensor.item_bytes, CHUNK_BYTES)) or [whole(tensor.spec.shape)]
    for number, box in enumerate(boxes):
        is_last = number == len(boxes) - 1
        job = StorageJob(tensor, box, volume(box), is_last)
        pickled = encode_single(tensor, box.sizes, work.copier)
        yield placer.place(plan_archive(pickled, [job], work.copier), box=box, is_last=is_last)


def _write_items(
    work: ExportWork, boxes: Mapping[Hashable, Sequence[DcpItem]], values: Sequence[DcpItem]
) -> dict[Hashable, Copied]:
    """Write the items, file by file, and return what was copied of each tensor."""
    work.target.verify_room(sum(item.archive.layout.size_bytes for item in (*chain(*boxes.values()), *values)))
    keys = [key for key, items in boxes.items() for _ in items]
    found: dict[Hashable, Copied] = {}
    ordered = [*zip(keys, chain(*boxes.values()), strict=True), *((None, item) for item in values)]
    for name, group in groupby(ordered, key=lambda pair: pair[1].file):
        pairs = list(group)
        with work.target.create(name) as file:
            jobs = [job for _, item in pairs for job in item.archive.plan_jobs(item.base)]
            copied = iter(work.copier.copy(jobs, file))
            for key, item in pairs:
                own = [next(copied) for _ in item.archive.storages]
                item.archive.write(file, item.base, own)
                if own and item.is_last:
                    found[key] = own[-1]
    return found


def _write_metadata(
    work: ExportWork,
    paths: Mapping[str, FlatPath],
    tensors: Mapping[str, tuple[PlannedTensor, Sequence[DcpItem]]],
    values: Mapping[str, DcpItem],
) -> None:
    state: dict[str, Stored] = {fqn: BytesStorageMetadata() for fqn in values}
    storage = {MetadataIndex(fqn): _locate(item) for fqn, item in values.items()}
    for fqn, (each, items) in tensors.items():
        spec = each.tensor.spec
        properties = TensorProperties(work.copier.find_dtype(each.tensor), requires_grad=spec.requires_grad)
        chunks = [ChunkStorageMetadata(torch.Size(item.box.starts), torch.Size(item.box.sizes)) for item in items]
        state[fqn] = TensorStorageMetadata(properties, torch.Size(spec.shape), chunks)
        for number, item in enumerate(items):
            storage[MetadataIndex(fqn, torch.Size(item.box.starts), number)] = _locate(item)
    metadata = make_metadata({fqn: state[fqn] for fqn in paths}, dict(paths), make_storage_meta(None, ""))
    metadata.storage_data = storage
    with work.target.create(_METADATA) as file:
        file.write_at(0, memoryview(pickle_value(metadata, name=_METADATA)))


def _locate(item: DcpItem) -> _StorageInfo:
    return _StorageInfo(item.file, item.base, item.archive.layout.size_bytes)
