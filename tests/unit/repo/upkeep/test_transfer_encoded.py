"""Copies, repacks, repairs and collections move encoded chunks as they are stored, and check them when they read."""

from __future__ import annotations

import pytest

from holdfast.errors import Corrupt
from holdfast.objects.memory import MemoryStore
from holdfast.repo.format.chunk import BLOSC2, RAW
from holdfast.repo.format.layout import PACKS
from holdfast.repo.handle.config import read_config
from holdfast.repo.handle.repository import Repository
from holdfast.repo.names.roots import read_live
from holdfast.repo.names.snapshots import delete_snapshot
from holdfast.repo.upkeep.check import Checker
from holdfast.repo.upkeep.collect import Rules, collect
from holdfast.repo.upkeep.repair import apply_repair, plan_repair, rebuild_index
from holdfast.repo.upkeep.transfer import apply_repack, copy_snapshot, plan_repack
from holdfast.repo.upkeep.usage import read_usage
from tests.kit.encoded import CONFIGS, codecs, encoded_repo, halves, save_encoded
from tests.kit.saving import (
    MIB,
    codes,
    flip,
    keys,
    load_bytes,
    new_repo,
    noise,
    only_pack,
    pack_of,
    read_entries,
    replace_object,
    rot,
    save_bytes,
    snapshot_of,
)

STATE = {"weights": halves(2 * MIB + 5000), "noise": noise(MIB, 1)}


@pytest.fixture
def encoded(store: MemoryStore) -> Repository:
    return encoded_repo(store, "a", STATE)


def stored(repo: Repository, name: str, entry: str) -> list[bytes]:
    """Return the stored bytes of each chunk."""
    places = [chunk.location for chunk in read_entries(repo, name)[entry].chunks]
    found = []
    for at in places:
        assert at is not None
        data = memoryview(bytearray(at.stored_bytes))
        repo.store.read_into(PACKS + at.pack_id, at.offset, data)
        found.append(bytes(data))
    return found


def check(repo: Repository) -> dict[str, int]:
    return dict(codes(list(Checker(repo.store, read=True).iter_findings())))


def test_a_check_reads_every_encoded_chunk(encoded: Repository) -> None:
    assert check(encoded) == {}


@pytest.mark.parametrize("offset", [0, 33, 4000])
def test_a_check_finds_a_damaged_encoded_chunk(encoded: Repository, offset: int) -> None:
    rot(encoded.store, only_pack(encoded.store), pack_of(encoded, "a", "weights").offset + offset)
    assert check(encoded) == {"chunk-damaged": 1, "chunk-lost": 1}


def test_a_check_finds_an_intact_copy_in_another_codec(encoded: Repository, store: MemoryStore) -> None:
    pack = only_pack(store)
    data = store.read(pack, limit_bytes=1 << 30)
    store.delete(pack)
    save_encoded(new_repo(store), "b", STATE, "small")
    store.create(pack, flip(data, pack_of(encoded, "b", "weights").offset + 4000))
    assert check(encoded)["chunk-hit"] == 1


def test_a_copy_has_the_same_stored_bytes(encoded: Repository) -> None:
    target = new_repo()
    result = copy_snapshot(encoded, snapshot_of(encoded, "a"), target)

    assert load_bytes(target, "a") == STATE
    assert stored(target, "a", "weights") == stored(encoded, "a", "weights")
    assert result.stored_bytes < result.new_bytes == sum(map(len, STATE.values()))
    assert keys(target.store, "config/") == CONFIGS
    assert check(target) == {}


def test_a_copy_of_raw_chunks_declares_nothing(repo: Repository) -> None:
    save_bytes(repo, "a", STATE)
    target = new_repo()
    copy_snapshot(repo, snapshot_of(repo, "a"), target)
    assert keys(target.store, "config/") == CONFIGS[:2]


@pytest.mark.parametrize("compression", [None, "small"])
def test_a_copy_reuses_what_the_target_has_in_another_codec(encoded: Repository, compression: str | None) -> None:
    target = new_repo()
    save_encoded(target, "mine", STATE, compression)  # type: ignore[arg-type]  # one of the choices
    before = keys(target.store, PACKS)
    assert copy_snapshot(encoded, snapshot_of(encoded, "a"), target).new_bytes == 0
    assert (load_bytes(target, "a"), keys(target.store, PACKS)) == (STATE, before)


def test_a_damaged_chunk_is_not_copied(encoded: Repository) -> None:
    rot(encoded.store, only_pack(encoded.store), pack_of(encoded, "a", "weights").offset + 4000)
    target = new_repo()
    with pytest.raises(Corrupt):
        copy_snapshot(encoded, snapshot_of(encoded, "a"), target)
    assert keys(target.store, "snapshots/") == []


def test_a_repack_moves_the_stored_bytes(encoded: Repository, store: MemoryStore) -> None:
    save_encoded(encoded, "b", {"weights": STATE["weights"][: 2 * MIB]})
    wanted = stored(encoded, "b", "weights")
    pack = only_pack(store)
    delete_snapshot(store, "a")

    plan = plan_repack(encoded, read_live(store).current, dead_share=0.1)
    apply_repack(encoded, plan)
    collect(store, Rules(min_age_s=0.0))

    assert keys(store, PACKS) not in ([], [pack])
    assert stored(new_repo(store), "b", "weights") == wanted
    assert codecs(new_repo(store), "b", "weights") == [BLOSC2, BLOSC2]
    assert load_bytes(new_repo(store), "b") == {"weights": STATE["weights"][: 2 * MIB]}
    assert check(encoded) == {}


def test_a_collection_keeps_what_is_in_use(encoded: Repository, store: MemoryStore) -> None:
    save_encoded(encoded, "b", {"other": halves(MIB, 5)})
    delete_snapshot(store, "b")
    collect(store, Rules(min_age_s=0.0))
    assert len(keys(store, PACKS)) == 1
    assert load_bytes(new_repo(store), "a") == STATE


def test_a_repair_restores_an_encoded_chunk_from_another_store(encoded: Repository) -> None:
    donor = new_repo()
    copy_snapshot(encoded, snapshot_of(encoded, "a"), donor)
    rot(encoded.store, only_pack(encoded.store), pack_of(encoded, "a", "weights").offset + 4000)

    apply_repair(encoded, plan_repair(encoded, source=donor), source=donor)

    assert load_bytes(new_repo(encoded.store), "a") == STATE
    assert stored(new_repo(encoded.store), "a", "weights") == stored(donor, "a", "weights")


def test_the_index_is_rebuilt_with_codecs(encoded: Repository, store: MemoryStore) -> None:
    for key in keys(store, "index/"):
        store.delete(key)
    assert rebuild_index(encoded) == 1
    for key in keys(store, "snapshots/"):
        store.delete(key)
    assert save_encoded(new_repo(store), "b", STATE, "small").new_bytes == 0


def test_usage_states_raw_and_stored_bytes(encoded: Repository, store: MemoryStore) -> None:
    usage = read_usage(store, read_live(store).current)
    (own,) = usage.snapshots
    assert usage.saved_bytes == own.raw_bytes - own.stored_bytes > 0.15 * len(STATE["weights"])
    assert own.raw_bytes - sum(map(len, STATE.values())) == snapshot_of(encoded, "a").manifest.size_bytes


def test_a_footer_with_an_encoded_chunk_that_is_not_smaller_is_refused(encoded: Repository, store: MemoryStore) -> None:
    assert codecs(encoded, "a", "noise") == [RAW]
    config = read_config(store)
    assert config is not None
    assert config.has_codec
    replace_object(store, only_pack(store), store.read(only_pack(store), limit_bytes=1 << 30)[:-1])
    assert "pack-damaged" in check(encoded)
