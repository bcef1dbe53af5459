"""Facts about compiled kernels: instructions are counted where a block is hashed, and limits follow from them."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

import pytest
import torch

from bench import gpu_digest
from bench.device_kernels import RECORDED, find_differences
from bench.kit import roofline
from bench.kit.cubins import count_names, find_block_code, parse_listing
from bench.kit.roofline import ALIGNED, ANY_ADDRESS, GPUS, project, render_counts, render_projection
from holdfast.tensors.device_digest.choice import digest_pieces
from holdfast.tensors.device_digest.pieces import DeviceBytes
from holdfast.tensors.memory import wrap_memory

LISTING = """
        /*0000*/                   MOV R1, c[0x0][0x28] ;
        /*0010*/                   LDG.E.64 R2, [R4] ;
        /*0020*/                   ISETP.GT.AND P0, PT, R2, R3, PT ;
        /*0030*/              @P0 BRA 0x60 ;
        /*0040*/                   LDG.E.128 R4, [R6.64] ;
        /*0050*/                   BRA 0x80 ;
        /*0060*/                   LDG.E R4, [R6.64] ;
        /*0070*/              @!P1 SEL R4, R5, R6, P1 ;
        /*0080*/                   LOP3.LUT R4, R4, R5, RZ, 0x3c, !PT ;
        /*0090*/                   SHF.R.W.U32 R4, R4, 0x10, R4 ;
        /*00a0*/              @P2 BRA 0x20 ;
        /*00b0*/                   STG.E [R6.64], R4 ;
        /*00c0*/                   EXIT ;
        /*00d0*/                   NOP;
"""


@pytest.fixture
def recorded() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(RECORDED.read_text(encoding="utf-8"))
    return found


def test_the_loop_is_counted_without_the_branch_for_the_end_of_a_leaf() -> None:
    code = parse_listing(LISTING)

    assert len(code) == 13
    assert count_names(find_block_code(code)) == {"BRA": 3, "ISETP": 1, "LDG.E.128": 1, "LOP3": 1, "SHF": 1}


def test_without_wide_loads_the_whole_loop_is_counted() -> None:
    code = parse_listing(LISTING.replace("LDG.E.128", "LDG.E"))

    assert count_names(find_block_code(code))["LDG.E"] == 2


def test_a_spill_and_a_changed_count_are_reported(recorded: dict[str, Any]) -> None:
    found = copy.deepcopy(recorded)
    assert find_differences(found, recorded) == []

    found["kernels"]["sm_80"]["join_pairs"]["spilled_bytes"] = 8
    found["kernels"]["sm_90"][ALIGNED]["per_block"]["LOP3"] += 1
    found["triton"] = "0"

    lines = find_differences(found, recorded)
    assert len(lines) == 4
    assert "registers are spilled" in lines[1]


def test_the_lowest_limit_is_the_projected_rate(recorded: dict[str, Any]) -> None:
    for gpu in GPUS:
        aligned = project(gpu, recorded["kernels"][gpu.architecture], ALIGNED)
        anywhere = project(gpu, recorded["kernels"][gpu.architecture], ANY_ADDRESS)
        assert aligned.rate == aligned.integers < aligned.memory
        assert anywhere.rate < aligned.rate


def test_a_limit_is_a_quotient_of_clocks_and_instructions() -> None:
    facts = {ALIGNED: {"per_block": {"LOP3": 640, "LDG.E.128": 4}}, roofline.JOIN: {"per_block": {"LOP3": 0}}}
    gpu = roofline.Gpu("G", "sm_0", multiprocessors=1, clock_hz=1e9, memory_bytes_s=1e15, host_bytes_s=1)

    found = project(gpu, facts, ALIGNED)

    # 640 instructions of 32 lanes take 320 clocks of 64 lanes, for 2,048 bytes.
    assert found.integers == pytest.approx(2048 / 320 * 1e9)
    assert found.cache == pytest.approx(2048 / (4 * 32) * 1e9)
    assert found.limit == "integers"


def test_tables_have_a_row_for_each_kernel_and_gpu(recorded: dict[str, Any]) -> None:
    assert render_counts(recorded).count("\n| ") == 1 + 9
    assert render_projection(recorded).count("\n| ") == 2 * len(GPUS)


def test_without_a_gpu_nothing_is_measured(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_digest, "list_accelerators", list)

    assert gpu_digest.main() == 0

    assert capsys.readouterr().out == "no GPU: nothing was measured\n"


def test_the_check_on_a_gpu_counts_wrong_digests(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = wrap_memory(memoryview(bytearray(random.Random(2).randbytes(6 << 20))))
    assert gpu_digest.count_wrong(memory, "cpu") == 0

    monkeypatch.setattr(
        gpu_digest, "digest_pieces", lambda pieces, backend: digest_pieces(pieces, backend=backend)[::-1]
    )

    assert gpu_digest.count_wrong(memory, "cpu") > 1000


def test_pieces_lie_within_the_memory() -> None:
    data = DeviceBytes.from_memory(torch.zeros(1000, dtype=torch.uint8))

    pieces = gpu_digest.make_pieces(data, random.Random(0))

    assert all(0 <= piece.start <= piece.stop <= 1000 for piece in pieces)
