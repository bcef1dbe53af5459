"""The Triton kernels give the digests of the blake3 package, run by Triton's interpreter on tensors of the CPU.

`make device-test` installs Triton and runs these; elsewhere they are skipped. The interpreter takes about a second for
each part of a program, however many lanes it has, so a test hashes much at once.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings

pytest.importorskip("triton", reason="needs Triton, which `make device-test` installs")

import triton

from holdfast.errors import DeviceFault
from holdfast.tensors.device_digest.choice import choose_backend, digest, find_backend
from holdfast.tensors.device_digest.triton_launch import TritonKernels, is_interpreted
from tests.kit import device_digests
from tests.kit.device_digests import CPU, piece_lists

pytestmark = pytest.mark.skipif(not is_interpreted(), reason="needs TRITON_INTERPRET=1, which `make device-test` sets")


def test_the_kernels_pass_the_check_of_the_first_use() -> None:
    find_backend("triton", CPU)

    assert choose_backend(CPU).backend == "cpu"


def test_the_official_test_vectors() -> None:
    device_digests.check_official_vectors("triton")


@settings(max_examples=8)
@given(piece_lists())
def test_pieces_of_any_length_anywhere(drawn: tuple[int, list[tuple[int, int]]]) -> None:
    device_digests.check_pieces("triton", *drawn)


@pytest.mark.parametrize("misaligned", [0, 1, 2, 3, 4, 8, 15])
def test_every_alignment_and_every_length_of_the_last_word(misaligned: int) -> None:
    spans = [(start, start + length) for start in range(5) for length in (*range(1, 10), 61, 62, 63, 64, 65, 130)]
    device_digests.check_pieces("triton", misaligned, spans)


def test_long_pieces_are_hashed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    device_digests.check_parts("triton", monkeypatch)


def test_gaps_are_not_hashed() -> None:
    device_digests.check_gaps("triton")


def test_counters_have_64_bits() -> None:
    device_digests.check_far_leaf(TritonKernels(CPU))


def test_a_thousand_pieces_take_one_launch_for_each_level(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[tuple[str, int]] = []
    launch = TritonKernels._launch

    def count(self: TritonKernels, kernel: object, num_lanes: int, *rest: object, **constants: bool) -> None:
        launched.append((getattr(kernel, "__name__", str(kernel)), num_lanes))
        launch(self, kernel, num_lanes, *rest, **constants)  # type: ignore[arg-type]  # passed on

    find_backend("triton", CPU)
    monkeypatch.setattr(TritonKernels, "_launch", count)

    device_digests.check_pieces(
        "triton", 0, [(16 * number, 16 * number + 16 * number % 3000) for number in range(1000)]
    )

    assert [name for name, _ in launched] == ["hash_leaves", "join_pairs", "join_pairs"]
    assert launched[0][1] > 1000


def test_lanes_are_divided_among_programs_as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    find_backend("triton", CPU)
    # Programs of 16 lanes: the interpreter would otherwise run one that is as wide as the batch.
    monkeypatch.setattr(triton, "next_power_of_2", lambda number: 16)

    device_digests.check_pieces("triton", 0, [(0, 34_000)])


@pytest.mark.parametrize("dead", ["hash_leaves", "join_pairs"])
def test_a_kernel_that_does_nothing_is_noticed(monkeypatch: pytest.MonkeyPatch, dead: str) -> None:
    launch = TritonKernels._launch

    def skip(self: TritonKernels, kernel: object, *rest: object, **constants: bool) -> None:
        if getattr(kernel, "__name__", str(kernel)) != dead:
            launch(self, kernel, *rest, **constants)  # type: ignore[arg-type]  # passed on

    find_backend("triton", CPU)
    monkeypatch.setattr(TritonKernels, "_launch", skip)

    with pytest.raises(DeviceFault, match="a kernel did not run"):
        digest(torch.zeros(30), backend="triton")


def test_the_kernels_leave_generators_as_they_are() -> None:
    before = torch.get_rng_state()

    digest(torch.zeros(30), backend="triton")

    assert torch.equal(torch.get_rng_state(), before)
