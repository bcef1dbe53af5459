"""Tensors that are read into memory which the next ones use again."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import holdfast
from holdfast.objects.blocks import new_block
from holdfast.snapshot.lazy import Snapshot
from holdfast.snapshot.load import ReusedMemory, TensorReader

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn]


def save(folder: Path, tree: dict[str, torch.Tensor]) -> Snapshot:
    store = holdfast.open(folder, create=True)
    store.save("x", tree)
    return store["x"]


def test_tensors_of_every_kind_are_the_saved_ones_and_in_the_given_memory(tmp_path: Path) -> None:
    raw = torch.arange(48, dtype=torch.uint8) % 2
    tree = {str(dtype).removeprefix("torch."): raw.view(dtype).clone() for dtype in DTYPES}
    tree |= {"empty": torch.empty(0, 3), "number": torch.tensor(3.5), "large": torch.randn(1000, 700)}
    block = new_block(8 << 20)
    start = torch.frombuffer(block, dtype=torch.uint8).data_ptr()

    names = list(tree)
    found = TensorReader(save(tmp_path, tree).open()).read(names, ReusedMemory(block))

    for name, tensor in zip(names, found, strict=True):
        assert (tensor.dtype, tensor.shape) == (tree[name].dtype, tree[name].shape)
        assert torch.equal(tensor.flatten().view(torch.uint8), tree[name].flatten().view(torch.uint8))
        assert not tensor.numel() or start <= tensor.data_ptr() < start + block.nbytes


def test_other_tensors_are_read_into_their_own_memory(tmp_path: Path) -> None:
    base = torch.arange(12.0).reshape(3, 4)
    tree = {"transposed": base.T, "base": base, "conj": torch.ones(2, dtype=torch.complex64).conj()}

    found = TensorReader(save(tmp_path, tree).open()).read(["transposed", "conj"], ReusedMemory(new_block(4096)))

    assert torch.equal(found[0], base.T)
    assert torch.equal(found[1], tree["conj"])


def test_memory_that_is_full_is_not_exceeded_and_can_be_cleared(tmp_path: Path) -> None:
    tree = {"a": torch.randn(1024), "b": torch.randn(1024)}
    reader, memory = TensorReader(save(tmp_path, tree).open()), ReusedMemory(new_block(6000))

    a, b = reader.read(["a", "b"], memory)
    assert torch.equal(a, tree["a"])
    assert torch.equal(b, tree["b"])

    memory.clear()
    (again,) = reader.read(["b"], memory)
    assert again.data_ptr() == a.data_ptr()
    assert torch.equal(a, tree["b"])  # the memory of the first read


def test_memory_ends_at_its_end_whatever_the_alignment() -> None:
    memory = ReusedMemory(new_block(4096)[:100])

    first, second, third = memory.take(70), memory.take(30), memory.take(1)

    assert len({first.untyped_storage().data_ptr(), second.untyped_storage().data_ptr()}) == 2
    assert [each.numel() for each in (first, second, third)] == [70, 30, 1]


def test_a_name_that_does_not_exist_is_said(tmp_path: Path) -> None:
    reader = TensorReader(save(tmp_path, {"a": torch.ones(2)}).open())

    with pytest.raises(holdfast.NotFound, match="no leaf 'b'"):
        reader.read(["b"], ReusedMemory(new_block(4096)))
