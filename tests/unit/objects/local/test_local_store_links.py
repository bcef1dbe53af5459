"""No call of a local store follows a symbolic link below its root, at any position in a path."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.errors import NotFound, StoreError
from holdfast.objects.local.local_store import LocalStore
from holdfast.objects.local.probe import probe_directory
from holdfast.objects.local.upload import TEMP_PREFIX
from holdfast.objects.url import locate_store_root
from tests.cli.runs import digest_tree
from tests.kit.scripted_files import open_descriptors

SHALLOW, DEEP = "packs/one", "snapshots/1c/one"
DATA = b"bytes of the store itself"


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A directory that is not a store, with files where a store would have some."""
    for key in ("one", "1c/one", f"{TEMP_PREFIX}1", f"1c/{TEMP_PREFIX}1"):
        (tmp_path / "outside" / key).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "outside" / key).write_bytes(b"precious")
    return tmp_path / "outside"


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    store = LocalStore(tmp_path / "store")
    for key in (SHALLOW, DEEP):
        store.create(key, DATA)
    return store


def plant(store: LocalStore, place: str, target: Path) -> None:
    """Put a link in the place of what is there."""
    path = Path(store.url) / place
    if path.exists():
        path.rename(path.parent.parent / f"moved-{path.name}")
    path.symlink_to(target)


def find_counterpart(outside: Path, place: str) -> Path:
    """Return the path outside that a link at `place` would make look like a part of the store."""
    return outside / place.partition("/")[2] if place != SHALLOW else outside / "one"


# The path of a link, and a key whose path contains it.
PLACES = [("packs", SHALLOW), ("snapshots", DEEP), ("snapshots/1c", DEEP), (SHALLOW, SHALLOW), (DEEP, DEEP)]
CALLS: dict[str, Callable[[LocalStore, str], object]] = {
    "read": lambda store, key: store.read(key, limit_bytes=100),
    "read_into": lambda store, key: store.read_into(key, 0, memoryview(bytearray(4))),
    "map": lambda store, key: store.map(key, 0, 4),
    "stat": lambda store, key: store.stat(key),
    "list": lambda store, key: store.list(key.rpartition("/")[0] + "/"),
    "list from above": lambda store, key: store.list(key.partition("/")[0] + "/"),
    "list one": lambda store, key: store.list(key),
    "create": lambda store, key: store.create(key, b"new"),
    "upload": lambda store, key: store.upload(key).commit(),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(("place", "key"), PLACES)
@pytest.mark.parametrize("target", ["outside", "nowhere", "loop", "inside"])
def test_a_call_that_meets_a_link_says_so_and_touches_nothing(
    store: LocalStore, outside: Path, call: str, place: str, key: str, target: str
) -> None:
    root = Path(store.url)
    targets = {
        "outside": find_counterpart(outside, place),
        "nowhere": outside / "none",
        "loop": root / place,
        "inside": root,
    }
    plant(store, place, targets[target])
    before, descriptors = digest_tree(root.parent), open_descriptors()

    with pytest.raises(StoreError, match=f"{place} is a symbolic link, and links inside a store are never") as caught:
        CALLS[call](store, key)

    assert caught.value.errno == errno.ELOOP
    assert not isinstance(caught.value, NotFound)
    assert caught.value.fate == "absent"
    assert digest_tree(root.parent) == before
    assert open_descriptors() == descriptors


@pytest.mark.parametrize(("place", "key"), [(place, key) for place, key in PLACES if place != key])
def test_a_key_below_a_link_is_not_deleted(store: LocalStore, outside: Path, place: str, key: str) -> None:
    plant(store, place, find_counterpart(outside, place))
    before = digest_tree(outside)

    with pytest.raises(StoreError, match=f"{place} is a symbolic link"):
        store.delete(key)

    assert digest_tree(outside) == before


@pytest.mark.parametrize("key", [SHALLOW, DEEP])
def test_to_delete_a_key_that_is_a_link_deletes_the_link(store: LocalStore, outside: Path, key: str) -> None:
    plant(store, key, outside / "one")
    before = digest_tree(outside)

    store.delete(key)

    assert not os.path.lexists(os.path.join(store.url, key))
    assert digest_tree(outside) == before


@pytest.mark.parametrize("prefix", ["packs/", "snapshots/1c/"])
def test_a_link_is_no_directory_to_prepare_or_to_make_durable(store: LocalStore, outside: Path, prefix: str) -> None:
    plant(store, prefix.rstrip("/"), outside)
    before = digest_tree(outside)

    with pytest.raises(StoreError, match=f"{prefix.rstrip('/')} is a symbolic link"):
        store.prepare([prefix])
    with pytest.raises(StoreError, match=f"{prefix.rstrip('/')} is a symbolic link"):
        store.sync(prefix)

    assert digest_tree(outside) == before


def test_a_lock_that_is_a_link_is_not_made_or_locked(store: LocalStore, outside: Path) -> None:
    plant(store, ".lock", outside / "new")

    with pytest.raises(StoreError, match=r"\.lock is a symbolic link"), store.hold(exclusive=False):
        pytest.fail("it was held")
    with store.hold(exclusive=True) as is_alone:
        assert not is_alone

    assert not (outside / "new").exists()


def test_a_lock_that_is_a_second_name_of_another_file_is_not_written(store: LocalStore, outside: Path) -> None:
    os.link(outside / "one", os.path.join(store.url, ".lock"))
    before = digest_tree(outside)

    with store.hold(exclusive=True) as is_alone:
        assert is_alone

    assert digest_tree(outside) == before


def test_a_lock_that_is_a_pipe_is_not_waited_for(store: LocalStore) -> None:
    os.mkfifo(os.path.join(store.url, ".lock"))

    for exclusive in (False, True):
        with store.hold(exclusive=exclusive) as is_held:
            assert is_held


@pytest.mark.parametrize("place", ["packs", "snapshots/1c"])
def test_a_pipe_in_the_place_of_a_directory_holds_nothing(store: LocalStore, place: str) -> None:
    path = Path(store.url) / place
    path.rename(path.parent.parent / "moved")
    os.mkfifo(path)

    assert store.list(f"{place}/") == []
    with pytest.raises(NotFound):
        store.read(f"{place}/one", limit_bytes=100)


def test_temporary_files_below_links_are_not_removed(store: LocalStore, outside: Path) -> None:
    plant(store, "packs", outside)
    plant(store, "snapshots/1c", outside / "1c")
    plant(store, f"{TEMP_PREFIX}2", outside / "one")
    before = digest_tree(outside)

    store.remove_debris(older_than_s=0.0)

    assert digest_tree(outside) == before
    assert not os.path.lexists(os.path.join(store.url, f"{TEMP_PREFIX}2"))


def test_links_to_their_own_directory_are_found_once(store: LocalStore) -> None:
    for number in range(12):
        (Path(store.url) / f"packs/{number}").symlink_to(".")

    found = list(store.iter_links())

    assert found == sorted(f"packs/{number}" for number in range(12))
    assert [info.key for info in store.skipping_links().list("")] == [SHALLOW, DEEP]
    with pytest.raises(StoreError, match="packs/0 is a symbolic link"):
        store.list("packs/")


def test_every_link_is_found_also_one_that_no_key_can_name(store: LocalStore, outside: Path) -> None:
    places = ["leases", "packs/A", f"packs/{TEMP_PREFIX}1", "snapshots/1c/two", "unknown"]
    for place in places:
        plant(store, place, outside)
    os.mkfifo(os.path.join(store.url, "packs/pipe"))

    assert sorted(store.iter_links()) == sorted(places)


def test_a_link_that_no_key_can_name_disturbs_no_call(store: LocalStore, outside: Path) -> None:
    plant(store, "packs/A", outside)
    plant(store, "packs/.hidden", outside)

    assert [info.key for info in store.list("")] == [SHALLOW, DEEP]


def test_the_root_may_be_a_link_and_be_reached_through_links(store: LocalStore, tmp_path: Path) -> None:
    (tmp_path / "above").symlink_to(tmp_path)
    (tmp_path / "link").symlink_to(tmp_path / "above/store")

    behind = LocalStore(tmp_path / "above/link")
    behind.create("packs/two", DATA)

    assert [info.key for info in store.list("")] == [SHALLOW, "packs/two", DEEP]
    assert behind.read("packs/two", limit_bytes=100) == DATA
    assert list(behind.iter_links()) == []
    behind.delete("packs/two")
    assert [info.key for info in behind.list("packs/")] == [SHALLOW]


def test_a_new_root_below_a_link_is_made(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")

    LocalStore(tmp_path / "link/a/b").create(SHALLOW, DATA)

    assert (tmp_path / "real/a/b" / SHALLOW).read_bytes() == DATA


def test_a_root_that_is_a_loop_of_links_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "store").symlink_to("store")

    with pytest.raises(StoreError, match="Too many levels of symbolic links"):
        LocalStore(tmp_path / "store").list("")


def test_a_directory_whose_config_is_a_link_is_no_store_to_be_found(store: LocalStore, outside: Path) -> None:
    (outside / "00000000").touch()
    plant(store, "config", outside)

    assert locate_store_root(store.url) != store.url


def test_a_probe_does_not_touch_links(store: LocalStore, outside: Path) -> None:
    plant(store, "packs", outside)
    before = digest_tree(outside)

    assert probe_directory(store.url).writable

    assert digest_tree(outside) == before


def test_no_group_may_write_to_an_object_whatever_the_umask(tmp_path: Path) -> None:
    mask = os.umask(0o002)
    try:
        LocalStore(tmp_path).create(SHALLOW, DATA)
    finally:
        os.umask(mask)

    assert stat.S_IMODE((tmp_path / SHALLOW).stat().st_mode) == 0o644
    assert stat.S_IMODE((tmp_path / "packs").stat().st_mode) == 0o775
