"""Storages are allocated and freed while tensors keep their shape, and never if another tensor uses them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Final

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor

from holdfast.errors import Mismatch, Unsupported
from holdfast.tensors.storage import alloc_storage, free_storage, is_allocated, tensor_bytes

ALL_DTYPES: Final = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)


def empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    with warnings.catch_warnings():
        # Some dtypes are experimental, others on their way out, and torch says so.
        warnings.simplefilter("ignore", UserWarning)
        return torch.empty(shape, dtype=dtype)


def test_all_dtypes_of_torch_are_tried() -> None:
    assert len(ALL_DTYPES) >= 44


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(3, 5), ()], ids=str)
def test_a_storage_of_any_dtype_is_freed_and_given_back_at_its_size(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = empty(shape, dtype)
    size_bytes = tensor.untyped_storage().nbytes()

    assert free_storage(tensor)
    assert (tensor.untyped_storage().nbytes(), is_allocated(tensor)) == (0, False)
    assert alloc_storage(tensor, shape)
    assert (tensor.untyped_storage().nbytes(), is_allocated(tensor)) == (size_bytes, True)
    assert tensor.shape == shape


def test_freeing_and_allocating_again_changes_nothing() -> None:
    tensor = torch.ones(4)

    assert not alloc_storage(tensor, (4,))
    assert torch.equal(tensor, torch.ones(4))
    free_storage(tensor)
    assert not free_storage(tensor)


def test_all_tensors_over_a_storage_see_it_go_and_come_back() -> None:
    tensor = torch.ones(2, 3)
    row = tensor[1]

    free_storage(tensor)
    assert not is_allocated(row)
    alloc_storage(tensor, (2, 3))
    tensor.fill_(7)

    assert row.tolist() == [7, 7, 7]


def test_a_parameter_is_freed_and_filled_again() -> None:
    parameter = torch.nn.Parameter(torch.ones(3))

    free_storage(parameter)
    alloc_storage(parameter, parameter.shape)
    with torch.no_grad():
        parameter.fill_(2)

    assert parameter.tolist() == [2, 2, 2]


def test_a_storage_may_be_allocated_through_a_part_of_it() -> None:
    tensor = torch.ones(4)
    part = tensor[2:]
    free_storage(tensor)

    alloc_storage(part, (4,))

    assert tensor.untyped_storage().nbytes() == 16


def test_a_view_of_everything_may_be_freed() -> None:
    tensor = torch.ones(2, 3)

    assert free_storage(tensor.t())
    assert not is_allocated(tensor)


def test_a_view_that_starts_later_is_not_freed() -> None:
    tensor = torch.ones(4)

    with pytest.raises(
        Unsupported,
        match=r"^a Tensor of torch\.float32 starts 1 elements into a storage that others may use; free the tensor",
    ):
        free_storage(tensor[1:])
    assert torch.equal(tensor, torch.ones(4))


@pytest.mark.parametrize(
    ("cut", "held_bytes"),
    [
        (lambda whole: whole[:2], 8),
        (lambda whole: whole[::2], 12),
        (lambda whole: whole[:1].expand(5), 20),
        (lambda whole: whole.resize_(2), 8),
        (lambda whole: whole[:0], 0),
    ],
    ids=["start", "every second", "expanded", "shrunk", "nothing"],
)
def test_a_tensor_that_is_not_its_whole_storage_is_not_freed(
    cut: Callable[[torch.Tensor], torch.Tensor], held_bytes: int
) -> None:
    part = cut(torch.ones(5))

    with pytest.raises(Unsupported, match=rf"is {held_bytes} bytes of a storage of 20, which others may use; free the"):
        free_storage(part)
    assert part.untyped_storage().nbytes() == 20


def test_a_storage_of_another_size_is_not_replaced() -> None:
    tensor = torch.ones(4)

    with pytest.raises(Mismatch, match=r"has 16 bytes, not 0 or the 32 of shape \(8,\); free it first$"):
        alloc_storage(tensor, (8,))
    assert torch.equal(tensor, torch.ones(4))


def test_a_storage_that_the_tensor_would_read_beyond_is_not_made() -> None:
    tensor = torch.ones(4)
    free_storage(tensor)

    with pytest.raises(Mismatch, match=r"needs 16 bytes of storage, more than the 12 of shape \(3,\); pass the shape"):
        alloc_storage(tensor, (3,))
    assert not is_allocated(tensor)


def test_memory_of_somebody_else_is_not_resized() -> None:
    array = np.ones(3)

    with pytest.raises(
        Unsupported, match=r"^the memory of a Tensor of torch\.float64 belongs to numpy, a file or another library"
    ):
        free_storage(torch.from_numpy(array))


def test_an_empty_tensor_has_nothing_to_free_or_allocate() -> None:
    tensor = torch.empty(0, 3)

    assert not is_allocated(tensor)
    assert not free_storage(tensor)
    assert not alloc_storage(tensor, (0, 3))


def test_tensors_without_data_have_no_memory_and_may_be_resized() -> None:
    with FakeTensorMode():
        fake = torch.empty(3)
    for tensor in (torch.empty(3, device="meta"), fake):
        assert not is_allocated(tensor)
        assert free_storage(tensor)
        assert alloc_storage(tensor, (3,))


def make_two() -> torch.Tensor:
    two: torch.Tensor = TwoTensor(torch.ones(2), torch.ones(2))  # type: ignore[no-untyped-call]  # torch has no types here
    return two


@pytest.mark.parametrize(
    ("tensor", "text"),
    [
        (
            torch.eye(2).to_sparse(),
            r"^a Tensor of layout torch\.sparse_coo of torch\.float32 has no storage of its own; use",
        ),
        (make_two(), r"^a TwoTensor of torch\.float32 has no storage of its own; use the tensors that it is made of$"),
        (
            torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged),
            r"^a NestedTensor of .* has no storage of its",
        ),
        (torch.nn.UninitializedParameter(), r"^an UninitializedParameter has no storage yet; run its module once$"),
        (torch.nn.UninitializedBuffer(), r"^an UninitializedBuffer has no storage yet; run its module once$"),
    ],
    ids=["sparse", "wrapper", "jagged", "lazy parameter", "lazy buffer"],
)
def test_tensors_without_a_storage_of_their_own_are_refused(tensor: torch.Tensor, text: str) -> None:
    for act in (is_allocated, free_storage, lambda tensor: alloc_storage(tensor, (2,))):
        with pytest.raises(Unsupported, match=text):
            act(tensor)


def test_the_bytes_of_a_tensor_are_its_memory_from_the_first_item_on() -> None:
    tensor = torch.arange(10, dtype=torch.int16)[3:]

    data = tensor_bytes(tensor, 4)
    data[:] = b"\x01\x00\x02\x00"

    assert (data.nbytes, data.format, data.readonly) == (4, "B", False)
    assert tensor.tolist() == [1, 2, 5, 6, 7, 8, 9]


def test_bytes_beyond_the_memory_of_a_tensor_are_never_given() -> None:
    with pytest.raises(ValueError, match="of a storage that has"):
        tensor_bytes(torch.zeros(4)[2:], 9)
