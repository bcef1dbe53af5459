"""Copies that a save reuses without reading: those that its handle knows, as long as their packs are unchanged."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Final, TypeVar

import pytest
import torch

import holdfast
from holdfast.errors import DigestMismatch, StoreError
from holdfast.objects.local.local_store import LocalStore
from holdfast.objects.memory import MemoryStore
from holdfast.objects.protocol import ObjectInfo
from holdfast.repo.format.chunk import Location
from holdfast.repo.format.source import BytesSource
from holdfast.repo.handle.repository import SAMPLE_SHARE, TRUST_S, Repository, VerifiedChunks, open_repository
from holdfast.repo.read.reader import Verify, open_snapshot
from holdfast.repo.write.existing import ExistingChunks
from holdfast.repo.write.writer import Request, WriteOptions, save
from tests.kit.deltas import save_step, trained
from tests.kit.saving import (
    flip,
    load_bytes,
    new_repo,
    noise,
    only_pack,
    pack_of,
    replace_object,
    save_bytes,
    snapshot_of,
)
from tests.kit.thinning import thin

MIB: Final = 1 << 20


def place(pack: str = "a", offset: int = 0) -> Location:
    return Location(pack, offset, 10, 0, b"")


def list_missed(proven: VerifiedChunks, location: Location, *, version: str = "v") -> list[int]:
    """Return which of as many saves as a sample takes have to read a copy."""
    return [turn for turn in range(SAMPLE_SHARE) if not proven.covers(location, version=version, turn=turn)]


def is_known(proven: VerifiedChunks, location: Location, *, version: str = "v") -> bool:
    """Tell whether a copy is read for the sample only; otherwise every save has to read it."""
    missed = list_missed(proven, location, version=version)
    assert len(missed) in (1, SAMPLE_SHARE)
    return len(missed) == 1


def test_what_was_written_or_read_lately_is_proven() -> None:
    now = [0.0]
    proven = VerifiedChunks(clock=lambda: now[0])
    assert not is_known(proven, place())
    proven.add(place("a", 5), version="v")
    proven.add_pack("b", version="v")
    assert is_known(proven, place("a", 5))
    assert not is_known(proven, place("a", 6))
    assert is_known(proven, place("b", 77))
    now[0] = TRUST_S - 1
    assert is_known(proven, place("b", 77))
    proven.add(place("b", 77), version="v")
    now[0] = TRUST_S
    assert not is_known(proven, place("a", 5))
    assert not is_known(proven, place("b", 1))
    assert is_known(proven, place("b", 77))


def test_nothing_of_a_pack_with_another_version_is_proven() -> None:
    proven = VerifiedChunks()
    proven.add_pack("a", version="v")
    assert not is_known(proven, place("a", 5), version="w")
    proven.add(place("a", 5), version="w")
    assert is_known(proven, place("a", 5), version="w")
    assert not is_known(proven, place("a", 5), version="v")
    assert not is_known(proven, place("a", 6), version="w")


def test_every_copy_is_read_by_one_in_so_many_saves_and_not_all_by_the_same() -> None:
    proven = VerifiedChunks()
    proven.add_pack("a", version="v")
    samples = [tuple(list_missed(proven, place("a", offset))) for offset in range(0, 100_000, 1000)]
    assert {len(sample) for sample in samples} == {1}
    assert len(set(samples)) > 10


def test_when_too_many_places_are_remembered_all_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.repo.handle.repository._LIMIT", 2)
    proven = VerifiedChunks()
    for offset in range(3):
        proven.add(place("a", offset), version="v")
    assert [is_known(proven, place("a", offset)) for offset in range(3)] == [False, False, True]


class Reading(MemoryStore):
    """Counts reads of packs."""

    reads = 0

    def read_into(self, key: str, start: int, buffer: memoryview) -> None:
        self.reads += key.startswith("packs/")
        super().read_into(key, start, buffer)

    def decay(self, key: str, position: int) -> None:
        """Flip one bit as a failing disk does: the version does not change."""
        found = self._objects[key]
        self._objects[key] = replace(found, data=flip(found.data, position))


@pytest.fixture
def unsampled(monkeypatch: pytest.MonkeyPatch) -> None:
    """No save reads a sample."""
    monkeypatch.setattr("holdfast.repo.handle.repository.SAMPLE_SHARE", 1 << 62)


@pytest.mark.usefixtures("unsampled")
def test_a_handle_reads_what_others_wrote_once_and_what_it_wrote_never() -> None:
    store, data = Reading(), noise(3 * MIB)
    first = new_repo(store)
    save_bytes(first, "run/1", {"x": data})
    save_bytes(first, "run/2", {"x": data})
    assert store.reads == 0
    second = new_repo(store)
    save_bytes(second, "run/3", {"x": data})
    assert store.reads == 3
    save_bytes(second, "run/4", {"x": data})
    assert store.reads == 3


Save = Callable[[Repository, str], object]
Store = TypeVar("Store", bound=Reading)
STORED: Final[dict[str, Save]] = {
    "raw": lambda repo, name: save_bytes(repo, name, {"x": noise(3 * MIB), "small": noise(20_000, 1)}),
    "encoded": lambda repo, name: save(
        repo, Request(name, [BytesSource("x", bytes(MIB) + noise(2 * MIB))], options=WriteOptions(compression="fast"))
    ),
    "delta": lambda repo, name: save_step(repo, name, {"w": trained(1)}, delta=3),
}


def make_stored(kind: str, make: type[Store]) -> Store:
    store = make()
    repo = open_repository(store, create=True)
    if kind == "delta":
        save_step(repo, "run/0", {"w": trained(0)}, delta=3)
    STORED[kind](repo, "run/1")
    return store


def load_whole(repo: Repository, verify: Verify) -> None:
    with open_snapshot(repo, snapshot_of(repo, "run/1"), verify=verify) as reader:
        for entry in reader.manifest.iter_entries():
            reader.read_entry(entry.name)


@pytest.mark.usefixtures("unsampled")
@pytest.mark.parametrize("kind", STORED)
@pytest.mark.parametrize("verify", ["full", "device", "fast", False])
def test_what_a_load_has_verified_in_full_is_not_read_by_the_first_save(kind: str, verify: Verify) -> None:
    store = make_stored(kind, Reading)
    repo = open_repository(store)
    load_whole(repo, verify)

    store.reads = 0
    STORED[kind](repo, "run/2")

    assert (store.reads == 0) == (verify in ("full", "device"))


@pytest.mark.parametrize("kind", thin(STORED))
def test_saves_after_a_load_read_the_sample_as_saves_after_a_save_do(kind: str) -> None:
    store = make_stored(kind, Reading)
    after_load, after_save = open_repository(store), open_repository(store)
    load_whole(after_load, "full")
    STORED[kind](after_save, "run/own")
    counts = []
    for repo, first in ((after_load, 0), (after_save, 1)):
        store.reads = 0
        for number in range(first, SAMPLE_SHARE + first):
            STORED[kind](repo, f"run/{id(repo)}-{number}")
        counts.append(store.reads)

    assert counts[0] == counts[1] > 0


@pytest.mark.usefixtures("unsampled")
def test_a_part_that_was_loaded_counts_and_the_rest_does_not() -> None:
    store = make_stored("raw", Reading)
    repo = open_repository(store)
    with open_snapshot(repo, snapshot_of(repo, "run/1")) as reader:
        reader.read_into(reader.find_entry("x"), MIB + 5, memoryview(bytearray(10)))

    store.reads = 0
    STORED["raw"](repo, "run/2")

    assert store.reads == 3  # two chunks of x, and the small entry


class ChangedDuringRead(Reading):
    """A store in which somebody writes to a pack after its bytes were read, before the load is done."""

    change_next = False

    def read_into(self, key: str, start: int, buffer: memoryview) -> None:
        super().read_into(key, start, buffer)
        if self.change_next and key.startswith("packs/"):
            self.change_next = False
            replace_object(self, key, bytes(self._objects[key].data))


@pytest.mark.usefixtures("unsampled")
def test_a_pack_that_changes_while_it_is_loaded_is_read_by_the_first_save() -> None:
    store = make_stored("raw", ChangedDuringRead)
    repo = open_repository(store)
    store.change_next = True
    load_whole(repo, "full")
    assert not store.change_next

    store.reads = 0
    STORED["raw"](repo, "run/2")

    assert store.reads == 4


class VersionsUnknown(Reading):
    def stat(self, key: str) -> ObjectInfo:
        if key.startswith("packs/") and self.reads:
            raise StoreError("the version cannot be read")
        return super().stat(key)


def test_a_load_does_not_need_the_versions_of_packs() -> None:
    store = make_stored("raw", VersionsUnknown)
    store.reads = 1

    load_whole(open_repository(store), "full")


def note_read(read: list[str], inner: Callable[..., None]) -> Callable[..., None]:
    def read_into(store: LocalStore, key: str, start: int, buffer: memoryview) -> None:
        read.append(key)
        inner(store, key, start, buffer)

    return read_into


@pytest.mark.usefixtures("unsampled")
@pytest.mark.parametrize("into", [False, True])
def test_a_resumed_run_reads_nothing_back_in_its_first_save(
    tmp_path: Path, into: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {"model": torch.arange(600_000.0), "optimizer": {"small": torch.ones(3)}, "text": "x" * 5000, "step": 1}
    holdfast.open(tmp_path / "s").save("run/1", state)
    store = holdfast.open(tmp_path / "s")
    state = store.load_into("run/1", state) if into else store.load("run/1")
    read: list[str] = []
    monkeypatch.setattr(LocalStore, "read_into", note_read(read, LocalStore.read_into))

    result = store.save("run/2", state)

    assert result.new_bytes < 100  # the smallest tensor is in the manifest
    assert [key for key in read if key.startswith("packs/")] == []


def test_as_many_saves_as_a_sample_takes_read_each_chunk_once() -> None:
    store, data = Reading(), noise(3 * MIB)
    repo = new_repo(store)
    save_bytes(repo, "run/0", {"x": data})
    for number in range(SAMPLE_SHARE):
        save_bytes(repo, f"run/{number + 1}", {"x": data})
    assert store.reads == 3


def test_silent_damage_is_found_by_the_sample_and_healed() -> None:
    store, data = Reading(), noise(2 * MIB)
    repo = new_repo(store)
    save_bytes(repo, "run/0", {"x": data})
    store.decay(only_pack(store), pack_of(repo, "run/0", "x").offset + 10)
    written = [save_bytes(repo, f"run/{number + 1}", {"x": data}).new_bytes for number in range(SAMPLE_SHARE)]
    assert sum(written) == MIB
    assert load_bytes(repo, "run/0") == load_bytes(repo, f"run/{SAMPLE_SHARE}") == {"x": data}


def test_all_that_a_save_uses_of_a_pack_is_read_once_one_chunk_of_it_proves_rotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store, data = Reading(), noise(4 * MIB)
    repo = new_repo(store)
    save_bytes(repo, "run/0", {"x": data})
    first = pack_of(repo, "run/0", "x").offset
    for number in (0, 1, 3):
        store.decay(only_pack(store), first + number * MIB + 10)

    def is_not_last(_self: ExistingChunks, at: Location) -> bool:
        return at.offset != first + 3 * MIB

    # The sample holds the last chunk alone: when that is read, the others have been accepted.
    monkeypatch.setattr(ExistingChunks, "is_proven", is_not_last)
    assert save_bytes(repo, "run/1", {"x": data}).new_bytes == 3 * MIB
    assert load_bytes(new_repo(store), "run/1") == {"x": data}


def test_rot_is_found_again_once_the_trust_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    store, data = Reading(), noise(2 * MIB)
    repo = new_repo(store)
    save_bytes(repo, "run/1", {"x": data})
    store.decay(only_pack(store), pack_of(repo, "run/1", "x").offset + 10)
    monkeypatch.setattr("holdfast.repo.handle.repository.TRUST_S", 0.0)
    assert save_bytes(repo, "run/2", {"x": data}).new_bytes == MIB
    assert load_bytes(repo, "run/2") == {"x": data}


def test_rot_that_a_read_has_met_is_not_relied_on() -> None:
    store, data = Reading(), noise(2 * MIB)
    repo = new_repo(store)
    save_bytes(repo, "run/1", {"x": data})
    store.decay(only_pack(store), pack_of(repo, "run/1", "x").offset + 10)
    with pytest.raises(DigestMismatch):
        load_bytes(repo, "run/1")
    assert save_bytes(repo, "run/2", {"x": data}).new_bytes == MIB
    assert load_bytes(repo, "run/1") == load_bytes(repo, "run/2") == {"x": data}


# --- In a directory, where the filesystem shows changes


@pytest.fixture
def local(tmp_path: Path) -> Repository:
    return new_repo(LocalStore(tmp_path / "s"))


@pytest.fixture
def pack_path(local: Repository, tmp_path: Path) -> Path:
    """The pack of a saved snapshot `run/1`."""
    save_bytes(local, "run/1", {"x": noise(2 * MIB)})
    return tmp_path / "s" / only_pack(local.store)


def let_time_pass(path: Path) -> None:
    """Return when the clock of the filesystem, which moves in steps, shows another time than the file's."""
    other = path.with_name(".clock")
    other.touch()
    while os.stat(other).st_ctime_ns <= os.stat(path).st_ctime_ns:
        os.utime(other)


def edit_in_place(path: Path, position: int) -> None:
    with open(path, "r+b") as file:
        file.seek(position)
        byte = file.read(1)
        file.seek(position)
        file.write(bytes([byte[0] ^ 1]))


def edit_and_hide_the_time(path: Path, position: int) -> None:
    before = os.stat(path)
    edit_in_place(path, position)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def replace_by_a_damaged_copy(path: Path, position: int) -> None:
    before = os.stat(path)
    damaged = flip(path.read_bytes(), position)
    path.unlink()
    path.write_bytes(damaged)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.usefixtures("unsampled")
@pytest.mark.parametrize("damage", [edit_in_place, edit_and_hide_the_time, replace_by_a_damaged_copy])
def test_a_pack_that_somebody_has_changed_is_read_by_the_very_next_save(
    local: Repository, pack_path: Path, damage: Callable[[Path, int], None]
) -> None:
    save_bytes(local, "run/2", {"x": noise(2 * MIB)})
    let_time_pass(pack_path)
    damage(pack_path, pack_of(local, "run/1", "x").offset + 10)
    assert save_bytes(local, "run/3", {"x": noise(2 * MIB)}).new_bytes == MIB
    assert load_bytes(local, "run/3") == load_bytes(local, "run/1") == {"x": noise(2 * MIB)}


@pytest.mark.usefixtures("unsampled")
def test_a_pack_that_got_a_second_name_is_read_once_and_not_written(local: Repository, pack_path: Path) -> None:
    os.link(pack_path, pack_path.with_name(".backup"))
    assert save_bytes(local, "run/2", {"x": noise(2 * MIB)}).new_bytes == 0


def test_a_pack_is_known_by_the_version_that_it_has_when_its_save_is_done(local: Repository, pack_path: Path) -> None:
    location = pack_of(local, "run/1", "x")
    version = local.store.stat(only_pack(local.store)).version
    assert version
    assert is_known(local.proven, location, version=version)
