"""Measures what recording adds to training steps of Hugging Face models, in CPU time of all threads.

Three limits are measured in the same rounds: the bare work on the bytes that a recorder has to see, without hooks,
names, tables or a store.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Final

import numpy as np
import torch
from blake3 import blake3
from xxhash import xxh3_128_digest

from bench.kit.hugging_face import IS_INSTALLED, MODELS, Training
from bench.kit.measure import Contestant, Goal, Result, Sizes, Timings, race, random_bytes
from bench.suites.capture import DEBUG_MODE, debug_mode, stepping
from holdfast.capture.record.options import LevelName, make_options
from holdfast.capture.record.recorder import record
from holdfast.capture.stored.events import Event
from holdfast.capture.stored.runs import read_run
from holdfast.objects.blocks import PAGE_BYTES, new_block
from holdfast.objects.local.local_store import LocalStore
from holdfast.objects.memory import MemoryStore
from holdfast.repo.handle.repository import open_repository
from holdfast.tensors.spec import find_dtype

PLAIN: Final = "plain step"
LEVELS: Final[Mapping[str, float]] = {"digest": 1.2, "stats": 1.8, "full": 2.0}
"""For each level, the goal: CPU time of a recorded step over that of a plain one."""
_NAMES: Final[tuple[LevelName, ...]] = ("digest", "stats", "full")
STEPS: Final = 15
"""Steps of a round; a segment ends after 1, 3, 7 and 15 of them."""
_DEBUG_ROUNDS: Final = 1


@dataclass(frozen=True, slots=True)
class Traffic:
    """The bytes that a recorder sees in one step."""

    seen: tuple[int, ...]
    """The size of each observed tensor."""
    new: tuple[int, ...]
    """The sizes of those whose bytes were seen neither in this step nor in the one before."""


def run(sizes: Sizes, work: Path) -> list[Result]:
    """Measure each model with one compute thread; no rows without transformers."""
    if not IS_INSTALLED:
        print("the suite `recording` is left out: transformers is not installed; `pip install transformers`")
        return []
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return [row for model in MODELS for row in _measure(model, sizes, work)]
    finally:
        torch.set_num_threads(threads)


def _measure(model: str, sizes: Sizes, work: Path) -> list[Result]:
    training = Training(model, is_tiny=sizes.save_bytes < 64 << 20)
    numbers, root = count(), work / "store"

    def recording(level: LevelName) -> AbstractContextManager[object]:
        repo = open_repository(LocalStore(root / str(next(numbers))), create=True)
        return record(repo, "run", training.model, training.optimizer, options=make_options(level=level))

    def step_within(context: Callable[[], AbstractContextManager[object]]) -> Contestant:
        return stepping(training, context, expected, root, steps=STEPS)

    expected: list[torch.Tensor] = []
    contestants = {PLAIN: step_within(nullcontext)}
    contestants |= {level: step_within(partial(recording, level)) for level in _NAMES}
    contestants[DEBUG_MODE] = replace(step_within(debug_mode), most_rounds=_DEBUG_ROUNDS)
    traffic = find_traffic(training)
    contestants |= {name_limit(level): _do_bare_work(traffic, level, work / "bytes") for level in LEVELS}
    timings = race(contestants, rounds=sizes.rounds)
    return [make_row(model, name, timings, traffic) for name in contestants if name != PLAIN]


def name_limit(level: str) -> str:
    """Return the name of the bare work of a level."""
    return f"limit of {level}"


def find_traffic(training: Training) -> Traffic:
    """Record two steps, and return what was seen in the second."""
    training.start()
    repo = open_repository(MemoryStore(), create=True)
    with record(repo, "run", training.model, training.optimizer, options=make_options(level="digest")):
        training.step()
        training.step()
    found = read_run(repo, "run")
    known = {(event.digest, event.dtype) for event in found.events(0, 0)}
    events = found.events(1, 0)
    new = {(event.digest, event.dtype): event for event in events}
    return Traffic(
        tuple(_count_bytes(event) for event in events),
        tuple(_count_bytes(event) for key, event in new.items() if key not in known),
    )


def _count_bytes(event: Event) -> int:
    return math.prod(event.shape) * find_dtype(event.dtype).itemsize


def _do_bare_work(traffic: Traffic, level: str, path: Path) -> Contestant:
    """Return the work on the bytes of some steps that no recorder of this level can avoid."""
    memory = random_bytes(sum(traffic.seen), seed=0)
    # Whole pages, which a direct write needs.
    copied = new_block(-(-max(1, sum(traffic.new)) // PAGE_BYTES) * PAGE_BYTES, huge=True)
    seen, new = _cut(memory, traffic.seen), _cut(memory, traffic.new)
    copies = _cut(copied, traffic.new)

    def work() -> None:
        for _ in range(STEPS):
            for part in seen:
                xxh3_128_digest(part)
            if level != "digest":
                for part in new:
                    np.frombuffer(part, dtype=np.uint8).max(initial=0)
            if level == "full":
                for part, copy in zip(new, copies, strict=True):
                    copy[:] = part
                    blake3(copy)
                _append_directly(path, copied)

    return Contestant(work, release=lambda: path.unlink(missing_ok=True))


def _append_directly(path: Path, memory: memoryview) -> None:
    """Append whole pages to a file around the page cache, as packs are written: no second copy is made of them."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    try:
        file = os.open(path, flags | os.O_DIRECT)
    except OSError:  # a filesystem in memory
        file = os.open(path, flags)
    try:
        done = 0
        while done < memory.nbytes:
            done += os.write(file, memory[done:])
    finally:
        os.close(file)


def _cut(memory: memoryview, sizes: Sequence[int]) -> list[memoryview]:
    """Return parts of memory that follow each other, so that each is read from memory and not from a cache."""
    ends = np.cumsum(sizes)
    return [memory[end - size : end] for end, size in zip(ends.tolist(), sizes, strict=True)]


def make_row(model: str, name: str, timings: Mapping[str, Timings], traffic: Traffic) -> Result:
    """Return the CPU time of a step in one way, against that of a plain step."""
    per_step = {each: 1e3 * min(found.cpu_seconds) / STEPS for each, found in timings.items()}
    for level in LEVELS:
        per_step[name_limit(level)] += per_step[PLAIN]
    wall = min(timings[name].seconds) / min(timings[PLAIN].seconds)
    note, goal = "", None
    if name in LEVELS:
        goal = Goal("ratio", "<=", LEVELS[name])
        limit = per_step[f"limit of {name}"] / per_step[PLAIN]
        note = f"limit {limit:.2f}; by wall time {wall:.2f}"
    elif name != DEBUG_MODE:
        seen, new = sum(traffic.seen) / 1e6, sum(traffic.new) / 1e6
        note = f"{len(traffic.seen)} tensors, {seen:.0f} MB; {len(traffic.new)} new ones, {new:.0f} MB"
    samples = {each: timings[each].cpu_seconds for each in (name, PLAIN)}
    return Result(f"{model}, {name}", per_step[name], "ms", PLAIN, per_step[PLAIN], goal, note, samples, per_step)
