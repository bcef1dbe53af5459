"""What a filesystem has and lacks, as one row of the table in docs/reference/filesystems.md."""

from __future__ import annotations

import fcntl
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from holdfast.objects.local.probe import probe_directory

_ODD_CHARACTERS: Final = '"*:<>?\\|'


@dataclass(frozen=True, slots=True)
class Features:
    """What was found by trying."""

    type_name: str
    network: bool
    hard_links: bool
    rename_noreplace: bool
    direct_io: bool
    flock: bool
    sync_directory: bool
    case_sensitive: bool
    longest_name_bytes: int
    refused_characters: str
    """Those of the usual suspects that no file name may have."""
    time_step_s: float
    """The finest step of modification times."""


def probe_features(folder: Path) -> Features:
    """Try everything in a directory that may be written."""
    place = probe_directory(folder, write=True)
    return Features(
        type_name=place.filesystem,
        network=place.network,
        hard_links=bool(place.hard_links),
        rename_noreplace=bool(place.rename_noreplace),
        direct_io=bool(place.direct_io),
        flock=_has_flock(folder),
        sync_directory=_can_sync_directory(folder),
        case_sensitive=bool(place.case_sensitive),
        longest_name_bytes=max(length for length in (64, 128, 200, 240, 255, 256) if _can_name(folder, "a" * length)),
        refused_characters="".join(each for each in _ODD_CHARACTERS if not _can_name(folder, f"a{each}b")),
        time_step_s=_find_time_step(folder),
    )


def _can_name(folder: Path, name: str) -> bool:
    try:
        (folder / name).write_bytes(b"")
    except OSError:
        return False
    is_there = name in os.listdir(folder)
    (folder / name).unlink()
    return is_there


def _has_flock(folder: Path) -> bool:
    handle = os.open(folder / "flock", os.O_RDWR | os.O_CREAT)
    other = os.open(folder / "flock", os.O_RDWR)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False
    except OSError:
        return False
    finally:
        os.close(handle)
        os.close(other)
        (folder / "flock").unlink()


def _can_sync_directory(folder: Path) -> bool:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    except OSError:
        return False
    finally:
        os.close(handle)
    return True


def _find_time_step(folder: Path) -> float:
    """Set an odd time that every finer step can keep, and see how far off it comes back from the disk."""
    file = folder / "time"
    file.write_bytes(b"")
    steps = []
    for nanoseconds in (1_000_000_001_111_111_111, 1_000_000_003_777_777_777):
        os.utime(file, ns=(nanoseconds, nanoseconds))
        steps.append(abs(os.stat(file).st_mtime_ns - nanoseconds))
    file.unlink()
    worst = max(steps)
    return next(step for step in (1e-9, 1e-6, 1e-3, 0.01, 1.0, 2.0, 3600.0) if worst < step * 1e9)
