"""A kernel that did not run, or computed something else, is noticed in the call in which it happens."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from holdfast.digest import hash_bytes
from holdfast.errors import DeviceFault
from holdfast.tensors.device_digest import pieces
from holdfast.tensors.device_digest import pieces as tree
from holdfast.tensors.device_digest.pieces import (
    DeviceBytes,
    DevicePiece,
    Part,
    Runs,
    digest_by_tree,
    make_challenge,
    make_split_challenge,
)
from holdfast.tensors.device_digest.side_stream import HostLink
from holdfast.tensors.device_digest.torch_ops import TorchKernels
from tests.kit.device_digests import CPU, make_memory

DATA = bytes(range(250)) * 40


class _Stale:
    """Kernels whose output memory keeps the nodes of the last launch that ran, as reused memory does."""

    alignment = 1
    leaf_scratch_bytes = 1

    def __init__(self) -> None:
        self._kernels = TorchKernels(CPU)
        self._last: dict[str, torch.Tensor] = {}
        self.dead: set[str] = set()
        """The launches that do nothing."""

    def hash_parts(self, parts: Sequence[Part], link: HostLink) -> torch.Tensor:
        return self._launch("hash", lambda: self._kernels.hash_parts(parts, link))

    def join_runs(self, nodes: torch.Tensor, runs: Runs, link: HostLink) -> torch.Tensor:
        return self._launch("join", lambda: self._kernels.join_runs(nodes, runs, link))

    def _launch(self, name: str, work: object) -> torch.Tensor:
        if name not in self.dead:
            self._last[name] = work()  # type: ignore[operator]  # a function
        return self._last[name].clone()


def _digest(kernels: _Stale, length: int = len(DATA)) -> list[bytes]:
    return [*digest_by_tree([DevicePiece(make_memory(DATA), 0, length)], kernels, CPU)]


def test_the_digests_of_an_earlier_call_are_not_taken_for_those_of_this_one() -> None:
    kernels = _Stale()
    assert _digest(kernels) == [hash_bytes(DATA)]

    kernels.dead.add("hash")

    # The very same bytes: even a right digest is refused if the launch did not compute it.
    with pytest.raises(DeviceFault, match="cpu returned a wrong digest of random bytes: a kernel did not run"):
        _digest(kernels)


def test_long_pieces_whose_parts_are_not_joined_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "PART_BYTES", 2048)
    kernels = _Stale()
    assert _digest(kernels) == [hash_bytes(DATA)]

    kernels.dead.add("join")

    with pytest.raises(DeviceFault):
        _digest(kernels)


def test_every_batch_has_a_challenge_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "SCRATCH_BYTES", 1)
    made: list[object] = []

    def count(*args: object) -> object:
        made.append(make_challenge(*args))  # type: ignore[arg-type]  # passed on
        return made[-1]

    monkeypatch.setattr(tree, "make_challenge", count)
    data = make_memory(DATA)

    found = digest_by_tree([DevicePiece(data, 0, 100), DevicePiece(data, 3, 3000)], TorchKernels(CPU), CPU)

    assert found == [hash_bytes(DATA[:100]), hash_bytes(DATA[3:3000])]
    assert len({challenge.expected for challenge in made}) == 2  # type: ignore[attr-defined]  # a Challenge


@pytest.mark.parametrize(("starts", "offsets"), [([0, 16], [0]), ([3], [1]), ([0, 3], [0, 1])])
def test_kernels_for_aligned_and_for_other_addresses_are_both_challenged(starts: list[int], offsets: list[int]) -> None:
    parts = [Part(make_memory(DATA), start, 100, 0, is_piece=True) for start in starts]

    challenge = make_challenge(parts, 16, HostLink(CPU))

    assert [part.start for part in challenge.parts] == offsets
    assert len(challenge.expected) == len(offsets)


def test_parts_that_are_gathered_challenge_both_kernels() -> None:
    rows = torch.arange(4000.0).view(40, 100)[:, 1:]
    # One row has no gaps, so it is read where it is: 4 bytes after a multiple of 16.
    part = Part(DeviceBytes.from_tensor(rows), 0, 99 * 4, 0, is_piece=True)

    challenge = make_challenge([part], 16, HostLink(CPU))

    assert part.data.read(part.start, part.stop).data_ptr() % 16
    assert [part.start for part in challenge.parts] == [0, 1]


def test_a_challenge_uses_none_of_torchs_generators() -> None:
    before = torch.get_rng_state()

    first, second = (make_split_challenge(HostLink(CPU)) for _ in range(2))

    assert first.expected != second.expected
    assert torch.equal(torch.get_rng_state(), before)
