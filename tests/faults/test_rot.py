"""Stored bytes go bad: nothing new is built on them, check finds them, and no reader is ever given a wrong byte."""

from __future__ import annotations

from itertools import combinations
from typing import Final

import pytest

from holdfast.errors import HoldfastError
from holdfast.objects.memory import MemoryStore
from holdfast.repo.format.layout import (
    BAD,
    INDEX,
    LEASES,
    MANIFESTS,
    MARKS,
    PACKS,
    SNAPSHOTS,
    TAGS,
    new_file_id,
    new_lease_id,
)
from holdfast.repo.format.record import encode_record
from holdfast.repo.names.snapshots import CommittedSnapshot, iter_names, read_snapshot, read_tag, set_tag
from holdfast.testing.faults import Crashed, Fault, FaultyStore
from tests.faults.damage import DAMAGES, DELETED, EMPTIED, HALVED, SCRAMBLED, ZEROED, Damage, flip, replace, swap
from tests.faults.scenario import (
    SAVE_AND_MERGE,
    Content,
    check_store,
    random_bytes,
    read_content,
    read_state,
    save_content,
)

SHARED: Final[Content] = {"one": random_bytes("one", 900), "two": random_bytes("two", 1_500), "inline": b"shared"}
OLD: Final[Content] = {"one": random_bytes("old", 800), "inline": b"old"}
NEW: Final[Content] = {**SHARED, "own": random_bytes("new", 700), "inline": b"new"}
BESIDE: Final[Content] = {**SHARED, "own": random_bytes("beside", 1_100)}


def keys(store: MemoryStore, prefix: str) -> list[str]:
    return [info.key for info in store.list(prefix)]


def load(store: MemoryStore, name: str) -> dict[str, bytes]:
    return read_content(store, read_snapshot(store, name))


def damage_all(store: MemoryStore, prefix: str, damage: Damage) -> None:
    for key in keys(store, prefix):
        damage.act(store, key)


# A save beside shares the base manifest, a save elsewhere finds chunks by the index only.
ELSEWHERE: Final = pytest.mark.parametrize("name", ["run/b", "elsewhere"], ids=["by the base", "by the index"])


@ELSEWHERE
@pytest.mark.parametrize("damage", DAMAGES, ids=str)
def test_a_save_onto_rotten_packs_loads_and_heals_the_one_before(damage: Damage, name: str) -> None:
    store = MemoryStore()
    save_content(store, "run/a", SHARED)
    damage_all(store, PACKS, damage)
    save_content(store, name, SHARED)
    assert load(store, name) == SHARED
    assert load(store, "run/a") == SHARED


@ELSEWHERE
def test_a_save_onto_packs_that_changed_places_loads_and_heals_both(name: str) -> None:
    store = MemoryStore()
    save_content(store, "run/a", SHARED)
    save_content(store, "run/other", OLD)
    swap(store, *keys(store, PACKS))
    save_content(store, name, {**SHARED, "old": OLD["one"]})
    assert load(store, name) == {**SHARED, "old": OLD["one"]}
    assert load(store, "run/a") == SHARED
    assert load(store, "run/other") == OLD


@pytest.mark.parametrize("damage", DAMAGES, ids=str)
def test_an_overwrite_with_what_has_rotted_makes_it_whole_again(damage: Damage) -> None:
    store = MemoryStore()
    save_content(store, "a", SHARED)
    damage_all(store, PACKS, damage)
    save_content(store, "a", SHARED, overwrite=True)
    assert load(store, "a") == SHARED


@pytest.mark.parametrize("prefix", [PACKS, MANIFESTS])
@pytest.mark.parametrize("damage", [HALVED, ZEROED, SCRAMBLED, DELETED], ids=str)
def test_a_repeated_save_of_what_has_rotted_does_not_return_unless_it_loads(damage: Damage, prefix: str) -> None:
    store = MemoryStore()
    save_content(store, "a", SHARED)
    damage_all(store, prefix, damage)
    try:
        save_content(store, "a", SHARED)
    except HoldfastError:
        return
    assert load(store, "a") == SHARED


@pytest.mark.parametrize("prefix", [INDEX, MANIFESTS, BAD, MARKS])
@pytest.mark.parametrize("damage", DAMAGES, ids=str)
def test_damage_to_what_a_save_only_looks_at_does_not_stop_it(damage: Damage, prefix: str) -> None:
    store = full_store()
    damage_all(store, prefix, damage)
    for name in ("run/c", "elsewhere"):
        save_content(store, name, NEW)
        assert load(store, name) == NEW


def test_no_flipped_bit_of_the_index_stops_a_save_or_keeps_a_reader_from_another_copy() -> None:
    base = MemoryStore()
    save_content(base, "a", SHARED)
    first_pack = keys(base, PACKS)[0]
    index_key = keys(base, INDEX)[0]
    data = base.contents()[index_key]
    for position in (*range(80), *range(80, len(data), 3)):
        store = base.clone()
        replace(store, index_key, flip(data, position))
        SCRAMBLED.act(store, first_pack)
        save_content(store, "b", SHARED)
        assert load(store, "b") == SHARED, position
        assert load(store, "a") == SHARED, position


NEWER: Final = Damage("of a later version", lambda store, key: replace(store, key, flip_major(store.contents()[key])))


def flip_major(data: bytes) -> bytes:
    return data[:8] + b"\x07" + data[9:]


@pytest.mark.parametrize("damage", [*DAMAGES, NEWER], ids=str)
def test_damaged_fragments_of_the_index_do_not_stop_the_save_that_merges_them(damage: Damage) -> None:
    store = MemoryStore()
    SAVE_AND_MERGE.prepare(store)
    damage_all(store, INDEX, damage)
    SAVE_AND_MERGE.act(store)
    assert read_state(store).names.keys() == {"run/step-1", "run/step-2"}


def full_store() -> MemoryStore:
    """Return a small store with an object of every kind, one name overwritten and one deleted."""
    store = MemoryStore()
    save_content(store, "run/a", OLD)
    save_content(store, "run/a", NEW, overwrite=True)
    save_content(store, "run/b", BESIDE)
    set_tag(store, "t", read_snapshot(store, "run/a"))
    set_tag(store, "u", read_snapshot(store, "run/b"))
    # A save that died leaves its lease and an unused pack.
    with pytest.raises(Crashed):
        save_content(FaultyStore(store, fault=Fault.CRASH, at=30), "run/z", {"z": random_bytes("z", 600)})
    assert keys(store, LEASES)
    gone = new_file_id(new_lease_id())
    store.create(MARKS + "collector@00000000", encode_record({"kind": "mark", "keys": [PACKS + gone], "generation": 0}))
    store.create(BAD + gone, encode_record({"kind": "bad", "generation": 0}))
    return store


EXPECTED: Final = {"run/a": NEW, "run/b": BESIDE}


def find_wrong_bytes(store: MemoryStore, *, may_roll_back: bool = False) -> list[str]:
    """Return what a reader is given that is not what was saved; being refused is right."""
    wrong = []
    for name, content in EXPECTED.items():
        try:
            found = load(store, name)
        except HoldfastError:
            continue
        if found != content and not (may_roll_back and (name, found) == ("run/a", OLD)):
            wrong.append(f"{name} shows other bytes")
    for tag, name in (("t", "run/a"), ("u", "run/b")):
        try:
            found_tag = read_tag(store, tag)
        except HoldfastError:
            continue
        if found_tag and found_tag.snapshot_name != name:
            wrong.append(f"tag {tag} points to {found_tag.snapshot_name}")
    try:
        listed = [found.name for found in iter_names(store) if isinstance(found, CommittedSnapshot)]
    except HoldfastError:
        return wrong
    return wrong + [f"{name} is listed" for name in listed if name not in EXPECTED]


def kinds() -> list[str]:
    return sorted({key.partition("/")[0] + "/" for key in full_store().contents()})


def test_the_small_store_holds_every_kind_of_object() -> None:
    wanted = ["bad/", "config/", "index/", "leases/", "manifests/", "marks/", "packs/", "snapshots/", "tags/"]
    assert kinds() == wanted
    assert {finding.severity for finding in check_store(full_store())} == {"note"}
    assert find_wrong_bytes(full_store()) == []


def verify_flips(prefix: str, *, per_file: int) -> None:
    """Flip a bit in so many bytes of each file below `prefix`."""
    base = full_store()
    for key in keys(base, prefix):
        data = base.contents()[key]
        for position in range(0, len(data), max(1, len(data) // per_file)):
            store = base.clone()
            replace(store, key, flip(data, position))
            severities = {finding.severity for finding in check_store(store)}
            assert severities & {"error", "warning"}, (key, position)
            assert find_wrong_bytes(store) == [], (key, position)


@pytest.mark.parametrize("prefix", kinds())
def test_a_flipped_bit_is_found_and_never_read(prefix: str) -> None:
    verify_flips(prefix, per_file=13)


@pytest.mark.slow
@pytest.mark.parametrize("prefix", kinds())
def test_a_flipped_bit_in_any_byte_is_found_and_never_read(prefix: str) -> None:
    verify_flips(prefix, per_file=10_000)


# A record that was cut short passes for one that was never finished: by design it never counted, so an older
# one is visible again. Check reports it, and no reader gets a mixture.
TORN: Final = (SNAPSHOTS, TAGS, LEASES, MARKS, BAD)


@pytest.mark.parametrize("prefix", kinds())
def test_a_file_cut_short_is_found_and_never_read(prefix: str) -> None:
    base = full_store()
    for key in keys(base, prefix):
        data = base.contents()[key]
        for size_bytes in {0, 1, 63, 111, 112, len(data) // 2, len(data) - 33, len(data) - 1} - {len(data)}:
            store = base.clone()
            replace(store, key, data[: max(size_bytes, 0)])
            findings = [finding for finding in check_store(store) if finding.severity != "note" or finding.key == key]
            assert findings, (key, size_bytes)
            assert prefix in TORN or {finding.severity for finding in findings} != {"note"}, (key, size_bytes)
            assert find_wrong_bytes(store, may_roll_back=prefix == SNAPSHOTS) == [], (key, size_bytes)


@pytest.mark.parametrize("prefix", kinds())
def test_a_file_that_is_gone_is_found_if_it_was_needed_and_never_read_around(prefix: str) -> None:
    base = full_store()
    # Of the config there are two, and either will do.
    needed = prefix in ("packs/", "manifests/")
    unused = {finding.key for finding in check_store(base)}
    for key in keys(base, prefix):
        store = base.clone()
        DELETED.act(store, key)
        if needed and key not in unused:
            assert "error" in {finding.severity for finding in check_store(store)}, key
        assert find_wrong_bytes(store, may_roll_back=prefix == SNAPSHOTS) == [], key


@pytest.mark.parametrize("prefix", kinds())
def test_files_that_changed_places_are_found_and_never_read(prefix: str) -> None:
    base = full_store()
    unused = {finding.key for finding in check_store(base)}
    for one, other in combinations(keys(base, prefix), 2):
        if {one, other} <= unused:
            continue  # nothing leads to either, so neither can be in the other's place
        store = base.clone()
        swap(store, one, other)
        assert {finding.severity for finding in check_store(store)} & {"error", "warning"}, (one, other)
        assert find_wrong_bytes(store) == [], (one, other)


@pytest.mark.parametrize("damage", [HALVED, EMPTIED, ZEROED, SCRAMBLED], ids=str)
def test_a_store_whose_config_is_damaged_is_refused_and_reported(damage: Damage) -> None:
    store = full_store()
    damage_all(store, "config/", damage)
    before = store.contents()
    with pytest.raises(HoldfastError):
        save_content(store, "run/c", NEW)
    assert store.contents() == before
    assert "error" in {finding.severity for finding in check_store(store)}
