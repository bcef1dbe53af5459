"""Measures the start of a compiled model, from the start of its process to the end of its first training step.

Each figure comes from a fresh process with one thread: eager, cold, with torch's own caches, and with a store copied
from another machine. The time contains everything: Python, the imports, the model, forward and backward. Some rows also
contain a step of AdamW, whose creation imports dynamo in any case.
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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from bench.kit.compile_models import GPT2, MODELS, is_installed
from bench.kit.measure import Goal, Result, Sizes, WrongResult

EAGER: Final = "eager"
TRACED: Final = "dynamo alone"
"""Only traces, and runs the traced graph uncompiled: what every backend needs, besides loading."""
COLD: Final = "cold"
WARM: Final = "torch, warm directory"
MEGA: Final = "Mega-cache"
OWN: Final = "Holdfast"
WHOLE: Final = "Holdfast, whole=True"
WAYS: Final = {TRACED: "trace", WARM: "plain", MEGA: "import", OWN: "store", WHOLE: "whole", EAGER: "eager"}
"""What is measured in every round -> the name of the way in the process."""
STARTED: Final = "first step from process start"
CLOCK: Final = "by the clock"

_UNMEASURED: Final = frozenset({"CNN with BatchNorm"})
_ROUNDS: Final = 5
_FEW_ROUNDS: Final = 2
"""Of the rows without goals, and of Mega-cache, which runs the C++ compiler as often as a cold start."""
_TIMES_WARM: Final = {"MLP": 1.4, "6-layer encoder": 1.4, GPT2: 1.15}
_TIMES_MEGA: Final = 3.0
_TIMES_WHOLE: Final = {"MLP": 3.0, "6-layer encoder": 3.0, "12-layer transformer": 3.0}
_ROOT: Final = Path(__file__).resolve().parents[2]
_REAL: Final = "compilers"
_NONE: Final = "no-compilers"
_RUNS: Final = "BENCH_COMPILER_RUNS"
"""The environment variable with the file in which a compiler records its runs."""
_COMPILERS: Final = ("g++", "gcc", "c++", "cc")
# Installed packages have compiled modules.
_DROPPED: Final = ("TORCH", "HOLDFAST_", "PYTHONDONTWRITEBYTECODE")


@dataclass(frozen=True, slots=True)
class Start:
    """What a measured process reported."""

    cpu: float
    """CPU seconds, user and system, of the process and its children."""
    wall: float
    digest: str
    used_dynamo: bool
    compiler_runs: int
    hit: int = 0
    stages: Mapping[str, float] | None = None
    """If it used a store: the seconds of each part of the store's work."""
    not_saved: tuple[str, ...] = ()
    """Why a callable was not stored as a whole."""


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
        self,
        model: str,
        way: str,
        place: Path,
        *,
        inductor: Path | None = None,
        has_compiler: bool = True,
        has_optimizer: bool = False,
    ) -> Start:
        """Run one process to its end; its inductor directory is empty unless one is passed."""
        own = self._work / f"process-{next(self._numbers)}"
        own.mkdir()
        runs = own / "runs"
        runs.touch()
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(_DROPPED)},
            "PATH": f"{self._work / _REAL}:{os.environ['PATH']}" if has_compiler else str(self._work / _NONE),
            _RUNS: str(runs),
            "PYTHONPATH": str(_ROOT),
            "OMP_NUM_THREADS": "1",
            "TORCHINDUCTOR_CACHE_DIR": str(inductor or own / "inductor"),
        }
        request = {"model": model, "way": way, "place": str(place), "optimizer": has_optimizer}
        request["started"] = time.monotonic()
        command = [sys.executable, "-m", "bench.kit.compile_process", json.dumps(request)]
        ran = subprocess.run(command, cwd=_ROOT, env=environment, capture_output=True, text=True, check=False)
        if ran.returncode:
            raise WrongResult(f"{model}, {way}: the process ended with {ran.returncode}:\n{ran.stderr[-3000:]}")
        reported: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
        compiler_runs = len(runs.read_text(encoding="utf-8").splitlines())
        shutil.rmtree(own)
        return Start(
            *(reported["cpu"], reported["wall"], reported["digest"], reported["dynamo"], compiler_runs),
            *(reported.get("hit", 0), reported.get("stages"), tuple(reported.get("not_saved", ()))),
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
    """Start each model in each way."""
    names = [name for name in MODELS if name not in _UNMEASURED and is_installed(name)]
    results: list[Result] = []
    for number, model in enumerate(names[: {3: len(names), 2: 2}.get(sizes.rounds, 1)]):
        folder = work / str(number)
        folder.mkdir()
        results += _measure(model, folder, rounds=min(sizes.starts, _ROUNDS))
        shutil.rmtree(folder)
    return results


def _measure(model: str, folder: Path, *, rounds: int) -> list[Result]:
    """Start a model in all ways, in turns; verify that all that compile compute the same values."""
    processes = Processes(folder)
    found = {COLD: [processes.run(model, "export", folder / "blob", inductor=folder / "directory")]}
    # It stores the graphs, too. Renamed: another path, as on another machine.
    processes.run(model, WAYS[WHOLE], folder / "made")
    (folder / "made").rename(folder / "store")
    trained: dict[str, list[Start]] = {way: [] for way in (WARM, WHOLE, EAGER)}
    for number in range(rounds):
        present = [way for way in WAYS if way != MEGA or number < _FEW_ROUNDS]
        for way in random.sample(present, len(present)):
            found.setdefault(way, []).append(_start(processes, model, way, folder))
        for way in random.sample(list(trained), len(trained)) if number < _FEW_ROUNDS else ():
            trained[way].append(_start(processes, model, way, folder, has_optimizer=True))
    verify(model, found)
    return make_rows(model, found, trained)


def _start(processes: Processes, model: str, way: str, folder: Path, *, has_optimizer: bool = False) -> Start:
    return processes.run(
        model,
        WAYS[way],
        folder / ("blob" if way == MEGA else "store"),
        inductor=folder / "directory" if way == WARM else None,
        has_compiler=way not in (OWN, WHOLE),
        has_optimizer=has_optimizer,
    )


def verify(model: str, found: Mapping[str, Sequence[Start]]) -> None:
    """Raise WrongResult unless stores were used, without a compiler, and all values are those of plain compiling."""
    right = found[COLD][0].digest
    for way, starts in found.items():
        for each in starts if way not in (TRACED, EAGER) else ():  # nothing is compiled, so rounding differs
            if each.digest != right:
                raise WrongResult(f"{model}: outputs or gradients of {way!r} are not those of plain compiling")
    for way in (OWN, WHOLE):
        for each in found[way]:
            if each.compiler_runs or not each.hit:
                raise WrongResult(
                    f"{model}: {way} had {each.hit} hits, and ran the compiler {each.compiler_runs} times"
                )
    for each in found[WHOLE]:
        if each.not_saved and model in _TIMES_WHOLE:
            raise WrongResult(f"{model}: it was not stored as a whole: {each.not_saved[0]}")
        if each.used_dynamo and model in _TIMES_WHOLE:
            raise WrongResult(f"{model}: {WHOLE} imported dynamo")


def make_rows(model: str, found: Mapping[str, Sequence[Start]], trained: Mapping[str, Sequence[Start]]) -> list[Result]:
    """Return the rows of one model: CPU seconds against both of torch's caches, and seconds by the clock."""
    start, whole = f"{STARTED}, {model}", f"{STARTED}, {model}, as a whole"
    refused = [reason for each in found[WHOLE] for reason in each.not_saved]
    notes = [_describe_tracing(found), _describe_stages(found[OWN])]
    return [
        _compare(start, found, OWN, WARM, _TIMES_WARM.get(model), *notes),
        _compare(f"{start}, elsewhere", found, OWN, MEGA, _TIMES_MEGA, _count_runs(found)),
        _compare(
            whole, found, WHOLE, WARM, _TIMES_WHOLE.get(model), *(refused[:1] or [_describe_stages(found[WHOLE])])
        ),
        _compare(f"{whole}, with an optimizer", trained, WHOLE, WARM, None),
        _compare(f"{start}, {CLOCK}", found, OWN, WARM, None, unit="wall"),
    ]


def _describe_tracing(found: Mapping[str, Sequence[Start]]) -> str:
    best = {way: min(each.cpu for each in found[way]) for way in (WARM, TRACED)}
    return f"{TRACED} {best[TRACED]:.2f} s, {best[WARM] / best[TRACED]:.2f} times"


def _describe_stages(own: Sequence[Start]) -> str:
    stages = min(own, key=lambda each: each.cpu).stages or {}
    return ", ".join(f"{stage} {1e3 * spent:.0f} ms" for stage, spent in stages.items() if spent)


def _count_runs(found: Mapping[str, Sequence[Start]]) -> str:
    return "runs of the C++ compiler: " + ", ".join(f"{way} {starts[0].compiler_runs}" for way, starts in found.items())


def _compare(
    workload: str,
    found: Mapping[str, Sequence[Start]],
    own: str,
    against: str,
    times: float | None,
    *notes: str,
    unit: Literal["cpu", "wall"] = "cpu",
) -> Result:
    seconds = {way: [getattr(each, unit) for each in starts] for way, starts in found.items()}
    best = {way: min(samples) for way, samples in seconds.items()}
    note = "; ".join([f"{best[against] / best[own]:.2f} times as fast as {against}", *notes])
    goal = Goal("ratio", "<=", round(1 / times, 3)) if times else None
    return Result(workload, best[own], "s", against, best[against], goal, note, seconds, best)
