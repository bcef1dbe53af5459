"""Opening never writes; the first save or `init` makes the store."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import NewerFormat, NotAStore, StoreGone
from holdfast.objects.local.local_store import LocalStore
from holdfast.objects.memory import MemoryStore
from holdfast.objects.protocol import StoreTraits
from holdfast.repo.format.layout import CONFIG, PREFIXES, SHELVES, generation_key
from holdfast.repo.format.record import encode_record
from holdfast.repo.handle.config import create_config, read_config
from holdfast.repo.handle.repository import (
    MIN_BUDGET_BYTES,
    init_repository,
    open_repository,
)
from holdfast.repo.names.generations import create_generation, read_newest
from tests.faults.unsynced import UnsyncedFiles
from tests.kit.rounds import count_rounds
from tests.kit.saving import keys, load_bytes, new_repo, noise, save_bytes, snapshot_of
from tests.kit.waiting_store import let_wait


def test_opening_nothing_is_refused_with_the_next_step(store: MemoryStore) -> None:
    with pytest.raises(NotAStore, match=r"memory:// is not a store; create one with `holdfast -s memory:// init`"):
        open_repository(store)
    assert store.contents() == {}


def test_opening_for_a_first_save_writes_nothing(store: MemoryStore) -> None:
    assert open_repository(store, create=True).config is None
    assert store.contents() == {}


def test_the_first_save_makes_the_store(store: MemoryStore) -> None:
    repo = open_repository(store, create=True)
    save_bytes(repo, "a", {"x": b"1"})
    assert open_repository(store).config == read_config(store) != None  # noqa: E711


def test_opening_reads_the_config_and_writes_nothing(store: MemoryStore) -> None:
    config = init_repository(store)
    before = store.contents()
    assert open_repository(store).config == config
    assert store.contents() == before


def test_other_files_are_no_store(store: MemoryStore) -> None:
    store.create("notes.txt", b"")
    for create in (False, True):
        with pytest.raises(NotAStore, match="notes"):
            open_repository(store, create=create)
    with pytest.raises(NotAStore):
        init_repository(store)
    assert list(store.contents()) == ["notes.txt"]


def test_a_store_is_made_once(store: MemoryStore) -> None:
    init_repository(store)
    before = store.contents()
    with pytest.raises(NotAStore, match="is a store already; nothing was changed"):
        init_repository(store)
    assert store.contents() == before


def test_a_budget_too_small_to_work_with_is_refused(store: MemoryStore) -> None:
    with pytest.raises(ValueError, match="at least"):
        open_repository(store, budget_bytes=MIN_BUDGET_BYTES - 1, create=True)


def test_a_store_whose_writers_need_a_later_feature_is_read_but_not_written(store: MemoryStore) -> None:
    create_config(store)
    fields = {
        "kind": "config",
        "generation": 2,
        "write_id": "w",
        "store_id": "s",
        "format": {"major": 1, "minor": 9},
        "features": {"read": [], "write": ["later"], "collect": []},
    }
    store.create(generation_key("config/", 2), encode_record(fields))
    repo = open_repository(store)
    before = store.contents()
    with pytest.raises(NewerFormat, match="'later' to write"):
        save_bytes(repo, "a", {"x": b"1"})
    assert store.contents() == before


def test_the_snapshot_saved_last_beside_a_name_is_remembered(store: MemoryStore) -> None:
    repo = new_repo(store)
    for name in ("run/1", "run/2", "other/1", "top"):
        save_bytes(repo, name, {"x": b"1"})
    assert repo.recent.find("run/3") == snapshot_of(repo, "run/2")
    assert repo.recent.find("elsewhere") == snapshot_of(repo, "top")
    assert repo.recent.find("none/1") is None


def list_directories(root: Path) -> set[str]:
    return {f"{path.relative_to(root)}/" for path in root.rglob("*") if path.is_dir()}


def test_a_new_store_has_every_directory_that_a_save_will_ever_need(tmp_path: Path) -> None:
    store = LocalStore(tmp_path, files=UnsyncedFiles())
    init_repository(store)
    assert list_directories(tmp_path) == {*PREFIXES, *SHELVES}
    for number in range(40):
        save_bytes(open_repository(store), f"run/{number}", {"x": b"1"})
    assert list_directories(tmp_path) == {*PREFIXES, *SHELVES}


def test_a_copy_of_a_store_that_lost_its_empty_directories_is_saved_to_as_before(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    init_repository(store)
    for path in sorted(tmp_path.rglob("*"), reverse=True):
        if path.is_dir() and not list(path.iterdir()):
            path.rmdir()
    assert list_directories(tmp_path) == {"config/"}
    save_bytes(open_repository(store), "run/1", {"x": noise(2000)})
    assert load_bytes(open_repository(store), "run/1") == {"x": noise(2000)}


def test_a_handle_keeps_its_index_open_and_sees_what_others_have_saved(store: MemoryStore) -> None:
    repo = new_repo(store)
    save_bytes(repo, "a", {"x": noise(2000, 1)})
    save_bytes(new_repo(store), "b", {"x": noise(2000, 2)})
    index = repo.index
    assert save_bytes(repo, "c", {"x": noise(2000, 1), "y": noise(2000, 2), "z": noise(2000, 3)}).new_bytes == 2000
    assert repo.index is index
    assert len(repo.index.refresh()) == len(keys(store, "index/"))


class Bucket(MemoryStore):
    """A store whose requests wait."""

    @property
    def traits(self) -> StoreTraits:
        return let_wait(super().traits, 8)


class Stale(MemoryStore):
    """A store in a directory whose listings this host caches."""

    @property
    def traits(self) -> StoreTraits:
        return replace(super().traits, stale_listings=True)


def test_the_config_is_read_each_time_if_listings_may_be_stale() -> None:
    store = Stale()
    init_repository(store)
    repo = open_repository(store)
    with count_rounds(MemoryStore, "read") as rounds:
        repo.verify_same()
        repo.verify_same()
    assert len(rounds.requests) == 2


@pytest.mark.parametrize("store", [MemoryStore(), Bucket()], ids=["at once", "waiting"])
def test_the_config_that_a_handle_has_seen_is_only_listed_again(store: MemoryStore) -> None:
    init_repository(store)
    repo = open_repository(store)
    with count_rounds(MemoryStore, "read") as rounds:
        repo.verify_may_write()
        repo.verify_same()
    assert rounds.requests == []


def test_choices_that_do_not_exist_are_refused_when_a_store_is_opened() -> None:
    store = MemoryStore()
    init_repository(store)
    compression: Any = "zip"
    delta: Any = 0
    with pytest.raises(ValueError, match="compression must be"):
        open_repository(store, compression=compression)
    with pytest.raises(ValueError, match="delta must be"):
        open_repository(store, delta=delta)


def test_another_store_in_the_place_of_the_one_that_was_seen_is_noticed() -> None:
    store = Bucket()
    init_repository(store)
    repo = open_repository(store)
    for key in list(store.contents()):
        store.delete(key)
    with pytest.raises(StoreGone, match="is gone"):
        repo.verify_same()
    init_repository(store)
    with pytest.raises(StoreGone, match="another store"):
        repo.verify_may_write()


def test_a_newer_config_is_read_at_once() -> None:
    store = Bucket()
    init_repository(store)
    repo = open_repository(store)
    newest = read_newest(store, CONFIG)
    assert newest.fields
    features = {"read": [], "write": ["of a later version"], "collect": []}
    fields = {**newest.fields.values, "features": features, "write_id": "0" * 32}
    create_generation(store, CONFIG, newest.next_generation, fields)
    for _ in range(2):
        with pytest.raises(NewerFormat, match="of a later version"):
            repo.verify_may_write()
