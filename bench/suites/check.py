"""Measures `check --read` of a whole store against hashing memory on all cores and against raw disk reads."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Final

from bench.kit.bare_work import HASHED_READ, count_cores, hash_cached, hash_memory, read_files, read_limits
from bench.kit.measure import (
    Contestant,
    Goal,
    Result,
    Sizes,
    WrongResult,
    count_resident_bytes,
    drop_pages,
    load_pages,
    name_bound,
    race,
    random_bytes,
    throughput,
)
from bench.kit.stores import check_store, fill_store, list_packs, remove_store, sum_sizes, verify_nothing_found

_PACKS: Final = 8


def run(sizes: Sizes, work: Path) -> list[Result]:
    """Measure a check of files in the page cache, of files not in it, and the quick check."""
    root = work / "store"
    fill_store(root, sizes.check_bytes, packs=_PACKS)
    try:
        return [*_measure_warm(root, sizes), *_measure_cold(root, sizes)]
    finally:
        remove_store(root)


def _checking(root: Path, packs: list[Path], *, is_cold: bool) -> Contestant:
    size = sum_sizes(packs)
    prepare = partial(drop_pages, packs) if is_cold else partial(_ensure_warm, packs)
    return Contestant(partial(check_store, root, read=True), prepare, partial(verify_nothing_found, read_bytes=size))


def _ensure_warm(packs: list[Path]) -> None:
    """Read the files into the page cache again, in case other work has evicted them."""
    if _count_cold(packs):
        load_pages(packs)
    cold, size = _count_cold(packs), sum_sizes(packs)
    if cold > size // 100:
        raise WrongResult(f"{cold} of {size} bytes do not stay in the page cache: is there enough memory?")


def _count_cold(packs: list[Path]) -> int:
    return sum_sizes(packs) - sum(map(count_resident_bytes, packs))


def _measure_warm(root: Path, sizes: Sizes) -> list[Result]:
    packs = list_packs(root)
    size = sum_sizes(packs)
    data = random_bytes(size, seed=1)
    cores = count_cores()
    timings = race(
        {
            "check --read, in page cache": _checking(root, packs, is_cold=False),
            "check": Contestant(
                partial(check_store, root, read=False), verify=partial(verify_nothing_found, read_bytes=0)
            ),
            "BLAKE3 of memory": Contestant(partial(hash_memory, data, threads=cores)),
            "cached BLAKE3": Contestant(partial(hash_cached, data, threads=cores)),
            "bare read and BLAKE3": Contestant(partial(read_files, packs, threads=cores, then_hash=True)),
        },
        rounds=sizes.rounds,
    )
    read = "check --read, in page cache"
    quick = timings["check"]
    return [
        throughput(read, timings, size, against="BLAKE3 of memory", goal=Goal("ratio", ">=", 0.8)),
        throughput(read, timings, size, against="bare read and BLAKE3"),
        throughput(read, timings, size, against="cached BLAKE3"),
        Result(
            "check", 1e3 * quick.best, "ms", note=f"median {1e3 * quick.median:.0f} ms, {size / 1e9:.1f} GB in store"
        ),
    ]


def _measure_cold(root: Path, sizes: Sizes) -> list[Result]:
    packs = list_packs(root)
    size = sum_sizes(packs)
    read = "check --read, not in page cache"
    contestants = {read: _checking(root, packs, is_cold=True)}
    timings = race(contestants | read_limits(packs) | read_limits(packs, then_hash=True), rounds=sizes.rounds)
    raw = throughput(read, timings, size, against="raw read,", goal=Goal("ratio", ">=", 0.9))
    hashed = throughput(read, timings, size, against=HASHED_READ)
    return [name_bound(raw, hashed), hashed]
