"""Many small tensors are read in batches, within the budget, and each gets separate memory."""

from __future__ import annotations

import pytest
import torch

from holdfast.errors import Corrupt, DigestMismatch
from holdfast.objects.memory import MemoryStore
from holdfast.repo.format.entry import Entry
from holdfast.repo.format.layout import pack_key
from holdfast.snapshot.batches import LoadOptions
from holdfast.snapshot.load import LeafReader
from holdfast.store import Store
from holdfast.tensors.build import SMALL_BATCH_DTYPES
from holdfast.trees.outline import iter_stored
from holdfast.trees.registered import Types
from tests.kit.saving import pack_of, rot
from tests.kit.tensors import assert_same_tensor

SHAPES = [(), (1,), (7,), (1, 5), (3, 1, 2), (128,), (4096,), (4097,)]


@pytest.fixture
def store() -> Store:
    return Store(MemoryStore())


def make_many(count: int) -> dict[str, torch.Tensor]:
    return {f"layers.{number}.weight": torch.full((5,), float(number)) for number in range(count)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.complex128, torch.float8_e4m3fn])
def test_small_tensors_come_back_in_memory_of_their_own(store: Store, dtype: torch.dtype) -> None:
    tree = {f"{shape}, {copy}": torch.ones(shape).to(dtype) for shape in SHAPES for copy in range(2)}
    store.save("x", tree)
    found = store.load("x")
    for name, tensor in tree.items():
        assert_same_tensor(found[name], tensor)
        assert (found[name].untyped_storage().nbytes(), found[name]._is_view()) == (tensor.nbytes, False)
    assert len({tensor.untyped_storage().data_ptr() for tensor in found.values()}) == len(tree)


def test_small_tensors_keep_their_roles(store: Store) -> None:
    tree = {
        "parameter": torch.nn.Parameter(torch.ones(3)),
        "frozen": torch.nn.Parameter(torch.ones(3), requires_grad=False),
        "buffer": torch.nn.Buffer(torch.ones(3)),
        "leaf": torch.ones(3, requires_grad=True),
        "tensor": torch.ones(3),
    }
    store.save("x", tree)
    found = store.load("x")
    for name, tensor in tree.items():
        assert_same_tensor(found[name], tensor)


@pytest.mark.parametrize("dtype", [*sorted(SMALL_BATCH_DTYPES, key=str), torch.bool, torch.float8_e5m2], ids=str)
def test_bits_that_are_no_numbers_survive(store: Store, dtype: torch.dtype) -> None:
    patterns = [torch.full((1024,), byte, dtype=torch.uint8) for byte in (0xFF, 0x7F, 0x80, 0x07)]
    patterns += [torch.randint(256, (1024,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))]
    store.save("x", {str(number): pattern.clone().view(dtype) for number, pattern in enumerate(patterns)})
    for found, pattern in zip(store.load("x").values(), patterns, strict=True):
        assert torch.equal(found.view(torch.uint8), pattern)


def test_small_tensors_that_shared_memory_share_it_again(store: Store) -> None:
    whole = torch.arange(6.0)
    store.save("x", {"whole": whole, "same": whole, "part": whole[2:], "other": torch.arange(6.0)})
    found = store.load("x")
    found["whole"][3] = 9.0
    assert (found["part"][1], found["other"][3]) == (9.0, 3.0)
    assert found["same"] is found["whole"]
    fresh = store.load("x", aliases="fresh")
    fresh["whole"][3] = 8.0
    assert (fresh["part"][1], fresh["same"][3]) == (3.0, 3.0)


def test_small_tensors_are_read_within_the_budget(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = make_many(100)
    store.save("x", tree)
    opened = store.snapshot("x").open()
    monkeypatch.setattr(opened.reader, "budget_bytes", 600)
    sizes = []
    read_all = opened.reader.read_all

    def count(wanted: list[tuple[Entry, memoryview]]) -> None:
        sizes.append(sum(buffer.nbytes for _, buffer in wanted))
        read_all(wanted)

    monkeypatch.setattr(opened.reader, "read_all", count)
    reader = LeafReader(opened, Types(), LoadOptions())
    reader.read(iter_stored(opened.tree))
    assert (sum(sizes), max(sizes)) == (2000, 300)
    for number, (name, tensor) in enumerate(tree.items()):
        found = reader.decode(["@tensor", number], (name,))
        assert isinstance(found, torch.Tensor)
        assert_same_tensor(found, tensor)


def test_damage_to_one_of_many_is_named(store: Store) -> None:
    store.save("x", {str(number): torch.full((300,), float(number)) for number in range(20)})
    at = pack_of(store.repository, "x", "7")
    rot(store.repository.store, pack_key(at.pack_id), at.offset)
    with pytest.raises(DigestMismatch, match="'x', entry '7', chunk"):
        store.load("x")


def test_a_spec_that_many_share_is_refused_by_the_name_of_the_first(store: Store) -> None:
    store.save("x", make_many(3))
    opened = store.snapshot("x").open()
    opened.reader.manifest._head["specs"][0]["shape"] = [6]
    with pytest.raises(Corrupt, match=r"^'x', layers.0.weight needs 24 bytes, and its entry has 20$"):
        LeafReader(opened, Types(), LoadOptions()).read(iter_stored(opened.tree))
