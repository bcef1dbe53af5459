"""Pieces are cut into parts that are subtrees, and parts are grouped into batches of bounded scratch memory."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from holdfast.tensors.device_digest import pieces
from holdfast.tensors.device_digest.pieces import (
    DeviceBytes,
    DevicePiece,
    Part,
    count_parts,
    cut_pieces,
    find_addresses,
    group_parts,
)


@pytest.mark.parametrize("size", [0, 1, 2047, 2048, 2049, 4096, 10_000])
def test_parts_cover_a_piece_and_know_their_first_leaf(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "PART_BYTES", 2048)
    piece = DevicePiece(DeviceBytes.from_memory(torch.zeros(size + 3, dtype=torch.uint8)), 3, size + 3)

    parts = list(cut_pieces([piece]))

    assert len(parts) == count_parts(piece)
    assert [part.start for part in parts] == [3 + 2048 * number for number in range(len(parts))]
    assert [part.stop for part in parts[:-1]] == [part.start for part in parts[1:]]
    assert parts[-1].stop == size + 3
    assert [part.first_leaf for part in parts] == [2 * number for number in range(len(parts))]
    assert {part.is_piece for part in parts} == {len(parts) == 1}


def test_addresses_may_use_the_highest_bit() -> None:
    far = 0xFF00_0000_0020_0010
    memories: Any = [SimpleNamespace(data_ptr=lambda: far), torch.zeros(0)]

    found = find_addresses(memories)

    assert [int(each) % 2**64 for each in found] == [far, 0]
    assert (found % 16).tolist() == [0, 0]


def test_the_size_of_a_part_is_a_power_of_two_of_leaves() -> None:
    leaves = pieces.PART_BYTES // pieces.LEAF_BYTES

    assert leaves & (leaves - 1) == 0


def test_a_batch_has_bounded_scratch_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "SCRATCH_BYTES", 5000)
    whole = DeviceBytes.from_memory(torch.zeros(9000, dtype=torch.uint8))
    gappy = DeviceBytes.from_tensor(torch.zeros(2000, 2, dtype=torch.uint8)[:, 0])
    parts = [Part(whole, 0, 9000, 0, is_piece=True)] * 10 + [Part(gappy, 0, 1500, 0, is_piece=True)] * 3

    batches = list(group_parts(parts, leaf_scratch_bytes=100))

    assert [part for batch in batches for part in batch] == parts
    assert [len(batch) for batch in batches] == [5, 5, 1, 1, 1]


def test_a_part_that_needs_more_is_a_batch_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "SCRATCH_BYTES", 10)
    part = Part(DeviceBytes.from_memory(torch.zeros(9, dtype=torch.uint8)), 0, 9, 0, is_piece=True)

    assert list(group_parts([part, part], leaf_scratch_bytes=100)) == [[part], [part]]


def test_bytes_without_gaps_are_read_in_place() -> None:
    tensor = torch.arange(12.0)[3:]

    assert DeviceBytes.from_tensor(tensor).read(4, 8).data_ptr() == tensor.data_ptr() + 4
