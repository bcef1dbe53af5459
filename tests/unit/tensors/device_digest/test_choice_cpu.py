"""The CPU hashes a piece part by part, so that a copy to the host is bounded."""

from __future__ import annotations

import pytest
import torch

from holdfast.digest import hash_bytes
from holdfast.tensors.device_digest import pieces
from holdfast.tensors.device_digest.choice import digest_on_cpu
from holdfast.tensors.device_digest.pieces import DeviceBytes, DevicePiece


def test_a_long_piece_is_read_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "PART_BYTES", 2048)
    memory = torch.arange(5000, dtype=torch.int32).view(torch.uint8)
    read: list[tuple[int, int]] = []
    whole = DeviceBytes.read

    def note(self: DeviceBytes, start: int, stop: int) -> torch.Tensor:
        read.append((start, stop))
        return whole(self, start, stop)

    monkeypatch.setattr(DeviceBytes, "read", note)

    found = digest_on_cpu([DevicePiece(DeviceBytes.from_memory(memory), 7, 5007)])

    assert found == [hash_bytes(memory[7:5007].numpy().tobytes())]
    assert read == [(7, 2055), (2055, 4103), (4103, 5007)]
