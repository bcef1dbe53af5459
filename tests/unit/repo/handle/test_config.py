"""The config makes a place a store: it is created once, read strictly, and never written into other people's files."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from holdfast.errors import Corrupt, NewerFormat, NotAStore, ObjectExists
from holdfast.json_text import Json
from holdfast.objects.memory import MemoryStore
from holdfast.objects.protocol import PAGE_LIMIT, ObjectInfo, ObjectStore
from holdfast.repo.format.layout import PREFIXES
from holdfast.repo.format.record import Fields, encode_record
from holdfast.repo.handle.config import (
    create_config,
    ensure_config,
    parse_config,
    read_config,
    read_unknown_prefix,
    verify_empty,
)
from tests.kit.saving import Watched, keys, rot

GOOD: dict[str, Json] = {
    "kind": "config",
    "generation": 0,
    "write_id": "w",
    "store_id": "s",
    "format": {"major": 1, "minor": 7},
    "features": {"read": [], "write": ["later"], "collect": []},
}


def fields(**changes: Json) -> Fields:
    return Fields("config/00000000", {**GOOD, **changes})


def test_an_empty_place_has_no_config(store: MemoryStore) -> None:
    assert read_config(store) is None
    assert store.contents() == {}


def test_what_was_created_is_found(store: MemoryStore) -> None:
    created = create_config(store)
    assert read_config(store) == created
    assert keys(store, "") == ["config/00000000", "config/00000001"]


def test_a_config_that_was_not_confirmed_is_by_the_first_writer(store: MemoryStore) -> None:
    create_config(store)
    store.delete("config/00000001")
    found = read_config(store)
    assert found is not None
    assert not found.is_confirmed
    assert ensure_config(store).is_confirmed
    assert read_config(store) == ensure_config(store)
    assert keys(store, "") == ["config/00000000", "config/00000001"]


def test_a_second_creation_is_refused(store: MemoryStore) -> None:
    create_config(store)
    with pytest.raises(ObjectExists):
        create_config(store)


def test_ensuring_twice_gives_one_config(store: MemoryStore) -> None:
    assert ensure_config(store) == ensure_config(store)


class Meanwhile(Watched):
    """Lets something happen once, after a listing that starts with `prefix` was made."""

    def __init__(self, inner: ObjectStore, prefix: str, act: Callable[[], object]) -> None:
        super().__init__(inner)
        self._prefix = prefix
        self._act: Callable[[], object] | None = act

    def list(self, prefix: str, *, after: str = "", limit: int = PAGE_LIMIT) -> list[ObjectInfo]:
        found = super().list(prefix, after=after, limit=limit)
        if self._act and prefix == self._prefix:
            act, self._act = self._act, None
            act()
        return found


@pytest.mark.parametrize("prefix", ["config/", ""])
def test_two_that_come_at_once_agree_on_one_config(store: MemoryStore, prefix: str) -> None:
    racing = Meanwhile(store, prefix, lambda: create_config(store))
    assert ensure_config(racing) == read_config(store)


def test_a_store_that_another_process_created_and_used_at_the_same_time_is_a_store(store: MemoryStore) -> None:
    def make_and_use() -> None:
        create_config(store)
        store.create("bad/x", b"")

    assert ensure_config(Meanwhile(store, "config/", make_and_use)) == read_config(store)


def test_a_config_that_was_torn_is_made_again(store: MemoryStore) -> None:
    store.create("config/00000000", b"holdfast-rec")
    made = ensure_config(store)
    assert read_config(store) == made
    assert keys(store, "") == ["config/00000000", "config/00000001", "config/00000002"]


def test_files_of_others_are_not_taken_for_an_empty_place(store: MemoryStore) -> None:
    store.create("weights.bin", b"")
    with pytest.raises(NotAStore, match=r"is not empty and has no config.*'weights.bin' is there"):
        verify_empty(store)
    with pytest.raises(NotAStore):
        ensure_config(store)
    assert keys(store, "") == ["weights.bin"]


def test_a_store_that_lost_its_config_is_not_created_again(store: MemoryStore) -> None:
    ensure_config(store)
    store.create("packs/x", b"")
    store.delete("config/00000000")
    store.delete("config/00000001")
    with pytest.raises(NotAStore, match="restore it from a copy"):
        ensure_config(store)


def test_a_damaged_config_is_an_error(store: MemoryStore) -> None:
    create_config(store)
    rot(store, "config/00000001", 150)
    with pytest.raises(Corrupt, match="config/00000001"):
        read_config(store)


def test_a_later_minor_format_is_read() -> None:
    config = parse_config(fields(format={"major": 1, "minor": 7, "more": 1}, later_field=1), url="memory://")
    assert (config.major, config.minor, config.store_id) == (1, 7, "s")


def test_a_later_major_format_is_refused_clearly() -> None:
    with pytest.raises(NewerFormat, match=r"memory:// has format 2\.2, this Holdfast reads up to 1: upgrade"):
        parse_config(fields(format={"major": 2, "minor": 2}), url="memory://")


def test_an_unknown_feature_forbids_only_what_needs_it() -> None:
    config = parse_config(fields(), url="memory://")
    config.verify_may("read", url="memory://")
    config.verify_may("collect", url="memory://")
    with pytest.raises(NewerFormat, match="needs the feature 'later' to write"):
        config.verify_may("write", url="memory://")


def test_a_feature_needed_to_read_forbids_opening() -> None:
    with pytest.raises(NewerFormat, match="'later' to read"):
        parse_config(fields(features={"read": ["later"]}), url="memory://")


@pytest.mark.parametrize(
    "changes",
    [
        {"kind": "tag"},
        {"format": 1},
        {"format": {"major": 1}},
        {"format": {"major": -1, "minor": 0}},
        {"features": []},
        {"features": {"read": "x"}},
        {"features": {"read": [1]}},
        {"store_id": None},
    ],
)
def test_a_config_of_the_wrong_shape_is_damage(changes: dict[str, Json]) -> None:
    with pytest.raises(Corrupt, match="config/00000000"):
        parse_config(fields(**changes), url="memory://")


def test_the_highest_config_counts(store: MemoryStore) -> None:
    create_config(store)
    store.create("config/00000002", encode_record({**GOOD, "generation": 2}))
    found = read_config(store)
    assert found is not None
    assert found.store_id == "s"


@pytest.mark.parametrize("key", ["aaa/x", "zzz/x", "packsx/y", "pack/x", "file"])
def test_a_prefix_that_the_format_does_not_have_is_found(store: MemoryStore, key: str) -> None:
    for prefix in PREFIXES:
        store.create(prefix + "a", b"")
        store.create(prefix + "zz", b"")
    assert read_unknown_prefix(store) is None
    store.create(key, b"")
    assert read_unknown_prefix(store) == key


def test_a_draft_is_refused_and_says_what_to_do() -> None:
    with pytest.raises(NotAStore, match=r"has format 0\.3, a draft that no release reads; create a new store"):
        parse_config(fields(format={"major": 0, "minor": 3}), url="memory://")
