"""The content of a storage has one name until its bytes change or the storage dies."""

from __future__ import annotations

import torch

from holdfast.content.batch import SeenStorages


def test_a_storage_keeps_its_name_until_its_remembered_bytes_change() -> None:
    seen = SeenStorages("a")
    memory = torch.zeros(3_000_000, dtype=torch.uint8)
    storage = memory.untyped_storage()
    names = [seen.find_group(storage, 0, 1_000_000), seen.find_group(storage, 999_000, 2_000_000)]
    memory[2_500_000] = 1
    names.append(seen.find_group(storage, 0, 3_000_000))
    memory[999_500] = 1
    names.append(seen.find_group(storage, 999_400, 999_600))

    assert names == ["a.1", "a.1", "a.1", "a.2"]


def test_many_small_views_are_remembered_together_and_a_change_of_one_is_seen() -> None:
    seen = SeenStorages("a")
    memory = torch.zeros(100_000, dtype=torch.uint8)
    for start in range(0, 10_000, 10):
        seen.find_group(memory.untyped_storage(), start, start + 10)
    memory[55] = 1

    assert seen.find_group(memory.untyped_storage(), 50, 60) == "a.2"


def test_a_change_found_while_pieces_are_joined_is_not_forgotten() -> None:
    seen = SeenStorages("a")
    memory = torch.zeros(100_000, dtype=torch.uint8)
    seen.find_group(memory.untyped_storage(), 0, 10)
    memory[5] = 1
    for start in range(1000, 3000, 10):
        seen.find_group(memory.untyped_storage(), start, start + 10)

    assert seen.find_group(memory.untyped_storage(), 0, 10) != "a.1"


def test_a_new_storage_at_the_address_of_a_dead_one_has_a_name_of_its_own() -> None:
    seen = SeenStorages("a")
    names = [seen.find_group(torch.zeros(64).untyped_storage(), 0, 256) for _ in range(3000)]

    assert len(set(names)) == 3000
