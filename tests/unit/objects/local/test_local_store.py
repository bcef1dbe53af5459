"""The local store on filesystems that differ: names, directories, fsyncs, and how exclusive a create is."""

from __future__ import annotations

import os
import stat
from array import array
from pathlib import Path

import pytest

from holdfast.digest import Buffer
from holdfast.errors import NotFound, ObjectExists, StoreError
from holdfast.objects.local.files import PosixFiles
from holdfast.objects.local.local_store import LocalStore
from tests.kit.scripted_files import Scripted, found_below, ready_store


def test_a_key_is_the_path_of_its_file(tmp_path: Path) -> None:
    LocalStore(tmp_path).create("snapshots/name%20x/0", b"data")
    assert (tmp_path / "snapshots/name%20x/0").read_bytes() == b"data"


def test_a_relative_root_is_fixed_when_it_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    store = LocalStore("store")
    monkeypatch.chdir("/")
    assert store.url == str(tmp_path / "store")


def test_files_are_as_open_to_others_as_the_umask_says(tmp_path: Path) -> None:
    mask = os.umask(0o027)
    try:
        LocalStore(tmp_path).create("packs/one", b"")
    finally:
        os.umask(mask)
    assert stat.S_IMODE((tmp_path / "packs/one").stat().st_mode) == 0o640


def test_opening_and_reading_create_nothing(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "a" / "store")
    assert store.list("") == []
    assert store.traits.durable
    assert store.find_free_bytes() is not None
    store.delete("packs/one")
    with pytest.raises(NotFound):
        store.read("packs/one", limit_bytes=1)
    assert list(tmp_path.iterdir()) == []


def test_a_read_only_store_is_not_even_probed(tmp_path: Path) -> None:
    files = Scripted()
    assert LocalStore(tmp_path, read_only=True, files=files).traits.durable
    assert files.counts["create_file"] == 0


@pytest.mark.parametrize("kind", ["create", "upload"])
def test_a_create_in_a_directory_that_is_there_costs_two_fsyncs(tmp_path: Path, kind: str) -> None:
    files = Scripted()
    store = ready_store(tmp_path, files)
    files.counts.clear()
    if kind == "create":
        store.create("packs/one", b"data")
    else:
        with store.upload("packs/one") as upload:
            upload.append(b"data")
            upload.commit()
    assert (files.counts["sync_file"], files.counts["sync_directory"]) == (1, 1)
    assert files.counts["make_directory"] == 0


def test_a_create_by_a_new_instance_costs_no_more(tmp_path: Path) -> None:
    ready_store(tmp_path, PosixFiles())
    files = Scripted()
    LocalStore(tmp_path, files=files).create("packs/one", b"data")
    assert (files.counts["sync_file"], files.counts["sync_directory"]) == (1, 1)


def test_a_create_that_need_not_be_durable_syncs_nothing(tmp_path: Path) -> None:
    files = Scripted()
    LocalStore(tmp_path / "new" / "store", files=files).create("leases/one/0", b"data", durable=False)
    assert files.counts["sync_file"] == files.counts["sync_directory"] == 0


def test_a_key_below_an_object_cannot_be_created(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.create("packs/one", b"")
    with pytest.raises(StoreError, match="packs/one/two"):
        store.create("packs/one/two", b"")
    with pytest.raises(NotFound):
        store.stat("packs/one/two")
    store.delete("packs/one/two")
    assert store.list("packs/one/") == []


def test_a_key_that_is_a_directory_cannot_be_created(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.create("packs/one", b"")
    with pytest.raises(StoreError, match="it is a directory") as caught:
        store.create("packs", b"")
    assert not isinstance(caught.value, ObjectExists)
    with pytest.raises(NotFound):
        store.stat("packs")
    store.delete("packs")
    assert found_below(tmp_path) == ["packs/one"]


def test_deleting_the_last_object_of_a_directory_leaves_it_for_the_next(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.create("snapshots/00/one", b"")
    store.delete("snapshots/00/one")
    assert os.listdir(tmp_path / "snapshots") == ["00"]
    assert store.list("") == []


def test_a_root_that_leads_nowhere_is_an_error_not_a_hang(tmp_path: Path) -> None:
    (tmp_path / "store").symlink_to("nowhere")
    with pytest.raises(StoreError, match="No such file"):
        LocalStore(tmp_path / "store").create("packs/one", b"")


class OfType(PosixFiles):
    def __init__(self, kind: str) -> None:
        self.kind = kind

    def read_filesystem_type(self, path: str) -> str:
        return self.kind


@pytest.mark.parametrize(
    "kind", ["nfs", "nfs4", "cifs", "smb3", "ceph", "fuse.sshfs", "lustre", "gpfs", "9p", "new", ""]
)
def test_a_filesystem_that_may_be_shared_counts_as_a_network(tmp_path: Path, kind: str) -> None:
    assert LocalStore(tmp_path, files=OfType(kind)).traits.shared_by_hosts


@pytest.mark.parametrize("kind", ["ext4", "xfs", "btrfs", "tmpfs", "zfs", "overlay", "f2fs"])
def test_a_filesystem_known_to_be_local_does_not(tmp_path: Path, kind: str) -> None:
    assert not LocalStore(tmp_path, files=OfType(kind)).traits.shared_by_hosts


def test_leftovers_of_a_killed_save_are_removed(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.create("packs/one", b"first")
    debris = ("packs/.tmp-1", ".tmp-2", "leases/.tmp-3", "snapshots/00/.tmp-4", "snapshots/1f/.tmp-5", "a/b/c/.tmp-6")
    for name in debris:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"half")
    assert store.remove_debris(older_than_s=3600.0) == 0
    assert store.remove_debris(older_than_s=0.0) == len(debris)
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == ["one"]


def test_debris_is_not_searched_through_links_or_in_foreign_directories(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "store")
    store.create("packs/one", b"whole")
    for directory in ("elsewhere", "store/.hidden", "store/Mine"):
        (tmp_path / directory).mkdir()
        (tmp_path / directory / ".tmp-1").write_bytes(b"not ours")
    (tmp_path / "store/snapshots").symlink_to(tmp_path / "elsewhere")
    assert store.remove_debris(older_than_s=0.0) == 0


def test_the_exclusive_lock_is_given_if_no_other_lock_exists(tmp_path: Path) -> None:
    store, other = LocalStore(tmp_path), LocalStore(tmp_path)
    with store.hold(exclusive=True) as is_alone:
        assert is_alone
        with other.hold(exclusive=True) as is_alone_too:
            assert not is_alone_too
    with other.hold(exclusive=False), store.hold(exclusive=True) as is_alone:
        assert not is_alone
    with store.hold(exclusive=True) as is_alone:
        assert is_alone


def test_a_network_filesystem_has_no_exclusive_lock(tmp_path: Path) -> None:
    class Remote(PosixFiles):
        def read_filesystem_type(self, path: str) -> str:
            return "nfs4"

    with LocalStore(tmp_path, files=Remote()).hold(exclusive=True) as is_alone:
        assert not is_alone


def test_small_and_large_buffers_of_any_type_are_written_in_order(tmp_path: Path) -> None:
    limit = 64 << 10
    sizes = [1, 0, limit, 3, limit - 3, 8, limit + 1, limit + 1, 0, 5, 5 << 20, 2]
    parts = [bytes([number + 1]) * size for number, size in enumerate(sizes)]
    buffers: list[Buffer] = [*parts, bytearray(parts[0]), memoryview(array("I", [7] * 10)), memoryview(parts[2])]
    store = LocalStore(tmp_path)
    with store.upload("packs/one") as upload:
        upload.append(*buffers)
        upload.commit()
    assert (tmp_path / "packs/one").read_bytes() == b"".join(buffers)
