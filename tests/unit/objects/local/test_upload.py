"""Uploads where the store may not write, where there is no room, and where the disk fails."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.errors import ReadOnlyStore, StoreError, StoreFull
from holdfast.objects.local.local_store import LocalStore
from tests.kit.scripted_files import Scripted, fail, found_below, open_descriptors, ready_store


@pytest.mark.parametrize("call", ["create_file", "make_directory"])
@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES, errno.EPERM])
def test_where_we_may_not_write_the_error_names_the_path_and_what_to_do(tmp_path: Path, call: str, code: int) -> None:
    store = LocalStore(tmp_path, files=Scripted(before={call: fail(code)}))
    with pytest.raises(ReadOnlyStore, match=rf"{tmp_path}/packs/one.*read_only=True") as caught:
        store.create("packs/one", b"data")
    assert (caught.value.errno, caught.value.fate) == (code, "absent")


@pytest.mark.parametrize("call", ["create_file", "write_at", "sync_file", "link", "make_directory"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_raises_store_full_and_leaves_nothing(tmp_path: Path, call: str, code: int) -> None:
    files = Scripted()
    store = ready_store(tmp_path, files)
    files.before = {call: fail(code)}
    with pytest.raises(StoreFull, match="free some space") as caught:
        store.create("new/one" if call == "make_directory" else "packs/one", b"data")
    assert caught.value.key in ("packs/one", "new/one")
    assert found_below(tmp_path) == ["packs/before"]


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A real filesystem of 256 KiB."""
    place = tmp_path / "tiny"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "none", str(place)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("mounting a tmpfs is not allowed here")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_disk_that_really_runs_full_raises_store_full_and_is_usable_afterwards(tiny_disk: Path) -> None:
    store = LocalStore(tiny_disk)
    upload = store.upload("packs/large")
    upload.append(*[bytes(64 << 10)] * 5)
    with pytest.raises(StoreFull) as caught:
        upload.commit()
    assert caught.value.needed_bytes == 320 << 10
    with pytest.raises(StoreError, match="has ended"):
        upload.commit()
    assert found_below(tiny_disk) == []
    store.create("packs/small", b"data")
    assert store.traits.durable is False


def test_a_file_that_cannot_be_synced_is_not_created(tmp_path: Path) -> None:
    files = Scripted()
    store = ready_store(tmp_path, files)
    files.before = {"sync_file": fail(errno.EIO)}
    with pytest.raises(StoreError, match="packs/one") as caught:
        store.create("packs/one", b"data")
    assert (caught.value.fate, caught.value.errno) == ("absent", errno.EIO)
    assert found_below(tmp_path) == ["packs/before"]


def test_a_new_directory_that_cannot_be_synced_means_that_nothing_is_created(tmp_path: Path) -> None:
    store = LocalStore(tmp_path, files=Scripted(before={"sync_directory": fail(errno.EIO)}))
    with pytest.raises(StoreError) as caught:
        store.create("packs/one", b"data")
    assert caught.value.fate == "absent"
    assert found_below(tmp_path) == []


def test_a_name_that_cannot_be_synced_is_there_but_volatile(tmp_path: Path) -> None:
    files = Scripted()
    store = ready_store(tmp_path, files)
    files.before = {"sync_directory": fail(errno.EIO)}
    with pytest.raises(StoreError, match="packs/one") as caught:
        store.create("packs/one", b"data")
    assert (caught.value.fate, caught.value.errno) == ("volatile", errno.EIO)
    assert found_below(tmp_path) == ["packs/before", "packs/one"]


def test_a_link_whose_answer_was_lost_is_of_unknown_fate(tmp_path: Path) -> None:
    files = Scripted()
    store = ready_store(tmp_path, files)
    files.before = {"link": fail(errno.EIO)}
    with pytest.raises(StoreError, match="check whether it exists") as caught:
        store.create("packs/one", b"data")
    assert caught.value.fate == "unknown"
    assert found_below(tmp_path) == ["packs/before"]


def test_an_error_reported_by_close_prevents_the_create(tmp_path: Path) -> None:
    files = Scripted()
    store = ready_store(tmp_path, files)
    files.after = {"close": fail(errno.EDQUOT)}
    with pytest.raises(StoreFull):
        store.create("packs/one", b"data", durable=False)
    assert found_below(tmp_path) == ["packs/before"]


@pytest.mark.parametrize("call", ["create_file", "write_at", "sync_file", "link", "sync_directory"])
def test_no_failed_write_leaks_a_descriptor(tmp_path: Path, call: str) -> None:
    files = Scripted()
    store = ready_store(tmp_path, files)
    before = open_descriptors()
    files.before = {call: fail(errno.EIO)}
    with pytest.raises(StoreError):
        store.create("packs/one", b"data")
    assert open_descriptors() == before


def test_no_file_under_way_is_left_where_the_probe_fails(tmp_path: Path) -> None:
    store = LocalStore(tmp_path, files=Scripted(before={"link": fail(errno.EIO)}))
    before = open_descriptors()
    with pytest.raises(StoreError) as caught:
        store.create("packs/one", b"data")
    assert caught.value.fate == "absent"
    assert found_below(tmp_path) == []
    assert open_descriptors() == before


def test_an_interrupted_upload_can_never_be_committed(tmp_path: Path) -> None:
    files = Scripted()
    store = ready_store(tmp_path, files)

    def interrupt() -> None:
        raise KeyboardInterrupt

    upload = store.upload("packs/one")
    files.before = {"write_at": interrupt}
    upload.append(b"data")
    with pytest.raises(KeyboardInterrupt):
        upload.commit()
    with pytest.raises(StoreError, match="has ended"):
        upload.commit()
    assert found_below(tmp_path) == ["packs/before"]
