"""Change hints: faster where nothing changed, and never wrong where something did."""

from __future__ import annotations

import pytest

from holdfast.digest import hash_bytes
from holdfast.objects.memory import MemoryStore
from holdfast.repo.handle.repository import HINTED_BYTES, ChangeHints, open_repository
from tests.kit.saving import MIB, load_bytes, noise, only_pack, save_bytes


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of what was hashed for hints."""
    sizes: list[int] = []

    def count(data: memoryview) -> bytes:
        sizes.append(len(data))
        return hash_bytes(data)

    monkeypatch.setattr("holdfast.repo.handle.repository.hash_bytes", count)
    return sizes


def test_what_looks_the_same_is_hashed_once(hashed: list[int]) -> None:
    hints, data = ChangeHints(), memoryview(noise(MIB))
    assert hints.hash("x", 0, data) == hints.hash("x", 0, data) == hash_bytes(data)
    assert hashed == [MIB]


@pytest.mark.parametrize(("name", "start"), [("y", 0), ("x", MIB)])
def test_a_hint_is_about_one_place(hashed: list[int], name: str, start: int) -> None:
    hints, data = ChangeHints(), memoryview(noise(MIB))
    hints.hash("x", 0, data)
    hints.hash(name, start, data)
    assert hashed == [MIB, MIB]


@pytest.mark.parametrize("position", [0, 1, MIB // 2, MIB - 1])
def test_one_bit_is_enough_to_look_different(position: int) -> None:
    hints, data = ChangeHints(), bytearray(noise(MIB))
    hints.hash("x", 0, memoryview(data))
    data[position] ^= 1
    assert hints.hash("x", 0, memoryview(data)) == hash_bytes(data)


def test_little_is_hashed_at_once(hashed: list[int]) -> None:
    hints, data = ChangeHints(), memoryview(noise(HINTED_BYTES - 1))
    hints.hash("x", 0, data)
    hints.hash("x", 0, data)
    assert len(hashed) == 2


def test_two_handles_do_not_see_alike() -> None:
    data = memoryview(noise(MIB))
    assert ChangeHints()._hint_of(data) != ChangeHints()._hint_of(data)


def test_memory_that_changes_while_it_is_hashed_is_not_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    hints, data = ChangeHints(), bytearray(noise(MIB))

    def hash_and_change(view: memoryview) -> bytes:
        digest = hash_bytes(view)
        view[5] ^= 1
        return digest

    with monkeypatch.context() as patch:
        patch.setattr("holdfast.repo.handle.repository.hash_bytes", hash_and_change)
        hints.hash("x", 0, memoryview(data))
    data[5] ^= 1
    assert hints.hash("x", 0, memoryview(data)) == hash_bytes(data)
    assert len(hints._seen) == 1


def test_when_too_much_is_remembered_all_is_forgotten(monkeypatch: pytest.MonkeyPatch, hashed: list[int]) -> None:
    monkeypatch.setattr("holdfast.repo.handle.repository._LIMIT", 2)
    hints, data = ChangeHints(), memoryview(noise(MIB))
    for start in (0, 1, 2, 0):
        hints.hash("x", start, data)
    assert len(hashed) == 4


def test_a_store_with_hints_saves_what_changed_and_only_that(store: MemoryStore, hashed: list[int]) -> None:
    repo = open_repository(store, create=True, change_hints=True)
    data = bytearray(noise(4 * MIB))
    save_bytes(repo, "run/1", {"x": bytes(data)})
    hashed.clear()
    data[2 * MIB] ^= 1
    result = save_bytes(repo, "run/2", {"x": bytes(data)})
    assert (result.new_bytes, hashed) == (MIB, [MIB])
    assert load_bytes(repo, "run/2") == {"x": bytes(data)}


def test_a_hint_does_not_bring_back_what_the_store_has_lost(store: MemoryStore) -> None:
    repo = open_repository(store, create=True, change_hints=True)
    data = noise(2 * MIB)
    save_bytes(repo, "run/1", {"x": data})
    store.delete(only_pack(store))
    assert save_bytes(repo, "run/2", {"x": data}).new_bytes == len(data)
    assert load_bytes(repo, "run/2") == {"x": data}
