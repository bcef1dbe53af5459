"""Opens stores on any filesystem, by the rules for a single writer where it has no exclusive create."""

from __future__ import annotations

import os
from pathlib import Path

from holdfast.objects.local.files import Files, PosixFiles
from holdfast.objects.local.local_store import LocalStore
from holdfast.objects.local.upload import FileNamer, Naming


def needs_single_writer(folder: Path) -> bool:
    """Tell whether the filesystem of an existing directory has no way to create a name that must be free."""
    return FileNamer(PosixFiles(os.fspath(folder))).read_naming(os.fspath(folder)) is Naming.CHECKED_RENAME


def open_place(root: str | os.PathLike[str], *, read_only: bool = False, files: Files | None = None) -> LocalStore:
    """Open a store, whose parent directory must be there."""
    is_single = needs_single_writer(Path(root).absolute().parent)
    return LocalStore(root, read_only=read_only, single_writer=is_single, files=files)
