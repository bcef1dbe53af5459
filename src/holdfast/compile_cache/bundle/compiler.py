"""Compiles graphs together with their backward, serialises them and loads them, with every supported torch."""

from __future__ import annotations

import inspect
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Final

import torch
from torch._dynamo.aot_compile_types import BundledAOTAutogradSerializableCallable as Bundle
from torch._dynamo.exc import RestartAnalysis, SkipFrame, exceptions_allowed_to_be_fallback
from torch._functorch import config as functorch_config
from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table
from torch._inductor import config as inductor_config
from torch._inductor.codecache import CppCodeCache
from torch.compiler import config as compiler_config

from holdfast.compile_cache.bundle.generated import drop_compiler, running_without_compiler
from holdfast.compile_cache.bundle.guards import SHARED_NAMES, GuardLanguage
from holdfast.compile_cache.bundle.kernels import LOAD_PARAMETERS, record_kernels, supply_kernels
from holdfast.compile_cache.bundle.lifting import lift_tensors
from holdfast.compile_cache.inductor import CompiledGraph, LiftedGraph, compile_plainly, describe_error
from holdfast.compile_cache.key.key import make_key
from holdfast.compile_cache.key_parts import GraphKey

# Torch replaces the class of this module on import; the type stubs do not show `patch`.
_patch_compiler_config: Final[Callable[..., Any]] = compiler_config.patch  # type: ignore[attr-defined]

# Settings under which torch returns a graph that can be serialised.
_SETTINGS_TO_SAVE: Final[dict[str, Any]] = {
    # Put forward and backward into one entry that does not refer to files in torch's cache directory.
    "bundled_autograd_cache": True,
    # Compile the backward now, not when it first runs.
    "force_non_lazy_backward_lowering": True,
    # Graphs without a torch cache key can be saved too: they have a Holdfast key.
    "bypass_autograd_cache_key": True,
    # Create an entry even if the user has turned torch's cache off.
    "enable_autograd_cache": True,
}


# With the last ones, dynamo breaks the graph; the user's program goes on.
_FOR_DYNAMO: Final = (RestartAnalysis, SkipFrame, *exceptions_allowed_to_be_fallback)


@dataclass(frozen=True, slots=True)
class BundleCompiler:
    """Implements `inductor.TorchCompiler` with private names that the supported versions of torch share."""

    guards: GuardLanguage

    def find_obstacle(self) -> str:
        """Return why graphs cannot be cached, as a sentence; "" if they can."""
        if compiler_config.force_disable_caches:
            return "torch.compiler.config.force_disable_caches is set, which turns off every compile cache"
        found = tuple(inspect.signature(CppCodeCache.load_async).parameters)
        if found != LOAD_PARAMETERS:
            return f"torch {torch.__version__} loads C++ kernels in a way that the compile cache does not support"
        return ""

    def lift_tensors(self, graph: torch.fx.GraphModule) -> LiftedGraph | None:
        """Return a copy of a graph with its parameters and buffers as first inputs; None if it has none."""
        return lift_tensors(graph)

    def make_key(
        self,
        graph: torch.fx.GraphModule,
        inputs: Sequence[Any],
        *,
        options: Mapping[str, Any],
        versions: Mapping[str, str],
    ) -> GraphKey:
        """Return the key of a graph; raises Uncacheable."""
        return make_key(graph, inputs, options=options, versions=versions)

    def compile_graph(
        self,
        graph: torch.fx.GraphModule,
        inputs: Sequence[Any],
        *,
        options: Mapping[str, Any],
        tag: str,
        system: str,
    ) -> CompiledGraph:
        """Compile forward and backward so that they can be saved."""
        started = time.monotonic()
        with ExitStack() as stack:
            stack.enter_context(functorch_config.patch(_SETTINGS_TO_SAVE))
            stack.enter_context(_patch_compiler_config(cache_key_tag=tag))
            stack.enter_context(_unique_names())
            kernels = stack.enter_context(record_kernels(system))
            try:
                run = compile_plainly(graph, inputs, options)
            except _FOR_DYNAMO:
                raise
            except Exception as error:  # noqa: BLE001 - compile as usual: that raises again if the graph itself is at fault
                reason = f"compiling it together with its backward failed ({describe_error(error)})"
            else:
                return self._serialise(run, kernels.read, time.monotonic() - started)
        return _compile_unsaved(graph, inputs, options, reason)

    def load_graph(self, graph: bytes, kernels: Mapping[str, bytes], options: Mapping[str, Any]) -> Callable[..., Any]:
        """Return a callable for a graph that `compile_graph` serialised. Runs code from `graph`."""
        with inductor_config.patch(dict(options)), supply_kernels(kernels), running_without_compiler():
            run: Callable[..., Any] = Bundle.deserialize_compile_artifacts(graph).compiled_fn
        return run

    def evaluate_guards(self, guards: str, inputs: Sequence[Any], *, install: bool) -> bool:
        """Return whether guards hold for the sizes among `inputs`. If `install`, add them to dynamo's guards."""
        return self.guards.evaluate(guards, inputs, install=install)

    def is_for_dynamo(self, error: Exception) -> bool:
        """Return whether the compiler raised this error so that dynamo traces again, breaks the graph or skips it."""
        return isinstance(error, _FOR_DYNAMO)

    def _serialise(
        self, run: Callable[..., Any], read_kernels: Callable[[str], dict[str, bytes]], seconds: float
    ) -> CompiledGraph:
        if not hasattr(run, "serialize"):
            return CompiledGraph(
                run, None, seconds=seconds, why_not_saved="torch returned a function that cannot be serialised"
            )
        try:
            entry = run.serialize()
            guards = entry.guards_expr or ""
            for part in _iter_graphs(entry):
                drop_compiler(part)
            with _no_triton_kernels():
                data = Bundle.serialize_compile_artifacts(Bundle(SimpleNamespace(serialize=lambda: entry)))
            kernels = read_kernels(_read_source(entry))
        except Exception as error:  # noqa: BLE001 - pickling runs user code, and the graph works without being saved
            return CompiledGraph(
                run, None, seconds=seconds, why_not_saved=f"it could not be serialised ({describe_error(error)})"
            )
        if guards and not self.guards.is_plain(guards):
            return CompiledGraph(
                run, None, seconds=seconds, why_not_saved=f"its guards are not plain arithmetic: {guards[:200]}"
            )
        return CompiledGraph(run, data, guards, kernels, seconds)


def _compile_unsaved(
    graph: torch.fx.GraphModule, inputs: Sequence[Any], options: Mapping[str, Any], reason: str
) -> CompiledGraph:
    started = time.monotonic()
    run = compile_plainly(graph, inputs, options)
    return CompiledGraph(run, None, seconds=time.monotonic() - started, why_not_saved=reason)


def _read_source(entry: Any) -> str:
    """Return the generated code, which names the kernels in use; autotuning builds others that are not used."""
    return "\n".join(graph.source_code for graph in _iter_graphs(entry))


def _iter_graphs(entry: Any) -> Iterator[Any]:
    """Yield the compiled forward and, if there is one, the compiled backward."""
    yield from (part.result for part in (entry.compiled_fw, entry.compiled_bw) if part is not None)


@contextmanager
def _unique_names() -> Iterator[None]:
    # In its own cache, torch names a graph for which it has no key by `random.random()`. Dynamo restores the state of
    # `random` after each compilation, and users seed it, so another graph could have the same name, and be returned.
    state = random.getstate()
    random.seed()
    try:
        yield
    finally:
        random.setstate(state)


@contextmanager
def _no_triton_kernels() -> Iterator[None]:
    # The table is global, and loading a serialised entry writes the entry's table into it: kernels of the loading
    # process that have the same numbers would be replaced.
    saved = kernel_side_table.id_to_kernel, kernel_side_table.constant_args
    kernel_side_table.id_to_kernel, kernel_side_table.constant_args = {}, {}
    try:
        yield
    finally:
        kernel_side_table.id_to_kernel, kernel_side_table.constant_args = saved


COMPILERS: Final = {
    "2.13": BundleCompiler(GuardLanguage(SHARED_NAMES | {"max", "min"})),
    "2.15": BundleCompiler(GuardLanguage(SHARED_NAMES | {"torch.sym_max", "torch.sym_min"})),
}
"""For each version of torch that `inductor.py` knows, the compiler with what differs from other versions."""
