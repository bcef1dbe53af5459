"""Writes files that `torch.load(weights_only=True)` reads: a zip archive of one pickle and the storages of tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from holdfast.formats.writing.copying import Copied, CopyJob, TensorCopier, TensorOutput
from holdfast.formats.writing.pickle_text import (
    EMPTY_ORDERED_DICT,
    PickleText,
    call,
    encode_flag,
    encode_int,
    encode_text,
    encode_tuple,
    name_global,
    refer,
)
from holdfast.formats.writing.plain_values import PlainTree, TensorRef
from holdfast.formats.writing.snapshot_tensor import SnapshotTensor
from holdfast.formats.writing.storages import StoragePlan, TensorView, plan_storages
from holdfast.formats.writing.work import ExportWork, WrittenExport, make_receipt_tensor
from holdfast.formats.writing.zip_layout import ZipLayout, add_crc, plan_zip
from holdfast.repo.format.boxes import Box
from holdfast.tensors.dtypes import dtype_name, find_dtype
from holdfast.tensors.spec import contiguous_stride

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
