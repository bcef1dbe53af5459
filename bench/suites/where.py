"""Measures wall and CPU time of each workload against the bare parts that it consists of.

All of them run in one race. The parts of a workload need a certain CPU time, which the cores share, and the disk needs
its own time. A workload cannot be faster than either, so the longer of the two is its lower limit on this machine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from bench.kit.arena import Arena, open_arena
from bench.kit.bare_work import (
    HASHED_READ,
    HASHED_WRITE,
    aligned_memory,
    copy_shared,
    count_cores,
    fingerprint_memory,
    hash_memory,
    random_pages,
    read_files,
    read_to_new,
    remove_durably,
    write_file,
)
from bench.kit.measure import Contestant, Result, Sizes, Timings, drop_pages, list_files, load_pages, race
from bench.kit.peers import HOLDFAST, HOLDFAST_FAST, Peer
from bench.kit.repeated_saves import RepeatedSaves
from bench.kit.states import Shape, State, clear_state, verify_state
from bench.kit.stores import list_packs

_TENSOR_BYTES: Final = 16 << 20
_SEED: Final = 71
_GIB: Final = 1 << 30
_WRITE_THREADS: Final = 2
_READ_THREADS: Final = 4
_HASHED_THREADS: Final = 6

BLAKE3: Final = "BLAKE3"
XXH3: Final = "XXH3"
COPY: Final = "copy"
COPY_TO_NEW: Final = "copy to new memory"
CACHED_READ: Final = "read of cached files"
CACHED_READ_TO_NEW: Final = "read of cached files to new memory"
DIRECT_WRITE: Final = "direct write"
DIRECT_READ: Final = "direct read"


@dataclass(frozen=True, slots=True)
class Work:
    """A workload of Holdfast, and the parts that it consists of."""

    name: str
    parts: tuple[str, ...]
    disk: str = ""
    """The part whose wall time is the time of the disk."""


WORKS: Final = (
    Work("first save", (COPY, BLAKE3, XXH3, DIRECT_WRITE), DIRECT_WRITE),
    Work("save again, unchanged", (BLAKE3,)),
    Work("save again, unchanged, change hints", (XXH3,)),
    Work("cold load", (DIRECT_READ, COPY_TO_NEW, BLAKE3), DIRECT_READ),
    Work("cold load, in place", (DIRECT_READ, COPY, BLAKE3), DIRECT_READ),
    Work("warm load", (CACHED_READ_TO_NEW, BLAKE3)),
    Work("warm load, in place", (CACHED_READ, BLAKE3)),
    Work('warm load, verify="fast"', (CACHED_READ_TO_NEW, XXH3)),
    Work('warm load, verify="fast", in place', (CACHED_READ, XXH3)),
    Work("blocked by save_async", (COPY,)),
)


def run(sizes: Sizes, work: Path) -> list[Result]:
    """Measure each workload and each part in one race, and compare the workload with the limit of its parts."""
    size = min(_TENSOR_BYTES, sizes.save_bytes // 4)
    shape = Shape("parts", (size,) * (sizes.save_bytes // size))
    arena = open_arena(shape, work, rounds=sizes.rounds, seed=_SEED)
    try:
        timings = race(_find_own(arena) | _find_parts(arena), rounds=arena.rounds)
        parts = [name for name in timings if name not in {one.name for one in WORKS}]
        return [
            *(make_work_row(one, timings, arena.size_bytes, cores=count_cores()) for one in WORKS),
            *(_make_part_row(name, timings[name], arena.size_bytes) for name in parts),
        ]
    finally:
        arena.close()


def _find_own(arena: Arena) -> dict[str, Contestant]:
    again = RepeatedSaves(arena)
    hinted = RepeatedSaves(arena, "hinted", change_hints=True)
    background = RepeatedSaves(arena, "background")
    again.save()
    background.save_in_background().wait()  # allocates the memory for copies, which later saves reuse
    found = {
        "first save": arena.saving(HOLDFAST),
        "save again, unchanged": again.saving(0.0),
        "save again, unchanged, change hints": hinted.saving(0.0),
        "blocked by save_async": Contestant(background.save_in_background, verify=background.verify_in_background),
    }
    # Each first save re-creates the folder of the peer, so loads read from a store in another folder.
    for label, peer, bring in (
        ("cold load", HOLDFAST, drop_pages),
        ("warm load", HOLDFAST, load_pages),
        ('warm load, verify="fast"', HOLDFAST_FAST, load_pages),
    ):
        prepare = partial(_bring, bring, again.root)
        found[label] = Contestant(
            partial(peer.load, again.root, arena.state), prepare, partial(arena.verify_loaded, who=peer.name)
        )
        found[f"{label}, in place"] = Contestant(
            partial(_fill, peer, again.root, arena.target),
            partial(_clear_and, arena.target, prepare),
            partial(verify_state, expected=arena.state, who=peer.name),
        )
    return found


def _bring(bring: Callable[[list[Path]], None], root: Path) -> None:
    bring(list_files(root))


def _clear_and(target: State, prepare: Callable[[], None]) -> None:
    clear_state(target)
    prepare()


def _fill(peer: Peer, root: Path, target: State) -> State:
    peer.fill(root, target)
    return target


def _find_parts(arena: Arena) -> dict[str, Contestant]:
    """Return the bare parts, each on one core and on all, and the loops that combine several parts."""
    size, cores = arena.size_bytes, count_cores()
    data, target = random_pages(size, seed=_SEED), aligned_memory(size)
    target[:] = data  # touched now, so that the first round does not pay for page faults
    raw, packs = arena.work / "raw", list_packs(arena.work / "again")
    cached, cold, removed = partial(load_pages, packs), partial(drop_pages, packs), partial(remove_durably, raw)
    acts: dict[str, Callable[..., object]] = {
        BLAKE3: partial(hash_memory, data),
        XXH3: partial(fingerprint_memory, data),
        COPY: partial(copy_shared, data, target),
        COPY_TO_NEW: partial(copy_shared, data, None),
        CACHED_READ: partial(read_files, packs),
        CACHED_READ_TO_NEW: partial(read_to_new, packs),
    }
    found = {
        _name_part(part, threads): Contestant(
            partial(act, threads=threads), cached if part in (CACHED_READ, CACHED_READ_TO_NEW) else lambda: None
        )
        for part, act in acts.items()
        for threads in dict.fromkeys((1, cores))
    }
    write = partial(write_file, raw, data, direct=True)
    read = partial(read_files, packs, threads=_READ_THREADS, direct=True)
    return found | {
        DIRECT_WRITE: Contestant(partial(write, threads=_WRITE_THREADS), removed),
        DIRECT_READ: Contestant(read, cold),
        HASHED_WRITE: Contestant(partial(write, threads=_HASHED_THREADS, hashed=True), removed),
        HASHED_READ: Contestant(partial(read, then_hash=True), cold),
    }


def _name_part(part: str, cores: int) -> str:
    return f"{part}, {cores} core{'s' if cores > 1 else ''}"


def make_work_row(work: Work, timings: Mapping[str, Timings], size_bytes: int, *, cores: int) -> Result:
    """Return the seconds per GiB against the least that its parts and the disk allow on this many cores."""
    scale = _GIB / size_bytes
    # The disk does not scale with cores; the other parts are measured with all cores busy.
    measured = {part: timings.get(_name_part(part, cores)) or timings[part] for part in work.parts}
    cpu = {part: scale * min(found.cpu_seconds) for part, found in measured.items()}
    disk = scale * timings[work.disk].best if work.disk else 0.0
    shared = sum(cpu.values()) / cores
    parts = " + ".join(f"{part} {seconds:.2f}" for part, seconds in cpu.items())
    own = timings[work.name]
    return Result(
        f"{work.name}, by parts",
        scale * own.best,
        "s/GiB",
        f"its parts on {cores} core{'s' if cores > 1 else ''}" if shared >= disk else f"its {work.disk}",
        max(shared, disk),
        None,
        f"{_format_cores(own, scale)}; {parts} = {sum(cpu.values()):.2f} CPU s"
        + (f"; disk {disk:.2f} s" if disk else ""),
        {name: found.seconds for name, found in {work.name: own, **measured}.items()},
        {name: scale * found.best for name, found in {work.name: own, **measured}.items()},
    )


def _make_part_row(name: str, found: Timings, size_bytes: int) -> Result:
    scale = _GIB / size_bytes
    return Result(name, scale * found.best, "s/GiB", note=_format_cores(found, scale), samples={name: found.seconds})


def _format_cores(found: Timings, scale: float) -> str:
    """Return the CPU time of the best round, and how many cores it kept busy."""
    seconds, cpu = min(zip(found.seconds, found.cpu_seconds, strict=True))
    return f"{scale * cpu:.2f} CPU s, {cpu / seconds:.1f} cores busy"
