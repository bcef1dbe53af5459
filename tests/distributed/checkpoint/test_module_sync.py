"""Modules are made equal on all ranks, or all ranks raise an error that lists the differences."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.utils import _sync_params_and_buffers

from holdfast.distributed.checkpoint.module_sync import (
    _list_states,
    sync_module_states,
    sync_tensors,
    verify_shapes_across_ranks,
)
from holdfast.distributed.talk.sending import Sender
from holdfast.errors import Mismatch, RankError, Unsupported
from tests.distributed.conftest import World
from tests.kit.hooking import hooked
from tests.kit.thinning import pair_up

SIZES = [1, 2, 3]


class Mixed(torch.nn.Module):
    """Has all that may be in the way: ties, dtypes that no backend sends, other strides, a scalar, nothing at all."""

    def __init__(self, value: int) -> None:
        super().__init__()
        self.one = torch.nn.Linear(3, 4)
        self.two = torch.nn.Linear(3, 4, bias=False)
        self.two.weight = self.one.weight
        self.turned = torch.nn.Parameter(torch.zeros(4, 3).t())
        self.register_buffer("small", torch.zeros(5, dtype=torch.float8_e4m3fn))
        self.register_buffer("scalar", torch.zeros((), dtype=torch.int64))
        self.register_buffer("empty", torch.zeros(0))
        self.register_buffer("flags", torch.zeros(3, dtype=torch.bool))
        with torch.no_grad():
            for tensor in [*self.parameters(), *self.buffers()]:
                tensor.copy_((torch.arange(tensor.numel()) + value).view(tensor.shape) % 7)


def values(module: torch.nn.Module) -> dict[str, list[Any]]:
    return {name: tensor.double().tolist() for name, tensor in module.state_dict().items()}


def sync(rank: int, options: dict[str, Any]) -> tuple[Any, Any]:
    module = Mixed(value=10 * rank)
    versions = [parameter._version for parameter in module.parameters()]
    sync_module_states(module, **options)
    is_told = [parameter._version for parameter in module.parameters()] != versions
    return values(module), is_told


@pytest.mark.parametrize(("bucket_bytes", "size"), pair_up([1, 7, 1 << 20], SIZES))
def test_all_ranks_get_what_one_has(world: World, size: int, bucket_bytes: int) -> None:
    src = size - 1
    found = world(size)(sync, {"src": src, "bucket_bytes": bucket_bytes})
    assert all(each == values(Mixed(10 * src)) for each, _ in found)
    assert [is_told for _, is_told in found] == [rank != src for rank in range(size)]


def sync_some(rank: int) -> tuple[dict[str, Any], dict[str, Any]]:
    first, second = Mixed(10 * rank), Mixed(10 * rank)
    sync_module_states(first, buffers=False)
    sync_module_states(second, ignore=["scalar", "two.weight", second.turned])
    return values(first), values(second)


def test_buffers_may_be_left_out_and_so_may_what_is_named(world: World) -> None:
    mine, theirs = values(Mixed(10)), values(Mixed(0))
    parameters = {name for name, _ in Mixed(0).named_parameters(remove_duplicate=False)}

    first, second = world(2)(sync_some)[1]

    assert first == {name: theirs[name] if name in parameters else mine[name] for name in mine}
    ignored = {"scalar", "one.weight", "two.weight", "turned"}
    assert second == {name: mine[name] if name in ignored else theirs[name] for name in mine}


def test_a_name_to_ignore_that_is_not_there_is_warned_of() -> None:
    with pytest.warns(UserWarning, match=r"ignore: no tensor 'wieght' in a Linear; did you mean 'weight'\?"):
        sync_module_states(torch.nn.Linear(2, 2), ignore=["wieght"])


def test_what_is_ignored_may_be_anything_that_contains_names() -> None:
    class Biases:
        def __contains__(self, name: object) -> bool:
            return isinstance(name, str) and name.endswith("bias")

    module = torch.nn.Linear(2, 2)

    assert list(_list_states(module, Biases(), buffers=True)) == ["weight"]
    assert list(_list_states(module, {"weight"}, buffers=True)) == ["bias"]


def make_list(rank: int) -> list[torch.Tensor]:
    """Make tensors of any kind that torch sends: more than ten, so that their order is not that of their names."""
    few = [torch.full((2, each), 10.0 * rank + each) for each in range(1, 12)]
    rest = [torch.tensor(rank), torch.arange(4) + rank, torch.nn.Parameter(torch.ones(3) * rank), torch.zeros(0)]
    whole = torch.arange(12.0) + 100 * rank
    return [*few, *rest, whole[2:5], whole.view(3, 4)[:, 1].contiguous()]


def sync_list(rank: int, src: int, by_name: bool) -> list[list[Any]]:
    ours, theirs = make_list(rank), [each.detach() for each in make_list(rank)]
    sync_tensors({f"t{number}": each for number, each in enumerate(ours)} if by_name else ours, src=src)
    assert dist.group.WORLD is not None
    _sync_params_and_buffers(dist.group.WORLD, theirs, 1 << 20, src)
    return [[each.tolist() for each in tensors] for tensors in (ours, theirs)]


@pytest.mark.parametrize(("src", "by_name"), [(0, False), (1, True)])
def test_a_list_of_tensors_is_sent_as_torch_sends_it(world: World, src: int, by_name: bool) -> None:
    wanted = [each.tolist() for each in make_list(src)]

    for ours, theirs in world(2)(sync_list, src, by_name):
        assert ours == theirs == wanted


def sync_unequal_list(rank: int) -> tuple[str, bool]:
    tensors = [torch.zeros(2), torch.zeros(3 + rank)]
    try:
        sync_tensors(tensors, src=1)
    except Mismatch as error:
        return str(error), all(not each.any() for each in tensors)
    return "", False


def test_lists_that_differ_between_ranks_are_refused_on_all_ranks_and_not_changed(world: World) -> None:
    for text, is_unchanged in world(2)(sync_unequal_list):
        assert "[1]: float32 [3] cpu on rank 0, float32 [4] cpu on rank 1" in text
        assert is_unchanged


def test_tensors_need_no_names_to_be_compared() -> None:
    verify_shapes_across_ranks([torch.ones(2), torch.ones(3)])
    mixed: list[torch.Tensor | tuple[str, torch.Tensor]] = [torch.ones(2), ("b", torch.ones(3))]
    verify_shapes_across_ranks(iter(mixed))


def compare_unnamed(rank: int) -> str:
    try:
        verify_shapes_across_ranks([torch.ones(2), torch.ones(3 + rank)])
    except Mismatch as error:
        return str(error)
    return "alike"


def test_tensors_without_names_are_named_by_their_positions(world: World) -> None:
    outcome = world(2)(compare_unnamed)

    assert outcome[0] == outcome[1]
    assert "[1]: float32 [3] on rank 0, float32 [4] on rank 1" in outcome[0]


def test_what_cannot_be_sent_is_named() -> None:
    module = torch.nn.Linear(2, 2, device="meta")
    with pytest.raises(Unsupported, match="weight: a Parameter cannot be copied"):
        sync_module_states(module)


def differ(rank: int) -> tuple[str, bool]:
    first, second = torch.nn.Linear(2, 3 + (rank == 1)), torch.nn.Linear(2, 2)
    module = torch.nn.Sequential(first, second.double() if rank == 2 else second)
    if rank == 2:
        module.register_buffer("more", torch.zeros(1))
    before = first.weight.tolist()
    text = ""
    for call in (verify_shapes_across_ranks, sync_module_states):
        try:
            call(module)
        except Mismatch as error:
            text = str(error)
    return text, before == first.weight.tolist()


def test_every_rank_is_told_which_tensors_differ_and_where(world: World) -> None:
    found = world(3)(differ)
    assert len({text for text, _ in found}) == 1
    assert all(is_same for _, is_same in found)
    lines = found[0][0].splitlines()
    assert lines[0] == "the ranks do not have the same tensors; build the same module on all ranks:"
    assert "  0.weight: float32 [3, 2] cpu on ranks 0 and 2, float32 [4, 2] cpu on rank 1" in lines
    assert "  1.bias: float32 [2] cpu on ranks 0 and 1, float64 [2] cpu on rank 2" in lines
    assert "  more: nothing on ranks 0 and 1, float32 [1] cpu on rank 2" in lines


def compare(rank: int) -> str:
    tensors = {"a": torch.zeros(2), "b": torch.zeros(2 + (rank == 1))}
    verify_shapes_across_ranks({"a": tensors["a"]})
    try:
        verify_shapes_across_ranks(tensors.items())
    except Mismatch as error:
        return str(error.problems)
    return ""


def test_tensors_can_be_given_by_name(world: World) -> None:
    assert world(2)(compare) == ["('b: float32 [2] on rank 0, float32 [3] on rank 1',)"] * 2


def fail_at_sending(rank: int) -> tuple[str, str]:
    def refuse(self: Sender, parts: Sequence[torch.Tensor], device: torch.device, src: int) -> None:
        raise MemoryError("no room for a bucket")

    try:
        with hooked(Sender, "_send_bucket", refuse) if rank == 1 else nullcontext():
            sync_module_states(torch.nn.Linear(2, 2))
    except RankError as error:
        if rank == 1:
            os._exit(0)  # the group waits for what it has not taken part in
        return error.step, error.failures[1].type_name
    return "", ""


def test_a_rank_that_fails_while_others_send_is_named_at_once(world: World) -> None:
    assert world(2)(fail_at_sending, lost=(1,))[0] == ("sync", "MemoryError")


def sync_subgroup(rank: int) -> dict[str, Any]:
    group = dist.new_group([0, 2])
    module = Mixed(10 * rank)
    if rank != 1:
        sync_module_states(module, process_group=group, src=1)
    return values(module)


def test_a_group_of_some_ranks_leaves_the_others_alone(world: World) -> None:
    assert world(3)(sync_subgroup) == [values(Mixed(20)), values(Mixed(10)), values(Mixed(20))]


def sync_alone(rank: int) -> bool:
    module = torch.nn.Linear(2 + rank, 2)
    before = values(module)
    verify_shapes_across_ranks(module, collective=False)
    sync_module_states(module, collective=False)
    return values(module) == before


def test_a_process_may_act_alone_beside_others(world: World) -> None:
    assert world(2)(sync_alone) == [True, True]
