"""The local store when a read or a delete fails."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from holdfast.errors import Corrupt, NotFound, ReadOnlyStore, StoreError
from holdfast.objects.local.files import PosixFiles
from holdfast.objects.local.local_store import LocalStore
from tests.kit.scripted_files import Scripted, fail, open_descriptors, ready_store


def test_where_we_may_not_delete_the_error_says_so(tmp_path: Path) -> None:
    files = Scripted()
    store = ready_store(tmp_path, files)
    files.before = {"unlink": fail(errno.EROFS)}
    with pytest.raises(ReadOnlyStore, match="packs/before"):
        store.delete("packs/before")


def test_no_failed_read_leaks_a_descriptor(tmp_path: Path) -> None:
    files = Scripted()
    store = ready_store(tmp_path, files)
    store.create("packs/one", b"data")
    before = open_descriptors()
    with pytest.raises(Corrupt):
        store.read_into("packs/one", 0, memoryview(bytearray(5)))
    with pytest.raises(Corrupt):
        store.read("packs/one", limit_bytes=3)
    with pytest.raises(NotFound):
        store.read("packs", limit_bytes=1)
    files.before = {"read_into": fail(errno.EIO)}
    with pytest.raises(StoreError):
        store.read("packs/one", limit_bytes=4)
    assert open_descriptors() == before


class OneByteAtATime(PosixFiles):
    """Takes and gives as little as POSIX allows."""

    def write_at(self, handle: int, start: int, buffer: memoryview) -> int:
        return super().write_at(handle, start, buffer[:1])

    def read_into(self, handle: int, start: int, buffer: memoryview) -> int:
        return super().read_into(handle, start, buffer[:1])


def test_short_writes_and_reads_are_continued(tmp_path: Path) -> None:
    store = LocalStore(tmp_path, files=OneByteAtATime())
    with store.upload("packs/one") as upload:
        upload.append(b"abc", b"", b"de", memoryview(b"f"))
        upload.commit()
    assert store.read("packs/one", limit_bytes=6) == b"abcdef"


def test_a_truncated_file_is_corrupt_and_names_key_offset_and_size(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.create("packs/one", b"0123456789")
    os.truncate(tmp_path / "packs/one", 4)
    with pytest.raises(Corrupt, match=r"packs/one ends at byte 4, before the 5 bytes at 3") as caught:
        store.read_into("packs/one", 3, memoryview(bytearray(5)))
    assert caught.value.key == "packs/one"


def test_a_read_that_fails_names_the_path(tmp_path: Path) -> None:
    files = Scripted()
    store = ready_store(tmp_path, files)
    files.before = {"read_into": fail(errno.EIO)}
    with pytest.raises(StoreError, match=f"{tmp_path}/packs/before") as caught:
        store.read_into("packs/before", 0, memoryview(bytearray(1)))
    assert caught.value.errno == errno.EIO
