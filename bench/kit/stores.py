"""Creates the stores that benchmarks work on, and verifies their content."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

from bench.kit.measure import WrongResult, random_entries
from holdfast.objects.local.files import PosixFiles
from holdfast.objects.local.local_store import LocalStore
from holdfast.repo.format.source import BytesSource
from holdfast.repo.handle.repository import Repository, open_repository
from holdfast.repo.names.snapshots import read_snapshot
from holdfast.repo.read.reader import open_snapshot
from holdfast.repo.upkeep.check import Checker
from holdfast.repo.write.writer import Request, SaveResult, WriteOptions, save

Entries = Sequence[tuple[str, memoryview]]


class CountingFiles(PosixFiles):
    """System calls on files; counts the expensive ones."""

    def __init__(self) -> None:
        self.syncs = 0

    def sync_file(self, handle: int) -> None:
        self.syncs += 1
        super().sync_file(handle)

    def sync_directory(self, path: str) -> None:
        self.syncs += 1
        super().sync_directory(path)


class UnsyncedFiles(PosixFiles):
    """System calls on files without any fsync, for stores that only have to be large."""

    def sync_file(self, handle: int) -> None:
        pass

    def sync_directory(self, path: str) -> None:
        pass


def open_store(root: Path) -> Repository:
    """Open the store at `root`; the first save creates it."""
    return open_repository(LocalStore(root), create=True)


def save_entries(repo: Repository, name: str, entries: Entries, *, verify_reuse: bool = True) -> SaveResult:
    """Save entries as one snapshot."""
    sources = [BytesSource(entry, data) for entry, data in entries]
    return save(repo, Request(name, sources, options=WriteOptions(verify_reuse=verify_reuse)))


def fill_store(root: Path, size_bytes: int, *, packs: int) -> None:
    """Create a store of random bytes, one snapshot, and so one pack, after the other."""
    repo = open_store(root)
    for number in range(packs):
        save_entries(repo, f"run/step-{number}", random_entries(size_bytes // packs, 8, seed=100 + number))


def remove_store(root: Path) -> None:
    """Delete a store, if it exists."""
    shutil.rmtree(root, ignore_errors=True)


def check_store(root: Path, *, read: bool) -> tuple[int, list[str]]:
    """Check a store; return the number of bytes read and the findings."""
    checker = Checker(LocalStore(root, read_only=True), read=read)
    found = [finding.message for finding in checker.iter_findings()]
    return checker.tally.bytes_read, found


def verify_nothing_found(result: object, *, read_bytes: int) -> None:
    """Raise unless a check read at least that many bytes and found nothing."""
    if not isinstance(result, tuple) or result[1] or result[0] < read_bytes:
        raise WrongResult(f"check of an intact store of {read_bytes} bytes returned {str(result)[:500]}")


def load_entries(repo: Repository, name: str) -> dict[str, bytearray]:
    """Load every entry of a snapshot, verified."""
    with open_snapshot(repo, read_snapshot(repo.store, name)) as reader:
        return {entry: reader.read_entry(entry) for entry in reader.manifest.names}


def verify_equal(result: object, *, entries: Entries) -> None:
    """Raise unless exactly these entries were loaded."""
    if not isinstance(result, dict) or list(result) != [name for name, _ in entries]:
        raise WrongResult("the loaded entries are not those that were saved")
    for name, data in entries:
        if result[name] != data:
            raise WrongResult(f"the loaded bytes of {name!r} are not those that were saved")


def list_packs(root: Path) -> list[Path]:
    """Return the pack files of a store."""
    return sorted((root / "packs").iterdir())


def sum_sizes(paths: Iterable[Path]) -> int:
    """Return the size of all these files."""
    return sum(path.stat().st_size for path in paths)
