"""Projects how fast a GPU could hash at most, from the instructions that the compiler made: not a measurement."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

ALIGNED: Final = "hash_leaves, aligned"
ANY_ADDRESS: Final = "hash_leaves, any address"
JOIN: Final = "join_pairs"
_LANES: Final = 32
_BLOCK_BYTES: Final = 64
_BLOCKS_PER_LEAF: Final = 16
_ISSUED_LANES: Final = 128
"""Lanes whose instruction an SM can issue in one clock: four warps."""
_MULTIPLY: Final = frozenset({"IMAD"})
"""Run by the multipliers. All other integer instructions share one unit, except those of the uniform data path."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """The figures of a GPU that its maker publishes."""

    name: str
    architecture: str
    multiprocessors: int
    clock_hz: float
    memory_bytes_s: float
    host_bytes_s: float
    """The limit of its connection to the host, in one direction."""
    integer_lanes: int = 64
    """Integer results of one kind that an SM computes in one clock: the throughput table of the CUDA guide."""
    tags: int = 1
    """Cache lines that the first cache of an SM looks up in one clock: an assumption, no published figure."""


GPUS: Final = (
    Gpu("A100 SXM, 80 GB", "sm_80", 108, 1.41e9, 2.039e12, 32e9),
    Gpu("H100 SXM", "sm_90", 132, 1.98e9, 3.35e12, 64e9),
)


@dataclass(frozen=True, slots=True)
class Projection:
    """What limits hashing, each in bytes per second; the lowest is the projected rate."""

    integers: float
    issue: float
    cache: float
    memory: float

    @property
    def rate(self) -> float:
        """The projected rate: the lowest of the limits."""
        return min(self.integers, self.issue, self.cache, self.memory)

    @property
    def limit(self) -> str:
        """What the lowest limit is."""
        names = ("integers", "issue", "cache", "memory")
        return min(names, key=lambda name: float(getattr(self, name)))


def project(gpu: Gpu, facts: Mapping[str, Any], kernel: str) -> Projection:
    """Return the limits of hashing on a GPU, parents included: one for each leaf."""
    blocks, parents = facts[kernel]["per_block"], facts[JOIN]["per_block"]
    warp_bytes = _LANES * _BLOCK_BYTES

    def rate(count: float, lanes_per_clock: float) -> float:
        cycles = count * _LANES / lanes_per_clock
        return gpu.multiprocessors * gpu.clock_hz * warp_bytes / cycles

    def count(counts: Mapping[str, int], *, multiply: bool) -> int:
        own = {name: number for name, number in counts.items() if not name.startswith(("U", "LDG", "STG", "BRA"))}
        return sum(number for name, number in own.items() if (name in _MULTIPLY) == multiply)

    pipes = [count(blocks, multiply=each) + count(parents, multiply=each) / _BLOCKS_PER_LEAF for each in (False, True)]
    everything = sum(blocks.values()) + sum(parents.values()) / _BLOCKS_PER_LEAF
    # Lanes read leaves that are 1,024 bytes apart, so each load of a warp touches 32 cache lines.
    loads = sum(number for name, number in blocks.items() if name.startswith("LDG"))
    return Projection(
        integers=rate(max(pipes), gpu.integer_lanes),
        issue=rate(everything, _ISSUED_LANES),
        cache=rate(loads, gpu.tags),
        memory=gpu.memory_bytes_s,
    )


def render_counts(result: Mapping[str, Any]) -> str:
    """Return a table of registers, spills and instructions of each kernel."""
    lines = [
        "| for | kernel | registers | stack, spills | instructions for 64 bytes"
        " | of these: logic, shifts, sums, multiply-adds | loads |",
        "|---|---|---|---|---|---|---|",
    ]
    for architecture, kernels in result["kernels"].items():
        for kernel, facts in kernels.items():
            counts = facts.get("per_block", {})
            kinds = ", ".join(str(counts[name]) for name in ("LOP3", "SHF", "IADD3", "IMAD") if name in counts)
            loads = ", ".join(f"{number} {name}" for name, number in counts.items() if name.startswith("LDG"))
            spills = f"{facts['stack_bytes']}, {facts['spilled_bytes']}"
            cells = (architecture, f"`{kernel}`", facts["registers"], spills, sum(counts.values()) or "", kinds, loads)
            lines.append("| " + " | ".join(str(cell) for cell in cells) + " |")
    return "\n".join([f"Compiled by Triton {result['triton']}:", "", *lines]) + "\n"


def render_projection(result: Mapping[str, Any]) -> str:
    """Return a table of the limits of each GPU, in GB/s."""
    lines = [
        "| GPU | pieces begin | integer units | issue | first cache (assumed) | memory | **projected**"
        " | link to the host |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for gpu in GPUS:
        for kernel, begin in ((ALIGNED, "at multiples of 16"), (ANY_ADDRESS, "anywhere")):
            found = project(gpu, result["kernels"][gpu.architecture], kernel)
            rates = (found.integers, found.issue, found.cache, found.memory)
            cells = [f"{rate / 1e9:,.0f}" for rate in rates]
            cells.append(f"**{found.rate / 1e9:,.0f}** ({found.limit})")
            lines.append("| " + " | ".join([gpu.name, begin, *cells, f"{gpu.host_bytes_s / 1e9:.0f}"]) + " |")
    return "\n".join(lines) + "\n"
