"""How a file gets its name: which calls work, which only claim to, and replies that are lost."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from holdfast.errors import ObjectExists, StoreError
from holdfast.objects.local.files import PosixFiles
from holdfast.objects.local.local_store import LocalStore
from tests.kit.scripted_files import Scripted, fail, found_below, ready_store


def no_naming() -> Scripted:
    return Scripted(before={"link": fail(errno.EPERM), "rename_noreplace": fail(errno.EINVAL)})


class Overwriting(PosixFiles):
    """A filesystem whose link and rename say that they refuse a name in use, and do not."""

    def link(self, source: str, target: str) -> None:
        super().rename(source, target)

    def rename_noreplace(self, source: str, target: str) -> None:
        super().rename(source, target)


def test_directories_made_without_durability_are_synced_when_it_is_wanted(tmp_path: Path) -> None:
    files = Scripted()
    store = LocalStore(tmp_path / "store", files=files)
    store.create("packs/first", b"", durable=False)
    store.create("packs/second", b"")
    # The file, its directory, the root for `packs`, the parent of the root for the root.
    assert files.counts["sync_file"] + files.counts["sync_directory"] == 4


def test_a_link_that_exists_because_we_made_it_is_our_success(tmp_path: Path) -> None:
    store = LocalStore(tmp_path, files=Scripted(after={"link": fail(errno.EEXIST)}))
    store.create("packs/one", b"ours")
    assert store.read("packs/one", limit_bytes=4) == b"ours"
    assert found_below(tmp_path) == ["packs/one"]


def test_a_link_that_exists_because_another_made_it_is_not(tmp_path: Path) -> None:
    store = LocalStore(tmp_path, files=Scripted(after={"link": fail(errno.EEXIST)}))
    store.create("packs/one", b"theirs")
    with pytest.raises(ObjectExists):
        store.create("packs/one", b"ours")
    assert store.read("packs/one", limit_bytes=6) == b"theirs"


def test_an_error_after_a_link_that_was_made_is_our_success(tmp_path: Path) -> None:
    store = LocalStore(tmp_path, files=Scripted(after={"link": fail(errno.EIO)}))
    store.create("packs/one", b"ours")
    assert found_below(tmp_path) == ["packs/one"]


def test_a_rename_whose_source_is_gone_because_we_made_it_is_our_success(tmp_path: Path) -> None:
    files = Scripted(before={"link": fail(errno.EPERM)}, after={"rename_noreplace": fail(errno.ENOENT)})
    store = LocalStore(tmp_path, files=files)
    store.create("packs/one", b"ours")
    assert store.read("packs/one", limit_bytes=4) == b"ours"
    assert found_below(tmp_path) == ["packs/one"]


def test_a_link_that_refuses_every_name_is_not_used(tmp_path: Path) -> None:
    store = LocalStore(tmp_path, files=Scripted(before={"link": fail(errno.EEXIST)}))
    store.create("packs/one", b"data")
    assert found_below(tmp_path) == ["packs/one"]


@pytest.mark.parametrize("code", [errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS])
def test_without_hard_links_files_are_renamed_without_replacement(tmp_path: Path, code: int) -> None:
    files = Scripted(before={"link": fail(code)})
    store = LocalStore(tmp_path, files=files)
    store.create("packs/one", b"first")
    with pytest.raises(ObjectExists):
        store.create("packs/one", b"second")
    assert found_below(tmp_path) == ["packs/one"]


def test_the_probe_is_made_once(tmp_path: Path) -> None:
    files = Scripted(before={"link": fail(errno.EPERM)})
    store = ready_store(tmp_path, files)
    assert files.counts["link"] == 1
    store.create("packs/one", b"")
    assert files.counts["link"] == 1


def test_with_neither_link_nor_rename_without_replacement_writing_is_refused(tmp_path: Path) -> None:
    store = LocalStore(tmp_path, files=no_naming())
    with pytest.raises(StoreError, match="single_writer=True") as caught:
        store.create("packs/one", b"data")
    assert caught.value.fate == "absent"
    with pytest.raises(StoreError, match="single_writer=True"):
        store.upload("packs/one")
    assert found_below(tmp_path) == []


def test_a_single_writer_may_check_and_then_rename(tmp_path: Path) -> None:
    store = LocalStore(tmp_path, files=no_naming(), single_writer=True)
    store.create("packs/one", b"first")
    with pytest.raises(ObjectExists):
        store.create("packs/one", b"second")
    assert found_below(tmp_path) == ["packs/one"]


def test_a_filesystem_that_overwrites_despite_its_promise_is_detected(tmp_path: Path) -> None:
    store = LocalStore(tmp_path, files=Overwriting())
    with pytest.raises(StoreError, match="single_writer=True"):
        store.create("packs/one", b"data")
    assert found_below(tmp_path) == []


def test_a_create_succeeds_although_its_directory_is_removed(tmp_path: Path) -> None:
    removals = iter(range(3))

    def remove() -> None:
        if next(removals, None) is not None and (tmp_path / "leases/one").exists():
            (tmp_path / "leases/one").rmdir()

    store = LocalStore(tmp_path, files=Scripted(before={"create_file": remove}))
    store.create("leases/one/0", b"data")
    assert found_below(tmp_path) == ["leases/one/0"]
