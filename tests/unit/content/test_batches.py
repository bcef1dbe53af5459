"""Batches: where tensors lie in a storage, whether that has changed, and notes that no writer has written."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch

from holdfast.content.catalog import StorageSpan, parse_storage_note
from holdfast.content.seen_storages import SeenStorages
from holdfast.content_store import ContentStoreReader, ContentStoreWriter
from holdfast.digest import hash_bytes
from holdfast.errors import Corrupt, NotFound
from holdfast.json_text import Json
from holdfast.objects.memory import MemoryStore
from holdfast.repo.format.source import BytesSource
from holdfast.repo.handle.repository import Repository, open_repository
from holdfast.repo.write.writer import Request, save

# The ledger


def test_a_storage_keeps_its_name_until_what_was_seen_of_it_changes() -> None:
    ledger = SeenStorages("a")
    memory = torch.zeros(3_000_000, dtype=torch.uint8)
    storage = memory.untyped_storage()
    names = [ledger.find_group(storage, 0, 1_000_000), ledger.find_group(storage, 999_000, 2_000_000)]
    memory[2_500_000] = 1
    names.append(ledger.find_group(storage, 0, 3_000_000))
    memory[999_500] = 1
    names.append(ledger.find_group(storage, 999_400, 999_600))

    assert names == ["a.1", "a.1", "a.1", "a.2"]


def test_many_small_views_are_remembered_together_and_a_change_of_one_is_seen() -> None:
    ledger = SeenStorages("a")
    memory = torch.zeros(100_000, dtype=torch.uint8)
    for start in range(0, 10_000, 10):
        ledger.find_group(memory.untyped_storage(), start, start + 10)
    memory[55] = 1

    assert ledger.find_group(memory.untyped_storage(), 50, 60) == "a.2"


def test_a_change_seen_while_views_are_put_together_is_not_forgotten() -> None:
    ledger = SeenStorages("a")
    memory = torch.zeros(100_000, dtype=torch.uint8)
    ledger.find_group(memory.untyped_storage(), 0, 10)
    memory[5] = 1
    for start in range(1000, 3000, 10):
        ledger.find_group(memory.untyped_storage(), start, start + 10)

    assert ledger.find_group(memory.untyped_storage(), 0, 10) != "a.1"


def test_a_new_storage_at_the_address_of_a_dead_one_has_a_name_of_its_own() -> None:
    ledger = SeenStorages("a")
    names = [ledger.find_group(torch.zeros(64).untyped_storage(), 0, 256) for _ in range(3000)]

    assert len(set(names)) == 3000


# Notes that no writer has written


@pytest.mark.parametrize(
    "value", ["", 7, "g:0:00:0:0", f"g:0:{'0' * 64}:0:-1", f"a:0:{'0' * 64}:-5:9", f"a:{10**18 * 9}:{'0' * 64}:0:1"]
)
def test_a_note_that_makes_no_sense_is_refused(value: Json) -> None:
    with pytest.raises(Corrupt, match=r"'batch', 'x': .*run `holdfast check`"):
        parse_storage_note({"storage": value}, what="'batch', 'x'")


def test_a_note_without_a_storage_is_nothing_special() -> None:
    assert parse_storage_note(None, what="x") is None
    assert parse_storage_note({"device": "cuda:0"}, what="x") is None
    assert parse_storage_note({"storage": f"a.1:8:{'0' * 64}:-8:16"}, what="x") == StorageSpan(
        "a.1", 8, "0" * 64, -8, 16
    )


def forge(repo: Repository, note: Mapping[str, Json], *, spec: Mapping[str, Json] | None = None) -> ContentStoreReader:
    """Write a batch of one float tensor whose note says what it likes."""
    own = {"type": "tensor", "dtype": "float32", "shape": [4], **(spec or {})}
    source = BytesSource("tensors.x", bytes(16), own, dict(note))
    tree = ["dict", "tensors", ["dict", "x", ["@tensor", 0]], "storages", ["dict"]]
    save(repo, Request("content/forged-00000001", [source], {"tree": tree}))
    return ContentStoreReader(repo)


@pytest.fixture
def repo() -> Repository:
    return open_repository(MemoryStore(), create=True)


DIGEST = hash_bytes(bytes(16)).hex()


def test_a_batch_by_another_program_is_read(repo: Repository) -> None:
    assert forge(repo, {}).read_tensor("x").tolist() == [0, 0, 0, 0]
    assert ContentStoreReader(repo).read_tensor_metadata("x").digest == ""


@pytest.mark.parametrize("storage", [f"a.1:0:{DIGEST}:0:{1 << 50}", f"a.1:{1 << 40}:{DIGEST}:{-(1 << 40)}:16", "x"])
def test_a_batch_that_claims_more_memory_than_it_has_bytes_is_left_out_and_said_so(
    repo: Repository, storage: str
) -> None:
    with ContentStoreWriter(repo) as writer:
        writer.write_tensor("good", torch.ones(1))
    reader = forge(repo, {"storage": storage})

    with pytest.raises(NotFound, match=r"no tensor 'x' in memory:.* \(1 damaged batches could not be read"):
        reader.read_tensor("x")
    assert reader.read_tensor("good").item() == 1


def test_a_tensor_that_reaches_out_of_its_storage_is_refused(repo: Repository) -> None:
    reader = forge(repo, {"storage": f"a.1:0:{DIGEST}:0:8"})

    with pytest.raises(Corrupt, match="beyond the storage"):
        reader.read_tensor("x")


def test_a_device_that_never_was_is_refused(repo: Repository) -> None:
    with pytest.raises(Corrupt, match=r"'tensors\.x' was on 'moon', which is not a device"):
        forge(repo, {"device": "moon"}).read_tensor("x")


def test_a_tensor_that_was_on_a_device_that_is_not_here_can_be_read_to_another(repo: Repository) -> None:
    reader = forge(repo, {"device": "cuda:3", "storage": f"a.1:0:{DIGEST}:0:16"})

    assert reader.read_tensor_metadata("x").device == torch.device("cuda:3")
    assert reader.read_tensor("x", device="cpu").device == torch.device("cpu")
    with pytest.raises(Exception, match="cuda:3"):
        reader.read_tensor("x")
