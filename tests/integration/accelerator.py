"""The fake accelerator of the checks: importing this installs it, so only a process of its own may."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from holdfast.digest import Digest, hash_bytes
from holdfast.tensors.device_digest.pieces import DevicePiece, Part, Runs, digest_by_tree
from holdfast.tensors.device_digest.side_stream import HostLink
from tests.kit import fake_accelerator

# At once: torch does not know the name of a device before it has it.
ACCELERATOR, _LIBRARIES = fake_accelerator.install()
DEVICE: Final = torch.device(fake_accelerator.NAME, 0)


class QuickKernels:
    """Hashes in the memory of the fake device by the blake3 package: every operation of the device takes its time."""

    alignment = 1
    leaf_scratch_bytes = 1

    def hash_parts(self, parts: Sequence[Part], link: HostLink) -> torch.Tensor:
        assert all(part.is_piece for part in parts), "no tensor here is so large that it has several parts"
        memories = [fake_accelerator.look_into(part.data.read(part.start, part.stop)) for part in parts]
        digests = b"".join(hash_bytes(memory.numpy().tobytes()) for memory in memories)
        return torch.frombuffer(bytearray(digests), dtype=torch.int32).view(-1, 8).to(DEVICE)

    def join_runs(self, nodes: torch.Tensor, runs: Runs, link: HostLink) -> torch.Tensor:
        raise AssertionError("there is nothing to join")


def digest_quickly(pieces: Sequence[DevicePiece]) -> list[Digest]:
    """Hash pieces by the kernels above, as the backend of the device does by its own."""
    return digest_by_tree(pieces, QuickKernels(), DEVICE)
