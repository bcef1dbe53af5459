"""Exports a snapshot to the files of another library, with a receipt."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Final

import torch

from holdfast import __version__
from holdfast.errors import BadName, NameInUse
from holdfast.files.keep import verify_target
from holdfast.formats.receipt import Receipt, TensorDigest, write_receipt
from holdfast.formats.writing.copying import ExportWork, TensorCopier, WrittenExport
from holdfast.formats.writing.dcp_folder import export_dcp
from holdfast.formats.writing.plan import plan_tensors, select_tree
from holdfast.formats.writing.safetensors_file import export_hf, export_safetensors
from holdfast.formats.writing.target import RECEIPT_NAME, RECEIPT_SUFFIX, ExportTarget
from holdfast.formats.writing.torch_file import export_torch
from holdfast.objects.local.files import Files, PosixFiles
from holdfast.objects.url import verify_path
from holdfast.progress import Progress, Silent
from holdfast.repo.files import is_below
from holdfast.repo.handle.repository import Repository
from holdfast.repo.names.snapshots import CommittedSnapshot
from holdfast.repo.read.reader import open_snapshot
from holdfast.snapshot.entries import verify_dtype
from holdfast.snapshot.opened import Opened
from holdfast.tensors.spec import find_dtype

_WRITERS: Final[Mapping[str, Callable[[ExportWork, str], WrittenExport]]] = {
    "safetensors": export_safetensors,
    "hf": export_hf,
    "torch": export_torch,
    "dcp": export_dcp,
}
FORMATS: Final = tuple(_WRITERS)
_FOLDERS: Final = ("hf", "dcp")
_SIZE: Final = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})?) ?([KMGT])(i?)B")
_POWERS: Final = {"K": 1, "M": 2, "G": 3, "T": 4}


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportOptions:
    """What to export, and how; `Store.export` describes each. Raises ValueError or BadName for a bad one."""

    format: str = "safetensors"
    select: str = ""
    exclude: str | Sequence[str] = ()
    dtype: torch.dtype | None = None
    max_shard_size: int | str = "5GB"
    replace: bool = False
    receipt: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        """Refuse what no export could use, before anything is read."""
        if self.format not in FORMATS:
            raise ValueError(f"format must be one of {', '.join(FORMATS)}, not {self.format!r}")
        verify_dtype(self.dtype)
        parse_shard_size(self.max_shard_size)
        if self.receipt is not None:
            verify_path(os.fspath(self.receipt))

    @property
    def patterns(self) -> tuple[str, ...]:
        """The patterns of leaf names to leave out."""
        return (self.exclude,) if isinstance(self.exclude, str) else tuple(self.exclude)


@dataclass(frozen=True, slots=True)
class ExportResult:
    """What an export has written."""

    path: str
    """The file or folder, as an absolute path."""
    receipt: Receipt
    receipt_path: str
    num_bytes: int
    """The number of bytes of all tensors in the files."""


def parse_shard_size(size: int | str) -> int:
    """Return a size in bytes, such as 5GB (10**9) or 500MiB; raises BadName."""
    found = _SIZE.fullmatch(size) if isinstance(size, str) else None
    number = size if isinstance(size, int) else 0
    if found:
        number = int(float(found[1]) * (1024 if found[3] else 1000) ** _POWERS[found[2]])
    if number <= 0:
        raise BadName(f"{size!r} is not the size of a file; write a number of bytes, or one such as 5GB or 500MiB")
    return number


def export(
    repo: Repository,
    snapshot: CommittedSnapshot,
    destination: str,
    options: ExportOptions,
    *,
    progress: Progress | None = None,
    files: Files | None = None,
) -> ExportResult:
    """Write a snapshot to files of another library, which appear whole or not at all, and return the receipt."""
    verify_target(repo, destination)
    path, progress = os.path.abspath(destination), progress or Silent()
    is_folder = options.format in _FOLDERS
    chosen = None if options.receipt is None else os.fspath(options.receipt)
    receipt_path = chosen or (os.path.join(path, RECEIPT_NAME) if is_folder else path + RECEIPT_SUFFIX)
    if not is_folder or chosen:
        _verify_receipt_path(repo, receipt_path, path, replace=options.replace)
    with Opened(open_snapshot(repo, snapshot)) as opened:
        tree = select_tree(opened, options.select, options.patterns)
        plan = plan_tensors(opened, tree)
        target = ExportTarget(
            files or PosixFiles(os.path.dirname(path)), path, is_folder=is_folder, replace=options.replace
        )
        progress.begin(f"export {snapshot.name}", plan.size_bytes)
        try:
            with target, TensorCopier(opened, dtype=options.dtype, progress=progress) as copier:
                work = ExportWork(opened, tree, plan, copier, target, parse_shard_size(options.max_shard_size))
                written = _WRITERS[options.format](work, os.path.basename(path))
                receipt = _make_receipt(snapshot, destination, options.format, written)
                if is_folder:
                    write_receipt(target.find_path(RECEIPT_NAME), receipt)
                target.commit()
        finally:
            progress.end()
    if not is_folder or chosen:
        write_receipt(receipt_path, receipt)
    return ExportResult(path, receipt, receipt_path, sum(_count_bytes(tensor.result) for tensor in receipt.tensors))


def _count_bytes(facts: TensorDigest) -> int:
    return math.prod(facts.shape) * find_dtype(facts.dtype).itemsize


def _make_receipt(snapshot: CommittedSnapshot, place: str, format: str, written: WrittenExport) -> Receipt:
    return Receipt(
        kind="export",
        format=format,
        snapshot=snapshot.name,
        root=snapshot.digest,
        time=datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        holdfast=__version__,
        place=place,
        tensors=tuple(written.tensors),
        files=tuple(written.files),
        left_out=tuple(written.left_out),
    )


def _verify_receipt_path(repo: Repository, path: str, destination: str, *, replace: bool) -> None:
    verify_target(repo, path)
    if is_below(path, destination):
        raise BadName(f"{path} is the export itself, or inside it; choose another place for the receipt (receipt=)")
    if os.path.lexists(path) and not replace:
        raise NameInUse(
            f"the receipt {path} exists already; choose another destination, or replace it (--force, replace=True)",
            name=path,
        )
