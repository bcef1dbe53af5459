"""A feature is declared once, by whoever comes first, and makes versions that do not know it refuse the store."""

from __future__ import annotations

import pytest

import holdfast.repo.handle.config as module
from holdfast.errors import NewerFormat, NotAStore, StoreError, StoreGone
from holdfast.objects.memory import MemoryStore
from holdfast.repo.format.chunk import BLOSC2
from holdfast.repo.handle.config import CODEC_FEATURE, create_config, declare_feature, read_config
from holdfast.repo.handle.repository import open_repository
from holdfast.repo.names.generations import read_newest
from tests.kit.encoded import CONFIGS
from tests.kit.rounds import count_rounds
from tests.kit.saving import Meanwhile, Watched, keys
from tests.kit.waiting_store import WaitingStore


def test_a_declared_feature_is_part_of_the_config(store: MemoryStore) -> None:
    created = create_config(store)
    declared = declare_feature(store, CODEC_FEATURE)
    assert declared == read_config(store)
    assert declared.has_codec
    assert declared.is_confirmed
    assert (declared.store_id, created.has_codec) == (created.store_id, False)
    assert keys(store, "config/") == CONFIGS


def test_it_is_declared_once_and_made_durable_by_whoever_finds_it(store: MemoryStore) -> None:
    class Synced(Watched):
        synced = 0

        def sync(self, prefix: str) -> None:
            self.synced += prefix == "config/"

    create_config(store)
    declare_feature(store, CODEC_FEATURE)
    again = Synced(store)
    assert declare_feature(again, CODEC_FEATURE).has_codec
    assert (again.synced, keys(store, "config/")) == (1, CONFIGS)


@pytest.mark.parametrize("other", [CODEC_FEATURE, "another"])
def test_two_that_declare_at_the_same_time_agree(
    store: MemoryStore, other: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "KNOWN_FEATURES", frozenset({CODEC_FEATURE, "another"}))
    create_config(store)

    class Racing(Watched):
        is_late = True

        def create(self, key: str, data: object, *, durable: bool = True) -> None:
            if self.is_late:
                self.is_late = False
                declare_feature(store, other)
            super().create(key, data, durable=durable)  # type: ignore[arg-type]  # passed on as it is

    declare_feature(Racing(store), CODEC_FEATURE)
    found = read_config(store)
    assert found is not None
    assert set(found.features["read"]) == {CODEC_FEATURE, other}


def test_an_older_version_refuses_the_store(store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    create_config(store)
    opened = open_repository(store)
    declare_feature(store, CODEC_FEATURE)
    monkeypatch.setattr(module, "KNOWN_FEATURES", frozenset())
    expected = "needs the feature 'codec-blosc2' to read, which this Holdfast does not know: upgrade"
    with pytest.raises(NewerFormat, match=expected):
        open_repository(store)
    with pytest.raises(NewerFormat, match=expected):
        opened.verify_may_write()


def test_a_declaration_says_what_else_the_config_said(store: MemoryStore) -> None:
    create_config(store)
    before = read_newest(store, "config/").fields
    declare_feature(store, CODEC_FEATURE)
    after = read_newest(store, "config/").fields
    assert before is not None
    assert after is not None
    changed = {key for key in after.values if after.values[key] != before.values.get(key)}
    assert changed == {"features", "generation", "write_id"}


def test_nothing_is_declared_where_there_is_no_store(store: MemoryStore) -> None:
    with pytest.raises(NotAStore):
        declare_feature(store, CODEC_FEATURE)


def test_a_handle_declares_nothing_in_another_store(store: MemoryStore) -> None:
    create_config(store)
    repo = open_repository(store)
    for key in keys(store, "config/"):
        store.delete(key)
    create_config(store)
    with pytest.raises(StoreGone):
        repo.declare_codec(BLOSC2)


def test_a_config_that_never_rests_is_an_error(store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_ATTEMPTS", 0)
    create_config(store)
    with pytest.raises(StoreError, match="keep changing its config"):
        declare_feature(store, CODEC_FEATURE)


def test_opening_a_store_takes_one_round_before_and_after() -> None:
    store = WaitingStore()
    create_config(store)
    for is_declared in (False, True):
        with count_rounds(MemoryStore, "_find") as reads, count_rounds(MemoryStore, "list") as lists:
            config = open_repository(store).config
        assert config is not None
        assert config.has_codec == is_declared
        assert (reads.greatest, lists.greatest) == (1, 1)
        declare_feature(store, CODEC_FEATURE)


def test_a_handle_that_was_opened_before_sees_the_declaration() -> None:
    store = WaitingStore()
    create_config(store)
    repo = open_repository(store)
    declare_feature(Meanwhile(store, "none/", lambda: None), CODEC_FEATURE)
    config = repo.read_same()
    assert config is not None
    assert config.has_codec
