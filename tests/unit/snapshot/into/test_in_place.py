"""Loading into existing tensors, of any strides, tied or not: they keep their memory, and get the saved values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from holdfast.errors import Mismatch
from holdfast.objects.memory import MemoryStore
from holdfast.repo.format.entry import Entry
from holdfast.snapshot.into.in_place import copy_into
from holdfast.snapshot.opened import Opened
from holdfast.store import OpenOptions, Store
from holdfast.tensors.storage import free_storage, is_allocated
from tests.kit.capabilities import needs_torch
from tests.kit.loading import bytes_of, noise, problems_of
from tests.kit.tensors import COMPOSITES, ORDINARY, SUBCLASSES, assert_same_tensor, raw_bytes


def test_every_ordinary_tensor_is_filled_with_what_was_saved(store: Store) -> None:
    saved: dict[str, torch.Tensor] = {name: tensor for name in ORDINARY if not (tensor := ORDINARY[name]()).is_meta}
    store.save("x", saved)
    target = store.load("x")
    for tensor in target.values():
        _invert(tensor)
    places = dict(target)

    store.load_into("x", target)

    assert all(target[name] is place for name, place in places.items())
    assert [name for name in saved if raw_bytes(target[name]) != raw_bytes(saved[name])] == []


def _invert(tensor: torch.Tensor) -> None:
    """Give a tensor other bytes, all of them."""
    memory = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    memory.copy_(255 - memory)


@pytest.mark.slow
def test_a_tensor_made_of_others_takes_the_place_of_one_of_its_kind() -> None:
    store = Store(MemoryStore(), OpenOptions(types=SUBCLASSES))
    saved = {name: make() for name, make in COMPOSITES.items()}
    store.save("x", saved)
    target = {name: make() for name, make in COMPOSITES.items()}

    store.load_into("x", target)

    for name, tensor in saved.items():
        assert_same_tensor(target[name], tensor)


def test_a_tensor_that_was_quantised_in_another_way_brings_its_scale_along(store: Store) -> None:
    saved = torch.quantize_per_tensor(noise(4), 0.5, 3, torch.qint8)
    store.save("x", saved)
    target = torch.quantize_per_tensor(torch.zeros(4), 0.25, 0, torch.qint8)

    store.load_into("x", target)

    assert target.q_scale() == 0.5
    assert torch.equal(target.dequantize(), saved.dequantize())


def test_tensors_are_filled_in_place(store: Store) -> None:
    saved = {"a": noise(3, 4), "b": [noise(2), (noise(1), 5)]}
    store.save("x", saved)
    target: Any = {"a": torch.zeros(3, 4), "b": [torch.zeros(2), (torch.zeros(1), 5)]}
    places = [target["a"].data_ptr(), target["b"][0].data_ptr(), target["b"][1][0].data_ptr()]

    found = store.load_into("x", target)

    assert found is target
    assert [target["a"].data_ptr(), target["b"][0].data_ptr(), target["b"][1][0].data_ptr()] == places
    assert bytes_of(target) == bytes_of(saved)


_WIDE = noise(2, 3, 4, 5)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.zeros(4, 2, 3, 5).permute(1, 2, 0, 3),
        lambda: torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last),
        lambda: torch.zeros(4, 6, 8, 10)[::2, ::2, ::2, ::2],
        lambda: torch.zeros(2, 3, 4, 6)[..., 1:],
        lambda: torch.zeros(2, 3, 4, 5, dtype=torch.complex64).imag,
    ],
)
@pytest.mark.parametrize(
    "saved",
    [_WIDE, _WIDE.to(memory_format=torch.channels_last), _WIDE.repeat(1, 1, 1, 2)[..., ::2]],
)
def test_any_strides_of_the_target_get_the_same_values(
    store: Store, make: Callable[[], torch.Tensor], saved: torch.Tensor
) -> None:
    store.save("x", saved)
    target = make()
    strides = target.stride()

    store.load_into("x", target)

    assert target.stride() == strides
    assert torch.equal(target, saved)


def test_what_lies_between_the_items_of_the_target_is_left_alone(store: Store) -> None:
    store.save("x", noise(3, 2))
    memory = torch.zeros(3, 4)

    store.load_into("x", memory[:, 1:3])

    assert memory[:, 0].tolist() == memory[:, 3].tolist() == [0, 0, 0]
    assert torch.equal(memory[:, 1:3], noise(3, 2))


@pytest.mark.parametrize("flip_saved", [False, True])
@pytest.mark.parametrize("flip_target", [False, True])
def test_conjugate_and_negative_views_get_the_right_values(store: Store, flip_saved: bool, flip_target: bool) -> None:
    value = torch.complex(noise(3), noise(3, seed=1))
    store.save("x", {"c": value.conj() if flip_saved else value, "n": value.conj().imag})
    target = {"c": torch.zeros(3, dtype=torch.complex64), "n": torch.zeros(3)}
    target["c"] = target["c"].conj() if flip_target else target["c"]

    store.load_into("x", target)

    assert torch.equal(target["c"], value.conj() if flip_saved else value)
    assert torch.equal(target["n"], value.conj().imag)


def test_cast_converts_to_the_dtype_of_the_target(store: Store) -> None:
    saved = noise(5)
    store.save("x", {"a": saved, "b": torch.arange(3)})
    target = {"a": torch.zeros(5, dtype=torch.bfloat16), "b": torch.zeros(3)}

    store.load_into("x", target, cast=True)

    assert torch.equal(target["a"], saved.to(torch.bfloat16))
    assert torch.equal(target["b"], torch.arange(3.0))


def test_graphs_that_were_recorded_before_notice(store: Store) -> None:
    store.save("x", {"a": noise(3), "b": noise(2, 3)})
    target = {"a": torch.zeros(3, requires_grad=True), "b": torch.zeros(3, 2, requires_grad=True).t()}
    loss = (target["a"] * target["a"]).sum() + (target["b"] * target["b"]).sum()
    versions = [tensor._version for tensor in target.values()]

    store.load_into("x", target)

    assert all(tensor._version > before for tensor, before in zip(target.values(), versions, strict=True))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.backward(loss)


def test_an_inference_tensor_is_filled(store: Store) -> None:
    store.save("x", noise(3))
    with torch.inference_mode():
        target = torch.zeros(3)

    store.load_into("x", target)

    assert target.tolist() == noise(3).tolist()


def test_gradients_that_were_saved_come_back_to_the_tensor_that_is_there(store: Store) -> None:
    saved = torch.nn.Parameter(noise(3))
    saved.grad = noise(3, seed=1)
    store.save("x", {"p": saved}, grads=True)
    target = {"p": torch.nn.Parameter(torch.zeros(3))}
    place = target["p"]

    store.load_into("x", target)

    assert target["p"] is place
    assert torch.equal(place, saved)
    assert place.grad is not None
    assert torch.equal(place.grad, noise(3, seed=1))


@pytest.mark.parametrize("assign", [False, True])
def test_gradients_are_converted_with_their_tensor(store: Store, assign: bool) -> None:
    saved = torch.nn.Parameter(noise(3))
    saved.grad = noise(3, seed=1)
    store.save("x", {"p": saved}, grads=True)
    target = {"p": torch.nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))}

    store.load_into("x", target, cast=True, assign=assign)

    assert torch.equal(target["p"], saved.bfloat16())
    assert target["p"].grad is not None
    assert torch.equal(target["p"].grad, noise(3, seed=1).bfloat16())


def test_what_is_converted_and_put_in_place_is_tied_as_it_was(store: Store) -> None:
    tied = torch.nn.Parameter(noise(3))
    store.save("x", {"a": tied, "b": tied})
    target = {name: torch.zeros(3, dtype=torch.bfloat16) for name in "ab"}

    store.load_into("x", target, cast=True, assign=True)

    assert target["a"] is target["b"]
    assert isinstance(target["a"], torch.nn.Parameter)


def test_a_parameter_becomes_whole_numbers_without_a_gradient(store: Store) -> None:
    store.save("x", {"p": torch.nn.Parameter(torch.tensor([1.5, -2.5]))})
    target = {"p": torch.zeros(2, dtype=torch.int64)}

    store.load_into("x", target, cast=True, assign=True)

    assert target["p"].tolist() == [1, -2]
    assert not target["p"].requires_grad


@needs_torch("float4_e2m1fn_x2")
@pytest.mark.parametrize("assign", [False, True])
def test_what_torch_cannot_convert_is_refused_before_anything_changes(store: Store, assign: bool) -> None:
    saved = {"a": noise(4), "w": torch.zeros(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)}
    target = {"a": torch.zeros(4), "w": torch.zeros(4)}

    assert problems_of(store, saved, target, cast=True, assign=assign) == [
        "w: torch.float32 in the target, torch.float4_e2m1fn_x2 in the snapshot, which torch cannot convert;"
        " give the target that dtype"
    ]


def test_tied_tensors_are_filled_together(store: Store) -> None:
    shared = noise(4)
    store.save("x", {"a": shared, "b": shared, "part": shared[1:3]})
    memory = torch.zeros(4)
    target = {"a": memory, "b": memory, "part": memory[1:3]}

    store.load_into("x", target)

    assert torch.equal(memory, shared)


def test_tied_tensors_fit_a_target_where_they_are_apart(store: Store) -> None:
    shared = noise(4)
    store.save("x", {"a": shared, "b": shared})
    target = {"a": torch.zeros(4), "b": torch.zeros(4)}

    store.load_into("x", target)

    assert torch.equal(target["a"], shared)
    assert torch.equal(target["b"], shared)


def test_equal_values_that_were_apart_fit_a_target_where_they_are_tied(store: Store) -> None:
    store.save("x", {"a": noise(4), "b": noise(4)})
    memory = torch.zeros(4)

    store.load_into("x", {"a": memory, "b": memory})

    assert torch.equal(memory, noise(4))


@pytest.mark.parametrize("step", [1, -1])
def test_different_values_for_one_and_the_same_memory_are_refused(store: Store, step: int) -> None:
    saved = {"a": noise(4, 2), "b": noise(4, 2, seed=1)}
    # Once with the strides that were saved, once with others.
    memory = torch.zeros(4, 2) if step == 1 else torch.zeros(2, 4).t()

    assert problems_of(store, saved, {"a": memory, "b": memory}) == [
        "b: the target shares its memory with a, and the snapshot has different values for them"
    ]


def test_a_part_of_the_target_s_memory_that_was_saved_apart_is_refused(store: Store) -> None:
    memory = torch.zeros(4)

    assert problems_of(store, {"a": noise(4), "b": noise(2)}, {"a": memory, "b": memory[1:3]}) == [
        "b: the target shares memory with a, and the snapshot keeps them separate; clone() one of them"
    ]


def test_views_that_interleave_without_sharing_an_item_are_no_conflict(store: Store) -> None:
    saved = {"even": noise(4), "odd": noise(4, seed=1), "left": noise(3, 2), "right": noise(3, 2, seed=1)}
    store.save("x", saved)
    line, square = torch.zeros(8), torch.zeros(3, 4)

    store.load_into("x", {"even": line[::2], "odd": line[1::2], "left": square[:, :2], "right": square[:, 2:]})

    assert torch.equal(line[1::2], saved["odd"])
    assert torch.equal(square, torch.cat([saved["left"], saved["right"]], 1))


def test_a_target_whose_memory_was_freed_gets_it_back(store: Store) -> None:
    store.save("x", {"w": torch.arange(12.0).reshape(3, 4)})
    target = torch.zeros(3, 4)
    free_storage(target)

    store.load_into("x", {"w": target})

    assert torch.equal(target, torch.arange(12.0).reshape(3, 4))


def test_a_target_whose_memory_was_freed_stays_so_if_something_else_does_not_fit(store: Store) -> None:
    store.save("x", {"w": torch.arange(12.0), "v": torch.zeros(1)})
    target = torch.zeros(12)
    free_storage(target)

    with pytest.raises(Mismatch):
        store.load_into("x", {"w": target, "v": torch.zeros(2)})

    assert not is_allocated(target)


@needs_torch("float4_e2m1fn_x2")
def test_a_target_whose_memory_was_freed_is_freed_again_if_nothing_can_be_copied() -> None:
    target = torch.zeros(4)
    free_storage(target)

    with pytest.raises(NotImplementedError):
        copy_into(target, torch.zeros(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2), what="w")

    assert not is_allocated(target)


def test_a_target_whose_memory_was_made_smaller_is_filled_and_nothing_beyond_it(store: Store) -> None:
    saved = noise(1000)
    store.save("x", {"w": saved})
    target = torch.zeros(1000)
    target.untyped_storage().resize_(100)

    store.load_into("x", {"w": target})

    assert torch.equal(target, saved)
    assert target.untyped_storage().nbytes() == 4000


def test_each_entry_is_looked_up_once(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = {str(number): noise(4, seed=number) for number in range(10)}
    store.save("x", tree)
    asked: list[int] = []
    find = Opened.entry

    def note(opened: Opened, number: int) -> Entry:
        asked.append(number)
        return find(opened, number)

    monkeypatch.setattr(Opened, "entry", note)
    target = {name: torch.zeros(4) for name in tree}

    store.load_into("x", target)

    assert asked == list(range(10))
    assert all(torch.equal(target[name], tree[name]) for name in tree)
