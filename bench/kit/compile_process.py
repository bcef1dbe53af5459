"""One process of the compile benchmark: starts a model in one way, trains one step, and prints the time of both.

It imports only what its way needs, as a program that uses this way would.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bench.kit.compile_models import digest_step, make_model, train_step


def main(request: dict[str, Any]) -> dict[str, Any]:
    """Start a model and train one step. The time counts from the start of the process to the end of the step."""
    model, x = make_model(request["model"])
    run, finish = _WAYS[request["way"]](model, Path(request["place"]))
    y = train_step(run, x)
    if request["optimizer"]:
        torch.optim.AdamW(model.parameters()).step()
    # Comparable with the parent's time: both read the machine's monotonic clock.
    wall = time.monotonic() - request["started"]
    measured = {"wall": wall, "cpu": _count_cpu_seconds(), "dynamo": "torch._dynamo" in sys.modules}
    return measured | {"digest": digest_step(model, y)} | finish()


def _count_cpu_seconds() -> float:
    """Return the CPU time of this process and of those that it has started, such as a C++ compiler."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


Prepared = tuple[Callable[..., Any], Callable[[], dict[str, Any]]]


def _run_eagerly(model: torch.nn.Module, place: Path) -> Prepared:
    return model, dict


def _trace(model: torch.nn.Module, place: Path) -> Prepared:
    # The traced graph is run uncompiled: what every backend needs, besides loading.
    return torch.compile(model, backend="eager"), dict


def _compile(model: torch.nn.Module, place: Path) -> Prepared:
    return torch.compile(model), dict


def _compile_and_export(model: torch.nn.Module, place: Path) -> Prepared:
    def export() -> dict[str, Any]:
        exported = torch.compiler.save_cache_artifacts()
        assert exported is not None, "torch has kept nothing"
        place.write_bytes(exported[0])
        return {}

    return torch.compile(model), export


def _import(model: torch.nn.Module, place: Path) -> Prepared:
    torch.compiler.load_cache_artifacts(place.read_bytes())
    return torch.compile(model), dict


def _use_store(model: torch.nn.Module, place: Path) -> Prepared:
    import holdfast

    compiler = holdfast.open(place).compiler()
    return torch.compile(model, backend=compiler), lambda: {
        "hit": compiler.statistics.hit,
        "stages": dict(compiler.statistics.seconds),
    }


def _use_whole(model: torch.nn.Module, place: Path) -> Prepared:
    import holdfast

    run: Any = holdfast.compile(model, store=place, whole=True)
    return run, lambda: {
        "hit": run.compile_cache.statistics.hit,
        "stages": dict(run.compile_cache.statistics.seconds),
        "not_saved": list(run.compile_cache.statistics.not_saved),
    }


_WAYS: dict[str, Callable[[torch.nn.Module, Path], Prepared]] = {
    "eager": _run_eagerly,
    "trace": _trace,
    "plain": _compile,
    "export": _compile_and_export,
    "import": _import,
    "store": _use_store,
    "whole": _use_whole,
}


if __name__ == "__main__":
    sys.stdout.write("\n" + json.dumps(main(json.loads(sys.argv[1]))) + "\n")
