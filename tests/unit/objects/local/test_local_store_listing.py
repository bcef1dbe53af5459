"""What the local store lists, in which order, and what that costs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import NotFound, StoreError
from holdfast.objects.local.files import FileStat
from holdfast.objects.local.local_store import LocalStore
from tests.kit.power import SimulatedDisk
from tests.kit.scripted_files import Scripted, ready_store


def test_only_objects_are_listed(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.create("packs/one", b"")
    for name in (".tmp-1", ".hidden", "UPPER", "with space", "caf\u00e9", os.fsdecode(b"\xff")):
        (tmp_path / "packs" / name).touch()
        (tmp_path / name).mkdir()
        (tmp_path / name / "inside").touch()
    (tmp_path / "packs" / "empty").mkdir()
    os.mkfifo(tmp_path / "packs" / "pipe")
    assert [info.key for info in store.list("")] == ["packs/one"]


def test_a_page_of_no_objects_is_empty(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.create("packs/one", b"")

    assert store.list("packs/", limit=0) == []


def test_a_pipe_in_place_of_an_object_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    store = LocalStore(tmp_path)
    with pytest.raises(NotFound):
        store.read("pipe", limit_bytes=1)
    with pytest.raises(StoreError):
        store.read_into("pipe", 0, memoryview(bytearray(1)))


def test_what_vanishes_while_it_is_listed_is_left_out(tmp_path: Path) -> None:
    files = Scripted()
    store = ready_store(tmp_path, files)
    store.create("packs/gone", b"")
    files.after = {"list_directory": lambda: (tmp_path / "packs/gone").unlink(missing_ok=True)}
    assert [info.key for info in store.list("packs/")] == ["packs/before"]


class CountingDisk(SimulatedDisk):
    """Counts how often it is asked about one path, and for a whole directory."""

    stats = 0
    lists = 0

    def stat(self, path: str) -> FileStat:
        self.stats += 1
        return super().stat(path)

    def list_directory(self, path: str) -> list[str]:
        self.lists += 1
        return super().list_directory(path)


def test_one_name_among_many_is_listed_at_the_cost_of_one() -> None:
    disk = CountingDisk()
    disk.make_directory("/store")
    disk.make_directory("/store/packs")
    for number in range(20_000):
        disk.close(disk.create_file(f"/store/packs/{number:05}"))
    store = LocalStore("/store", files=disk)
    assert [info.key for info in store.list("packs/12345")] == ["packs/12345"]
    assert (disk.stats, disk.lists) == (1, 1)
    assert [info.key for info in store.list("packs/", after="packs/19998")] == ["packs/19999"]
    # The key after which to list may be a directory by now.
    assert (disk.stats, disk.lists) == (1 + 2, 2)
    assert len(store.list("", limit=5)) == 5
    assert (disk.stats, disk.lists) == (3 + 6, 4)


KEYS = st.lists(
    st.lists(st.text("ab0-.=", min_size=1, max_size=3).filter(lambda name: name[0] != "."), min_size=1, max_size=3),
    max_size=12,
)


@given(parts=KEYS, after=st.text("ab0-./=", max_size=6), prefix=st.sampled_from(["", "a", "a/", "a/b", "ab"]))
def test_any_tree_is_listed_in_the_order_of_its_keys(parts: list[list[str]], after: str, prefix: str) -> None:
    store = LocalStore("/store", files=SimulatedDisk())
    keys: set[str] = set()
    for key in map("/".join, parts):
        if not any(key.startswith(other + "/") or (other + "/").startswith(key + "/") for other in keys):
            store.create(key, b"", durable=False)
            keys.add(key)
    wanted = sorted(key for key in keys if key.startswith(prefix) and key > after)
    assert [info.key for info in store.list(prefix, after=after)] == wanted
    assert [info.key for info in store.list(prefix, after=after, limit=2)] == wanted[:2]
