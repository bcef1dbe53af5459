"""Loading as another floating dtype: which tensors are cast, which share memory afterwards, and what it costs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast.errors import Unsupported
from holdfast.objects.memory import MemoryStore
from holdfast.repo.handle.repository import MIN_BUDGET_BYTES
from holdfast.repo.read.reader import SnapshotReader
from holdfast.snapshot.batches import LoadOptions
from holdfast.store import OpenOptions, Store
from holdfast.trees.apply import PACKED_FLOAT
from tests.kit.capabilities import param_dtypes
from tests.kit.loading import noise
from tests.kit.tensors import SUBCLASSES, TENSORS, assert_same_tensor, find_facts

BF16 = torch.bfloat16


@pytest.fixture
def store() -> Store:
    return Store(MemoryStore(), OpenOptions(types=SUBCLASSES))


def shares_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def values_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the values of a tensor of any layout, for a comparison."""
    tensor = tensor.detach()
    if tensor.layout == torch.strided and not tensor.is_nested:
        # Some dtypes cannot be negated; whether they should be is told apart.
        return torch._neg_view(tensor) if tensor.is_neg() else tensor
    return tensor._values() if tensor.layout == torch.sparse_coo else tensor.values()


def will_be_cast(tensor: torch.Tensor) -> bool:
    is_number = tensor.is_floating_point() and tensor.dtype != PACKED_FLOAT
    return is_number and not isinstance(tensor, SUBCLASSES)


KINDS = ("class", "layout", "meta", "parameter", "buffer", "requires_grad", "shape", "stride", "conj, neg", "context")


# What is cast


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_floating_tensors_are_cast_and_all_others_are_as_they_were_saved(store: Store, dtype: torch.dtype) -> None:
    tree = {name: make() for name, make in TENSORS.items()}
    store.save("x", tree)

    loaded = store.load("x", dtype=dtype)

    for name, tensor in tree.items():
        found = loaded[name]
        if not will_be_cast(tensor):
            assert_same_tensor(found, tensor)
            continue
        facts, wanted = find_facts(found), find_facts(tensor)
        assert found.dtype == dtype, name
        assert {kind: facts.get(kind) for kind in KINDS} == {kind: wanted.get(kind) for kind in KINDS}, name
        if not tensor.is_meta:
            expected = values_of(tensor).to(dtype).nan_to_num(7.0)
            assert torch.equal(values_of(found).nan_to_num(7.0), expected), name


def test_many_small_tensors_are_cast(store: Store) -> None:
    tree = {str(number): torch.nn.Parameter(noise(5, seed=number)) for number in range(50)}
    tree["step"] = torch.nn.Parameter(torch.ones(5, dtype=torch.int64), requires_grad=False)
    store.save("x", tree)

    found = store.load("x", dtype=BF16)

    for number in range(50):
        assert type(found[str(number)]) is torch.nn.Parameter
        assert found[str(number)].requires_grad
        assert torch.equal(found[str(number)], tree[str(number)].to(BF16))
    assert found["step"].dtype == torch.int64


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float16, torch.float64], ids=str)
def test_any_floating_dtype_will_do(store: Store, dtype: torch.dtype) -> None:
    tree = {"small": noise(5), "large": noise(300, 300), "half": noise(7).half()}
    store.save("x", tree)
    for name, found in store.load("x", dtype=dtype).items():
        assert_same_tensor(found, tree[name].to(dtype))


def test_gradients_are_cast_with_their_tensors(store: Store) -> None:
    weight = torch.nn.Parameter(noise(4))
    weight.grad = noise(4, seed=1)
    store.save("x", weight, grads=True)

    found = store.load("x", dtype=BF16)

    assert_same_tensor(found.grad, noise(4, seed=1).to(BF16))


def test_memory_shared_with_the_parts_of_a_registered_class_is_refused(store: Store) -> None:
    scaled: Any = TENSORS["subclass/whole"]()
    store.save("x", {"scaled": scaled, "scale": scaled.scale})
    with pytest.raises(Unsupported, match=r"^scaled.scale .* and scale .* share memory, which cannot be cast"):
        store.load("x", dtype=torch.float64)


def test_states_of_random_generators_stay_as_they_are(store: Store) -> None:
    state = torch.get_rng_state()
    store.save("x", {"rng": state, "model": torch.nn.Linear(3, 2)})
    found = store.load("x", dtype=BF16)
    assert_same_tensor(found["rng"], state)
    assert {tensor.dtype for tensor in found["model"].values()} == {BF16}


def test_only_what_is_chosen_is_cast_under_its_new_name(store: Store) -> None:
    store.save("x", {"module.w": noise(3), "other": noise(3)})
    found = store.load("x", dtype=BF16, only="module*", rename={"module.": ""})
    assert list(found) == ["w"]
    assert found["w"].dtype == BF16


# Who shares memory


def test_one_object_stays_one_object(store: Store) -> None:
    tied = torch.nn.Parameter(noise(3, 4))
    store.save("x", {"a": tied, "b": tied})
    found = store.load("x", dtype=BF16)
    assert found["a"] is found["b"]
    assert torch.equal(found["a"], tied.to(BF16))


@pytest.mark.parametrize("dtype", [BF16, torch.float64], ids=str)
def test_what_shared_memory_shares_it_again(store: Store, dtype: torch.dtype) -> None:
    base = noise(6, 8)
    views = {"whole": base, "turned": base.t(), "rows": base[2:5], "one": base[3, 5], "columns": base[:, 1::3]}
    store.save("x", views)

    found = store.load("x", dtype=dtype)

    for name, view in views.items():
        assert_same_tensor(found[name], base.to(dtype).as_strided(view.shape, view.stride(), view.storage_offset()))
        assert shares_memory(found[name], found["whole"])
    found["whole"].zero_()
    assert not any(tensor.any() for tensor in found.values())


def test_views_of_which_a_part_is_loaded_are_cast(store: Store) -> None:
    base = noise(1000)
    store.save("x", {"base": base, "low": base[1:4], "high": base[901:]})
    found = store.load("x", dtype=BF16, only=["low", "high"])
    assert torch.equal(found["low"], base[1:4].to(BF16))
    assert torch.equal(found["high"], base[901:].to(BF16))
    assert shares_memory(found["low"], found["high"])


def test_items_far_apart_are_cast_without_what_lies_between_them(store: Store) -> None:
    spread = torch.empty(1 << 22)[:: 1 << 20]
    spread.copy_(torch.arange(4.0))
    store.save("x", [spread, spread])

    found = store.load("x", dtype=BF16)

    assert found[0].stride() == (1 << 20,)
    assert found[0].tolist() == [0, 1, 2, 3]
    assert found[0] is found[1]


def test_the_values_of_a_sparse_tensor_are_shared_again(store: Store) -> None:
    sparse = TENSORS["sparse_csr/whole"]()
    store.save("x", {"sparse": sparse, "values": sparse.values()})
    found = store.load("x", dtype=BF16)
    assert (found["sparse"].dtype, found["values"].dtype) == (BF16, BF16)
    assert shares_memory(found["sparse"].values(), found["values"])


@pytest.mark.parametrize("aliased", [torch.int32, torch.uint8, torch.bfloat16], ids=str)
def test_memory_seen_as_two_dtypes_is_refused(store: Store, aliased: torch.dtype) -> None:
    weight = noise(8)
    store.save("x", {"w": weight, "bits": weight.view(aliased)})

    text = rf"w \(torch.float32\) and bits \({aliased}\) share memory, which cannot be cast to torch.bfloat16 for both"
    with pytest.raises(Unsupported, match=rf'^{text}; pass aliases="fresh" to give each its own memory'):
        store.load("x", dtype=BF16)

    found = store.load("x", dtype=BF16, aliases="fresh")
    assert_same_tensor(found["w"], weight.to(BF16))
    assert_same_tensor(found["bits"], weight.view(aliased).to(BF16 if aliased.is_floating_point else aliased))
    assert_same_tensor(store.load("x", dtype=torch.float32, only="bits")["bits"].to(aliased), weight.view(aliased))


def test_memory_seen_as_two_dtypes_that_both_stay_is_shared(store: Store) -> None:
    weight = noise(8).to(BF16)
    store.save("x", {"w": weight, "bits": weight.view(torch.int16)})
    found = store.load("x", dtype=BF16)
    assert shares_memory(found["w"], found["bits"])


# Where it goes, and what it costs


def test_a_cast_goes_to_the_device_that_was_asked_for(store: Store) -> None:
    store.save("x", {"w": noise(4), "n": torch.arange(3)})
    found = store.load("x", dtype=BF16, device="meta")
    assert all(tensor.is_meta for tensor in found.values())
    assert [tensor.dtype for tensor in found.values()] == [BF16, torch.int64]


def test_what_is_cast_is_read_and_not_mapped(tmp_path: Path) -> None:
    store = holdfast.open(tmp_path / "s")
    tree = {"w": noise(300, 300), "n": torch.arange(90000), "same": noise(300, 300, seed=2).to(BF16)}
    store.save("x", tree)

    found = store.load("x", dtype=BF16, mmap=True)

    assert_same_tensor(found["w"], tree["w"].to(BF16))
    assert_same_tensor(found["n"], tree["n"])
    assert_same_tensor(found["same"], tree["same"])
    assert (store.statistics().mapped_entries, store.statistics().unmapped_entries) == (2, 1)


@pytest.mark.parametrize("size", [1 << 18, (5 << 20) + 3], ids=["small", "large"])
@pytest.mark.parametrize("dtype", [BF16, torch.float64], ids=str)
def test_a_cast_takes_no_more_than_the_budget_besides_the_tensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, dtype: torch.dtype
) -> None:
    store = holdfast.open(tmp_path / "s", budget_bytes=MIN_BUDGET_BYTES)
    tree = {str(number): torch.arange(size) * 0.5 + number for number in range(max(2, (6 << 20) // size))}
    store.save("x", tree)
    sizes: list[int] = []
    read = SnapshotReader._read

    def meter(reader: SnapshotReader, wants: Any, watch: Any = None) -> None:
        sizes.append(sum(want.ref.size_bytes for want in wants))
        read(reader, wants, watch)

    monkeypatch.setattr(SnapshotReader, "_read", meter)
    found = store.load("x", dtype=dtype)

    assert sum(sizes) >= sum(tensor.nbytes for tensor in tree.values())
    # A piece may begin and end within a chunk.
    assert max(sizes) <= MIN_BUDGET_BYTES // 2 + (2 << 20)
    assert all(torch.equal(found[name], tensor.to(dtype)) for name, tensor in tree.items())


# One by one, and in views


def test_a_tensor_read_by_itself_can_be_cast(store: Store) -> None:
    base = noise(4, 5)
    store.save("x", {"a": base, "b": base[1:], "n": torch.arange(3), "s": TENSORS["sparse_coo/hybrid"]()})
    snapshot = store.snapshot("x")

    assert_same_tensor(snapshot["b"].read(dtype=BF16), base[1:].to(BF16))
    assert snapshot["s"].read(dtype=BF16).dtype == BF16
    assert snapshot["n"].read(dtype=BF16) is not None
    assert shares_memory(snapshot["n"].read(dtype=BF16), held := snapshot["n"].read())
    assert held.dtype == torch.int64
    assert_same_tensor(snapshot["b"].read(), base[1:])


def test_a_view_of_a_snapshot_can_be_cast(store: Store) -> None:
    store.save("x", {"model": {"w": noise(3), "n": torch.arange(3)}, "step": 3})
    found = store.snapshot("x")["model"].load(LoadOptions(dtype=BF16))
    assert [found["w"].dtype, found["n"].dtype] == [BF16, torch.int64]


# What is refused


@pytest.mark.parametrize("dtype", param_dtypes("int64", "complex64", "bool", "float4_e2m1fn_x2"))
def test_what_no_floating_tensor_can_be_cast_to_is_refused_before_anything_is_read(
    store: Store, dtype: torch.dtype
) -> None:
    store.save("x", {"n": 1})
    with pytest.raises(Unsupported, match="cast to"):
        store.load("x", dtype=dtype)
    store.save("w", noise(3))
    with pytest.raises(Unsupported, match="cast to"):
        store.snapshot("w")[()].read(dtype=dtype)


def test_what_is_no_dtype_is_refused(store: Store) -> None:
    store.save("x", noise(3))
    wrong: Any = "bfloat16"
    with pytest.raises(ValueError, match=r"^dtype must be a dtype of torch or None, not 'bfloat16'$"):
        store.load("x", dtype=wrong)
