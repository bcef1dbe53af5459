"""Measures the limits of the machine, and how close Holdfast's calls of both hashes come to them."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from bench.kit.bare_work import hash_limits, memory_limits, random_pages, read_limits, write_limits
from bench.kit.measure import Goal, Result, Sizes, race, throughput

_HASH_GOAL: Final = Goal("ratio", ">=", 0.9)


def run(sizes: Sizes, work: Path) -> list[Result]:
    """Measure the limits, and how close Holdfast's use of the hashes comes to them."""
    data = random_pages(sizes.save_bytes // 2, seed=1)
    path = work / "raw"
    hashes = race(hash_limits(data), rounds=2 * sizes.rounds)
    timings = race(memory_limits(data) | write_limits(path, data), rounds=sizes.rounds)
    reads = race(read_limits([path]), rounds=sizes.rounds)
    best = min(reads, key=lambda name: reads[name].best)
    path.unlink()
    every = timings | {best: reads[best]}
    return [
        throughput("hash_bytes (BLAKE3)", hashes, len(data), against="bare BLAKE3", goal=_HASH_GOAL),
        throughput("fingerprint (XXH3)", hashes, len(data), against="bare XXH3", goal=_HASH_GOAL),
        *(throughput(name, every, len(data)) for name in every),
    ]
