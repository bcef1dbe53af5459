"""The value of a name is its highest valid generation, and of two that change it exactly one wins."""

from __future__ import annotations

import secrets

import pytest

from holdfast.digest import Buffer
from holdfast.errors import CommitUnknown, Corrupt, Fate, NameInUse, NotFound, ObjectExists, StoreError, StoreFull
from holdfast.objects.memory import MemoryStore
from holdfast.objects.protocol import ObjectStore
from holdfast.repo.format.layout import generation_key
from holdfast.repo.format.record import encode_record
from holdfast.repo.names.generations import (
    change_name,
    create_generation,
    iter_records,
    iter_stems,
    list_generations,
    read_listed,
    read_newest,
    read_record,
)
from holdfast.testing.faults import Fault, FaultyStore
from tests.kit.rounds import count_rounds
from tests.kit.saving import Watched, replace_object, rot
from tests.kit.waiting_store import WaitingStore

STEM = "tags/x"


def create(store: ObjectStore, generation: int, *, stem: str = STEM) -> None:
    create_generation(store, stem, generation, {"value": generation, "write_id": secrets.token_hex(16)})


def change(store: ObjectStore, generation: int) -> None:
    change_name(store, STEM, generation, {"write_id": secrets.token_hex(16)}, name="x")


def value(store: ObjectStore) -> object:
    newest = read_newest(store, STEM)
    return newest.fields.values["value"] if newest.fields else None


def test_a_stem_without_records_has_no_value(store: MemoryStore) -> None:
    newest = read_newest(store, STEM)
    assert (newest.fields, newest.generation, newest.next_generation) == (None, -1, 0)


def test_the_highest_generation_counts(store: MemoryStore) -> None:
    for generation in range(12):
        create(store, generation)
    newest = read_newest(store, STEM)
    assert (value(store), newest.generation, newest.next_generation) == (11, 11, 12)


def test_a_torn_newest_record_is_skipped_and_its_number_is_not_used_again(store: MemoryStore) -> None:
    create(store, 0)
    store.create(generation_key(STEM, 1), b"holdfast-rec")
    newest = read_newest(store, STEM)
    assert (value(store), newest.generation, newest.next_generation) == (0, 0, 2)


def test_a_damaged_newest_record_is_an_error_and_not_the_older_value(store: MemoryStore) -> None:
    create(store, 0)
    create(store, 1)
    rot(store, generation_key(STEM, 1), 120)
    with pytest.raises(Corrupt, match="tags/x@00000001"):
        read_newest(store, STEM)


def test_a_record_under_the_number_of_another_is_damage(store: MemoryStore) -> None:
    create(store, 0)
    store.create(generation_key(STEM, 1), store.read(generation_key(STEM, 0), limit_bytes=10_000))
    with pytest.raises(Corrupt, match="belongs to another key"):
        read_newest(store, STEM)


def test_stems_with_a_common_start_are_distinguished(store: MemoryStore) -> None:
    stems = ("tags/a", "tags/a-b", "tags/a.b", "tags/ab", "tags/a%2fb", "tags/a_b")
    for stem in stems:
        create(store, 0, stem=stem)
        create(store, 1, stem=stem)
    store.create("tags/a@x", b"")
    store.create("tags/a", b"")
    assert list_generations(store, "tags/a") == [0, 1]
    assert sorted(iter_stems(store, "tags/")) == [(stem, [0, 1]) for stem in sorted(stems)]


def test_generations_beyond_one_page_are_all_seen(store: MemoryStore) -> None:
    for generation in range(1005):
        store.create(generation_key(STEM, generation), encode_record({"generation": generation, "value": generation}))
    assert value(store) == 1004
    assert dict(iter_stems(store, "tags/"))[STEM] == list(range(1005))


def test_an_outdated_listing_is_made_again(store: MemoryStore) -> None:
    create(store, 0)
    create(store, 1)
    store.delete(generation_key(STEM, 1))
    newest = read_listed(store, STEM, [0, 1])
    assert newest.generation == 0


class Vanishing(Watched):
    """Lists what cannot be read."""

    def read(self, key: str, *, limit_bytes: int) -> bytes:
        raise NotFound(f"no object {key}", name=key)


def test_records_that_keep_vanishing_are_an_error_and_no_endless_loop(store: MemoryStore) -> None:
    create(store, 0)
    with pytest.raises(Corrupt, match="keep disappearing"):
        read_newest(Vanishing(store), STEM)


def test_the_second_to_create_a_generation_loses(store: MemoryStore) -> None:
    create(store, 0)
    with pytest.raises(ObjectExists):
        create(store, 0)


def test_a_record_below_a_higher_generation_does_not_count(store: MemoryStore) -> None:
    create(store, 0)
    create(store, 2)
    with pytest.raises(ObjectExists, match="overtaken"):
        create(store, 1)
    assert value(store) == 2


def test_an_object_too_large_for_a_record_is_damage(store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.repo.names.generations.MAX_RECORD_BYTES", 100)
    store.create(generation_key(STEM, 0), bytes(5000))
    with pytest.raises(Corrupt, match="more than the limit"):
        read_record(store, generation_key(STEM, 0))


class Refusing(Watched):
    """Fails every create with a given fate; with `keeps`, the object is there all the same."""

    def __init__(self, inner: ObjectStore, fate: Fate, *, keeps: bool) -> None:
        super().__init__(inner)
        self._fate: Fate = fate
        self._keeps = keeps

    def create(self, key: str, data: Buffer, *, durable: bool = True) -> None:
        if self._keeps:
            super().create(key, data, durable=durable)
        raise StoreError("refused", key=key, fate=self._fate)


def test_a_change_that_certainly_did_not_happen_raises_what_the_store_raised(store: MemoryStore) -> None:
    with pytest.raises(StoreError, match="refused"):
        change(Refusing(store, "absent", keeps=False), 0)
    with pytest.raises(StoreFull):
        change(FaultyStore(store, fault=Fault.NO_SPACE), 0)
    assert list_generations(store, STEM) == []


def test_a_change_that_may_not_last_is_unknown(store: MemoryStore) -> None:
    with pytest.raises(CommitUnknown, match=r"'x' .* has the old or the new state") as caught:
        change(Refusing(store, "volatile", keeps=True), 0)
    assert caught.value.name == "x"


@pytest.mark.parametrize("fault", [Fault.ONCE, Fault.REPLY_LOST])
def test_a_change_whose_reply_was_lost_is_settled_by_a_look(store: MemoryStore, fault: Fault) -> None:
    change(FaultyStore(store, fault=fault, at=1), 0)
    assert list_generations(store, STEM) == [0]


def test_a_change_that_cannot_be_looked_at_is_unknown(store: MemoryStore) -> None:
    with pytest.raises(CommitUnknown):
        change(FaultyStore(store, fault=Fault.FOR_GOOD, at=1), 0)


def test_a_change_that_was_made_but_not_seen_to_count_is_unknown(store: MemoryStore) -> None:
    with pytest.raises(CommitUnknown, match="unknown whether it counts"):
        # Hold, create, list.
        change(FaultyStore(store, fault=Fault.ONCE, at=3), 0)
    assert list_generations(store, STEM) == [0]


def test_the_loser_of_a_race_gets_an_error_with_the_name(store: MemoryStore) -> None:
    change(store, 0)
    with pytest.raises(NameInUse, match="'x' was changed by another process at the same time") as caught:
        change(store, 0)
    assert caught.value.name == "x"


def test_who_is_overtaken_while_creating_loses(store: MemoryStore) -> None:
    change(store, 1)
    with pytest.raises(NameInUse):
        change(store, 0)


def test_a_replaced_record_is_read_as_it_is_now(store: MemoryStore) -> None:
    create(store, 0)
    replace_object(store, generation_key(STEM, 0), encode_record({"generation": 0, "value": "new"}))
    assert value(store) == "new"


@pytest.mark.parametrize("highest", [0, 1, 2])
@pytest.mark.parametrize("likely", [0, 1, 7])
def test_a_guess_at_the_newest_generation_changes_no_answer(highest: int, likely: int) -> None:
    store = WaitingStore()
    for generation in range(highest + 1):
        create(store, generation)
    assert read_newest(store, STEM, likely=(likely,)) == read_newest(store, STEM)


def test_a_right_guess_reads_the_record_while_the_generations_are_listed() -> None:
    store = WaitingStore()
    create(store, 0)
    with count_rounds(MemoryStore, "_find") as reads, count_rounds(MemoryStore, "list") as lists:
        assert read_newest(store, STEM, likely=(0,)).generation == 0
    assert (len(reads.requests), len(lists.requests)) == (1, 1)


def test_a_guess_does_not_hide_a_damaged_or_torn_record() -> None:
    store = WaitingStore()
    create(store, 0)
    create(store, 1)
    replace_object(store, generation_key(STEM, 1), b"torn")
    assert read_newest(store, STEM, likely=(1,)).generation == 0
    rot(store, generation_key(STEM, 0), 150)
    with pytest.raises(Corrupt):
        read_newest(store, STEM, likely=(0,))
    with pytest.raises(Corrupt):
        read_newest(store, STEM, likely=(1,))


@pytest.mark.parametrize("kind", [MemoryStore, WaitingStore])
def test_records_are_read_in_order_with_their_errors(kind: type[MemoryStore]) -> None:
    store = kind()
    for generation in range(4):
        create(store, generation)
    replace_object(store, generation_key(STEM, 1), b"torn")
    rot(store, generation_key(STEM, 2), 150)

    found = list(iter_records(store, [generation_key(STEM, generation) for generation in range(5)]))

    assert [record.fields.values["value"] if record.fields else None for record in found] == [0, None, None, 3, None]
    assert [type(record.error) for record in found] == [type(None), type(None), Corrupt, type(None), NotFound]
    with pytest.raises(Corrupt):
        found[2].take_fields()
