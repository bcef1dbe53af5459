"""Saves store chunks as deltas on the snapshot before, and loads give back every byte of them."""

from __future__ import annotations

import pytest

from holdfast.errors import NewerFormat
from holdfast.objects.memory import MemoryStore
from holdfast.repo.format.chunk import BLOSC2, DELTA, RAW
from holdfast.repo.format.layout import PACKS, pack_key
from holdfast.repo.format.record import encode_record
from holdfast.repo.format.source import BytesSource
from holdfast.repo.handle import config as config_module
from holdfast.repo.handle.compression import DeltaChoice, find_delta_run, verify_delta
from holdfast.repo.handle.config import read_config
from holdfast.repo.handle.repository import open_repository
from holdfast.repo.names.snapshots import delete_snapshot, read_snapshot
from holdfast.repo.read.reader import SnapshotReader, Verify
from holdfast.repo.write.encoding import DeltaEncoder
from holdfast.repo.write.writer import Request, WriteOptions, save
from tests.kit.deltas import DELTA_CONFIGS, SIZE, bases, delta_repo, save_step, trained
from tests.kit.encoded import codecs, halves
from tests.kit.saving import (
    MIB,
    Meanwhile,
    keys,
    load_bytes,
    new_repo,
    noise,
    pack_of,
    read_entries,
    replace_object,
    rot,
)


@pytest.mark.parametrize("verify", ["full", "fast", False])
def test_deltas_are_much_smaller_and_give_back_every_byte(verify: Verify) -> None:
    repo = new_repo()
    whole = save_step(repo, "run/0", {"w": trained(0)})
    change = save_step(repo, "run/1", {"w": trained(1)})
    assert change.new_bytes == whole.new_bytes
    assert change.stored_bytes < 0.2 * whole.stored_bytes
    assert codecs(repo, "run/1", "w") == [DELTA, DELTA, DELTA]
    with SnapshotReader(repo, read_snapshot(repo.store, "run/1"), verify=verify) as reader:
        assert bytes(reader.read_entry("w")) == trained(1)
        part = bytearray(1000)
        reader.read_into(reader.find_entry("w"), MIB - 500, memoryview(part))
        assert bytes(part) == trained(1)[MIB - 500 : MIB + 500]


def test_a_base_is_never_a_delta() -> None:
    repo = delta_repo(steps=4)
    first = [chunk.digest for chunk in read_entries(repo, "run/0")["w"].chunks]
    for step in (1, 2, 3):
        found = bases(repo, f"run/{step}")
        assert [base.digest for base in found if base] == first
        assert all(base.location.codec == BLOSC2 for base in found if base)
        assert load_bytes(repo, f"run/{step}")["w"] == trained(step)


def test_one_save_in_n_is_whole() -> None:
    repo = new_repo()
    kinds = []
    for step in range(7):
        save_step(repo, f"run/{step}", {"w": trained(step)}, delta=3)
        kinds.append(codecs(repo, f"run/{step}", "w")[0])
    assert kinds == [BLOSC2, DELTA, DELTA, BLOSC2, DELTA, DELTA, BLOSC2]


def test_a_new_process_continues_the_run() -> None:
    store = MemoryStore()
    for step in range(4):
        save_step(open_repository(store, create=True), f"run/{step}", {"w": trained(step)}, delta=3)
    repo = open_repository(store)
    assert [codecs(repo, f"run/{step}", "w")[0] for step in range(4)] == [BLOSC2, DELTA, DELTA, BLOSC2]


@pytest.mark.parametrize(("choice", "run"), [("auto", 9), ("off", 0), (1, 0), (5, 4)])
def test_a_choice_is_a_number_of_saves_in_a_row(choice: DeltaChoice, run: int) -> None:
    verify_delta(choice)
    assert find_delta_run(choice, "small") == run
    assert find_delta_run(choice, None) == (0 if choice == "auto" else run)


@pytest.mark.parametrize("choice", [0, -1, True, "on", None, 2.5])
def test_another_choice_is_refused(choice: object) -> None:
    with pytest.raises(ValueError, match="one save in N is whole"):
        verify_delta(choice)  # type: ignore[arg-type]


def test_a_save_that_is_refused_for_its_choice_writes_nothing() -> None:
    repo = new_repo()
    with pytest.raises(ValueError, match="delta must be"):
        save(repo, Request("a", [BytesSource("w", b"1")], options=WriteOptions(delta=0)))
    assert keys(repo.store, "") == []


def test_without_deltas_nothing_is_a_delta_and_nothing_declares_it() -> None:
    repo = new_repo()
    for step, choice in enumerate(("off", "auto", 1)):
        save_step(repo, f"run/{step}", {"w": trained(step)}, delta=choice, compression=None)  # type: ignore[arg-type]
    assert {codec for step in range(3) for codec in codecs(repo, f"run/{step}", "w")} == {RAW}
    config = read_config(repo.store)
    assert config is not None
    assert not config.has_deltas


def test_deltas_of_raw_chunks() -> None:
    repo = new_repo()
    for step in range(2):
        save_step(repo, f"run/{step}", {"w": trained(step)}, compression=None, delta=2)
    assert codecs(repo, "run/0", "w") == [RAW, RAW, RAW]
    assert codecs(repo, "run/1", "w") == [DELTA, DELTA, DELTA]
    assert load_bytes(repo, "run/1")["w"] == trained(1)


def test_a_chunk_whose_delta_is_not_much_smaller_is_stored_whole() -> None:
    repo = new_repo()
    save_step(repo, "run/0", {"w": trained(0), "m": halves(SIZE, 1)})
    save_step(repo, "run/1", {"w": trained(1), "m": halves(SIZE, 2)})
    assert codecs(repo, "run/1", "w") == [DELTA, DELTA, DELTA]
    assert codecs(repo, "run/1", "m") == [BLOSC2, BLOSC2, BLOSC2]


def test_what_was_not_worth_it_is_not_tried_again_until_a_whole_save(monkeypatch: pytest.MonkeyPatch) -> None:
    repo = new_repo()
    tried: list[str] = []
    encode = DeltaEncoder._read

    def note(self: DeltaEncoder, *args: object) -> object:
        tried.append("read")
        return encode(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(DeltaEncoder, "_read", note)
    counts = []
    for step in range(4):
        tried.clear()
        save_step(repo, f"run/{step}", {"m": halves(MIB, step), "w": trained(step, MIB)}, delta=3)
        counts.append(len(tried))
    assert counts == [0, 2, 1, 0]


def test_chunks_that_have_not_changed_are_shared_as_they_are() -> None:
    repo = delta_repo(steps=2)
    again = save_step(repo, "run/2", {"w": trained(1)})
    assert again.new_bytes == 0
    assert bases(repo, "run/2") == bases(repo, "run/1")
    save_step(repo, "run/3", {"w": trained(0)})
    assert codecs(repo, "run/3", "w") == [BLOSC2, BLOSC2, BLOSC2]


def test_a_delta_is_found_by_the_index_with_its_base() -> None:
    store = MemoryStore()
    delta_repo(store)
    repo = open_repository(store)
    found = save_step(repo, "other/name", {"w": trained(2)}, delta="off")
    assert found.new_bytes == 0
    assert bases(repo, "other/name") == bases(repo, "run/2")
    delete_snapshot(repo.store, "run/0")
    assert load_bytes(repo, "other/name")["w"] == trained(2)


def test_a_delta_whose_base_is_gone_is_not_reused() -> None:
    store = MemoryStore()
    repo = delta_repo(store, steps=2)
    store.delete(PACKS + pack_of(repo, "run/0", "w").pack_id)
    again = save_step(open_repository(store), "other/name", {"w": trained(1)}, delta="off")
    assert again.reused_bytes == 0
    assert load_bytes(open_repository(store), "other/name")["w"] == trained(1)


def test_a_damaged_base_is_not_used() -> None:
    store = MemoryStore()
    repo = delta_repo(store, steps=1)
    at = pack_of(repo, "run/0", "w")
    rot(store, PACKS + at.pack_id, at.offset + 100)
    save_step(open_repository(store), "run/1", {"w": trained(1)})
    assert codecs(repo, "run/1", "w") == [BLOSC2, DELTA, DELTA]
    assert load_bytes(repo, "run/1")["w"] == trained(1)


def test_another_length_or_another_place_has_no_base() -> None:
    repo = delta_repo(steps=1)
    save_step(repo, "run/1", {"w": trained(1)[:MIB] + trained(1)[: MIB // 2], "v": trained(2)})
    assert codecs(repo, "run/1", "w") == [DELTA, BLOSC2]
    assert DELTA not in codecs(repo, "run/1", "v")


def test_an_overwritten_name_is_a_base() -> None:
    repo = delta_repo(steps=1)
    save_step(repo, "run/0", {"w": trained(1)}, overwrite=True)
    assert codecs(repo, "run/0", "w") == [DELTA, DELTA, DELTA]
    assert load_bytes(repo, "run/0")["w"] == trained(1)


def test_a_store_declares_deltas_before_the_first_one(monkeypatch: pytest.MonkeyPatch) -> None:
    repo = delta_repo(steps=1)
    config = read_config(repo.store)
    assert config is not None
    assert config.has_codec
    assert not config.has_deltas
    save_step(repo, "run/1", {"w": trained(1)})
    assert len(keys(repo.store, "config")) == DELTA_CONFIGS
    monkeypatch.setattr(config_module, "KNOWN_FEATURES", frozenset({config_module.CODEC_FEATURE}))
    with pytest.raises(NewerFormat, match="'delta-xor' to read, which this Holdfast does not know: upgrade"):
        read_config(repo.store)


def test_only_the_base_that_is_damaged_makes_a_loss() -> None:
    store = MemoryStore()
    repo = delta_repo(store, steps=2)
    at = pack_of(repo, "run/0", "w")
    data = store.read(PACKS + at.pack_id, limit_bytes=1 << 30)
    rot(store, PACKS + at.pack_id, at.offset + 100)
    with pytest.raises(Exception, match=r"entry 'w', chunk .* is a delta: its base .* is damaged in packs/") as lost:
        load_bytes(repo, "run/1")
    assert at.pack_id in str(lost.value)
    save_step(new_repo(store), "other", {"w": trained(0)}, delta="off", compression=None)
    assert load_bytes(repo, "run/1")["w"] == trained(1)
    replace_object(store, PACKS + at.pack_id, data)
    assert load_bytes(repo, "run/1")["w"] == trained(1)


def test_a_lost_base_does_not_matter_if_the_chunk_is_stored_whole_elsewhere() -> None:
    store = MemoryStore()
    repo = delta_repo(store, steps=2)
    store.delete(PACKS + pack_of(repo, "run/0", "w").pack_id)
    save_step(open_repository(store), "whole", {"w": trained(1)}, delta="off")
    assert load_bytes(repo, "run/1")["w"] == trained(1)


def test_incompressible_entries_stay_raw() -> None:
    repo = new_repo()
    for step in range(2):
        save_step(repo, f"run/{step}", {"n": noise(MIB, step), "w": trained(step, MIB)})
    assert (codecs(repo, "run/1", "n"), codecs(repo, "run/1", "w")) == ([RAW], [DELTA])


def mark(store: MemoryStore, pack_id: str) -> None:
    store.create("marks/0", encode_record({"kind": "mark", "keys": [pack_key(pack_id)]}))


def test_a_base_that_is_marked_before_a_save_is_not_used() -> None:
    store = MemoryStore()
    repo = delta_repo(store, steps=1)
    mark(store, pack_of(repo, "run/0", "w").pack_id)
    save_step(repo, "run/1", {"w": trained(1)})
    assert codecs(repo, "run/1", "w") == [BLOSC2, BLOSC2, BLOSC2]


@pytest.mark.parametrize("step", [2, 1])
def test_chunks_whose_base_is_marked_during_a_save_are_written_whole(step: int) -> None:
    # Step 2 is a new delta; step 1 reuses those that are stored.
    store = MemoryStore()
    repo = delta_repo(store, steps=2)
    base, delta = pack_of(repo, "run/0", "w").pack_id, pack_of(repo, "run/1", "w").pack_id
    watched = open_repository(Meanwhile(store, "manifests/", lambda: mark(store, base)))
    save_step(watched, "run/2", {"w": trained(step)})
    assert codecs(repo, "run/2", "w") == [BLOSC2, BLOSC2, BLOSC2]
    assert {pack_of(repo, "run/2", "w").pack_id} & {base, delta} == set()
    store.delete(pack_key(base))
    assert load_bytes(repo, "run/2")["w"] == trained(step)
