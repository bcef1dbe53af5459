"""Measures how fast a model takes over a version of which 1 % of the chunks changed, and what waiting for it costs."""

from __future__ import annotations

import os
import random
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Final

import torch
from safetensors.torch import load_file, save_file

import holdfast
from bench.kit.measure import Contestant, Goal, Result, Sizes, Timings, WrongResult, race
from holdfast.digest import hash_bytes
from holdfast.repo.engine import count_cores

_TENSORS: Final = 32
_CHUNK_BYTES: Final = 1 << 20
_SHARE: Final = 0.01
_ROUNDS: Final = 5
_VERSIONS: Final = ("v/00000001", "v/00000002")
_SINCE, _CHECKED, _FULL, _ATOMIC = "since", "since, all of the tree hashed", "whole", "whole, atomic"
_PEER, _LIMIT = "safetensors load_file and copy_", "read and BLAKE3 of what changed"
_IDLE_S: Final = 10.0
_SETTLED_S: Final = 2.5
"""For two seconds after a change, each look lists the names."""
_PUBLISHED: Final = 10

State = dict[str, torch.Tensor]


def run(sizes: Sizes, work: Path) -> list[Result]:
    """Measure loads into a model, from files in the page cache, then the delay and the cost of following."""
    old, new, changed = _make_versions(sizes.save_bytes // 2)
    with holdfast.open(work / "store") as store:
        for version, state in zip(_VERSIONS, (old, new), strict=True):
            store.save(version, state)
            save_file(state, work / f"{version[-1]}.safetensors")
        rows = _measure_loads(store, work, (old, new), changed, rounds=max(sizes.rounds, _ROUNDS))
        return [*rows, *_measure_following(work / "followed", sizes)]


def _make_versions(size_bytes: int) -> tuple[State, State, int]:
    """Return two versions of bf16 weights, and how many bytes of chunks differ between them."""
    generator = torch.Generator().manual_seed(0)
    num_items = size_bytes // _TENSORS // 2 // (_CHUNK_BYTES // 2) * (_CHUNK_BYTES // 2) or _CHUNK_BYTES // 2
    old = {f"layer.{n}": torch.randn(num_items, generator=generator).bfloat16() for n in range(_TENSORS)}
    new = {name: tensor.clone() for name, tensor in old.items()}
    places = [(name, at) for name in new for at in range(0, num_items, _CHUNK_BYTES // 2)]
    chosen = random.Random(0).sample(places, max(1, round(_SHARE * len(places))))
    for name, at in chosen:
        new[name][at] += 1
    return old, new, len(chosen) * _CHUNK_BYTES


def _measure_loads(
    store: holdfast.Store, work: Path, states: tuple[State, State], changed_bytes: int, *, rounds: int
) -> list[Result]:
    loads: dict[str, Callable[[State, int], object]] = {
        _SINCE: lambda target, to: store.load_into(_VERSIONS[to], target, since=_VERSIONS[1 - to]),
        _CHECKED: lambda target, to: store.load_into(_VERSIONS[to], target, since=_VERSIONS[1 - to], check_target=True),
        _FULL: lambda target, to: store.load_into(_VERSIONS[to], target),
        _ATOMIC: lambda target, to: store.load_into(_VERSIONS[to], target, atomic=True),
        _PEER: lambda target, to: _copy_from_file(work / f"{_VERSIONS[to][-1]}.safetensors", target),
    }
    contestants = {name: _alternating(load, store, states) for name, load in loads.items()}
    contestants[_LIMIT] = Contestant(partial(_read_and_hash, next((work / "store/packs").iterdir()), changed_bytes))
    timings = race(contestants, rounds=rounds)
    total = sum(tensor.nbytes for tensor in states[0].values())
    what = f"bf16 model of {total >> 20} MiB, {changed_bytes >> 20} MiB of its chunks changed"
    samples = {name: timings[name].seconds for name in timings}
    return [
        _compare(f"{what}: against {_FULL}", timings, _FULL, Goal("figure", ">=", 20), samples),
        _compare(f"{what}: against {_PEER}", timings, _PEER, Goal("figure", ">=", 10), samples),
        _compare(f"{what}: against {_ATOMIC}", timings, _ATOMIC, None, samples),
        _compare(f"{what}: against {_CHECKED}", timings, _CHECKED, None, samples),
        Result(
            f"{what}: time",
            timings[_SINCE].best * 1e3,
            "ms",
            _LIMIT,
            timings[_LIMIT].best * 1e3,
            note=f"CPU {min(timings[_SINCE].cpu_seconds) * 1e3:.1f} ms",
            samples=samples,
        ),
    ]


def _alternating(
    load: Callable[[State, int], object], store: holdfast.Store, states: tuple[State, State]
) -> Contestant:
    """Return a contestant whose model takes over the other version in each round."""
    target = {name: torch.zeros_like(tensor) for name, tensor in states[0].items()}
    store.load_into(_VERSIONS[0], target)
    turn = [0]

    def run() -> int:
        turn[0] = 1 - turn[0]
        load(target, turn[0])
        return turn[0]

    def verify(result: object) -> None:
        if not all(torch.equal(target[name], tensor) for name, tensor in states[turn[0]].items()):
            raise WrongResult("the model does not have the values of the version")

    return Contestant(run, verify=verify)


def _copy_from_file(path: Path, target: State) -> None:
    for name, tensor in load_file(path).items():
        target[name].copy_(tensor)


def _read_and_hash(path: Path, size_bytes: int) -> None:
    """Read so many bytes of a file, which is in the page cache, and hash them, on all cores."""
    with open(path, "rb", buffering=0) as file, ThreadPoolExecutor(count_cores()) as pool:
        offsets = range(0, size_bytes, _CHUNK_BYTES)
        list(pool.map(lambda at: hash_bytes(os.pread(file.fileno(), _CHUNK_BYTES, at)), offsets))


def _compare(
    workload: str, timings: dict[str, Timings], other: str, goal: Goal | None, samples: dict[str, tuple[float, ...]]
) -> Result:
    own, theirs = timings[_SINCE], timings[other]
    ratio = theirs.best / own.best
    cpu = min(theirs.cpu_seconds) / min(own.cpu_seconds)
    note = f"best wall {own.best * 1e3:.1f} ms against {theirs.best * 1e3:.1f} ms; CPU {cpu:.1f} times less"
    return Result(f"load_into(since=), {workload}", ratio, "x", goal=goal, note=note, samples=samples)


def _measure_following(path: Path, sizes: Sizes) -> list[Result]:
    delays, idle_share = _follow(path, sizes.save_bytes // 16)
    return [
        Result(
            "from the commit to a model that holds it",
            statistics.median(delays) * 1e3,
            "ms",
            note=f"{len(delays)} versions, worst {max(delays) * 1e3:.0f} ms; looks every 0.1 s at most",
            samples={"seconds": tuple(delays)},
        ),
        Result("CPU of an hour of waiting, local disk", idle_share * 3600, "s", note=f"measured for {_IDLE_S:.0f} s"),
    ]


def _follow(path: Path, size_bytes: int) -> tuple[Sequence[float], float]:
    """Return the seconds from each commit to the loaded model, and the share of a core that waiting takes."""
    source = {"w": torch.randn(size_bytes // 4)}
    target = {"w": torch.zeros(size_bytes // 4)}
    delays = []
    with holdfast.open(path) as writer, holdfast.open(path) as reader:
        writer.publish("v", source)

        def publish() -> None:
            for number in range(_PUBLISHED):
                time.sleep(0.37)
                source["w"][number] += 1
                writer.publish("v", source)

        thread = threading.Thread(target=publish)
        with reader.follow("v/", timeout_s=3.0) as follower:
            loaded = follower.iter_into(target)
            next(loaded)
            thread.start()
            for snapshot in loaded:
                delays.append(time.time() - snapshot.record.time_s)
            thread.join()
        if not torch.equal(source["w"], target["w"]):
            raise WrongResult("the model does not have the values of the last version")
        return delays, _measure_idle(reader)


def _measure_idle(reader: holdfast.Store) -> float:
    with reader.follow("v/", since=reader.latest("v/"), timeout_s=_IDLE_S) as follower:
        time.sleep(_SETTLED_S)
        follower.poll()
        began_s, began_cpu = time.perf_counter(), time.process_time()
        if next(follower, None) is not None:
            raise WrongResult("there is a new version, and nobody has published one")
        return (time.process_time() - began_cpu) / (time.perf_counter() - began_s)
