"""A process that runs cases in which a graph that another process compiled is wrong, with torch's cache or ours."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import importlib.util
import json
import logging
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final
from unittest import mock

import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor import cpu_vec_isa, standalone_compile
from torch._inductor.standalone_compile import CompiledArtifact

from holdfast.compile_cache.backend import Compiler, make_compiler
from holdfast.objects.url import open_store
from holdfast.repo.handle.repository import open_repository

Compile = Callable[..., Any]
Pairs = list[tuple[Tensor, Tensor]]
"""Results, each with the right one."""

_OPERATOR: Final = """
import torch

@torch.library.custom_op("wrong::{name}", mutates_args=())
def operator(x: torch.Tensor) -> torch.Tensor:
    return x * 2

@operator.register_fake
def _(x):
    return torch.empty_like(x)

def setup_context(ctx, inputs, output):
    ctx.rows = inputs[0].shape[0]

def backward(ctx, gradient):
    return gradient * {factor}

operator.register_autograd(backward, setup_context=setup_context)
"""
_FACTORS: Final = {"make": 2.0, "use": 5.0}
_ROWS: Final = {"make": 16, "use": 4}


@dataclasses.dataclass(frozen=True, slots=True)
class Setting:
    """The arguments of a case."""

    role: str
    """Whether it is the first process, "make", or the one after it, "use"."""
    way: str
    folder: Path
    compiler: Compiler | None
    compile_: Compile


def other_processor(setting: Setting) -> Pairs:
    """Compile for a processor with vectors of 512 bits, then run where they have 256."""

    def wave(x: Tensor) -> Tensor:
        return torch.sin(x) * 2 + 1

    x = torch.arange(64.0)
    with torch.no_grad():
        if setting.role == "use":
            return [(setting.compile_(wave)(x), wave(x))]
        with _wide_processor():
            return [(torch.compile(wave, backend=functools.partial(_only_compile, setting))(x), wave(x))]


@contextlib.contextmanager
def _wide_processor() -> Iterator[None]:
    """Make torch and Holdfast assume AVX512. Code compiled for it may not run on this machine."""
    is_wide = mock.patch.object(cpu_vec_isa, "valid_vec_isa_list", return_value=[cpu_vec_isa.VecAVX512()])
    tells = mock.patch.object(torch.backends.cpu, "get_cpu_capability", return_value="AVX512")
    with is_wide, tells:
        yield


def _only_compile(setting: Setting, graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Compile:
    compile_graph = torch._inductor.compile if setting.compiler is None else setting.compiler
    compile_graph(copy.deepcopy(graph), list(inputs))
    run: Compile = graph.forward
    return run


def shared_inputs(setting: Setting) -> Pairs:
    """Change one input, read another: they share memory only in the second process."""

    def shift(a: Tensor, b: Tensor) -> Tensor:
        a.add_(1)
        return a + b

    def make() -> tuple[Tensor, Tensor]:
        first = torch.zeros(96)
        second = first if setting.role == "use" else torch.zeros(96)
        return first[0:64], second[32:96]

    right = shift(*make())
    return [(setting.compile_(shift)(*make()), right)]


def edited_operator(setting: Setting) -> Pairs:
    """Call an operator whose backward was edited between the two processes."""
    operator = _load_operator(setting, "edited", str(_FACTORS[setting.role]))
    x = torch.ones(8, requires_grad=True)
    setting.compile_(lambda x: operator(x).sum())(x).backward()
    assert x.grad is not None
    return [(x.grad, torch.full((8,), _FACTORS[setting.role]))]


def _load_operator(setting: Setting, name: str, factor: str) -> Callable[[Tensor], Tensor]:
    path = setting.folder / f"{name}-{setting.way}-{setting.role}.py"
    path.write_text(_OPERATOR.format(name=name, factor=factor))
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    operator: Callable[[Tensor], Tensor] = module.operator
    return operator


def outside_guards(setting: Setting) -> Pairs:
    """Have a gradient that depends on the size, for a size on the other side."""
    operator = _load_operator(setting, "sized", "(2.0 if ctx.rows > 8 else 3.0)")
    rows = _ROWS[setting.role]
    x = torch.ones(rows, 4, requires_grad=True)
    torch._dynamo.mark_dynamic(x, 0)
    compile_ = setting.compile_
    if setting.compiler is None:
        compile_ = functools.partial(torch.compile, backend=functools.partial(_use_artifact, setting))
    compile_(lambda x: operator(x).sin())(x).sum().backward()
    assert x.grad is not None
    return [(x.grad, torch.full((rows, 4), 2.0 if rows > 8 else 3.0) * math.cos(2.0))]


def _use_artifact(setting: Setting, graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Compile:
    path = str(setting.folder / "artifact")
    if setting.role == "use":
        loaded: Compile = CompiledArtifact.load(path=path, format="binary")
        return loaded
    artifact = standalone_compile(graph, list(inputs), dynamic_shapes="from_tracing_context")
    artifact.save(path=path, format="binary")
    made: Compile = artifact
    return made


def exported_twice(setting: Setting) -> Pairs:
    """Compile one graph and export it, then another, and export again; or use what was exported last."""
    pairs: Pairs = []
    if setting.role == "use" and setting.way == "torch":
        torch.compiler.load_cache_artifacts((setting.folder / "second").read_bytes())
    functions: dict[str, Callable[[Tensor], Tensor]] = {
        "first": lambda x: torch.cos(x) + 3,
        "second": lambda x: torch.tanh(x) * 5,
    }
    for name, function in functions.items():
        x = torch.arange(16.0)
        with torch.no_grad():
            pairs.append((setting.compile_(function)(x), function(x)))
        if setting.role == "make" and setting.way == "torch":
            exported = torch.compiler.save_cache_artifacts()
            assert exported is not None
            (setting.folder / name).write_bytes(exported[0])
    return pairs


CASES: Final[dict[str, Callable[[Setting], Pairs]]] = {
    case.__name__: case for case in (other_processor, shared_inputs, edited_operator, outside_guards, exported_twice)
}


def _run(name: str, setting: Setting) -> dict[str, Any]:
    torch._dynamo.reset()
    counters.clear()
    told: dict[str, Any] = {}
    try:
        pairs = CASES[name](setting)
    except Exception as error:  # noqa: BLE001 - a crash is one of the answers
        told["error"] = f"{type(error).__name__}: {error}"
        pairs = []
    told["wrong"] = [int((~torch.isclose(got, right, rtol=1e-3, atol=1e-4)).sum()) for got, right in pairs]
    told["of"] = [right.numel() for _, right in pairs]
    told["counted"] = {
        event: counters[part][event]
        for part, event in (
            ("aot_autograd", "autograd_cache_hit"),
            ("aot_autograd", "autograd_cache_miss"),
            ("inductor", "fxgraph_cache_hit"),
            ("inductor", "fxgraph_cache_miss"),
        )
    }
    return told


def main(request: dict[str, Any]) -> dict[str, Any]:
    """Run each case, in each process in one way."""
    torch.set_num_threads(1)
    told: dict[str, Any] = {}
    for name in request["cases"]:
        compile_: Compile = torch.compile
        compiler = None
        if request["way"] == "holdfast":
            compiler = make_compiler(open_repository(open_store(request["store"]), create=True))
            compile_ = functools.partial(torch.compile, backend=compiler)
        told[name] = _run(name, Setting(request["role"], request["way"], Path(request["folder"]), compiler, compile_))
        if compiler is not None:
            told[name]["statistics"] = dataclasses.asdict(compiler.statistics)
            told[name]["explained"] = [explained.headline for explained in compiler.explain()]
    return told


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)
    sys.stdout.write("\n" + json.dumps(main(json.loads(sys.argv[1]))) + "\n")
