"""Measures the start of a compiled model from the start of its process: torch's warm directory, and a stored callable.

Each figure comes from a fresh process with one thread: CPU seconds to the end of the first forward and backward. The
rows "with an optimizer" contain one step of AdamW, whose creation imports dynamo in any case.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from bench.kit.measure import Goal, Result, Sizes, WrongResult

WARM: Final = "torch, warm directory"
WHOLE: Final = "Holdfast, whole=True"
EAGER: Final = "eager"
WAYS: Final = {WARM: "torch", WHOLE: "whole", EAGER: "eager"}
MODELS: Final = ("MLP", "6-layer encoder", "12-layer transformer")

_ROOT: Final = Path(__file__).resolve().parents[2]
_TIMES_WARM: Final = 3.0


@dataclass(frozen=True, slots=True)
class Start:
    """What a measured process reported."""

    cpu: float
    wall: float
    digest: str
    used_dynamo: bool
    hit: int


def run(sizes: Sizes, work: Path) -> list[Result]:
    """Start each model in each way; the first process of each way fills its cache and is not measured."""
    results = []
    for model in MODELS[: {3: 3, 2: 2}.get(sizes.rounds, 1)]:
        for has_optimizer in (False, True):
            folder = work / f"{model} {has_optimizer}"
            folder.mkdir()
            results.append(
                make_row(
                    model,
                    _measure(model, folder, sizes.rounds, has_optimizer=has_optimizer),
                    has_optimizer=has_optimizer,
                )
            )
    return results


def _measure(model: str, folder: Path, rounds: int, *, has_optimizer: bool) -> dict[str, list[Start]]:
    first = {way: start(model, way, folder, has_optimizer=has_optimizer) for way in (WARM, WHOLE)}
    found: dict[str, list[Start]] = {way: [] for way in WAYS}
    for _ in range(rounds):
        for way in random.sample(list(WAYS), len(WAYS)):
            found[way].append(start(model, way, folder, has_optimizer=has_optimizer))
    verify(model, first, found, has_optimizer=has_optimizer)
    return found


def start(model: str, way: str, folder: Path, *, has_optimizer: bool) -> Start:
    """Run one process to its end."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("TORCH", "HOLDFAST_"))}
    variables |= {
        "PYTHONPATH": str(_ROOT),
        "OMP_NUM_THREADS": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(folder / WAYS[way]),
    }
    request = {
        "model": model,
        "way": WAYS[way],
        "place": str(folder / "store"),
        "optimizer": has_optimizer,
        "started": time.monotonic(),
    }
    command = [sys.executable, "-m", "bench.kit.whole_process", json.dumps(request)]
    ran = subprocess.run(command, cwd=_ROOT, env=variables, capture_output=True, text=True, check=False)
    if ran.returncode:
        raise WrongResult(f"{model}, {way}: the process ended with {ran.returncode}:\n{ran.stderr[-3000:]}")
    found: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    if found.get("not_saved"):
        raise WrongResult(f"{model}: it was not stored: {found['not_saved']}")
    return Start(found["cpu"], found["wall"], found["digest"], found["dynamo"], found.get("hit", 0))


def verify(
    model: str, first: Mapping[str, Start], found: Mapping[str, Sequence[Start]], *, has_optimizer: bool
) -> None:
    """Raise WrongResult unless stored callables were used, without dynamo, and gave the values of plain compiling."""
    for each in found[WHOLE]:
        if each.digest != first[WARM].digest:
            raise WrongResult(f"{model}: outputs or gradients of {WHOLE} are not those of plain compiling")
        if not each.hit or (each.used_dynamo and not has_optimizer):
            raise WrongResult(f"{model}: {WHOLE} had {each.hit} hits, and imported dynamo: {each.used_dynamo}")


def make_row(model: str, found: Mapping[str, Sequence[Start]], *, has_optimizer: bool) -> Result:
    """Return the row of one model."""
    cpu = {way: [each.cpu for each in starts] for way, starts in found.items()}
    best = {way: min(samples) for way, samples in cpu.items()}
    wall = ", ".join(f"{way} {min(each.wall for each in starts):.1f} s" for way, starts in found.items())
    return Result(
        f"first step from process start, {model}, as a whole" + (", with an optimizer" if has_optimizer else ""),
        best[WHOLE],
        "s",
        WARM,
        best[WARM],
        None if has_optimizer else Goal("ratio", "<=", round(1 / _TIMES_WARM, 3)),
        f"{best[WARM] / best[WHOLE]:.1f} times as fast as {WARM}; eager {best[EAGER]:.2f} s; by the clock: {wall}",
        cpu,
        best,
    )
