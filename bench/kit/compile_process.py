"""One process of the compile benchmark: compiles a model in one way, trains one step, and prints the time."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
import torch._inductor.compile_fx

from bench.kit.compile_models import digest_step, make_model, train_step
from holdfast.compile_cache.backend import make_compiler
from holdfast.opening import open as open_store


def main(request: dict[str, Any]) -> dict[str, Any]:
    """Compile and train; the clock of `seconds` starts here, when everything is imported and the model exists."""
    model, x = make_model(request["model"])
    measured: dict[str, Any] = {}
    started = time.monotonic()
    run, finish = _WAYS[request["way"]](model, Path(request["place"]))
    y = train_step(run, x)
    ended = time.monotonic()
    measured["digest"] = digest_step(model, y)
    # Comparable with the parent's time: both read the machine's monotonic clock.
    measured |= {"seconds": ended - started, "from_start": ended - request["started"]}
    return measured | finish()


Prepared = tuple[Callable[..., Any], Callable[[], dict[str, Any]]]


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
    compiler = make_compiler(open_store(place).repository)
    return torch.compile(model, backend=compiler), lambda: {
        "hit": compiler.statistics.hit,
        "stages": dict(compiler.statistics.seconds),
    }


def _trace(model: torch.nn.Module, place: Path) -> Prepared:
    # The traced graph is run uncompiled: no backend can be faster than this, except for the speed of a single step.
    return torch.compile(model, backend="eager"), dict


_WAYS: dict[str, Callable[[torch.nn.Module, Path], Prepared]] = {
    "plain": _compile,
    "export": _compile_and_export,
    "import": _import,
    "store": _use_store,
    "trace": _trace,
}


if __name__ == "__main__":
    sys.stdout.write("\n" + json.dumps(main(json.loads(sys.argv[1]))) + "\n")
