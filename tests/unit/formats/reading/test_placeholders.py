"""Placeholders have the geometry of tensors in files, and take no memory however large they are."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from holdfast.errors import BadFile, TooLarge
from holdfast.formats.reading.found import Placeholders, TensorForm, make_tensor


@dataclass(frozen=True)
class Nothing:
    """Bytes that are never read."""

    size_bytes: int
    file: str = "x"

    def read(self, start: int, stop: int) -> memoryview:
        raise AssertionError("a placeholder was read")


def test_tensors_of_one_storage_share_it_and_others_do_not() -> None:
    placeholders = Placeholders()
    one, two = placeholders.add_storage(Nothing(64)), placeholders.add_storage(Nothing(64))
    form = TensorForm(torch.float32, (4, 2), (1, 4), 8)

    first, second = (make_tensor(stored, form, what="w") for stored in (one, one))
    other = make_tensor(two, form, what="w")

    assert (first.shape, first.stride(), first.storage_offset()) == ((4, 2), (1, 4), 8)
    assert first.untyped_storage()._cdata == second.untyped_storage()._cdata != other.untyped_storage()._cdata
    assert placeholders.find(first) is one
    assert placeholders.find(other) is two
    assert placeholders.find(torch.ones(1)) is None


def test_a_tensor_larger_than_all_memory_needs_none() -> None:
    placeholders = Placeholders()

    stored = placeholders.add_storage(Nothing(1 << 42))

    assert make_tensor(stored, TensorForm(torch.uint8, (1 << 42,), (1,)), what="w").numel() == 1 << 42


def test_a_storage_beyond_the_address_space_is_refused() -> None:
    with pytest.raises(TooLarge):
        Placeholders().add_storage(Nothing(1 << 60))


@pytest.mark.parametrize(
    "form",
    [
        TensorForm(torch.float32, (17,), (1,)),
        TensorForm(torch.float32, (4,), (1,), 13),
        TensorForm(torch.float32, (4,), (1,), -1),
        TensorForm(torch.float32, (2, 2), (1,)),
        TensorForm(torch.float32, (-1,), (1,)),
        TensorForm(torch.float32, (1 << 59, 1 << 59), (1 << 59, 1)),
        TensorForm(torch.float32, (1,) * 65, (1,) * 65),
        TensorForm(torch.int64, (2,), (1,), requires_grad=True),
    ],
)
def test_a_tensor_that_does_not_fit_its_storage_is_refused(form: TensorForm) -> None:
    placeholders = Placeholders()

    with pytest.raises(BadFile, match=r"^w "):
        make_tensor(placeholders.add_storage(Nothing(64)), form, what="w")


def test_an_empty_tensor_fits_any_storage() -> None:
    stored = Placeholders().add_storage(Nothing(0))

    assert make_tensor(stored, TensorForm(torch.float32, (0, 4), (4, 1), 7), what="w").shape == (0, 4)
