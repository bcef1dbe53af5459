"""Measures the start of a compiled model: cold, with torch's own caches, and with a store copied from another machine.

Each figure comes from a fresh process: seconds to the end of the first step, forward and backward, counted from when
torch, its compiler and Holdfast are imported and the model exists, and also counted from the start of the process.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from bench.kit.compile_models import MODELS
from bench.kit.measure import Goal, Result, Sizes, WrongResult

COLD: Final = "cold"
COLD_STORE: Final = "cold, into a store"
WARM: Final = "torch, warm directory"
MEGA: Final = "Mega-cache"
OWN: Final = "Holdfast"
TRACED: Final = "dynamo alone"
"""Only traces, and runs the traced graph uncompiled: a lower bound for every backend."""
COMPILED: Final = "first step"
STARTED: Final = "first step from process start"

_ROOT: Final = Path(__file__).resolve().parents[2]
_TIMES_WARM: Final = 3.0
_TIMES_MEGA: Final = 20.0
_MOST_MEGA_ROUNDS: Final = 1
"""Runs the C++ compiler, so a round takes as long as a cold one."""
_REAL: Final = "compilers"
_NONE: Final = "no-compilers"
_RUNS: Final = "BENCH_COMPILER_RUNS"
"""The environment variable with the file in which a compiler records its runs."""
_COMPILERS: Final = ("g++", "gcc", "c++", "cc")


@dataclass(frozen=True, slots=True)
class ProcessResult:
    """What a measured process reported."""

    seconds: float
    from_start: float
    digest: str
    compiler_runs: int
    hit: int
    stages: Mapping[str, float]
    """If it used a store: the seconds of each part of the store's work."""


class Processes:
    """Starts processes, each with its own folder, and with a compiler whose runs are counted or with none."""

    def __init__(self, work: Path) -> None:
        """Create the folders of the processes below `work`."""
        self._work = work
        self._numbers = itertools.count()
        # The same path for all processes: torch's cache is valid only for the same compiler path.
        for folder, has_compiler in ((_REAL, True), (_NONE, False)):
            (work / folder).mkdir()
            for name in _COMPILERS:
                _write_counted(work / folder / name, has_compiler=has_compiler)

    def run(
        self, model: str, way: str, place: Path, *, inductor: Path | None = None, has_compiler: bool = True
    ) -> ProcessResult:
        """Run one process to its end; its inductor directory is empty unless one is passed."""
        own = self._work / f"process-{next(self._numbers)}"
        own.mkdir()
        runs = own / "runs"
        runs.touch()
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("TORCH", "HOLDFAST_"))},
            "PATH": f"{self._work / _REAL}:{os.environ['PATH']}" if has_compiler else str(self._work / _NONE),
            _RUNS: str(runs),
            "PYTHONPATH": str(_ROOT),
            "TORCHINDUCTOR_CACHE_DIR": str(inductor or own / "inductor"),
        }
        request = {"model": model, "way": way, "place": str(place), "started": time.monotonic()}
        command = [sys.executable, "-m", "bench.kit.compile_process", json.dumps(request)]
        ran = subprocess.run(command, cwd=_ROOT, env=environment, capture_output=True, text=True, check=False)
        if ran.returncode:
            raise WrongResult(f"{model}, {way}: the process ended with {ran.returncode}:\n{ran.stderr[-3000:]}")
        reported: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
        compiler_runs = len(runs.read_text(encoding="utf-8").splitlines())
        shutil.rmtree(own)
        return ProcessResult(
            *(reported["seconds"], reported["from_start"], reported["digest"], compiler_runs),
            *(reported.get("hit", 0), reported.get("stages", {})),
        )


def _write_counted(path: Path, *, has_compiler: bool) -> None:
    """Write a compiler script that records each run and then calls the real compiler or fails."""
    real = shutil.which(path.name) if has_compiler else None
    if has_compiler and not real:
        raise WrongResult(f"this benchmark needs {path.name}, which is not installed")
    action = f'exec {real} "$@"' if real else "exit 1"
    path.write_text(f'#!/bin/sh\necho "$*" >> "${_RUNS}"\n{action}\n', encoding="utf-8")
    path.chmod(0o755)


def run(sizes: Sizes, work: Path) -> list[Result]:
    """Compile each model in each way."""
    count = {3: len(MODELS), 2: 2}.get(sizes.rounds, 1)
    results: list[Result] = []
    for number, model in enumerate(list(MODELS)[:count]):
        folder = work / str(number)
        folder.mkdir()
        results += _make_rows(model, _measure(model, folder, rounds=sizes.rounds))
        shutil.rmtree(folder)
    return results


def _measure(model: str, folder: Path, *, rounds: int) -> dict[str, list[ProcessResult]]:
    """Run all contestants, compiling ones once and the others in turns; verify that all compute the same values."""
    processes = Processes(folder)
    found = {
        COLD: [processes.run(model, "export", folder / "blob", inductor=folder / "directory")],
        COLD_STORE: [processes.run(model, "store", folder / "made")],
    }
    shutil.copytree(folder / "made", folder / "copy")
    shutil.rmtree(folder / "made")
    for way in _iter_turns(rounds):
        found.setdefault(way, []).append(_take_turn(processes, model, way, folder))
    _verify(model, found)
    return found


def _take_turn(processes: Processes, model: str, way: str, folder: Path) -> ProcessResult:
    if way == WARM:
        return processes.run(model, "plain", folder, inductor=folder / "directory")
    if way == TRACED:
        return processes.run(model, "trace", folder)
    if way == MEGA:
        return processes.run(model, "import", folder / "blob")
    return processes.run(model, "store", folder / "copy", has_compiler=False)


def _iter_turns(rounds: int) -> Iterator[str]:
    for number in range(rounds):
        present = [WARM, OWN, TRACED] + ([MEGA] if number < _MOST_MEGA_ROUNDS else [])
        yield from random.sample(present, len(present))


def _verify(model: str, found: Mapping[str, Sequence[ProcessResult]]) -> None:
    right = found[COLD][0].digest
    for way, results in found.items():
        for each in results if way != TRACED else ():  # nothing is compiled, so rounding differs
            if each.digest != right:
                raise WrongResult(f"{model}: outputs or gradients of {way!r} are not those of plain compiling")
    for each in found[OWN]:
        if each.compiler_runs or not each.hit:
            raise WrongResult(f"{model}: {OWN} had {each.hit} hits, and the compiler ran {each.compiler_runs} times")


def _make_rows(model: str, found: Mapping[str, Sequence[ProcessResult]]) -> list[Result]:
    seconds = {way: [each.seconds for each in results] for way, results in found.items()}
    from_start = {way: [each.from_start for each in results] for way, results in found.items()}
    runs = ", ".join(f"{way} {results[0].compiler_runs}" for way, results in found.items())
    return [
        _compare(f"{COMPILED}, {model}", seconds, WARM, Goal("ratio", "<=", round(1 / _TIMES_WARM, 3)), runs),
        _compare(f"{COMPILED}, {model}, elsewhere", seconds, MEGA, Goal("ratio", "<=", 1 / _TIMES_MEGA), runs),
        _compare(f"{STARTED}, {model}", from_start, WARM, None, runs),
        _make_floor_row(model, seconds, found[OWN]),
    ]


def _make_floor_row(model: str, seconds: Mapping[str, list[float]], own: Sequence[ProcessResult]) -> Result:
    """Return the time above that of dynamo alone, and the store's share of it."""
    stages = min(own, key=lambda each: each.seconds).stages
    parts = ", ".join(f"{stage} {1e3 * spent:.0f} ms" for stage, spent in stages.items())
    best = {way: min(seconds[way]) for way in (OWN, TRACED, WARM)}
    above = best[WARM] - best[TRACED], best[OWN] - best[TRACED]
    note = f"above it torch's warm directory takes {above[0]:.2f} s and Holdfast {above[1]:.2f}: {parts}"
    samples = {way: seconds[way] for way in best}
    return Result(f"{COMPILED}, {model}, by parts", best[OWN], "s", TRACED, best[TRACED], None, note, samples, best)


def _compare(workload: str, seconds: Mapping[str, list[float]], against: str, goal: Goal | None, runs: str) -> Result:
    best = {way: min(samples) for way, samples in seconds.items()}
    times = f"{best[against] / best[OWN]:.1f} times as fast as {against}"
    return Result(
        workload,
        best[OWN],
        "s",
        against,
        best[against],
        goal,
        f"{times}; runs of the C++ compiler: {runs}",
        seconds,
        best,
    )
