from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from holdfast.errors import StoreError
from holdfast.store.files import PosixFiles
from holdfast.store.probe import probe_place


class _Refusing(PosixFiles):
    """A filesystem that refuses what `refused` names, or claims to do it and does not."""

    def __init__(self, *refused: str, code: int = errno.EPERM) -> None:
        self._refused = refused
        self._code = code

    def _act(self, call: str) -> None:
        if call in self._refused:
            raise OSError(self._code, os.strerror(self._code))

    def create_file(self, path: str) -> int:
        self._act("create_file")
        return super().create_file(path)

    def link(self, source: str, target: str) -> None:
        self._act("link")
        super().link(source, target)

    def rename_noreplace(self, source: str, target: str) -> None:
        self._act("rename_noreplace")
        super().rename_noreplace(source, target)

    def sync_file(self, handle: int) -> None:
        self._act("sync_file")
        super().sync_file(handle)


class _Careless(PosixFiles):
    """A filesystem that says it does not replace, and does."""

    def rename_noreplace(self, source: str, target: str) -> None:
        os.rename(source, target)


def test_an_ordinary_directory_can_do_all(tmp_path: Path) -> None:
    place = probe_place(tmp_path)

    assert place.path == str(tmp_path)
    assert place.writable
    assert place.hard_links
    assert place.rename_noreplace
    assert place.case_sensitive
    assert place.direct_io is not None
    assert place.sync_ms is not None
    assert place.sync_ms >= 0
    assert place.free_bytes > 0
    assert place.filesystem


@pytest.mark.parametrize(
    "files", [PosixFiles(), _Refusing("link"), _Refusing("create_file"), _Careless(), _Refusing("sync_file")]
)
def test_nothing_is_left_behind(tmp_path: Path, files: PosixFiles) -> None:
    (tmp_path / "packs").mkdir()

    probe_place(tmp_path, files=files)

    assert [path.name for path in tmp_path.iterdir()] == ["packs"]


def test_missing_hard_links_are_noticed(tmp_path: Path) -> None:
    place = probe_place(tmp_path, files=_Refusing("link"))

    assert place.hard_links is False
    assert place.rename_noreplace


def test_a_rename_that_replaces_is_noticed(tmp_path: Path) -> None:
    assert probe_place(tmp_path, files=_Careless()).rename_noreplace is False


@pytest.mark.parametrize(
    ("code", "refusal"), [(errno.EROFS, "Read-only file system"), (errno.ENOSPC, "No space left on device")]
)
def test_what_cannot_be_written_is_not_tried(tmp_path: Path, code: int, refusal: str) -> None:
    place = probe_place(tmp_path, files=_Refusing("create_file", code=code))

    assert not place.writable
    assert place.refusal == refusal
    assert place.hard_links is None
    assert place.sync_ms is None


def test_a_failing_disk_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=f"cannot try out {tmp_path}: Input/output error"):
        probe_place(tmp_path, files=_Refusing("sync_file", code=errno.EIO))

    assert list(tmp_path.iterdir()) == []


def test_a_place_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="No such file"):
        probe_place(tmp_path / "nowhere")

    assert list(tmp_path.iterdir()) == []


def test_a_file_is_no_place(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    with pytest.raises(StoreError, match="is not a directory"):
        probe_place(tmp_path / "file")


def test_memory_filesystems_are_not_durable() -> None:
    if PosixFiles().read_filesystem_type("/dev/shm") != "tmpfs":
        pytest.skip("there is no tmpfs at /dev/shm")

    place = probe_place("/dev/shm")

    assert (place.filesystem, place.durable, place.network) == ("tmpfs", False, False)
