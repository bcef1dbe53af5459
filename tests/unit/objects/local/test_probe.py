from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

import pytest

from holdfast.errors import StoreError
from holdfast.objects.local.files import PosixFiles
from holdfast.objects.local.probe import DirectoryFacts, locate_nearest_directory, probe_directory
from tests.kit.scripted_files import open_descriptors


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
    place = probe_directory(tmp_path, write=True)

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
    before = open_descriptors()

    probe_directory(tmp_path, write=True, files=files)

    assert [path.name for path in tmp_path.iterdir()] == ["packs"]
    assert open_descriptors() == before


def test_missing_hard_links_are_noticed(tmp_path: Path) -> None:
    place = probe_directory(tmp_path, write=True, files=_Refusing("link"))

    assert place.hard_links is False
    assert place.rename_noreplace


def test_a_rename_that_replaces_is_noticed(tmp_path: Path) -> None:
    assert probe_directory(tmp_path, write=True, files=_Careless()).rename_noreplace is False


@pytest.mark.parametrize(
    ("code", "refusal"), [(errno.EROFS, "Read-only file system"), (errno.ENOSPC, "No space left on device")]
)
def test_what_cannot_be_written_is_not_tried(tmp_path: Path, code: int, refusal: str) -> None:
    place = probe_directory(tmp_path, write=True, files=_Refusing("create_file", code=code))

    assert not place.writable
    assert place.refusal == refusal
    assert place.hard_links is None
    assert place.sync_ms is None


def test_a_failing_disk_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=f"cannot test {tmp_path}: Input/output error"):
        probe_directory(tmp_path, write=True, files=_Refusing("sync_file", code=errno.EIO))

    assert list(tmp_path.iterdir()) == []


def test_a_place_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="No such file"):
        probe_directory(tmp_path / "nowhere", write=True)

    assert list(tmp_path.iterdir()) == []


def test_a_file_is_no_place(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    with pytest.raises(StoreError, match="is not a directory"):
        probe_directory(tmp_path / "file", write=True)


def test_memory_filesystems_are_not_durable() -> None:
    if PosixFiles().read_filesystem_type("/dev/shm") != "tmpfs":
        pytest.skip("there is no tmpfs at /dev/shm")

    place = probe_directory("/dev/shm", write=True)

    assert (place.filesystem, place.durable, place.network) == ("tmpfs", False, False)


# --- without writing


class _Watching(PosixFiles):
    """A filesystem on which nothing may be made, linked, renamed or removed."""

    def create_file(self, path: str) -> int:
        raise AssertionError(f"made {path}")

    def make_directory(self, path: str) -> None:
        raise AssertionError(f"made {path}")

    def lock(self, path: str, *, exclusive: bool) -> int | None:
        raise AssertionError(f"locked {path}")

    def unlink(self, path: str) -> None:
        raise AssertionError(f"removed {path}")


def test_nothing_is_written_unless_asked_for(tmp_path: Path) -> None:
    before = tmp_path.stat().st_mtime_ns

    place = probe_directory(tmp_path, files=_Watching())

    assert tmp_path.stat().st_mtime_ns == before
    assert (place.tried, place.writable, place.refusal) == (False, True, "")
    assert (place.hard_links, place.rename_noreplace, place.direct_io, place.sync_ms) == (None, None, None, None)
    assert place.case_sensitive is None
    assert place.free_bytes > 0
    assert place.filesystem


def test_a_directory_of_somebody_else_is_seen_to_be_not_writable() -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o555)
        place = _look_as_nobody(folder)
        os.chmod(folder, 0o700)

    assert (place.tried, place.writable, place.refusal) == (False, False, "Permission denied")


def _look_as_nobody(folder: str) -> DirectoryFacts:
    """Probe a directory without the rights of root, which no permission stops."""
    if os.getuid() != 0:
        return probe_directory(folder)
    receiving, sending = os.pipe()
    child = os.fork()
    if child == 0:
        # No exec: the user "nobody" may not be allowed to run this Python again.
        try:
            os.setgroups([])
            os.setuid(65534)
            os.write(sending, json.dumps(asdict(probe_directory(folder))).encode())
        finally:
            os._exit(0)
    os.close(sending)
    with os.fdopen(receiving) as answer:
        found = json.load(answer)
    os.waitpid(child, 0)
    return DirectoryFacts(**found)


def test_a_filesystem_that_is_mounted_read_only_is_seen_to_be() -> None:
    with tempfile.TemporaryDirectory() as folder:
        mount = f"mount --bind {folder} {folder} && mount -o remount,ro,bind {folder}"
        program = "import sys; from holdfast.objects.local.probe import *; print(probe_directory(sys.argv[1]))"
        done = subprocess.run(
            ["unshare", "-m", "sh", "-c", f'{mount} || exit 77; exec "$0" -c "$1" {folder}', sys.executable, program],
            capture_output=True,
            text=True,
            check=False,
        )
    if "not permitted" in done.stderr or done.returncode == 77:
        pytest.skip(f"nothing can be mounted here: {done.stderr.strip()}")
    assert "tried=False" in done.stdout
    assert "writable=False" in done.stdout
    assert "refusal='Read-only file system'" in done.stdout


def test_the_nearest_directory_is_found(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    for path in (tmp_path, tmp_path / "a/b/c", tmp_path / "file", tmp_path / "file/below"):
        assert locate_nearest_directory(path) == str(tmp_path)
    assert locate_nearest_directory("/") == "/"
