"""Compiles the kernels of device digests ahead of time, without a GPU, and counts what the compiler made of them."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

ARCHITECTURES: Final = (80, 90)
"""Compute capabilities: 8.0 is the A100, 9.0 the H100."""
AMD: Final = "gfx942"
"""The MI300."""
KERNELS: Final = ("hash_leaves, aligned", "hash_leaves, any address", "join_pairs")
_INSTRUCTION: Final = re.compile(r"^\s+/\*(?P<at>[0-9a-f]{4,})\*/\s+(?P<text>\S.*?)\s*;", re.MULTILINE)
_GUARD: Final = re.compile(r"^@!?U?P[0-9T]+\s+")
_TARGET: Final = re.compile(r"0x(?P<to>[0-9a-f]+)")
_USAGE: Final = re.compile(r"REG:(?P<registers>\d+) STACK:(?P<stack>\d+) SHARED:(?P<shared>\d+) LOCAL:(?P<local>\d+)")


class Instruction(NamedTuple):
    """One machine instruction: its address, its name with modifiers, and the address that it may jump to."""

    at: int
    name: str
    target: int | None


@dataclass(frozen=True, slots=True)
class KernelFacts:
    """What the compiler made of a kernel."""

    registers: int
    stack_bytes: int
    spilled_bytes: int
    shared_bytes: int
    per_block: Mapping[str, int]
    """Instructions of each kind for one full block of 64 bytes; for `join_pairs`, for one pair of nodes."""


def compile_all() -> dict[str, dict[str, Any]]:
    """Compile every kernel for every architecture, and return the facts by architecture and kernel; needs Triton."""
    import triton

    tools = Path(triton.__file__).parent / "backends/nvidia/bin"
    found: dict[str, dict[str, Any]] = {}
    for architecture in ARCHITECTURES:
        found[f"sm_{architecture}"] = {
            kernel: _describe_cubin(_compile(kernel, "cuda", architecture).asm["cubin"], tools, kernel)
            for kernel in KERNELS
        }
    found[AMD] = {kernel: _describe_amd(_compile(kernel, "hip", AMD)) for kernel in KERNELS}
    return found


def _compile(kernel: str, backend: str, architecture: int | str) -> Any:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from holdfast.tensors.device_digest import triton_kernels

    function = triton_kernels.join_pairs if kernel == "join_pairs" else triton_kernels.hash_leaves
    integers = ("num_runs", "num_pairs", "stride") if kernel == "join_pairs" else ("num_parts", "num_leaves")
    constants: dict[str, int | bool] = {"BLOCK": triton_kernels.BLOCK}
    if kernel != "join_pairs":
        constants["IS_ALIGNED"] = kernel == "hash_leaves, aligned"
    signature = (
        {"nodes": "*i32", "table": "*i64"} | dict.fromkeys(integers, "i32") | dict.fromkeys(constants, "constexpr")
    )
    # The allocators of GPUs align what `nodes` points to; `table` may begin anywhere, as in a launch.
    source = ASTSource(function, signature, constants, {(0,): [["tt.divisibility", 16]]})
    target = GPUTarget(backend, architecture, 64 if backend == "hip" else 32)
    num_warps = triton_kernels.count_warps(target.warp_size)
    return triton.compile(source, target=target, options={"num_warps": num_warps, "enable_fp_fusion": False})


def _describe_cubin(cubin: bytes, tools: Path, kernel: str) -> dict[str, Any]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = _run(tools / "cuobjdump", "--dump-resource-usage", file.name)
        listing = _run(tools / "cuobjdump", "-sass", file.name)
    match = _USAGE.search(usage)
    assert match, usage
    code = parse_listing(listing)
    counted = find_block_code(code) if kernel != "join_pairs" else code
    return {
        "registers": int(match["registers"]),
        "stack_bytes": int(match["stack"]),
        "spilled_bytes": int(match["local"]),
        "shared_bytes": int(match["shared"]),
        "instructions": len(code),
        "per_block": count_names(counted),
    }


def _run(*command: str | Path) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def parse_listing(listing: str) -> list[Instruction]:
    """Return the instructions of a listing of cuobjdump, without the padding at its end."""
    found = []
    for match in _INSTRUCTION.finditer(listing):
        text = _GUARD.sub("", match["text"])
        name = text.split()[0]
        target = _TARGET.search(text) if name.startswith("BRA") else None
        found.append(Instruction(int(match["at"], 16), name, int(target["to"], 16) if target else None))
    while found and found[-1].name == "NOP":
        found.pop()
    return found


def find_block_code(code: Sequence[Instruction]) -> list[Instruction]:
    """Return the instructions that hash one full block of a leaf: the longest loop.

    If it has loads of 128 bits, its branch with loads of 32 bits is left out: only the last block of a leaf takes it.
    """
    loops = [(each.at - each.target, each.target, each.at) for each in code if each.target is not None]
    length, first, last = max(loops)
    assert length > 0, "there is no loop"
    body = [each for each in code if first <= each.at <= last]
    if not any(each.name == "LDG.E.128" for each in body):
        return body
    return [each for block in _cut_blocks(body) for each in block if not any(one.name == "LDG.E" for one in block)]


def _cut_blocks(body: Sequence[Instruction]) -> list[list[Instruction]]:
    """Return the basic blocks of a piece of code: straight stretches that are entered at the top alone."""
    targets = {each.target for each in body}
    blocks: list[list[Instruction]] = [[]]
    for each in body:
        if each.at in targets and blocks[-1]:
            blocks.append([])
        blocks[-1].append(each)
        if each.target is not None:
            blocks.append([])
    return [block for block in blocks if block]


def count_names(code: Iterable[Instruction]) -> dict[str, int]:
    """Return how often each kind of instruction occurs, most frequent first; loads keep their width."""
    names = (each.name if each.name.startswith("LDG") else each.name.partition(".")[0] for each in code)
    return dict(sorted(Counter(names).items(), key=lambda item: (-item[1], item[0])))


def _describe_amd(compiled: Any) -> dict[str, Any]:
    listing = compiled.asm["amdgcn"]
    facts = {
        "registers": "vgpr_count",
        "spilled_bytes": "vgpr_spill_count",
        "stack_bytes": "private_segment_fixed_size",
    }
    found = {name: int(re.findall(rf"\.{key}:\s+(\d+)", listing)[-1]) for name, key in facts.items()}
    return {**found, "shared_bytes": compiled.metadata.shared}
