"""What the writer of a format is given, and what it returns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.formats.receipt import CarriedFile, LeftOut, ReceiptTensor
from holdfast.formats.writing.copying import Copied, TensorCopier
from holdfast.formats.writing.plan import PlannedTensor, SelectedTree, TensorPlan
from holdfast.formats.writing.target import ExportTarget
from holdfast.snapshot.load.opened import Opened


@dataclass(frozen=True, slots=True)
class ExportWork:
    """One export: what to write, and what writes it."""

    opened: Opened
    tree: SelectedTree
    plan: TensorPlan
    copier: TensorCopier
    target: ExportTarget
    max_shard_bytes: int
    """The largest size of a file, for formats of several files."""


@dataclass(frozen=True, slots=True)
class WrittenExport:
    """What was written: the content of the receipt."""

    tensors: Sequence[ReceiptTensor]
    left_out: Sequence[LeftOut]
    files: Sequence[CarriedFile] = ()


def make_receipt_tensor(planned: PlannedTensor, copied: Copied, file: str, name_in_files: str = "") -> ReceiptTensor:
    """Return the line of the receipt for a tensor that was copied into a file."""
    assert copied.source is not None, "the last job of a tensor has its facts"
    assert copied.result is not None, "the last job of a tensor has its facts"
    name = name_in_files or planned.name_in_files
    return ReceiptTensor(planned.tensor.name, name, file, copied.source, copied.result, copied.cast)
