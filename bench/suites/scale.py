"""Measures saving and loading as a state grows: the time per byte and per tensor should stay constant.

A state is saved, cleared and loaded in place, and compared by fingerprints: the largest takes a third of the memory,
and a copy for comparison would take another third.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import torch

import holdfast
from bench.kit.bare_work import aligned_memory, count_cores, read_files, write_file
from bench.kit.measure import (
    Contestant,
    Goal,
    Result,
    Sizes,
    Timings,
    WrongResult,
    drop_pages,
    list_files,
    race,
    random_bytes,
)
from bench.kit.peers import SNAPSHOT, sync_filesystem
from bench.kit.states import Shape, State, clear_state, make_state, verify_state
from bench.kit.stores import list_packs, remove_store
from holdfast.digest import fingerprint

_TENSOR_BYTES: Final = 16 << 20
_RAW_BYTES: Final = 1 << 30
_SETTLED_BYTES: Final = 256 << 20
"""Below this size, the fixed cost of a save is visible."""
_MANY_TENSORS: Final = 10_000
_ITEMS: Final = 16
_LARGE_BYTES: Final = 2 << 30
_SEED: Final = 41


def run(sizes: Sizes, work: Path) -> list[Result]:
    """Measure save and load of increasing numbers of bytes, and of increasing numbers of tensors."""
    return [*_measure_bytes(sizes, work), *_measure_tensors(sizes, work)]


@dataclass(frozen=True, slots=True)
class _Sample:
    """A state of one size, its store, and a file for raw writes."""

    state: State
    root: Path
    raw: Path
    size_bytes: int

    def renew(self) -> None:
        remove_store(self.root)
        self.raw.unlink(missing_ok=True)
        sync_filesystem(self.root.parent)

    def save(self) -> object:
        return holdfast.open(self.root).save(SNAPSHOT, dict(self.state))

    def load(self) -> State:
        holdfast.open(self.root).load_into(SNAPSHOT, dict(self.state))
        return self.state

    def clear(self) -> None:
        clear_state(self.state)
        drop_pages(list_files(self.root))

    def verify(self, found: object, *, expected: Mapping[str, bytes]) -> None:
        if not isinstance(found, Mapping) or fingerprint_state(found) != expected:
            raise WrongResult(f"a state of {self.size_bytes} bytes differs after loading")


def fingerprint_state(state: State) -> dict[str, bytes]:
    """Return a fingerprint of the bytes of each tensor."""
    return {name: fingerprint(tensor.view(-1).view(torch.uint8).numpy().data) for name, tensor in state.items()}


def _measure_bytes(sizes: Sizes, work: Path) -> list[Result]:
    largest = max(sizes.scale_bytes)
    each = min(_TENSOR_BYTES, *sizes.scale_bytes)
    whole = make_state(Shape("growing", (each,) * (largest // each)), seed=_SEED)
    expected = fingerprint_state(whole)
    buffer = aligned_memory(min(_RAW_BYTES, *sizes.scale_bytes))
    buffer[:] = random_bytes(len(buffer), seed=_SEED)
    found: dict[str, dict[int, Timings]] = {}
    for size in sizes.scale_bytes:
        names = list(whole)[: size // each]
        sample = _Sample({name: whole[name] for name in names}, work / "store", work / "raw", size)
        rounds = sizes.rounds if size < _LARGE_BYTES else max(1, sizes.rounds - 1)
        for name, timings in _race_bytes(sample, {name: expected[name] for name in names}, buffer, rounds).items():
            found.setdefault(name, {})[size] = timings
        sample.renew()
    return [_make_bytes_row(name, timings, is_goal=name in ("save", "cold load")) for name, timings in found.items()]


def _race_bytes(sample: _Sample, expected: Mapping[str, bytes], buffer: memoryview, rounds: int) -> dict[str, Timings]:
    """Save and load; also write and read as many raw bytes, because the speed of a disk may change over hours."""
    write = partial(
        write_file, sample.raw, buffer, direct=True, threads=count_cores(), repeats=sample.size_bytes // len(buffer)
    )
    raw = race({"raw write": Contestant(write, sample.renew)}, rounds=1)
    saved = race({"save": Contestant(sample.save, sample.renew)}, rounds=rounds)
    packs = list_packs(sample.root)
    read = partial(read_files, packs, direct=True, threads=count_cores())
    raw |= race({"raw read": Contestant(read, partial(drop_pages, packs))}, rounds=1)
    load = Contestant(sample.load, sample.clear, partial(sample.verify, expected=expected))
    return saved | race({"cold load": load}, rounds=rounds) | raw


def _make_bytes_row(name: str, timings: Mapping[int, Timings], *, is_goal: bool) -> Result:
    """Compare the largest state with the ordinary one, in seconds per gigabyte."""
    figures = {size: 1e9 * found.best / size for size, found in timings.items()}
    settled = [figure for size, figure in figures.items() if size >= _SETTLED_BYTES] or list(figures.values())
    largest = max(figures)
    return Result(
        f"{name}, per byte, {format_size(largest)}",
        figures[largest],
        "s/GB",
        f"median from {format_size(min(_SETTLED_BYTES, largest))}",
        statistics.median(settled),
        Goal("ratio", "<=", 1.25) if is_goal else None,
        ", ".join(f"{figure:.2f} at {format_size(size)}" for size, figure in figures.items()),
        {str(size): found.seconds for size, found in timings.items()},
        {str(size): figure for size, figure in figures.items()},
    )


def format_size(size_bytes: int) -> str:
    """Format a size for people."""
    return f"{size_bytes >> 30} GiB" if size_bytes >= 1 << 30 else f"{size_bytes >> 20} MiB"


def _measure_tensors(sizes: Sizes, work: Path) -> list[Result]:
    found: dict[str, dict[int, Timings]] = {}
    for count in sizes.scale_tensors:
        root = work / "store"
        state = make_small(count)
        for name, timings in _race_tensors(state, root, sizes.rounds).items():
            found.setdefault(name, {})[count] = timings
        remove_store(root)
    return [_make_tensors_row(name, timings) for name, timings in found.items()]


def make_small(count: int) -> dict[str, torch.Tensor]:
    """Return `count` tensors of 64 bytes, each with its own storage."""
    rows = torch.frombuffer(random_bytes(4 * _ITEMS * count, seed=_SEED), dtype=torch.int32).view(count, _ITEMS)
    return {f"layers.{i}.weight": row.clone() for i, row in enumerate(rows)}


def _race_tensors(state: State, root: Path, rounds: int) -> dict[str, Timings]:
    def open_and_list() -> Iterable[str]:
        return holdfast.open(root).snapshot(SNAPSHOT).keys()

    def verify_names(found: object) -> None:
        if not isinstance(found, list) or found != list(state):
            raise WrongResult(f"the names of {len(state)} tensors differ after loading")

    save: Callable[[], object] = lambda: holdfast.open(root).save(SNAPSHOT, dict(state))  # noqa: E731 - three of a kind
    saved = race({"save": Contestant(save, partial(_remove_and_collect, root))}, rounds=rounds)
    return saved | race(
        {
            # Collect the garbage of earlier work now, not during the next measurement.
            "open and list": Contestant(open_and_list, _collect, verify_names),
            "load": Contestant(
                lambda: holdfast.open(root).load(SNAPSHOT),
                _collect,
                partial(verify_state, expected=state, who="Holdfast"),
            ),
        },
        rounds=rounds,
    )


def _collect() -> None:
    gc.collect()


def _remove_and_collect(root: Path) -> None:
    remove_store(root)
    gc.collect()


def _make_tensors_row(name: str, timings: Mapping[int, Timings]) -> Result:
    """Compare the largest number of tensors with an ordinary one, in microseconds per tensor."""
    figures = {count: 1e6 * found.best / count for count, found in timings.items()}
    most = max(figures)
    ordinary = _MANY_TENSORS if _MANY_TENSORS in figures and most > _MANY_TENSORS else sorted(figures)[-2]
    return Result(
        f"{name}, per tensor, {most} tensors",
        figures[most],
        "us",
        f"at {ordinary}",
        figures[ordinary],
        Goal("ratio", "<=", 1.5),
        ", ".join(f"{figure:.1f} at {count}" for count, figure in figures.items()),
        {str(count): found.seconds for count, found in timings.items()},
        {str(count): figure for count, figure in figures.items()},
    )
