"""The Triton kernels compile for GPUs, without one: no register is spilled, and whole blocks are loaded fast.

`make device-test` installs Triton and runs this; elsewhere it is skipped.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("triton", reason="needs Triton, which `make device-test` installs")

import triton

from bench.device_kernels import RECORDED, compile_result, find_differences
from holdfast.tensors.device_digest import triton_kernels
from holdfast.tensors.device_digest.pieces import Part
from holdfast.tensors.device_digest.side_stream import SideStream
from holdfast.tensors.device_digest.triton_launch import TritonKernels, is_interpreted
from tests.kit.device_digests import CPU, make_memory

pytestmark = pytest.mark.skipif(is_interpreted(), reason="an interpreted kernel cannot be compiled")


def test_kernels_compile_to_what_is_recorded() -> None:
    found = compile_result()

    assert find_differences(found, json.loads(RECORDED.read_text(encoding="utf-8"))) == []
    for architecture in ("sm_80", "sm_90"):
        aligned = found["kernels"][architecture]["hash_leaves, aligned"]
        # With 64 registers at most, an SM runs 1,024 lanes at a time.
        assert aligned["registers"] <= 64
        assert aligned["per_block"]["LDG.E.128"] == 4
        assert "LDG.E" not in aligned["per_block"]
    # A wave of AMD has 64 threads. With two for each lane, they would exchange what they load.
    assert found["kernels"]["gfx942"]["join_pairs"]["shared_bytes"] == 0


class _Driver:
    """What Triton asks of a GPU before it launches a kernel."""

    def get_current_target(self) -> Any:
        return triton.backends.compiler.GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@pytest.fixture
def _compile_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile what is launched, for an H100 that is not there, and do not run it."""
    run = triton.JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        return run(self, *args, grid=grid, warmup=True, **options)

    monkeypatch.setattr(triton.JITFunction, "run", compile_only)
    monkeypatch.setattr(triton.runtime.driver, "_active", _Driver())


@pytest.mark.usefixtures("_compile_only")
def test_no_number_and_no_alignment_of_a_batch_compiles_a_kernel_again() -> None:
    kernels = TritonKernels(CPU)
    data = make_memory(bytes(40_000))

    with SideStream(CPU) as link:
        for lengths in ([1], [16] * 16, [5000, 3], [1024] * 17, [40_000, 1, 1]):
            for start in (0, 5):
                parts = [Part(data, start, min(start + length, 40_000), 0, is_piece=True) for length in lengths]
                assert kernels.hash_parts(parts, link).shape == (len(lengths), 8)

    assert _count_versions(triton_kernels.hash_leaves) == 2
    assert _count_versions(triton_kernels.join_pairs) == 1


def _count_versions(kernel: Any) -> int:
    return sum(len(cached[0]) for cached in kernel.device_caches.values())
