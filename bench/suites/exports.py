"""Measures exports against a load of the same snapshot, and the training steps beside an export in the background."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Iterator
from functools import partial
from itertools import count
from pathlib import Path
from statistics import median
from typing import Final

import torch

import holdfast
from bench.kit.measure import Contestant, Goal, Result, Sizes, WrongResult, race, throughput
from bench.kit.steps import STEPS, make_step, step_while
from holdfast.formats.export import FORMATS, ExportResult

_LOAD: Final = "load of the same snapshot"
_TENSORS: Final = 16
_ROUNDS: Final = 3
_NO_STALL: Final = Goal("ratio", "<=", 1.1)


def run(sizes: Sizes, work: Path) -> list[Result]:
    """Measure exports in every format, then steps of a small model with and without an export."""
    size_bytes = sizes.save_bytes // 4
    torch.manual_seed(0)
    rows = max(1, size_bytes // _TENSORS // 4096)
    state = {f"w{number:02}": torch.randn(rows, 1024) for number in range(_TENSORS)}
    with holdfast.open(work / "store") as store:
        store.save("m", state)
        saved_bytes = rows * 4096 * _TENSORS
        return [*_measure_speed(store, work, saved_bytes, sizes), *_measure_stall(store, work)]


def _measure_speed(store: holdfast.Store, work: Path, size_bytes: int, sizes: Sizes) -> list[Result]:
    numbers = count()
    contestants = {f"export, {format}": _exporting(store, work, format, numbers, size_bytes) for format in FORMATS}
    contestants[_LOAD] = Contestant(partial(store.load, "m"))
    timings = race(contestants, rounds=max(sizes.rounds, _ROUNDS))
    goal = Goal("ratio", ">=", 0.8)
    return [throughput(name, timings, size_bytes, against=_LOAD, goal=goal) for name in contestants if name != _LOAD]


def _exporting(store: holdfast.Store, work: Path, format: str, numbers: Iterator[int], size_bytes: int) -> Contestant:
    made: list[Path] = []

    def export() -> ExportResult:
        return store.export("m", made[-1], format=format)

    def verify(result: object) -> None:
        if not isinstance(result, ExportResult) or result.num_bytes != size_bytes:
            raise WrongResult(f"the export as {format} does not have all bytes")
        if store.verify_export(made[-1], "m"):
            raise WrongResult(f"the export as {format} differs from the snapshot")

    def release() -> None:
        shutil.rmtree(made[-1]) if made[-1].is_dir() else made[-1].unlink()

    return Contestant(
        export, lambda: made.append(work / f"out-{next(numbers)}"), verify, release=release, verify_once=True
    )


def _measure_stall(store: holdfast.Store, work: Path) -> list[Result]:
    """Return the median step beside `export_async`, which is a process, and beside an export in a thread."""
    step = make_step()
    alone = [step() for _ in range(STEPS)]
    started = time.perf_counter()
    handle = store.export_async("m", work / "beside")
    call_ms = 1e3 * (time.perf_counter() - started)
    beside = step_while(step, lambda: not handle.done())
    handle.wait()
    thread = threading.Thread(target=store.export, args=("m", work / "other"))
    thread.start()
    in_thread = step_while(step, thread.is_alive)
    thread.join()
    # Before and after, because other work on the machine comes and goes.
    alone_ms = 1e3 * median([*alone, *(step() for _ in range(STEPS))])
    note = f"export_async returned after {call_ms:.1f} ms; {len(beside)} steps beside it"
    return [
        Result("step beside export_async", 1e3 * median(beside), "ms", "step alone", alone_ms, _NO_STALL, note),
        Result("step beside a thread that exports", 1e3 * median(in_thread), "ms", "step alone", alone_ms),
    ]
