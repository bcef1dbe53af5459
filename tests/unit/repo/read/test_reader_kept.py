"""Loads leave their bytes in the page cache, so the disk is read once, however many processes load."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.objects.local.files import PosixFiles
from holdfast.objects.local.local_store import LocalStore
from holdfast.repo.format.layout import pack_key
from holdfast.repo.handle.repository import Repository, open_repository
from holdfast.repo.read.read_plan import group_stretches, list_entry_wants, plan_runs, plan_stretches
from holdfast.repo.read.reader import SnapshotReader, open_snapshot
from tests.kit.saving import MIB, noise, save_bytes, snapshot_of

SIZE = 24 * MIB
DATA = noise(SIZE)


class Watched(PosixFiles):
    """The real calls, on a filesystem that claims to be a disk; records which packs are opened for reading."""

    def __init__(self) -> None:
        self.opened: list[str] = []
        self.asked = 0

    def read_filesystem_type(self, path: str) -> str:
        return "ext4"

    def find_available_memory(self) -> int | None:
        self.asked += 1
        return 1 << 40

    def open_file(self, path: str) -> int:
        if "/packs/" in path:
            self.opened.append(path)
        return super().open_file(path)


def new_store(root: Path) -> Watched:
    """Save one entry, and return the calls through which the store is read."""
    save_bytes(open_repository(LocalStore(root), create=True), "a", {"x": DATA})
    return Watched()


def open_again(root: Path, files: Watched) -> Repository:
    return open_repository(LocalStore(root, files=files))


def test_a_load_reads_long_runs_of_a_pack_through_the_page_cache(tmp_path: Path) -> None:
    files = new_store(tmp_path)
    repo = open_again(tmp_path, files)
    with open_snapshot(repo, snapshot_of(repo, "a")) as reader:
        files.opened.clear()
        assert reader.read_entry("x") == DATA
    assert files.asked == 1
    assert 1 <= len(files.opened) <= 4


def test_a_verification_leaves_the_page_cache_as_it_is(tmp_path: Path) -> None:
    files = new_store(tmp_path)
    repo = open_again(tmp_path, files)
    with open_snapshot(repo, snapshot_of(repo, "a"), use_cache=False) as reader:
        assert reader.read_entry("x") == DATA
    with SnapshotReader(repo, snapshot_of(repo, "a")) as reader:
        assert reader.read_entry("x") == DATA
    assert files.asked == 0


def test_damage_within_a_run_is_found_and_the_intact_copy_is_returned(tmp_path: Path) -> None:
    files = new_store(tmp_path)
    repo = open_again(tmp_path, files)
    snapshot = snapshot_of(repo, "a")
    with open_snapshot(repo, snapshot) as reader:
        location = reader.find_entry("x").chunks[5].location
        assert location is not None
        path = tmp_path / pack_key(location.pack_id)
        intact = path.read_bytes()
        path.write_bytes(intact[: location.offset] + bytes(100) + intact[location.offset + 100 :])
        # The writer of another snapshot finds the damage and writes the chunk again.
        save_bytes(open_repository(LocalStore(tmp_path)), "b", {"y": DATA})
        assert reader.read_entry("x") == DATA


def test_a_thread_reads_one_after_the_other_what_counts_as_one_in_the_budget(tmp_path: Path) -> None:
    new_store(tmp_path)
    repo = open_repository(LocalStore(tmp_path))
    with open_snapshot(repo, snapshot_of(repo, "a")) as reader:
        wants = list_entry_wants(reader.find_entry("x"), 0, memoryview(bytearray(SIZE)))
    rules = plan_runs(SIZE, threads=1)
    batches = list(group_stretches(plan_stretches(wants, rules), rules))
    assert [len(batch) for batch, _ in batches] == [3, 3, 3, 3]
    assert all(cost < 3 * MIB for _, cost in batches)


@pytest.mark.parametrize(
    ("size_bytes", "threads", "run_bytes"),
    [(0, 6, 8 * MIB), (96 * MIB, 6, 8 * MIB), (960 * MIB, 6, 40 * MIB), (100 << 30, 64, 64 * MIB)],
)
def test_runs_are_long_unless_some_threads_would_have_none(size_bytes: int, threads: int, run_bytes: int) -> None:
    assert plan_runs(size_bytes, threads=threads).batch_bytes == run_bytes


# Loads all entries, and prints how many bytes this process has requested from the disk meanwhile.
LOAD = """
import sys
from holdfast.objects.local.local_store import LocalStore
from holdfast.repo.handle.repository import open_repository
from holdfast.repo.names.snapshots import read_snapshot
from holdfast.repo.read.reader import open_snapshot

def count():
    with open("/proc/self/io") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))

repo = open_repository(LocalStore(sys.argv[1]))
print("ready", flush=True)
sys.stdin.readline()
before = count()
with open_snapshot(repo, read_snapshot(repo.store, "a")) as reader:
    found = [len(reader.read_entry(name)) for name in reader.manifest.names]
print(sum(found), count() - before, flush=True)
"""


def load_at_once(root: Path, processes: int) -> int:
    """Load from files that are not in the page cache, in several processes; return how many bytes the disk read."""
    for path in root.rglob("packs/*"):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)
    command = [sys.executable, "-c", LOAD, str(root)]
    started = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(processes)
    ]
    read_bytes = 0
    for process in started:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in started:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    for process in started:
        loaded, read = map(int, process.communicate()[0].split())
        assert (process.returncode, loaded) == (0, SIZE)
        read_bytes += read
    return read_bytes


@pytest.mark.slow
def test_four_processes_that_load_at_once_read_the_disk_once(tmp_path: Path) -> None:
    if not Path("/proc/self/io").exists():
        pytest.skip("this system does not count what a process reads from the disk")
    new_store(tmp_path)
    alone = load_at_once(tmp_path, 1)
    if alone < SIZE:
        pytest.skip(f"this filesystem does not count what is read from its disk: {alone} of {SIZE} bytes")
    assert load_at_once(tmp_path, 4) < 1.25 * SIZE
