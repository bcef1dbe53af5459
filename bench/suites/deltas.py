"""Measures states of a training run stored as deltas on an earlier step, against whole ones and other formats."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

from bench.kit.compressed_peers import (
    Format,
    State,
    count_state,
    make_zipnn_peers,
    make_zstd_peers,
    verify_state,
)
from bench.kit.measure import (
    Contestant,
    Goal,
    Result,
    Sizes,
    Timings,
    WrongResult,
    count_bytes,
    list_files,
    load_pages,
    race,
)
from bench.kit.trained_states import Trained, Training, iter_trained
from holdfast.digest import hash_bytes
from holdfast.objects.local.local_store import LocalStore
from holdfast.repo.format.chunk import CHUNK_BYTES
from holdfast.repo.format.codec import apply_delta, encode_delta
from holdfast.repo.handle.compression import LEVELS, Compression, DeltaChoice
from holdfast.store import Store

OWN: Final = "small + deltas"
"""The contestant that the rows are about."""
APART: Final = (1, 10, 50)
"""How many steps are between a state and its base."""
_RUN: Final = tuple(range(0, 100, 10))
"""The steps of a run of which one save in ten is whole: the first of them."""
_MOST_SHARE: Final = 0.2
"""The share of their size that bf16 weights should take, 10 steps from their base."""
_CORE_GB_PER_S: Final = 1.0
"""The speed that a load of deltas should have, by CPU time."""
_SMALL_BYTES: Final = 16 << 20
_FULL_BYTES: Final = 1 << 30


class _Choice(NamedTuple):
    compression: Compression
    delta: DeltaChoice


_CHOICES: Final[Mapping[str, _Choice]] = {
    "raw": _Choice(None, "off"),
    "fast": _Choice("fast", "off"),
    "small": _Choice("small", "off"),
    OWN: _Choice("small", 10),
    "fast + deltas": _Choice("fast", 10),
    "raw + deltas": _Choice(None, 10),
}


@dataclass(frozen=True, slots=True)
class Kind:
    """What of a training state is saved."""

    label: str
    item_bytes: int
    select: Callable[[Trained], State]
    """Returns a copy."""


def _copy_weights(dtype: torch.dtype, trained: Trained) -> State:
    return {name: tensor.to(dtype, copy=True) for name, tensor in trained.weights.items()}


def _copy_all(trained: Trained) -> State:
    parts = {"model": trained.weights, "exp_avg": trained.first_moments, "exp_avg_sq": trained.second_moments}
    return {f"{part}.{name}": tensor.clone() for part, state in parts.items() for name, tensor in state.items()}


BF16: Final = Kind("bf16", 2, partial(_copy_weights, torch.bfloat16))
KINDS: Final = (BF16, Kind("fp32", 4, partial(_copy_weights, torch.float32)), Kind("fp32 + AdamW", 4, _copy_all))


def run(sizes: Sizes, work: Path) -> list[Result]:
    """Train a model, then measure each kind of state 1, 10 and 50 steps from its base, and a run of ten saves."""
    states: dict[Kind, dict[int, State]] = {kind: {} for kind in KINDS}
    for step, trained in enumerate(iter_trained(_plan_training(sizes), _RUN[-1])):
        for kind in KINDS:
            if step in (0, *APART) or (kind is BF16 and step in _RUN):
                states[kind][step] = kind.select(trained)
    rows = []
    for kind, kept in states.items():
        for apart in APART:
            rows += _measure_formats(Pair(kind, apart, kept[0], kept[apart]), sizes.rounds, work)
    rows += [_measure_run(states[BF16], work)]
    for kind, kept in states.items():
        rows += _measure_xor(Pair(kind, 10, kept[0], kept[10]), sizes.rounds)
    return rows


def _plan_training(sizes: Sizes) -> Training:
    """Return 19 million parameters for the full size, 76 MB as fp32; a tiny model for tests."""
    if sizes.save_bytes >= _FULL_BYTES:
        return Training(width=512, layers=6, warm_steps=150)
    if sizes.save_bytes >= _SMALL_BYTES:
        return Training(width=256, layers=3, warm_steps=150)
    return Training(width=64, layers=1, warm_steps=5)


@dataclass(frozen=True, slots=True)
class Pair:
    """A state of a kind, and an earlier one of the same training: its base."""

    kind: Kind
    apart: int
    base: State
    state: State

    @property
    def label(self) -> str:
        return f"{self.kind.label}, {self.apart} {'step' if self.apart == 1 else 'steps'} apart"


def _make_formats(like: State) -> dict[str, Format]:
    own = {
        name: Format(partial(_save_store, choice, "run/1"), _load_store, partial(_save_store, choice, "run/0"))
        for name, choice in _CHOICES.items()
    }
    return own | make_zstd_peers(like) | make_zipnn_peers(like)


def _save_store(choice: _Choice, name: str, state: State, path: Path) -> None:
    with Store(LocalStore(path)) as store:
        store.save(name, state, compression=choice.compression, delta=choice.delta)


def _load_store(path: Path, name: str = "run/1") -> State:
    with Store(LocalStore(path)) as store:
        loaded: State = store.load(name)
        return loaded


class _Place:
    """Where one contestant saves; every round begins with nothing but the base there."""

    def __init__(self, contestant: Format, base: State, path: Path) -> None:
        self._format = contestant
        self._base = base
        self.path = path
        self._base_bytes = 0

    def prepare(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        if self._format.save_base is not None:
            self._format.save_base(self._base, self.path)
            self._base_bytes = count_bytes(self.path)

    def count_stored(self) -> int:
        """Return the bytes that the last save added."""
        return count_bytes(self.path) - self._base_bytes

    def load_pages(self) -> None:
        load_pages(list_files(self.path))


def _measure_formats(pair: Pair, rounds: int, work: Path) -> list[Result]:
    """Save the state where its base is saved already, and load it from the page cache."""
    formats = _make_formats(pair.state)
    places = {
        name: _Place(each, pair.base, work / f"place {number}") for number, (name, each) in enumerate(formats.items())
    }
    saves = {
        name: Contestant(partial(each.save, pair.state, places[name].path), places[name].prepare)
        for name, each in formats.items()
    }
    saved = race(saves, rounds=rounds)
    size_bytes = count_state(pair.state)
    stored = {name: place.count_stored() / size_bytes for name, place in places.items()}
    loads = {
        name: Contestant(
            partial(each.load, places[name].path), places[name].load_pages, partial(verify_state, pair.state)
        )
        for name, each in formats.items()
    }
    loaded = race(loads, rounds=rounds)
    for place in places.values():
        shutil.rmtree(place.path)
    return [
        _describe_stored(pair, stored),
        *_describe_speed(f"{pair.label}: save", saved, size_bytes),
        *_describe_speed(f"{pair.label}: load", loaded, size_bytes, Goal("figure", ">=", _CORE_GB_PER_S)),
    ]


def _list_peers(figures: Mapping[str, float]) -> list[str]:
    return [name for name in figures if name not in _CHOICES]


def _describe_stored(pair: Pair, stored: Mapping[str, float]) -> Result:
    best = min(_list_peers(stored), key=lambda name: stored[name])
    is_judged = pair.kind is BF16 and pair.apart == 10
    goal = Goal("figure", "<=", _MOST_SHARE) if is_judged else None
    note = ", ".join(f"{name} {share:.3f}" for name, share in stored.items())
    return Result(f"{pair.label}: stored", stored[OWN], "of raw", best, stored[best], goal, note, {}, stored)


def _describe_speed(
    workload: str, timings: Mapping[str, Timings], size_bytes: int, core_goal: Goal | None = None
) -> list[Result]:
    """Return one row by the clock and one by CPU time."""
    by_clock = {name: size_bytes / found.best / 1e9 for name, found in timings.items()}
    by_core = {name: size_bytes / min(found.cpu_seconds) / 1e9 for name, found in timings.items()}
    rows = []
    for name, speeds, goal in ((workload, by_clock, None), (f"{workload}, one core", by_core, core_goal)):
        best = max(_list_peers(speeds), key=lambda peer, speeds=speeds: speeds[peer])  # type: ignore[misc] # bound early
        is_core = speeds is by_core
        cost = {each: 2**30 / 1e9 / speed for each, speed in by_core.items()}
        note = "CPU s/GiB: " + ", ".join(f"{each} {seconds:.2f}" for each, seconds in cost.items()) if is_core else ""
        samples = {each: found.cpu_seconds if is_core else found.seconds for each, found in timings.items()}
        rows.append(Result(name, speeds[OWN], "GB/s", best, speeds[best], goal, note, samples, speeds))
    return rows


def _measure_run(states: Mapping[int, State], work: Path) -> Result:
    """Save ten states, ten steps apart, of which the first is whole; return the share that all of them take."""
    raw_bytes = sum(count_state(states[step]) for step in _RUN)
    shares: dict[str, float] = {}
    for name, choice in _CHOICES.items():
        path = work / "run"
        for step in _RUN:
            _save_store(choice, f"run/{step}", states[step], path)
        shares[name] = count_bytes(path) / raw_bytes
        for step in _RUN:
            verify_state(states[step], _load_store(path, f"run/{step}"))
        shutil.rmtree(path)
    note = ", ".join(f"{name} {share:.3f}" for name, share in shares.items())
    workload = f"{BF16.label}, ten saves, each 10 steps after the one before: stored"
    return Result(workload, shares[OWN], "of raw", "small", shares["small"], None, note, {}, shares)


def _measure_xor(pair: Pair, rounds: int) -> list[Result]:
    """Encode and decode deltas on one core with each level, by CPU time, without a store."""
    chunks = list(zip(_cut(pair.base), _cut(pair.state), strict=True))
    size_bytes = sum(len(data) for _, data in chunks)
    rows = []
    for level in LEVELS:
        encode_all = partial(_encode_all, chunks, level, pair.kind.item_bytes)
        encoded = encode_all()
        if any(
            bytes(found) != bytes(data) for found, (_, data) in zip(_iter_decoded(encoded, chunks), chunks, strict=True)
        ):
            raise WrongResult("a delta was not decoded to the bytes that were encoded")
        share = sum(map(len, encoded)) / size_bytes
        ways: dict[str, Callable[[], object]] = {"encode": encode_all, "decode": partial(_decode_all, encoded, chunks)}
        timings = race({way: Contestant(work) for way, work in ways.items()}, rounds=max(rounds, 3))
        for way, found in timings.items():
            speed = size_bytes / min(found.cpu_seconds) / 1e9
            workload = f"{pair.label}: {way} deltas with {level!r}, one core"
            note = f"{share:.3f} of the size"
            rows.append(Result(workload, speed, "GB/s", note=note, samples={way: found.cpu_seconds}))
    return rows


def _cut(state: State) -> list[memoryview]:
    """Return the chunks of the tensors that have whole ones."""
    views = [tensor.view(torch.uint8).numpy().reshape(-1).data for tensor in state.values() if tensor.ndim > 1]
    return [view[at : at + CHUNK_BYTES] for view in views for at in range(0, len(view), CHUNK_BYTES)]


_Chunks = list[tuple[memoryview, memoryview]]


def _encode_all(chunks: _Chunks, level: Any, item_bytes: int) -> list[bytes]:
    """Return each chunk as a delta on its base; as its own bytes where that is not smaller."""
    digest = hash_bytes(b"")  # which one makes no difference here
    return [encode_delta(data, base, digest, level, item_bytes) or bytes(data) for base, data in chunks]


def _decode_all(encoded: list[bytes], chunks: _Chunks) -> None:
    for _ in _iter_decoded(encoded, chunks):
        pass


def _iter_decoded(encoded: list[bytes], chunks: _Chunks) -> Iterator[memoryview]:
    """Yield each chunk, copied from its base and changed by its delta; the next one overwrites it."""
    target, scratch = memoryview(bytearray(CHUNK_BYTES)), memoryview(bytearray(CHUNK_BYTES))
    for stored, (base, data) in zip(encoded, chunks, strict=True):
        place = target[: len(data)]
        if len(stored) == len(data):
            place[:] = stored
        else:
            place[:] = base
            apply_delta(memoryview(stored), place, scratch)
        yield place
