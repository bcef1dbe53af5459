"""Measures a save with a mirror against one without, and training steps beside an upload: in a process, in a thread."""

from __future__ import annotations

import threading
import time
from itertools import count
from pathlib import Path
from statistics import median
from typing import Final

import torch

import holdfast
from bench.kit.measure import Contestant, Goal, Result, Sizes, WrongResult, race, throughput
from bench.kit.steps import STEPS, make_step, step_while
from holdfast.mirror.mirror import upload_now
from holdfast.mirror.setting import MirrorSetting

_ALONE: Final = "save without a mirror"
_TENSORS: Final = 16
_ROUNDS: Final = 3
_NO_STALL: Final = Goal("ratio", "<=", 1.1)


def run(sizes: Sizes, work: Path) -> list[Result]:
    """Measure the saves, then steps of a small model with and without an upload."""
    torch.manual_seed(0)
    rows = max(1, sizes.save_bytes // 4 // _TENSORS // 4096)
    state = {f"w{number:02}": torch.randn(rows, 1024) for number in range(_TENSORS)}
    return [*_measure_save(state, rows * 4096 * _TENSORS, sizes, work), *_measure_stall(state, work)]


def _measure_save(state: dict[str, torch.Tensor], size_bytes: int, sizes: Sizes, work: Path) -> list[Result]:
    """Return the speed of a save whose upload is still to come, in ratio to a save without a mirror."""
    numbers = count()

    def make(name: str, store: holdfast.Store) -> Contestant:
        def change() -> None:
            if store.mirror is not None:
                store.mirror.wait()
            for tensor in state.values():
                tensor.add_(1.0)

        return Contestant(lambda: store.save(f"{name}/{next(numbers)}", state), change)

    with holdfast.open(work / "plain") as plain, holdfast.open(work / "tiered", mirror=work / "mirror") as tiered:
        contestants = {"save with a mirror": make("a", tiered), _ALONE: make("b", plain)}
        timings = race(contestants, rounds=max(sizes.rounds, _ROUNDS))
        if tiered.mirror is None or not tiered.mirror.wait().is_complete:
            raise WrongResult("the mirror does not have every snapshot")
    return [throughput("save with a mirror", timings, size_bytes, against=_ALONE)]


def _measure_stall(state: dict[str, torch.Tensor], work: Path) -> list[Result]:
    """Return the median step beside an upload of the store, by a process as a mirror does it, and by a thread."""
    step = make_step()
    alone = [step() for _ in range(STEPS)]
    with holdfast.open(work / "stall", mirror=work / "by-process") as store:
        store.save("m", state)
        mirror = store.mirror
        assert mirror is not None
        beside = step_while(step, lambda: bool(mirror.state.waiting))
        mirror.wait()
        started = time.perf_counter()
        thread = threading.Thread(target=upload_now, args=(store.repository, MirrorSetting(str(work / "by-thread"))))
        thread.start()
        in_thread = step_while(step, thread.is_alive)
        thread.join()
        seconds = time.perf_counter() - started
    # Before and after, because other work on the machine comes and goes.
    alone_ms = 1e3 * median([*alone, *(step() for _ in range(STEPS))])
    note = f"{len(beside)} steps beside it"
    return [
        Result("step beside a mirror", 1e3 * median(beside), "ms", "step alone", alone_ms, _NO_STALL, note),
        Result(
            "step beside a thread that uploads",
            1e3 * median(in_thread),
            "ms",
            "step alone",
            alone_ms,
            note=f"{len(in_thread)} steps in {seconds:.1f} s",
        ),
    ]
