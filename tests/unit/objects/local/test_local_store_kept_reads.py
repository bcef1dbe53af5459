"""Reads that leave their bytes in the page cache: one open file for a run, and around the cache if memory is short."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.errors import Corrupt, NotFound, StoreError
from holdfast.objects.local.block_io import DIRECT_BYTES
from holdfast.objects.local.files import PosixFiles
from holdfast.objects.local.local_store import LocalStore
from tests.kit.scripted_files import open_descriptors

SIZE = 2 * DIRECT_BYTES
DATA = {"packs/one": os.urandom(SIZE), "packs/two": os.urandom(SIZE)}


class Watched(PosixFiles):
    """The real calls, on a filesystem that claims to be a disk and a machine that claims to have some memory."""

    def __init__(self, memory_bytes: int | None = 1 << 30, *, kind: str = "ext4") -> None:
        self.opened: list[str] = []
        self.direct_reads = 0
        self.asked = 0
        self.before_read: Callable[[], None] = lambda: None
        self._memory_bytes = memory_bytes
        self._kind = kind
        self._direct: set[int] = set()

    def read_filesystem_type(self, path: str) -> str:
        return self._kind

    def find_available_memory(self) -> int | None:
        self.asked += 1
        return self._memory_bytes

    def is_cached(self, handle: int, start: int) -> bool:
        return False

    def set_direct(self, handle: int, *, direct: bool) -> bool:
        (self._direct.add if direct else self._direct.discard)(handle)
        return direct  # whether or not the filesystem of this test has direct I/O

    def open_file(self, path: str) -> int:
        self.opened.append(path.rpartition("/")[2])
        return super().open_file(path)

    def read_into(self, handle: int, start: int, buffer: memoryview) -> int:
        self.before_read()
        self.direct_reads += handle in self._direct
        return super().read_into(handle, start, buffer)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for key, data in DATA.items():
        LocalStore(tmp_path).create(key, data)
    return tmp_path


def read_all(store: LocalStore, *, piece_bytes: int = DIRECT_BYTES) -> None:
    """Read both objects piece by piece in one run, and compare them."""
    with store.keep_reads().run() as read_into:
        for key, data in DATA.items():
            for start in range(0, len(data), piece_bytes):
                target = bytearray(piece_bytes)
                read_into(key, start, memoryview(target))
                assert target == data[start : start + piece_bytes]


def test_a_run_goes_through_the_page_cache_and_opens_each_file_once(root: Path) -> None:
    files = Watched()
    before = open_descriptors()
    read_all(LocalStore(root, files=files), piece_bytes=DIRECT_BYTES // 4)
    assert files.opened == ["one", "two"]
    assert files.direct_reads == 0
    assert open_descriptors() == before


@pytest.mark.parametrize("memory_bytes", [None, 0, 4 * DIRECT_BYTES - 1])
def test_bytes_that_are_large_beside_the_memory_go_around_the_cache(root: Path, memory_bytes: int | None) -> None:
    files = Watched(memory_bytes)
    read_all(LocalStore(root, files=files))
    assert files.direct_reads == 4


def test_the_beginning_of_a_large_state_is_kept_and_the_rest_goes_around_the_cache(root: Path) -> None:
    files = Watched(4 * SIZE)
    read_all(LocalStore(root, files=files))
    assert files.direct_reads == 2
    assert files.asked == 1


def test_the_runs_of_one_reader_share_the_room_and_the_next_reader_has_its_own(root: Path) -> None:
    files = Watched(4 * SIZE)
    store = LocalStore(root, files=files)
    target = memoryview(bytearray(SIZE))
    kept = store.keep_reads()
    for _ in range(2):
        with kept.run() as read_into:
            read_into("packs/one", 0, target)
    assert files.direct_reads == 1
    with store.keep_reads().run() as read_into:
        read_into("packs/one", 0, target)
    assert files.direct_reads == 1


def test_a_filesystem_that_is_always_cached_is_not_asked_for_memory(root: Path) -> None:
    files = Watched(0, kind="nfs4")
    read_all(LocalStore(root, files=files))
    assert (files.direct_reads, files.asked) == (0, 0)


def test_reads_outside_a_run_still_go_around_the_cache(root: Path) -> None:
    files = Watched()
    LocalStore(root, files=files).read_into("packs/one", 0, memoryview(bytearray(SIZE)))
    assert files.direct_reads == 1


def test_an_object_that_is_missing_or_too_short_is_reported_and_the_run_goes_on(root: Path) -> None:
    before = open_descriptors()
    with LocalStore(root, files=Watched()).keep_reads().run() as read_into:
        with pytest.raises(NotFound):
            read_into("packs/three", 0, memoryview(bytearray(5)))
        with pytest.raises(Corrupt, match=r"packs/one ends at byte \d+, before the 5 bytes"):
            read_into("packs/one", SIZE - 4, memoryview(bytearray(5)))
        target = bytearray(5)
        read_into("packs/one", 1, memoryview(target))
        assert target == DATA["packs/one"][1:6]
    assert open_descriptors() == before


def test_after_an_error_the_file_is_opened_again(root: Path) -> None:
    files = Watched()
    errors = iter([errno.EIO, errno.ESTALE])

    def fail() -> None:
        if code := next(errors, 0):
            raise OSError(code, os.strerror(code))

    before = open_descriptors()
    with LocalStore(root, files=files).keep_reads().run() as read_into:
        files.before_read = fail
        with pytest.raises(StoreError, match="cannot read"):
            read_into("packs/one", 0, memoryview(bytearray(5)))
        # The second error is a stale handle of a network filesystem, which is opened again at once.
        target = bytearray(5)
        read_into("packs/one", 0, memoryview(target))
    assert target == DATA["packs/one"][:5]
    assert files.opened == ["one", "one", "one"]
    assert open_descriptors() == before


def test_a_deleted_object_can_be_read_to_its_end(root: Path) -> None:
    store = LocalStore(root, files=Watched())
    target = bytearray(10)
    with store.keep_reads().run() as read_into:
        read_into("packs/one", 0, memoryview(target))
        store.delete("packs/one")
        read_into("packs/one", SIZE - 10, memoryview(target))
        assert target == DATA["packs/one"][-10:]
        with pytest.raises(NotFound):
            store.read_into("packs/one", 0, memoryview(target))
