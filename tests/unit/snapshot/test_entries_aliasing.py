"""Tensors that shared memory are stored once and share it again; tensors that were merely equal do not share."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from holdfast.objects.memory import MemoryStore
from holdfast.repo.format.layout import PACKS
from holdfast.store import OpenOptions, Store
from holdfast.tensors import sources
from tests.kit.saving import keys, stored_bytes
from tests.kit.tensors import SUBCLASSES, TENSORS, assert_same_tensor

MIB = 1 << 20


@pytest.fixture
def store() -> Store:
    return Store(MemoryStore(), OpenOptions(types=SUBCLASSES))


def noise(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def save_and_load(store: Store, tree: Any, **options: Any) -> Any:
    store.save("x", tree)
    return store.load("x", **options)


def assert_same_sharing(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    """Fail unless the tensors are the same, and writing to one changes just the others that it changed before."""
    for one, other in zip(found, wanted, strict=True):
        assert_same_tensor(one, other)
    for index, tensor in enumerate(wanted):
        if tensor.numel():
            with torch.no_grad():
                tensor.view(-1)[-1:].zero_() if tensor.is_contiguous() else tensor[..., -1:].zero_()
                twin = found[index]
                twin.view(-1)[-1:].zero_() if twin.is_contiguous() else twin[..., -1:].zero_()
        for one, other in zip(found, wanted, strict=True):
            assert_same_tensor(one, other)


def test_tied_tensors_are_stored_once_and_tied_again(store: Store) -> None:
    weight = noise(64, 64)
    result = store.save("x", {"embed": weight, "head": weight.view(64, 64)})
    assert result.new_bytes == weight.nbytes
    found = store.load("x")
    found["embed"][3, 5] = 7.0
    assert found["head"][3, 5] == 7.0


def test_tied_parameters_of_a_module_stay_tied(store: Store) -> None:
    net = torch.nn.ModuleDict({"embed": torch.nn.Embedding(9, 4), "head": torch.nn.Linear(4, 9, bias=False)})
    net["head"].weight = net["embed"].weight
    store.save("x", dict(net.named_parameters(remove_duplicate=False)))
    found = store.load("x")
    assert found["embed.weight"] is found["head.weight"]


def test_views_of_all_kinds_share_memory_as_they_did(store: Store) -> None:
    base = noise(12, 10)
    wanted = [base, base[2:7], base.t(), base[:, 3], base[::3, ::2], base.view(-1)[17:93], base.view(torch.int32)[4]]
    assert_same_sharing(save_and_load(store, wanted), wanted)
    assert store.snapshot("x").logical_bytes > base.nbytes
    assert stored_bytes(store.repository.store) < base.nbytes + 4000


def test_conjugated_and_negated_views_share_memory_as_they_did(store: Store) -> None:
    base = torch.view_as_complex(noise(6, 2))
    wanted = [base, base.conj(), base.real, base.imag, base.conj().imag, torch._neg_view(base[2:])]
    found = save_and_load(store, wanted)
    for one, other in zip(found, wanted, strict=True):
        assert_same_tensor(one, other)
    found[0][3] = 5 - 2j
    assert [found[1][3].item(), found[2][3].item(), found[4][3].item()] == [5 + 2j, 5.0, 2.0]


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0], [1, 2, 0]])
def test_bytes_and_wide_items_over_one_storage_share_it(store: Store, order: list[int]) -> None:
    base = torch.arange(64, dtype=torch.uint8)
    views = [base[11:19], base[16:48].view(torch.complex128), base[6:12].view(torch.int16)]
    wanted = [views[number] for number in order]
    assert_same_sharing(save_and_load(store, wanted), wanted)


def test_disjoint_views_come_back_right_and_the_rest_is_not_saved(store: Store) -> None:
    base = noise(100_000)
    wanted = [base[7:19], base[50_000:50_001], base[99_990:]]
    result = store.save("x", wanted)
    found = store.load("x")
    assert result.logical_bytes == 4 * (12 + 1 + 10)
    assert_same_sharing(found, wanted)
    assert found[0].untyped_storage().nbytes() < 200


def test_a_small_view_of_a_large_storage_is_stored_small(store: Store) -> None:
    large = noise(MIB)
    result = store.save("x", large[5000:6000])
    assert result.new_bytes == 4000
    assert store.load("x").untyped_storage().nbytes() == 4000


def test_equal_tensors_are_stored_once_and_come_back_apart(store: Store) -> None:
    one, other = noise(5000), noise(5000)
    result = store.save("x", [one, other])
    assert (result.logical_bytes, result.new_bytes) == (40_000, 20_000)
    found = store.load("x")
    found[0].zero_()
    assert torch.equal(found[1], other)


def test_the_same_object_comes_back_as_one_object(store: Store) -> None:
    tensor = noise(3)
    found = save_and_load(store, {"a": tensor, "b": [tensor, tensor.view(3)]})
    assert found["a"] is found["b"][0]
    assert found["a"] is not found["b"][1]


@pytest.mark.parametrize(
    "name", ["sparse_coo/hybrid", "sparse_csr/whole", "nested/whole", "jagged/whole", "subclass/of a subclass"]
)
def test_the_same_composite_object_comes_back_as_one_object(store: Store, name: str) -> None:
    tensor = TENSORS[name]()
    found = save_and_load(store, [tensor, torch.ones(1), tensor, TENSORS[name]()])
    assert found[0] is found[2]
    assert found[3] is not found[0]
    assert_same_tensor(found[0], tensor)


def test_the_parts_of_a_composite_may_stand_beside_it(store: Store) -> None:
    scaled: Any = TENSORS["subclass/of a subclass"]()
    found = save_and_load(store, [scaled.payload.payload, scaled.payload, scaled, scaled.payload, scaled])
    assert found[2].payload is found[1] is found[3]
    assert found[2].payload.payload is found[0]
    assert found[2] is found[4]


def test_jagged_tensors_that_share_their_offsets_still_fit_each_other(store: Store) -> None:
    offsets = torch.tensor([0, 2, 5])
    pair = [torch.nested.nested_tensor_from_jagged(noise(5, size), offsets) for size in (3, 3)]
    found = save_and_load(store, pair)
    assert (found[0] + found[1]).values().tolist() == (pair[0] + pair[1]).values().tolist()


def test_an_object_that_is_chosen_without_its_first_place_is_loaded(store: Store) -> None:
    tensor = TENSORS["sparse_coo/hybrid"]()
    found = save_and_load(store, {"a": tensor, "b": tensor, "c": [tensor]}, only=["b", "c.*"])
    assert found["b"] is found["c"][0]
    assert_same_tensor(found["b"], tensor)


def test_fresh_memory_shares_nothing(store: Store) -> None:
    base = noise(10)
    stepped = base[::3]
    found = save_and_load(store, [base, base, base[2:5], stepped, base.view(torch.int32)], aliases="fresh")
    assert len({tensor.untyped_storage().data_ptr() for tensor in found}) == 5
    for one, other in zip(found, [base, base, base[2:5], stepped, base.view(torch.int32)], strict=True):
        assert_same_tensor(one, other)


def test_thousands_of_overlapping_windows_come_back_over_one_memory(store: Store) -> None:
    base = torch.arange(6000, dtype=torch.int32)
    windows = list(base.unfold(0, 500, 5))
    found = save_and_load(store, windows)
    assert all(torch.equal(one, other) for one, other in zip(found, windows, strict=True))
    assert len({window.untyped_storage().data_ptr() for window in found}) == 1
    assert stored_bytes(store.repository.store) < 40 * base.nbytes


def test_tangled_views_of_several_dtypes_share_memory(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_MAX_CUTS", 5)
    base = torch.arange(200, dtype=torch.uint8)
    wanted = [base[2:30], base[4:36].view(torch.float32), base[8:40].view(torch.int64)]
    wanted += [base[start : start + 60] for start in range(2, 40)]
    assert_same_sharing(save_and_load(store, wanted), wanted)


def test_tied_gappy_tensors_are_tied_again(store: Store) -> None:
    view = noise(50, 7)[:, ::3]
    result = store.save("x", [view, view.detach(), view])
    found = store.load("x")
    assert result.new_bytes == view.numel() * 4
    assert_same_sharing(found, [view, view.detach(), view])


def test_gappy_views_of_one_memory_do_not_lose_each_others_items(store: Store) -> None:
    memory = noise(11)
    wanted = [memory.as_strided((3, 1), (5, 2)), memory.as_strided((1, 6), (5, 2)), memory[1::2]]
    assert_same_sharing(save_and_load(store, wanted), wanted)


def test_a_part_of_a_group_is_loaded_alone(store: Store) -> None:
    base = noise(1000)
    found = save_and_load(store, {"a": base, "b": base[900:910], "c": base[905:950]}, only=["b", "c"])
    found["b"][7] = 3.0
    assert found["c"][2] == 3.0


def test_gradients_may_share_memory_with_others(store: Store) -> None:
    weight = torch.nn.Parameter(noise(4))
    weight.grad = torch.ones(4)
    store.save("x", {"w": weight, "g": weight.grad}, grads=True)
    found = store.load("x")
    assert found["w"].grad is not None
    found["g"][1] = 8.0
    assert found["w"].grad.tolist() == [1.0, 8.0, 1.0, 1.0]


def test_a_thousand_scalars_take_little_room_and_at_most_one_pack(store: Store) -> None:
    store.save("x", {f"step.{number}": torch.tensor(float(number)) for number in range(1000)})
    assert stored_bytes(store.repository.store) < 200_000
    assert len(keys(store.repository.store, PACKS)) <= 1
    assert [tensor.item() for tensor in store.load("x").values()] == list(range(1000))
