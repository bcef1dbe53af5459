"""Reads and writes around the page cache: the same bytes on every way, and no way that does not work is taken."""

from __future__ import annotations

import ctypes
import errno
import os
import threading
from pathlib import Path

import pytest

from holdfast.errors import Corrupt, StoreError, StoreFull
from holdfast.objects.blocks import PAGE_BYTES, BlockPool, copy_bytes, is_aligned, new_block
from holdfast.objects.local.block_io import BLOCK_BYTES, DIRECT_BYTES
from holdfast.objects.local.files import PosixFiles
from holdfast.objects.local.local_store import LocalStore
from tests.kit.hooking import Hook
from tests.kit.scripted_files import Scripted, fail, found_below, open_descriptors, ready_store

SIZES = [
    DIRECT_BYTES,
    DIRECT_BYTES + 1,
    BLOCK_BYTES - 1,
    BLOCK_BYTES,
    BLOCK_BYTES + 1,
    2 * BLOCK_BYTES + PAGE_BYTES,
    6 * BLOCK_BYTES + 4097,
]


class Watched(PosixFiles):
    """The real calls, on a filesystem that claims to be a disk; records how each byte was transferred."""

    def __init__(self, *, direct: bool = True, cached: bool = False) -> None:
        self.direct_writes = 0
        self.direct_reads = 0
        self._direct = direct
        self._cached = cached
        self._handles: set[int] = set()

    def read_filesystem_type(self, path: str) -> str:
        return "ext4"

    def set_direct(self, handle: int, *, direct: bool) -> bool:
        self._handles.discard(handle)
        if direct and self._direct and super().set_direct(handle, direct=True):
            self._handles.add(handle)
            return True
        return super().set_direct(handle, direct=False)

    def is_cached(self, handle: int, start: int) -> bool:
        return self._cached

    def write_at(self, handle: int, start: int, buffer: memoryview) -> int:
        count = super().write_at(handle, start, buffer)
        self.direct_writes += handle in self._handles
        return count

    def read_into(self, handle: int, start: int, buffer: memoryview) -> int:
        count = super().read_into(handle, start, buffer)
        self.direct_reads += handle in self._handles
        return count


@pytest.fixture
def has_direct_io(tmp_path: Path) -> None:
    handle = os.open(tmp_path / "probe", os.O_RDWR | os.O_CREAT)
    try:
        if not PosixFiles().set_direct(handle, direct=True):
            pytest.skip("this filesystem has no direct I/O")
    finally:
        os.close(handle)
        (tmp_path / "probe").unlink()


def upload(store: LocalStore, data: bytes, *, piece_bytes: int = 1_000_003) -> None:
    with store.upload("packs/one") as under_way:
        for start in range(0, len(data), piece_bytes):
            under_way.append(bytearray(data[start : start + piece_bytes]))
        under_way.commit()


def read(store: LocalStore, start: int, size: int) -> bytes:
    target = bytearray(size)
    store.read_into("packs/one", start, memoryview(target))
    return bytes(target)


@pytest.mark.usefixtures("has_direct_io")
@pytest.mark.parametrize("size", SIZES)
def test_bytes_written_directly_are_read_back_directly_and_through_the_cache(tmp_path: Path, size: int) -> None:
    data = os.urandom(size)
    files = Watched()
    store = LocalStore(tmp_path, files=files)
    upload(store, data)
    assert (files.direct_writes > 0) == (size >= BLOCK_BYTES)
    assert (tmp_path / "packs/one").read_bytes() == data
    for start in (0, 1, PAGE_BYTES, size - DIRECT_BYTES):
        assert read(store, start, size - start) == data[start:]
        assert read(LocalStore(tmp_path, files=Watched(cached=True)), start, size - start) == data[start:]
        assert read(LocalStore(tmp_path, files=Watched(direct=False)), start, size - start) == data[start:]
    assert files.direct_reads > 0


@pytest.mark.usefixtures("has_direct_io")
def test_aligned_memory_is_read_into_without_a_block_in_between(tmp_path: Path) -> None:
    files = Watched()
    store = LocalStore(tmp_path, files=files)
    data = os.urandom(3 << 20)
    upload(store, data)
    target = new_block(2 << 20)
    assert is_aligned(target, PAGE_BYTES)
    store.read_into("packs/one", PAGE_BYTES, target)
    assert target == data[PAGE_BYTES : PAGE_BYTES + (2 << 20)]
    assert files.direct_reads == 1


def test_cached_bytes_are_read_from_the_cache(tmp_path: Path) -> None:
    files = Watched(cached=True)
    store = LocalStore(tmp_path, files=files)
    data = os.urandom(1 << 20)
    upload(store, data)
    assert read(store, 0, len(data)) == data
    assert files.direct_reads == 0


@pytest.mark.usefixtures("has_direct_io")
def test_a_file_that_ends_too_early_is_corrupt_however_it_is_read(tmp_path: Path) -> None:
    store = LocalStore(tmp_path, files=Watched())
    upload(store, os.urandom(1 << 20))
    os.truncate(tmp_path / "packs/one", 700_000)
    with pytest.raises(Corrupt, match=r"packs/one ends at byte 700000"):
        read(store, 0, 1 << 20)
    with pytest.raises(Corrupt, match=r"packs/one ends at byte 700000"):
        read(store, 800_000, DIRECT_BYTES)


class WantsMore(Watched):
    """A disk whose direct writes and reads need an alignment that we never have."""

    def write_at(self, handle: int, start: int, buffer: memoryview) -> int:
        if handle in self._handles:
            raise OSError(errno.EINVAL, "coarser, please")
        return super().write_at(handle, start, buffer)

    def read_into(self, handle: int, start: int, buffer: memoryview) -> int:
        if handle in self._handles:
            raise OSError(errno.EINVAL, "coarser, please")
        return super().read_into(handle, start, buffer)


def test_a_disk_that_refuses_our_alignment_is_used_through_the_cache(tmp_path: Path) -> None:
    store = LocalStore(tmp_path, files=WantsMore())
    data = os.urandom(3 * BLOCK_BYTES + 5)
    upload(store, data)
    assert read(store, 0, len(data)) == data


class TakesHalf(Watched):
    """Takes less than it is given, and not whole pages."""

    def write_at(self, handle: int, start: int, buffer: memoryview) -> int:
        return super().write_at(handle, start, buffer[: max(1, buffer.nbytes // 2 // 512 * 512)])


def test_a_direct_write_that_is_cut_short_is_continued(tmp_path: Path) -> None:
    store = LocalStore(tmp_path, files=TakesHalf())
    data = os.urandom(2 * BLOCK_BYTES + 77)
    upload(store, data)
    assert (tmp_path / "packs/one").read_bytes() == data


@pytest.mark.parametrize(("code", "kind"), [(errno.ENOSPC, StoreFull), (errno.EIO, StoreError)])
def test_a_block_that_cannot_be_written_ends_the_upload(tmp_path: Path, code: int, kind: type[StoreError]) -> None:
    files = Scripted()
    store = ready_store(tmp_path, files)
    before = open_descriptors()
    files.before = {"write_at": fail(code)}
    upload = store.upload("packs/large")
    with pytest.raises(kind):
        upload.append(*[bytearray(BLOCK_BYTES)] * 8)
    with pytest.raises(StoreError, match="has ended"):
        upload.commit()
    assert found_below(tmp_path) == ["packs/before"]
    assert open_descriptors() == before


def test_an_aborted_upload_leaves_neither_file_nor_thread(tmp_path: Path) -> None:
    store = ready_store(tmp_path, PosixFiles())
    threads = set(threading.enumerate())
    with store.upload("packs/large") as under_way:
        for _ in range(6):
            under_way.append(bytearray(BLOCK_BYTES))
    assert set(threading.enumerate()) <= threads
    assert found_below(tmp_path) == ["packs/before"]


def test_an_appended_buffer_may_be_reused_at_once(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    piece = bytearray(BLOCK_BYTES // 2)
    with store.upload("packs/one") as under_way:
        for number in range(16):
            piece[:] = bytes([number]) * len(piece)
            under_way.append(piece)
        under_way.commit()
    expected = b"".join(bytes([number]) * len(piece) for number in range(16))
    assert (tmp_path / "packs/one").read_bytes() == expected


@pytest.mark.parametrize("size", [0, 1, 4096, 1 << 20])
@pytest.mark.parametrize("kind", [bytes, bytearray])
def test_memory_is_copied_whatever_its_size_and_owner(size: int, kind: type[bytes] | type[bytearray]) -> None:
    source = kind(os.urandom(size))
    target = bytearray(size)
    copy_bytes(memoryview(target), memoryview(source))
    assert target == source


def test_a_block_is_lent_to_one_at_a_time_and_used_again() -> None:
    pool = BlockPool(PAGE_BYTES, kept=1)
    with pool.lend() as first, pool.lend() as second:
        first[:1], second[:1] = b"1", b"2"
        assert bytes(first[:1]) == b"1"
    with pool.lend() as again:
        assert again in (first, second)


def test_a_copy_for_which_ctypes_gets_no_memory_is_a_memory_error(hook: Hook) -> None:
    def fail(*_: object) -> None:
        raise ctypes.ArgumentError("argument 3: MemoryError: ")

    hook(ctypes, "memmove", fail)
    with pytest.raises(MemoryError, match="no memory to copy 100000 bytes"):
        copy_bytes(memoryview(bytearray(100_000)), memoryview(bytearray(100_000)))
