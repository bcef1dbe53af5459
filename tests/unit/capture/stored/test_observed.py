"""Observing tensors: bytes and digests, whatever the layout and dtype."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
import pytest
import torch

from holdfast.capture.stored.observed import TensorInspector, build_copy, observe
from holdfast.errors import Unsupported

BASE: Final = torch.arange(6.0).reshape(2, 3)


def test_equal_values_have_equal_digests_in_every_layout() -> None:
    strided = torch.zeros(2, 6)[:, ::2].copy_(BASE)

    assert observe(strided).digest() == observe(BASE).digest() == observe(BASE.T.contiguous().T).digest()
    assert observe(BASE.T).digest() != observe(BASE).digest()


def test_a_copy_has_the_bytes_and_the_shape_of_the_tensor() -> None:
    observed = observe(BASE.bfloat16())
    memory = np.empty(observed.data.nbytes, dtype=np.uint8)

    observed.copy(memory)

    assert torch.equal(build_copy(memory, observed.dtype, observed.shape), BASE.bfloat16())


@pytest.mark.parametrize(
    "tensor", [BASE.to_sparse(), BASE.to("meta"), torch.quantize_per_tensor(BASE, 0.1, 0, torch.qint8)]
)
def test_a_tensor_that_its_bytes_do_not_describe_is_refused(tensor: torch.Tensor) -> None:
    with pytest.raises(Unsupported):
        observe(tensor)


@pytest.mark.parametrize(
    "other", [BASE.to_sparse(), BASE.to("meta"), torch.quantize_per_tensor(BASE, 0.1, 0, torch.qint8)]
)
def test_a_reader_that_knows_ordinary_tensors_still_refuses_others(other: torch.Tensor) -> None:
    inspector = TensorInspector()
    inspector.observe(BASE)

    with pytest.raises(Unsupported):
        inspector.observe(other)


def test_a_reader_that_knows_ordinary_tensors_resolves_conjugate_and_negative_views() -> None:
    inspector, tensor = TensorInspector(), torch.tensor([1 + 2j, 3 - 4j])
    inspector.observe(tensor)
    inspector.observe(tensor.imag.clone())

    assert inspector.observe(tensor.conj()).digest() == observe(tensor.conj().resolve_conj()).digest()
    assert inspector.observe(tensor.conj().imag).digest() == observe(-tensor.imag).digest()


def test_a_lasting_tensor_is_observed_as_it_is_now() -> None:
    inspector, tensor = TensorInspector(), BASE.clone()
    first, known = inspector.observe_lasting(tensor, None)
    before = first.digest()
    tensor.data.add_(1)  # changes no version

    again, same = inspector.observe_lasting(tensor, known)

    assert same is known
    assert again.digest() == observe(BASE + 1).digest() != before


@pytest.mark.parametrize(
    "change",
    [
        lambda tensor: tensor.clone(),
        lambda tensor: tensor.reshape(3, 2),
        lambda tensor: tensor.view(torch.int32),
        lambda tensor: tensor[:1],
        torch._neg_view,
        lambda tensor: tensor.T,
    ],
)
def test_a_tensor_that_is_not_what_was_known_is_observed_anew(change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    inspector, tensor = TensorInspector(), torch.arange(6.0).reshape(2, 3)
    _, known = inspector.observe_lasting(tensor, None)
    other = change(tensor)

    found, now = inspector.observe_lasting(other, known)

    assert now is not known
    assert (found.dtype, found.shape, found.digest()) == (other.dtype, tuple(other.shape), observe(other).digest())


def test_a_storage_that_was_freed_is_not_read() -> None:
    inspector, tensor = TensorInspector(), torch.arange(6.0)
    _, known = inspector.observe_lasting(tensor, None)
    tensor.untyped_storage().resize_(0)

    with pytest.raises(ValueError, match="of a storage that has 0"):
        inspector.observe_lasting(tensor, known)
