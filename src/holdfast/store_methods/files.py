"""The methods of `Store` for files: keep files as they are; import and export checkpoints of other libraries."""

from __future__ import annotations

import os
from io import BufferedReader
from typing import TYPE_CHECKING

from typing_extensions import Unpack

from holdfast.display.bars import make_progress
from holdfast.files.keep import GetChoices, KeepOptions, Paths, PutChoices, keep_files, plan_sources, restore_files
from holdfast.objects.url import verify_path
from holdfast.progress import ProgressChoice
from holdfast.repo.files import Restored
from holdfast.repo.format.layout import verify_user_name
from holdfast.repo.read.reader import open_snapshot
from holdfast.repo.write.writer import SaveResult
from holdfast.store_methods.opened import OpenStore, StrPath

if TYPE_CHECKING:
    from holdfast.formats.background import ExportHandle
    from holdfast.formats.export import ExportChoices, ExportResult
    from holdfast.formats.importing import ImportChoices, ImportResult
    from holdfast.formats.receipt import ReceiptFinding
    from holdfast.snapshot.view.lazy import Snapshot


class FileMethods(OpenStore):
    """Keep, import and export files."""

    def put(
        self, name: str, paths: Paths, *, progress: ProgressChoice = None, **choices: Unpack[PutChoices]
    ) -> SaveResult:
        """Save files and directories as one snapshot, on one rank; `get` restores them byte for byte.

        A directory `dir` becomes the entries `dir/...`; `dir/` stands for its files. Files of tensors share bytes.
        """
        repo, options, bar = self.repository, KeepOptions(**choices), make_progress(progress)
        sources = plan_sources(repo, paths, follow_links=options.follow_links)
        return keep_files(repo, name, sources, options, progress=bar)

    def get(
        self, name: str | Snapshot, folder: StrPath, *, progress: ProgressChoice = None, **choices: Unpack[GetChoices]
    ) -> Restored:
        """Write the files of a snapshot below `folder`, each whole and verified, or not at all; follows no links there.

        If some files exist, NameInUse lists them and nothing is written, unless `overwrite`. A saved tree has no files:
        `export` writes it, and `raw=True` its tensors as raw bytes.
        """
        snapshot, bar = self._open_snapshot(name), make_progress(progress)
        with open_snapshot(repo := snapshot.repository, snapshot.record) as reader:
            return restore_files(repo, reader, folder, progress=bar, **choices)

    def open_file(self, name: str | Snapshot, path: str) -> BufferedReader:
        """Open a file of a snapshot as `open(path, "rb")` does; reads fetch and verify only the chunks they need."""
        return self._open_snapshot(name).open_file(path)

    def import_(
        self, source: StrPath, name: str, *, progress: ProgressChoice = None, **choices: Unpack[ImportChoices]
    ) -> ImportResult:
        """Save a checkpoint of another library under a name, in pieces, and return the result with its receipt.

        Reads safetensors, torch.save, `save_pretrained`, DCP, content stores of PyTorch and ZeRO of DeepSpeed, and
        unpickles nothing. Raises BadFile or Untrusted, and writes nothing, if the source is damaged or could run code.
        """
        from holdfast.formats.importing import import_checkpoint, make_import_options

        verify_user_name(name)
        options = make_import_options(choices, environment=self._environment)
        repo, types, bar = self.repository, self._types, make_progress(progress)
        return import_checkpoint(repo, source, name, options, types=types, progress=bar)

    def verify_import(
        self,
        source: StrPath,
        name: str | Snapshot,
        *,
        unpickle: bool = False,
        follow_links: bool = False,
        progress: ProgressChoice = None,
    ) -> list[ReceiptFinding]:
        """Compare files with the receipt and snapshot of their import, read as then; return all differences."""
        from holdfast.formats.measuring import check_imported

        record, bar = self._views.open_here(name).record, make_progress(progress)
        path, chosen = os.fspath(source), {"unpickle": unpickle, "follow_links": follow_links}
        return list(check_imported(self.repository, record, path, progress=bar, **chosen))

    def export(self, name: str | Snapshot, destination: StrPath, **choices: Unpack[ExportChoices]) -> ExportResult:
        """Write a snapshot to files of other libraries; they appear whole and verified, or not at all.

        `format` is "safetensors", "torch", "hf" or "dcp"; `ExportChoices` has all options. The receipt has all digests.
        """
        from holdfast.formats.export import export_chosen

        snapshot = self._open_snapshot(name)
        return export_chosen(snapshot.repository, snapshot.record, os.fspath(destination), choices)

    def verify_export(self, destination: StrPath, name: str | Snapshot) -> list[ReceiptFinding]:
        """Compare exported files, the receipt beside them and the snapshot; return a finding for each difference."""
        from holdfast.formats.verifying import check_all

        snapshot = self._open_snapshot(name)
        return list(check_all(snapshot.repository, snapshot.record, os.fspath(destination)))

    def export_async(
        self, name: str | Snapshot, destination: StrPath, **choices: Unpack[ExportChoices]
    ) -> ExportHandle:
        """Start `export` in a process of low priority and return; `close` raises errors that no `wait` raised."""
        from holdfast.formats.background import ExportRunner

        self._exporter = self._exporter or ExportRunner()
        path = os.path.abspath(verify_path(os.fspath(destination)))
        snapshot = self._open_snapshot(name)
        return self._exporter.export(snapshot.repository, snapshot.record, path, choices)
