"""Runs the generated code of a stored graph without importing torch's compiler.

The code that torch generates for a graph imports two names from the compiler, and torch imports the compiler's `graph`
and `debug` modules to load and to call it. These imports take 0.7 s,
and a hit does not need them: kernels such as `mm` are functions of torch, and the modules are read only for settings,
which have their defaults until the modules are imported. Here the code imports one of the names from the module that
defines it. The other is replaced by a substitute, which imports the compiler only for kernels that it does not know.

Torch's own way is used if the compiler has been imported already, if torch's logs or traces want the code, and for
graphs with Triton kernels.
"""

from __future__ import annotations

import functools
import inspect
import linecache
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from importlib import import_module
from types import MappingProxyType, ModuleType
from typing import Any, Final

import torch
from torch._dynamo.utils import counters, get_runtime_metrics_context
from torch._inductor import metrics, utils
from torch._inductor.codecache import FxGraphCache, PyCodeCache, output_code_log
from torch._inductor.output_code import CompiledFxGraph
from torch._logging import _internal as torch_logging

from holdfast.digest import hash_bytes

HIT_PARAMETERS: Final = ("graph", "cache_info", "constants")
"""The parameters of `FxGraphCache.cache_hit_post_compile`, through which torch loads every stored graph."""

_COMPILER: Final = "torch._inductor.graph"
_SELECTION: Final = "torch._inductor.select_algorithm"
_PLANNING: Final = "torch._inductor.codegen.memory_planning"
_DEBUG: Final = "torch._inductor.debug"
# Lines of generated code -> lines that import the same without the compiler. The numbers of the lines do not change.
_IMPORT_ALIGN: Final = f"\nfrom {_PLANNING} import _align as align\n"
_SUBSTITUTES: Final = {
    _IMPORT_ALIGN: f"\nfrom {utils.__name__} import _align as align\n",
    f"\nfrom {_SELECTION} import extern_kernels\n": f"\nfrom {__name__} import extern_kernels\n",
}
_END_OF_IMPORTS: Final = "\n\n"
# The function that returns the compiler's table of decompositions.
_ONLY_FOR_COMPILING: Final = frozenset({"get_decomp_fn"})

KERNELS: Final = MappingProxyType(
    {
        "addmm": torch.addmm,
        "baddbmm": torch.baddbmm,
        "bmm": torch.bmm,
        "convolution": torch.convolution,
        "mm": torch.mm,
    }
)
"""Kernels that generated code calls -> the functions as which torch's compiler registers them."""


class _ExternKernels:
    """Stands in for `extern_kernels` of torch's compiler."""

    def __getattr__(self, name: str) -> Any:
        # If the compiler has been imported meanwhile, its own object counts: code may have changed it.
        found = getattr(getattr(sys.modules.get(_SELECTION), "extern_kernels", None), name, None) or KERNELS.get(name)
        return getattr(import_module(_SELECTION).extern_kernels, name) if found is None else found


extern_kernels: Final = _ExternKernels()


class _LoadedGraph(CompiledFxGraph):
    """A graph that is called without `torch._inductor.debug`, which can record calls once it has been imported."""

    def __call__(self, inputs: Any) -> Any:
        if _DEBUG in sys.modules or torch.autograd.profiler._is_profiler_enabled or self._compile_context is not None:
            import_module(_DEBUG)
            return super().__call__(inputs)
        run: Callable[[Any], Any] | None = self.current_callable
        assert run is not None, "set when the graph was loaded"
        try:
            return run(inputs)
        finally:
            get_runtime_metrics_context().finish()


_is_active: ContextVar[bool] = ContextVar("holdfast_generated_code", default=False)


class _Hook(staticmethod):  # type: ignore[type-arg]  # staticmethod is generic only in the stubs
    """Marks the function with which `_install` replaced that of torch."""


def _install() -> None:
    original = FxGraphCache.__dict__["cache_hit_post_compile"]
    if isinstance(original, _Hook):
        return
    plain: Callable[..., Any] = original.__func__
    if tuple(inspect.signature(plain).parameters) != HIT_PARAMETERS:
        return

    @functools.wraps(plain)
    def cache_hit_post_compile(graph: Any, cache_info: Any, constants: Any) -> Any:
        if not _is_active.get():
            return plain(graph, cache_info, constants)
        if not _needs_compiler(graph):
            _load(graph, constants)
            return graph, cache_info
        # Kernels of Triton have to be in files; torch writes them, and the code, into its cache directory.
        if not _has_triton_kernels(graph._triton_bundle):
            graph.after_deserialization = functools.partial(_run_source, graph, graph.source_code)
        try:
            return plain(graph, cache_info, constants)
        finally:
            vars(graph).pop("after_deserialization", None)

    setattr(FxGraphCache, plain.__name__, _Hook(cache_hit_post_compile))


@contextmanager
def running_without_compiler() -> Iterator[None]:
    """Load graphs inside the `with` block without importing torch's compiler, where nothing else needs it."""
    _install()
    token = _is_active.set(True)
    try:
        yield
    finally:
        _is_active.reset(token)


def _needs_compiler(graph: Any) -> bool:
    """Return whether loading a graph by torch's own function may do more than `_load` does."""
    return (
        _COMPILER in sys.modules
        or type(graph) is not CompiledFxGraph
        or _has_triton_kernels(graph._triton_bundle)
        or bool(graph.inductor_provenance_stack_traces_str)
        or not graph.device_types <= {"cpu"}
        or bool(torch_logging.trace_log.handlers)
        or output_code_log.isEnabledFor(logging.DEBUG)
    )


def _has_triton_kernels(bundle: Any) -> bool:
    return bundle is not None and bool(bundle.kernel_artifacts or bundle.static_autotuners)


def _load(graph: Any, constants: Any) -> None:
    """Run the generated code of a graph, and let the graph call it."""
    _run_source(graph, substitute_imports(graph.source_code), constants)
    metrics.CachedMetricsHelper.apply_deltas(graph.metrics_deltas)
    counters["inductor"] += graph.counter_deltas
    graph.__class__ = _LoadedGraph


def _run_source(graph: Any, source: str, constants: Any) -> str:
    """Run the generated code of a graph as `PyCodeCache` does, but from memory. Return what stands for its file.

    Torch runs the file that has the name of the code in its cache directory, without looking whether it is that code.
    """
    key = hash_bytes(source.encode()).hex()
    module = ModuleType(f"{PyCodeCache.__module__}.{key}")
    module.__file__ = path = f"<holdfast {key}>"
    vars(module)["key"] = key
    exec(compile(source, path, "exec", dont_inherit=True), vars(module))  # noqa: S102 - an artifact is code, and it is trusted
    vars(module).update(constants.unwrap(graph) or {})
    sys.modules[module.__name__] = module
    linecache.cache[path] = len(source), None, source.splitlines(keepends=True), path
    PyCodeCache.linemaps[path] = list(zip(*graph.cache_linemap or (), strict=True))
    PyCodeCache.modules.append(module)
    graph.current_callable = vars(module)["call"]
    graph.recursively_apply_fns = vars(module).get("recursively_apply_fns")
    graph.compiled_fn_runner = vars(module).get("runner")
    return path


def drop_compiler(graph: Any) -> None:
    """Remove from a graph that is about to be stored what only a compiler needs, and would import the compiler."""
    graph.fx_kwargs = {name: value for name, value in graph.fx_kwargs.items() if name not in _ONLY_FOR_COMPILING}


def substitute_imports(source: str) -> str:
    """Return generated code that imports the two names without importing the compiler."""
    imports, end, rest = source.partition(_END_OF_IMPORTS)
    imports += "\n"
    for line, substitute in _SUBSTITUTES.items():
        # A version of torch that defines it elsewhere imports the compiler for it.
        if line != _IMPORT_ALIGN or "_align" in vars(utils):
            imports = imports.replace(line, substitute)
    return imports[:-1] + end + rest
