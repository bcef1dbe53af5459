"""BLAKE3 in plain torch operations: counters, rotations, and lanes that end before others."""

from __future__ import annotations

import pytest
import torch

from holdfast.tensors.device_digest.torch_ops import TorchKernels, _rotate
from tests.kit import device_digests
from tests.kit.device_digests import CPU


def test_counters_have_64_bits() -> None:
    device_digests.check_far_leaf(TorchKernels(CPU))


@pytest.mark.parametrize("bits", [7, 8, 12, 16])
def test_words_are_rotated_without_their_sign(bits: int) -> None:
    values = [0, 1, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0xDEADBEEF]
    words = torch.tensor(values, dtype=torch.int64).to(torch.int32)

    _rotate(words, bits, torch.empty_like(words))

    assert [word & 0xFFFFFFFF for word in words.tolist()] == [
        (value >> bits | value << (32 - bits)) & 0xFFFFFFFF for value in values
    ]


@pytest.mark.parametrize("lengths", [[64, 65], [1024, 64, 1023], [0, 0], [63, 1, 64]], ids=str)
def test_a_lane_that_ends_first_keeps_its_value(lengths: list[int]) -> None:
    device_digests.check_pieces("torch", 0, [(0, length) for length in lengths])
