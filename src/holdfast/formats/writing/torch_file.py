"""Writes files that `torch.load(weights_only=True)` reads: a zip archive of one pickle and the storages of tensors."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from holdfast.formats.receipt import LeftOut
from holdfast.formats.writing.copying import (
    Copied,
    CopyJob,
    ExportWork,
    TensorCopier,
    TensorOutput,
    WrittenExport,
    make_receipt_tensor,
)
from holdfast.formats.writing.pickle_text import (
    EMPTY_ORDERED_DICT,
    PickleText,
    PlainTree,
    TensorRef,
    call,
    encode_flag,
    encode_int,
    encode_text,
    encode_tuple,
    name_global,
    refer,
)
from holdfast.formats.writing.plan import PlannedTensor
from holdfast.formats.writing.snapshot_tensor import SnapshotTensor, is_c_order
from holdfast.formats.writing.zip_layout import ZipLayout, add_crc, plan_zip
from holdfast.repo.format.boxes import Box
from holdfast.snapshot.opened import Opened
from holdfast.tensors.spec import TensorSpec, contiguous_stride, dtype_name, find_dtype

_ALONE: Final = "memory that it shares with other tensors in part: written as a tensor of its own"


@dataclass(frozen=True, slots=True)
class TensorView:
    """A tensor as a view of a storage; offset and strides are in items."""

    storage: int
    offset: int
    stride: tuple[int, ...]
    spec: TensorSpec


@dataclass(frozen=True, slots=True)
class StoragePlan:
    """The storages to write, and a view for each tensor, by the number of its entry."""

    storages: list[SnapshotTensor] = field(default_factory=list)
    views: dict[int, TensorView] = field(default_factory=dict)
    left_out: list[LeftOut] = field(default_factory=list)

    def is_whole(self, tensor: SnapshotTensor) -> bool:
        """Return whether the items of a tensor in C order are those of its storage, in the same shape."""
        view, spec = self.views[tensor.number], tensor.spec
        base = self.storages[view.storage]
        is_plain = is_c_order(replace(spec, packed=False, stride=view.stride)) and not (spec.conj or spec.neg)
        return is_plain and view.offset == 0 and spec.shape == base.spec.shape


def plan_storages(opened: Opened, tensors: Sequence[PlannedTensor]) -> StoragePlan:
    """Give tensors that share memory one storage, if one of them contains all of that memory."""
    plan = StoragePlan()
    groups: dict[object, list[SnapshotTensor]] = {}
    for each in tensors:
        alias = opened.find_facts(each.tensor.number)[2]
        groups.setdefault(alias or ("alone", each.tensor.number), []).append(each.tensor)
    for members in groups.values():
        for shared in _iter_overlapping(opened, members):
            _add_storage(plan, opened, shared)
    return plan


def _iter_overlapping(opened: Opened, members: Sequence[SnapshotTensor]) -> Iterator[list[SnapshotTensor]]:
    """Yield the members in groups whose bytes overlap; packed tensors of one alias are the same tensor."""
    if any(member.spec.packed for member in members):
        yield list(members)
        return
    group: list[SnapshotTensor] = []
    end = 0
    for member in sorted(members, key=lambda each: (each.spec.at, -_find_size(opened, each))):
        if group and member.spec.at >= end:
            yield group
            group = []
        group.append(member)
        end = max(end, member.spec.at + _find_size(opened, member))
    yield group


def _add_storage(plan: StoragePlan, opened: Opened, members: Sequence[SnapshotTensor]) -> None:
    # Sorted: the first member begins first, and is the longest of those that begin there.
    first = members[0]
    end = first.spec.at + _find_size(opened, first)
    is_covered = all(member.spec.at + _find_size(opened, member) <= end for member in members)
    # torch loads a storage with one dtype.
    if is_covered and len({member.spec.dtype for member in members}) == 1:
        _add_views(plan, opened, first, members)
        return
    for member in members:
        plan.left_out.append(LeftOut(member.name, _ALONE))
        _add_views(plan, opened, member, [member])


def _add_views(plan: StoragePlan, opened: Opened, base: SnapshotTensor, members: Sequence[SnapshotTensor]) -> None:
    for member in members:
        spec = member.spec
        offset = 0 if spec.packed else (spec.at - base.spec.at) // member.item_bytes + spec.offset
        stride = _pack_stride(spec) if spec.packed else spec.stride
        plan.views[member.number] = TensorView(len(plan.storages), offset, stride, spec)
    plan.storages.append(_flatten(opened, base))


def _flatten(opened: Opened, base: SnapshotTensor) -> SnapshotTensor:
    """Return the bytes of an entry as a tensor; the tensor itself if it is all of them, in C order."""
    spec, size_bytes = base.spec, _find_size(opened, base)
    is_raw = is_c_order(spec) and not (spec.conj or spec.neg)
    if is_raw and base.size_bytes == size_bytes:
        return base
    items = size_bytes // base.item_bytes
    return SnapshotTensor(base.name, base.number, TensorSpec(spec.dtype, (items,), (1,)))


def _find_size(opened: Opened, tensor: SnapshotTensor) -> int:
    return opened.find_facts(tensor.number)[1]


def _pack_stride(spec: TensorSpec) -> tuple[int, ...]:
    """Return the strides of items without gaps; dimensions of stride 0 keep it."""
    dense = iter(contiguous_stride(spec.packed_shape))
    return tuple(next(dense) if step or size == 1 else 0 for size, step in zip(spec.shape, spec.stride, strict=True))


_ROOT: Final = "archive"
_STORAGE_CLASSES: Final = {
    "float64": "DoubleStorage",
    "float32": "FloatStorage",
    "float16": "HalfStorage",
    "bfloat16": "BFloat16Storage",
    "int64": "LongStorage",
    "int32": "IntStorage",
    "int16": "ShortStorage",
    "int8": "CharStorage",
    "uint8": "ByteStorage",
    "bool": "BoolStorage",
    "complex128": "ComplexDoubleStorage",
    "complex64": "ComplexFloatStorage",
}
"""Dtypes that have a class of storages of their own; the others are bytes, and their dtype is beside them."""


@dataclass(frozen=True, slots=True)
class StorageJob:
    """The storage of one record: a stored tensor, or some of its rows."""

    tensor: SnapshotTensor
    rows: Box | None
    num_items: int
    is_last: bool = True


@dataclass(frozen=True, slots=True)
class TorchArchive:
    """One archive before its storages are written."""

    literals: tuple[tuple[str, bytes], ...]
    """The records before the storages, with their bytes."""
    storages: tuple[StorageJob, ...]
    layout: ZipLayout

    def plan_jobs(self, base: int) -> list[CopyJob]:
        """Return the jobs that copy the storages, if the archive begins at byte `base` of the file."""
        records = self.layout.records[len(self.literals) :]
        return [
            CopyJob(job.tensor, base + record.data_at, rows=job.rows, is_last=job.is_last, has_crc=True)
            for job, record in zip(self.storages, records, strict=True)
        ]

    def write(self, output: TensorOutput, base: int, copied: Sequence[Copied]) -> None:
        """Write everything but the storages, which were copied before."""
        crcs = [*(add_crc(data) for _, data in self.literals), *(each.crc for each in copied)]
        start = bytearray()
        for record, crc, (_, data) in zip(self.layout.records, crcs, self.literals, strict=False):
            start += record.encode_header(crc) + data
        output.write_at(base, memoryview(start))
        for record, crc in list(zip(self.layout.records, crcs, strict=True))[len(self.literals) :]:
            output.write_at(base + record.header_at, memoryview(record.encode_header(crc)))
        output.write_at(base + self.layout.directory_at, memoryview(self.layout.encode_directory(crcs)))


def export_torch(work: ExportWork, file_name: str) -> WrittenExport:
    """Write the tree with its containers and plain values into one file; tensors that share memory share a storage."""
    tensors = list(work.plan.tensors.values())
    plan = plan_storages(work.opened, tensors)
    plain = PlainTree(work.opened, work.tree)
    pickled = encode_tree(plain.convert(), plan, work.copier)
    storages = [StorageJob(each, None, each.size_bytes // each.item_bytes) for each in plan.storages]
    archive = plan_archive(pickled, storages, work.copier)
    work.target.verify_room(archive.layout.size_bytes)
    with work.target.create() as file:
        copied = work.copier.copy(archive.plan_jobs(0), file)
        archive.write(file, 0, copied)
        # The cells of a view are not those of its storage: another read finds their digest.
        views = {each.tie: each for each in tensors if not plan.is_whole(each.tensor)}
        digests = work.copier.digest([each.tensor for each in views.values()])
    by_view = dict(zip(views, digests, strict=True))
    lines = []
    for each in tensors:
        found = by_view.get(each.tie) or copied[plan.views[each.tensor.number].storage]
        lines.append(make_receipt_tensor(each, found, file_name))
    return WrittenExport(lines, [*work.plan.left_out, *plan.left_out, *plain.left_out])


def plan_archive(pickled: bytes, storages: Sequence[StorageJob], copier: TensorCopier) -> TorchArchive:
    """Lay out an archive of a pickle and its storages."""
    literals = ((f"{_ROOT}/data.pkl", pickled), (f"{_ROOT}/byteorder", b"little"), (f"{_ROOT}/version", b"3\n"))
    sizes = [job.num_items * copier.find_dtype(job.tensor).itemsize for job in storages]
    records = [(name, len(data)) for name, data in literals]
    records += [(f"{_ROOT}/data/{key}", size) for key, size in enumerate(sizes)]
    return TorchArchive(literals, tuple(storages), plan_zip(records))


def encode_tree(value: Any, plan: StoragePlan, copier: TensorCopier) -> bytes:
    """Return the pickle of a tree whose tensors are views of the planned storages."""
    return PickleText(lambda ref: _encode_tensor(ref, plan, copier)).encode(value)


def encode_single(tensor: SnapshotTensor, shape: tuple[int, ...], copier: TensorCopier) -> bytes:
    """Return the pickle of one contiguous tensor that is all of the only storage."""
    geometry = _Geometry(0, shape, contiguous_stride(shape))
    rebuilt = _rebuild(geometry, dtype_name(copier.find_dtype(tensor)), 0, math.prod(shape))
    return PickleText(lambda _: rebuilt).encode(TensorRef(0))


@dataclass(frozen=True, slots=True)
class _Geometry:
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    requires_grad: bool = False
    flags: tuple[str, ...] = ()


def _encode_tensor(ref: TensorRef, plan: StoragePlan, copier: TensorCopier) -> bytes:
    view: TensorView = plan.views[ref.number]
    storage, spec = plan.storages[view.storage], view.spec
    is_parameter = spec.role == "parameter"
    flags = tuple(name for name in ("conj", "neg") if getattr(spec, name))
    requires_grad = spec.requires_grad and not is_parameter
    geometry = _Geometry(view.offset, spec.shape, view.stride, requires_grad, flags)
    num_items = storage.size_bytes // storage.item_bytes
    rebuilt = _rebuild(geometry, dtype_name(copier.find_dtype(storage)), view.storage, num_items)
    if not is_parameter:
        return rebuilt
    return call(
        "torch._utils", "_rebuild_parameter", [rebuilt, encode_flag(value=spec.requires_grad), EMPTY_ORDERED_DICT]
    )


def _rebuild(geometry: _Geometry, dtype: str, key: int, num_items: int) -> bytes:
    kind = _STORAGE_CLASSES.get(dtype)
    item_bytes = 1 if kind else find_dtype(dtype).itemsize
    storage_class = name_global("torch", kind) if kind else name_global("torch.storage", "UntypedStorage")
    storage = refer(
        [
            encode_text("storage"),
            storage_class,
            encode_text(str(key)),
            encode_text("cpu"),
            encode_int(num_items * item_bytes),
        ]
    )
    arguments = [
        storage,
        encode_int(geometry.offset),
        encode_tuple(map(encode_int, geometry.shape)),
        encode_tuple(map(encode_int, geometry.stride)),
        encode_flag(value=geometry.requires_grad),
        EMPTY_ORDERED_DICT,
    ]
    arguments += [] if kind else [name_global("torch", dtype)]
    if geometry.flags:
        arguments.append(PickleText(lambda _: b"").encode_value(dict.fromkeys(geometry.flags, True)))
    return call("torch._utils", "_rebuild_tensor_v2" if kind else "_rebuild_tensor_v3", arguments)
