"""Checks exported files against their receipt, and the receipt against the snapshot: every byte of both is read."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from typing import Final

import torch
from blake3 import blake3

from holdfast.digest import Digest
from holdfast.errors import BadFile, NotFound
from holdfast.formats.digests import CellDigest
from holdfast.formats.importing import open_source, read_import_receipt
from holdfast.formats.reading.byte_ranges import SPAN_BYTES, ByteReader, Geometry, iter_gathered
from holdfast.formats.reading.detect import open_checkpoint
from holdfast.formats.reading.found import FoundCheckpoint, iter_named_tensors
from holdfast.formats.receipt import (
    CarriedFile,
    Receipt,
    ReceiptFinding,
    TensorDigest,
    check_files,
    check_tensors,
    read_receipt,
)
from holdfast.formats.writing.copying import TensorCopier
from holdfast.formats.writing.plan import ROOT_NAME, SelectedTree, TensorPlan, plan_tensors
from holdfast.formats.writing.snapshot_tensor import SnapshotTensor
from holdfast.formats.writing.target import RECEIPT_NAME, RECEIPT_SUFFIX
from holdfast.objects.url import verify_path
from holdfast.progress import Progress, Silent
from holdfast.repo.files import FileSource
from holdfast.repo.format.entry import Entry
from holdfast.repo.handle.repository import Repository
from holdfast.repo.names.snapshots import CommittedSnapshot
from holdfast.repo.read.reader import SnapshotReader, open_snapshot
from holdfast.snapshot.opened import Opened
from holdfast.tensors.memory import view_raw, wrap_memory
from holdfast.tensors.spec import TENSOR, TensorSpec, contiguous_stride, decode_spec, dtype_name, item_bytes
from holdfast.trees.pick import pick


def check_import(
    path: str,
    receipt: Receipt,
    *,
    format: str | None = None,
    unpickle: bool = False,
    follow_links: bool = False,
    progress: Progress | None = None,
) -> Iterator[ReceiptFinding]:
    """Yield every difference between the files of a checkpoint and the receipt of its import; reads every byte.

    With `unpickle`, the file is loaded by torch.load, which can run any code: only for files that were imported so.
    """
    if receipt.kind != "import":
        raise BadFile(f"the receipt is of an {receipt.kind}; `holdfast verify-{receipt.kind}` checks it", path=path)
    # The format of a receipt may be a folder's, and one file of it may be checked alone.
    format = format or (receipt.format if os.path.isdir(path) else None)
    found = open_source(path, format=format, unpickle=unpickle, follow_links=follow_links)
    yield from check_tensors(receipt, iter_measured(found, progress or Silent()), side="source", by_file_names=True)
    yield from check_files(receipt, map(measure_file, found.files))


def check_stored(
    repo: Repository, snapshot: CommittedSnapshot, receipt: Receipt, progress: Progress | None = None
) -> Iterator[ReceiptFinding]:
    """Yield every difference between a snapshot and the receipt of its import; reads and verifies every byte."""
    if snapshot.digest != receipt.root:
        yield ReceiptFinding(snapshot.name, f"the snapshot {receipt.root.hex()[:12]}", snapshot.digest.hex()[:12])
        return
    with open_snapshot(repo, snapshot) as reader:
        stored = _iter_snapshot_digests(reader, {tensor.name for tensor in receipt.tensors}, progress or Silent())
        yield from check_tensors(receipt, stored, side="result", by_file_names=False)


def check_imported(
    repo: Repository,
    snapshot: CommittedSnapshot,
    path: str,
    *,
    unpickle: bool = False,
    follow_links: bool = False,
    progress: Progress | None = None,
) -> Iterator[ReceiptFinding]:
    """Yield every difference between the files, the receipt in the store, and the snapshot."""
    receipt = read_import_receipt(repo, snapshot)
    yield from check_import(path, receipt, unpickle=unpickle, follow_links=follow_links, progress=progress)
    yield from check_stored(repo, snapshot, receipt, progress)


def iter_measured(found: FoundCheckpoint, progress: Progress) -> Iterator[tuple[str, TensorDigest]]:
    """Yield the name and facts of each tensor of a checkpoint; reads it in pieces."""
    tensors = list(iter_named_tensors(found.tree))
    progress.begin("verify the files", sum(tensor.numel() * tensor.element_size() for _, tensor in tensors))
    try:
        for name, tensor in tensors:
            stored = found.placeholders.find(tensor)
            pieces = _iter_memory(tensor) if stored is None else _iter_pieces(stored.reader, tensor)
            yield name, _digest(tensor.dtype, tuple(tensor.shape), pieces, progress)
    finally:
        progress.end()


def _digest(
    dtype: torch.dtype, shape: tuple[int, ...], pieces: Iterator[memoryview], progress: Progress
) -> TensorDigest:
    cells = CellDigest(dtype, shape)
    for piece in pieces:
        cells.update(piece)
        progress.advance(len(piece))
    return TensorDigest(dtype_name(dtype), shape, cells.digest())


def _iter_pieces(reader: ByteReader, tensor: torch.Tensor) -> Iterator[memoryview]:
    size = tensor.element_size()
    if not tensor.is_contiguous():
        geometry = Geometry(size, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))
        yield from iter_gathered(reader, geometry)
        return
    start = int(tensor.storage_offset()) * size
    stop = start + tensor.numel() * size
    for at in range(start, stop, SPAN_BYTES):
        yield reader.read(at, min(at + SPAN_BYTES, stop))


def _iter_memory(tensor: torch.Tensor) -> Iterator[memoryview]:
    if tensor.numel() and not tensor.is_meta:
        raw = view_raw(tensor.detach()).contiguous().view(-1).view(torch.uint8)
        yield memoryview(raw.numpy().data)


def measure_file(source: FileSource) -> CarriedFile:
    """Return size and digest of a file; reads it in pieces."""
    hasher = blake3()
    for at in range(0, source.size_bytes, SPAN_BYTES):
        hasher.update(source.read(at, min(at + SPAN_BYTES, source.size_bytes)))
    return CarriedFile(source.name, source.size_bytes, Digest(hasher.digest()))


def _iter_snapshot_digests(
    reader: SnapshotReader, names: set[str], progress: Progress
) -> Iterator[tuple[str, TensorDigest]]:
    """Yield the name and facts of each stored tensor; carried files are verified by the snapshot's own digests."""
    entries = [entry for entry in reader.manifest.iter_entries() if entry.name in names or _is_tensor(entry)]
    progress.begin("verify the snapshot", sum(entry.size_bytes for entry in entries))
    try:
        for entry in entries:
            spec = decode_spec(entry.spec, size_bytes=entry.size_bytes, what=entry.name)
            yield entry.name, _digest(spec.dtype, spec.shape, _iter_entry(reader, entry, spec), progress)
    finally:
        progress.end()


def _is_tensor(entry: Entry) -> bool:
    return isinstance(entry.spec, dict) and entry.spec.get("type") == TENSOR


def _iter_entry(reader: SnapshotReader, entry: Entry, spec: TensorSpec) -> Iterator[memoryview]:
    """Yield the items of a stored tensor in C order."""
    is_plain = spec.packed or (spec.stride == contiguous_stride(spec.shape) and not spec.offset)
    if spec.meta or (is_plain and entry.size_bytes == math.prod(spec.shape) * item_bytes(spec.dtype)):
        yield from reader.iter_entry(entry)
        return
    data = bytearray().join(reader.iter_entry(entry))
    stride = spec.stride
    if spec.packed:
        kept = iter(contiguous_stride(spec.packed_shape))
        stride = tuple(next(kept) if s or n == 1 else 0 for n, s in zip(spec.shape, spec.stride, strict=True))
    empty = torch.empty(0, dtype=spec.dtype)
    items = empty.set_(wrap_memory(memoryview(data)).untyped_storage(), spec.offset, spec.shape, stride)
    yield from _iter_memory(items)


_TENSORS_AT_ONCE: Final = 256


def read_export_receipt(path: str) -> Receipt:
    """Return the receipt beside an exported file, or in an exported folder; raises NotFound if there is none."""
    verify_path(path)
    found = os.path.join(path, RECEIPT_NAME) if os.path.isdir(path) else path + RECEIPT_SUFFIX
    if not os.path.exists(path):
        raise NotFound(f"{path} does not exist", name=path)
    if not os.path.exists(found):
        raise NotFound(f"{path} has no receipt ({found} is missing); name one with --receipt FILE", name=found)
    return read_receipt(found)


def check_export(path: str, receipt: Receipt, *, progress: Progress | None = None) -> Iterator[ReceiptFinding]:
    """Yield every difference between exported files and a receipt; needs no store."""
    if receipt.kind != "export":
        raise BadFile(f"the receipt is of an {receipt.kind}; `holdfast verify-{receipt.kind}` checks it", path=path)
    found = open_checkpoint(path, receipt.format)
    measured = ((name or ROOT_NAME, facts) for name, facts in iter_measured(found, progress or Silent()))
    yield from check_tensors(receipt, measured, side="result", by_file_names=True)
    carried = [measure_file(source) for source in found.files if source.name != RECEIPT_NAME]
    yield from check_files(receipt, carried)


def check_exported(
    repo: Repository, snapshot: CommittedSnapshot, receipt: Receipt, *, progress: Progress | None = None
) -> Iterator[ReceiptFinding]:
    """Yield every difference between a snapshot and the receipt of its export; reads and verifies every byte."""
    if snapshot.digest != receipt.root:
        yield ReceiptFinding(snapshot.name, f"the snapshot {receipt.root.hex()[:12]}", snapshot.digest.hex()[:12])
        return
    names = {tensor.name for tensor in receipt.tensors}
    with Opened(open_snapshot(repo, snapshot)) as opened:
        node = pick(opened.tree, lambda name: (name or ROOT_NAME) in names)
        plan = plan_tensors(opened, SelectedTree(node)) if node is not None else TensorPlan()
        measured = _iter_stored(opened, [each.tensor for each in plan.tensors.values()], progress or Silent())
        yield from check_tensors(receipt, measured, side="source", by_file_names=False)


def check_all(
    repo: Repository, snapshot: CommittedSnapshot, path: str, *, progress: Progress | None = None
) -> Iterator[ReceiptFinding]:
    """Yield every difference between exported files, the receipt beside them, and the snapshot."""
    receipt = read_export_receipt(path)
    yield from check_exported(repo, snapshot, receipt, progress=progress)
    yield from check_export(path, receipt, progress=progress)


def _iter_stored(
    opened: Opened, tensors: Sequence[SnapshotTensor], progress: Progress
) -> Iterator[tuple[str, TensorDigest]]:
    progress.begin("verify the snapshot", sum(tensor.size_bytes for tensor in tensors))
    try:
        with TensorCopier(opened) as copier:
            for first in range(0, len(tensors), _TENSORS_AT_ONCE):
                some = tensors[first : first + _TENSORS_AT_ONCE]
                for tensor, copied in zip(some, copier.digest(some), strict=True):
                    assert copied.source is not None, "the job ends its tensor"
                    progress.advance(tensor.size_bytes)
                    yield tensor.name, copied.source
    finally:
        progress.end()
