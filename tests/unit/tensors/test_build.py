"""Tensors are built in memory that is bounded by the stored bytes; each byte is read once, none out of bounds."""

from __future__ import annotations

import pytest
import torch

from holdfast.errors import Corrupt, Unsupported
from holdfast.repo.format.entry import Entry
from holdfast.tensors.build import MemoryBlock, apply_flags, build_tensor, plan_block
from holdfast.tensors.spec import TensorSpec
from tests.kit.tensor_planning import plan_sources
from tests.kit.tensors import ORDINARY, assert_same_tensor, group_by_kind

CPU = torch.device("cpu")


def spec_of(shape: tuple[int, ...], stride: tuple[int, ...], **more: object) -> TensorSpec:
    return TensorSpec(torch.float32, shape, stride, **more)  # type: ignore[arg-type]  # what tests pass fits


def entry(size_bytes: int, name: str = "x", alias: int = 0) -> Entry:
    return Entry(name, size_bytes, (), alias=alias)


def filled(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return what becomes of tensors by way of sources, a block and memory."""
    sources = plan_sources([(str(number), tensor) for number, tensor in enumerate(tensors)])
    block = plan_block([(entry(each.size_bytes, each.name), each.tensor_spec) for each in sources], what="x")
    for fill in block.fills:
        fill.buffer[:] = sources[int(fill.entry.name)].read(0, fill.entry.size_bytes)
    memory = block.finish()
    return [build_tensor(each.tensor_spec, memory, what="x") for each in sources]


@pytest.mark.parametrize("kind", [kind for kind in group_by_kind(ORDINARY) if kind != "grad"])
def test_every_ordinary_tensor_is_built_as_it_was(kind: str) -> None:
    for make in group_by_kind(ORDINARY)[kind]:
        tensor = make()
        (found,) = filled([tensor])
        assert_same_tensor(found, tensor)


def test_tied_tensors_are_read_once_and_share_memory() -> None:
    tensor = torch.arange(4.0)
    sources = plan_sources([("a", tensor), ("b", tensor.view(2, 2))])
    block = plan_block([(entry(16, each.name), each.tensor_spec) for each in sources], what="x")
    assert len(block.fills) == 1
    one, other = filled([tensor, tensor.view(2, 2)])
    one[3] = 9
    assert other[1, 1] == 9


def test_memory_between_tensors_that_is_nobodys_is_not_taken() -> None:
    ats = (1 << 40, 0, (1 << 40) + 8, (1 << 50) + 4)
    block = plan_block([(entry(12, str(at)), spec_of((3,), (1,), at=at)) for at in ats], what="x")
    assert block.offsets == (16, 0, 24, 36)
    assert block.memory.numel() == 48


def test_the_memory_of_a_whole_group_is_laid_out_as_it_was_planned() -> None:
    base = torch.arange(1000, dtype=torch.uint8)
    views = [base[3:9], base[100:132].view(torch.int32), base[7:20], base[500:501], base[501:502], base[88:104]]
    sources = plan_sources([(str(number), view) for number, view in enumerate(views)])
    block = plan_block([(entry(each.size_bytes, each.name), each.tensor_spec) for each in sources], what="x")
    assert block.offsets == tuple(each.tensor_spec.at for each in sources)


@pytest.mark.parametrize(
    "other",
    [spec_of((2,), (5,), packed=True), spec_of((3,), (2,), packed=True), spec_of((3,), (1,))],
    ids=["another stride", "another shape", "not packed"],
)
def test_packed_tensors_that_share_memory_must_be_alike(other: TensorSpec) -> None:
    members = [(entry(8, "a"), spec_of((2,), (4,), packed=True)), (entry(8, "b"), other)]
    with pytest.raises(Corrupt, match="tensors that share memory do not agree on it"):
        plan_block(members, what="x")


def test_items_that_lie_far_apart_cost_no_more_than_they_are() -> None:
    block: MemoryBlock = plan_block([(entry(8), spec_of((2,), (1 << 32,), packed=True))], what="x")
    for fill in block.fills:
        fill.buffer[:] = torch.tensor([1.0, 2.0]).numpy().tobytes()
    tensor = build_tensor(spec_of((2,), (1 << 32,), packed=True), block.finish(), what="x")
    assert tensor.tolist() == [1.0, 2.0]
    assert tensor.untyped_storage().nbytes() == ((1 << 32) + 1) * 4


def test_items_that_lie_further_apart_than_any_memory_are_refused() -> None:
    spec = TensorSpec(torch.complex128, (8,), ((1 << 60) - 1,), packed=True)
    with pytest.raises(
        Corrupt, match=r"^x: the gaps between its items are too large: \d+ bytes of memory cannot be allocated"
    ):
        plan_block([(entry(128), spec)], what="x")


def test_integers_cannot_require_a_gradient() -> None:
    spec = TensorSpec(torch.int32, (1,), (1,), requires_grad=True)
    with pytest.raises(Corrupt, match=r"^x cannot require a gradient"):
        build_tensor(spec, torch.zeros(4, dtype=torch.uint8), what="x")


def test_a_quantizer_for_another_shape_is_refused() -> None:
    quantizer = ["per_channel", 1, "float64", "00" * 16, "int64", "00" * 16]
    spec = TensorSpec(torch.quint8, (2, 3), (3, 1), quantizer=quantizer)
    with pytest.raises(Corrupt, match=r"^x has a quantizer for another shape"):
        build_tensor(spec, torch.zeros(6, dtype=torch.uint8), what="x")


def test_quantised_tensors_are_not_made_where_torch_has_none() -> None:
    spec = TensorSpec(torch.quint8, (2,), (1,), quantizer=["per_tensor", "0x1p0", 0])
    with pytest.raises(Unsupported, match=r"^x: torch has no quantised tensors on the meta device"):
        build_tensor(spec, torch.zeros(2, dtype=torch.uint8, device="meta"), what="x")


def test_roles_are_put_on() -> None:
    assert isinstance(apply_flags(torch.ones(1), spec_of((1,), (1,), role="parameter")), torch.nn.Parameter)
    passing = apply_flags(torch.ones(1), spec_of((1,), (1,), role="passing buffer"))
    assert isinstance(passing, torch.nn.Buffer)
    assert not passing.persistent
