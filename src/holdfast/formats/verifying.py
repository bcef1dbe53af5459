"""Checks exported files against their receipt, and the receipt against the snapshot: every byte of both is read."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Final

from holdfast.errors import BadFile, NotFound
from holdfast.formats.measuring import iter_measured, measure_file
from holdfast.formats.reading.detect import open_checkpoint
from holdfast.formats.receipt import (
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
from holdfast.repo.handle.repository import Repository
from holdfast.repo.names.snapshots import CommittedSnapshot
from holdfast.repo.read.reader import open_snapshot
from holdfast.snapshot.load.opened import Opened
from holdfast.trees.pick import pick

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
