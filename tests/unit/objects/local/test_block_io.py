"""Blocks handed over to an upload: written from where they are, released once whatever happens, never out of order."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import pytest

from holdfast.errors import StoreError, StoreFull
from holdfast.objects.blocks import PAGE_BYTES, LentBlock, copy_bytes, new_block
from holdfast.objects.local import block_io
from holdfast.objects.local.block_io import BLOCK_BYTES
from holdfast.objects.local.files import PosixFiles
from holdfast.objects.local.local_store import LocalStore
from holdfast.objects.local.upload import LocalUpload
from tests.kit.scripted_files import Scripted, fail, found_below, open_descriptors, ready_store

SIZE = 64 * PAGE_BYTES


class Lender:
    """Lends blocks of random bytes and counts how often each comes back."""

    def __init__(self) -> None:
        self.released: list[int] = []
        self.data = b""

    def lend(self, size: int) -> LentBlock:
        number = len(self.released)
        self.released.append(0)
        memory = new_block(max(size, 1))[:size]
        memory[:] = os.urandom(size)
        self.data += bytes(memory)

        def release() -> None:
            self.released[number] += 1
            memory[:] = bytes(size)  # whoever still needs it is found out

        return LentBlock(memory, release)


@pytest.fixture
def lender() -> Lender:
    return Lender()


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the sizes of all copies that a writer takes."""
    sizes: list[int] = []

    def watch(target: memoryview, source: memoryview) -> None:
        sizes.append(source.nbytes)
        copy_bytes(target, source)

    monkeypatch.setattr(block_io, "copy_bytes", watch)
    return sizes


@contextmanager
def uploading(store: LocalStore) -> Iterator[LocalUpload]:
    """Upload, and check that no thread remains."""
    before = set(threading.enumerate())
    with store.upload("packs/one") as upload:
        yield upload
    assert set(threading.enumerate()) <= before


def append_blocks(upload: LocalUpload, blocks: Iterable[LentBlock]) -> None:
    for block in blocks:
        upload.append_block(block)


def read(root: Path) -> bytes:
    return (root / "packs/one").read_bytes()


def test_whole_pages_are_written_without_a_copy(tmp_path: Path, lender: Lender, copied: list[int]) -> None:
    with uploading(LocalStore(tmp_path)) as upload:
        for _ in range(6):
            upload.append_block(lender.lend(SIZE))
        upload.commit()
    assert copied == []
    assert read(tmp_path) == lender.data
    assert lender.released == [1] * 6


def test_of_an_odd_block_only_the_tail_is_copied(tmp_path: Path, lender: Lender, copied: list[int]) -> None:
    with uploading(LocalStore(tmp_path)) as upload:
        upload.append_block(lender.lend(SIZE + 77))
        upload.commit()
    assert copied == [77]
    assert read(tmp_path) == lender.data
    assert lender.released == [1]


def test_a_block_that_begins_within_a_page_is_copied(tmp_path: Path, lender: Lender, copied: list[int]) -> None:
    with uploading(LocalStore(tmp_path)) as upload:
        upload.append(b"head")
        upload.append_block(lender.lend(SIZE))
        assert lender.released == [1]
        upload.commit()
    assert sum(copied) == 4 + SIZE
    assert read(tmp_path) == b"head" + lender.data


def test_a_block_without_a_whole_page_is_copied(tmp_path: Path, lender: Lender) -> None:
    with uploading(LocalStore(tmp_path)) as upload:
        for size in (100, 0, 200):
            upload.append_block(lender.lend(size))
        upload.commit()
    assert read(tmp_path) == lender.data
    assert lender.released == [1, 1, 1]


def test_blocks_and_copies_come_in_the_order_in_which_they_were_appended(tmp_path: Path, lender: Lender) -> None:
    expected = b""
    with uploading(LocalStore(tmp_path)) as upload:
        for size, odd in ((SIZE, 5), (SIZE + 5, PAGE_BYTES - 5), (PAGE_BYTES, BLOCK_BYTES + 9), (SIZE - 9, 1)):
            upload.append_block(lender.lend(size))
            expected += lender.data[-size:]
            gap = os.urandom(odd)
            upload.append(gap)
            expected += gap
        upload.commit()
    assert read(tmp_path) == expected
    assert lender.released == [1] * 4


@pytest.mark.parametrize(("code", "kind"), [(errno.ENOSPC, StoreFull), (errno.EIO, StoreError)])
def test_a_block_that_cannot_be_written_ends_the_upload_and_all_are_released(
    tmp_path: Path, lender: Lender, code: int, kind: type[StoreError]
) -> None:
    files = Scripted()
    store = ready_store(tmp_path, files)
    before = open_descriptors()
    files.before = {"write_at": fail(code)}

    with uploading(store) as upload:
        with pytest.raises(kind, match=os.strerror(code)):
            append_blocks(upload, (lender.lend(SIZE) for _ in range(8)))
        with pytest.raises(StoreError, match="has ended"):
            upload.append_block(lender.lend(SIZE))

    assert lender.released == [1] * len(lender.released)
    assert found_below(tmp_path) == ["packs/before"]
    assert open_descriptors() == before


def test_the_error_of_the_last_block_is_raised_by_the_commit(tmp_path: Path, lender: Lender) -> None:
    files = Scripted()
    store = ready_store(tmp_path, files)
    files.before = {"write_at": fail(errno.ENOSPC)}
    with uploading(store) as upload:
        upload.append_block(lender.lend(SIZE))
        with pytest.raises(StoreFull):
            upload.commit()
    assert lender.released == [1]
    assert found_below(tmp_path) == ["packs/before"]


def test_an_upload_that_is_given_up_releases_what_it_was_given(tmp_path: Path, lender: Lender) -> None:
    store = ready_store(tmp_path, PosixFiles())
    with uploading(store) as upload:
        for _ in range(3):
            upload.append_block(lender.lend(SIZE + 1))
    assert lender.released == [1, 1, 1]
    assert found_below(tmp_path) == ["packs/before"]


class Interrupted(PosixFiles):
    """Somebody presses Ctrl-C while the file is made ready for the first block."""

    def set_direct(self, handle: int, *, direct: bool) -> bool:
        raise KeyboardInterrupt

    def read_filesystem_type(self, path: str) -> str:
        return "ext4"


def test_an_interrupt_releases_the_block_and_leaves_no_file(tmp_path: Path, lender: Lender) -> None:
    store = LocalStore(tmp_path, files=Interrupted())
    with pytest.raises(KeyboardInterrupt), uploading(store) as upload:
        upload.append_block(lender.lend(SIZE))
    assert lender.released == [1]
    assert found_below(tmp_path) == []


class Crowded(PosixFiles):
    """Refuses direct writes, and only when two of them have come."""

    def __init__(self) -> None:
        self._both = threading.Barrier(2)
        self._calls = count(1)

    def read_filesystem_type(self, path: str) -> str:
        return "ext4"

    def set_direct(self, handle: int, *, direct: bool) -> bool:
        return direct

    def write_at(self, handle: int, start: int, buffer: memoryview) -> int:
        if next(self._calls) <= 2:
            self._both.wait()
            raise OSError(errno.EINVAL, "coarser, please")
        return super().write_at(handle, start, buffer)


def test_two_writes_that_are_refused_at_once_both_go_through_the_cache(tmp_path: Path, lender: Lender) -> None:
    with uploading(LocalStore(tmp_path, files=Crowded())) as upload:
        for _ in range(2):
            upload.append_block(lender.lend(SIZE))
        upload.commit()
    assert read(tmp_path) == lender.data


def test_the_number_of_concurrent_writes_is_limited(
    tmp_path: Path, lender: Lender, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_io, "_WRITES", 2)
    held: list[int] = []
    with uploading(LocalStore(tmp_path)) as upload:
        for _ in range(8):
            upload.append_block(lender.lend(SIZE))
            held.append(lender.released.count(0))
        upload.commit()
    assert max(held) <= 2
    assert read(tmp_path) == lender.data
