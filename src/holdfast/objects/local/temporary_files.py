"""Removes the temporary files that killed saves have left in a local store."""

from __future__ import annotations

import os
from collections.abc import Iterable
from math import inf

from holdfast.objects.local.files import FileKind, Files
from holdfast.objects.local.naming import TEMP_PREFIX, FileNamer


def remove_debris(
    files: Files,
    namer: FileNamer,
    root: str,
    directories: Iterable[tuple[str, dict[str, FileKind]]],
    *,
    older_than_s: float,
) -> int:
    """Remove temporary files that are older, by the filesystem's own clock; return how many.

    With 0 all are removed, whatever their time. A negative age also removes files that are so much younger than now.
    `directories` are paths relative to `root`, each with the names in it.
    """
    removed = 0
    now_s = _read_file_time(files, namer, root) if older_than_s else inf
    for directory, kinds in directories:
        for name in kinds:
            path = os.path.join(root, directory, name)
            if name.startswith(TEMP_PREFIX) and _is_older(files, path, now_s - older_than_s):
                namer.discard(path)
                removed += 1
    return removed


def _read_file_time(files: Files, namer: FileNamer, root: str) -> float:
    """Return the time that the filesystem gives to a new file: this host's clock may be hours ahead of it."""
    try:
        path, handle = namer.create_temp(root)
    except OSError:
        return 0.0  # what is old cannot be told: nothing is
    try:
        return files.stat_handle(handle).modified_s
    finally:
        files.close(handle)
        namer.discard(path)


def _is_older(files: Files, path: str, time_s: float) -> bool:
    try:
        return files.stat(path).modified_s <= time_s
    except OSError:
        return False  # its writer is done with it
