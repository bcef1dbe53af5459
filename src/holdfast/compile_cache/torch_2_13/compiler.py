"""What the cache takes of torch 2.13, by private names: compiling so that it can be kept, kernels, loading, guards."""

from __future__ import annotations

import inspect
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Final

import torch

# What the code of a stored graph imports: once, here, and not when the first one is loaded. The compiler itself, which
# is a second more, is not among it.
import torch._functorch._aot_autograd.aot_autograd_result
import torch._inductor.async_compile
import torch._inductor.codegen.memory_planning
import torch._inductor.hooks
import torch._inductor.select_algorithm
from torch._dynamo.aot_compile_types import BundledAOTAutogradSerializableCallable as Bundle
from torch._dynamo.exc import RestartAnalysis, ShortenTraceback, SkipFrame
from torch._functorch import config as functorch_config
from torch._guards import TracingContext
from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table
from torch._inductor import config as inductor_config
from torch._inductor.codecache import CppCodeCache
from torch.compiler import config as compiler_config
from torch.fx.experimental.symbolic_shapes import ShapeEnv, guarding_hint_or_throw, has_guarding_hint

from holdfast.compile_cache.inductor import CompiledGraph, compile_plainly
from holdfast.compile_cache.torch_2_13.guards import is_plain
from holdfast.compile_cache.torch_2_13.kernels import LOAD_PARAMETERS, record_kernels, supply_kernels
from holdfast.errors import CompileCacheError

_log = logging.getLogger(__name__)

_KEEP: Final[dict[str, Any]] = {
    # Forward and backward in one entry that refers to nothing in torch's own directory.
    "bundled_autograd_cache": True,
    # The backward is compiled now and not when it first runs.
    "force_non_lazy_backward_lowering": True,
    # What torch finds no key for can be kept under ours.
    "bypass_autograd_cache_key": True,
    # Entries come into being even for those who have turned torch's cache off.
    "enable_autograd_cache": True,
}

# Torch makes a class of the module when it is imported, which its types do not tell.
_patch_tag: Final[Callable[..., Any]] = compiler_config.patch  # type: ignore[attr-defined]


class Refusal(CompileCacheError, ShortenTraceback):
    """What is raised if strict; dynamo lets it pass as it is."""

    def __init__(self, text: str) -> None:
        """Say what was refused."""
        super().__init__(text, first_useful_frame=None)


def find_obstacle() -> str:
    """Return why graphs cannot be kept, as a sentence, or nothing."""
    if compiler_config.force_disable_caches:
        return "torch.compiler.config.force_disable_caches is set, which turns every compile cache off"
    found = tuple(inspect.signature(CppCodeCache.load_async).parameters)
    if found != LOAD_PARAMETERS:
        return f"torch {torch.__version__} loads C++ kernels in another way than the compile cache knows"
    return ""


def compile_graph(
    graph: torch.fx.GraphModule, inputs: Sequence[Any], *, options: Mapping[str, Any], tag: str, system: str
) -> CompiledGraph:
    """Compile forward and backward so that they can be kept."""
    started = time.monotonic()
    with ExitStack() as stack:
        stack.enter_context(functorch_config.patch(_KEEP))
        stack.enter_context(_patch_tag(cache_key_tag=tag))
        kernels = stack.enter_context(record_kernels(system))
        try:
            run = compile_plainly(graph, inputs, options)
        except (RestartAnalysis, SkipFrame):
            raise
        except Exception as error:  # noqa: BLE001 - whatever it is, compiling as usual tells whether it is the graph's
            reason = f"it could not be compiled with its backward ({_describe(error)})"
        else:
            return _keep(run, kernels.read, time.monotonic() - started)
    return _give_up(graph, inputs, options, reason)


def _give_up(
    graph: torch.fx.GraphModule, inputs: Sequence[Any], options: Mapping[str, Any], reason: str
) -> CompiledGraph:
    started = time.monotonic()
    run = compile_plainly(graph, inputs, options)
    return CompiledGraph(run, None, seconds=time.monotonic() - started, why_not=reason)


def _keep(run: Callable[..., Any], read_kernels: Callable[[str], dict[str, bytes]], seconds: float) -> CompiledGraph:
    if not hasattr(run, "serialize"):
        return CompiledGraph(run, None, seconds=seconds, why_not="torch made nothing of it that can be kept")
    try:
        entry = run.serialize()
        guards = entry.guards_expr or ""
        with _no_triton_kernels():
            data = Bundle.serialize_compile_artifacts(Bundle(run))
        kernels = read_kernels(_read_text(entry))
    except Exception as error:  # noqa: BLE001 - pickling calls anybody's code, and the graph works without being kept
        return CompiledGraph(run, None, seconds=seconds, why_not=f"it could not be serialised ({_describe(error)})")
    if guards and not is_plain(guards):
        return CompiledGraph(run, None, seconds=seconds, why_not=f"its guards are more than arithmetic: {guards[:200]}")
    return CompiledGraph(run, data, guards, kernels, seconds)


def _read_text(entry: Any) -> str:
    """Return the code that was generated, to tell kernels that are used from those that were only tried."""
    parts = (entry.compiled_fw, entry.compiled_bw)
    return "\n".join(part.result.source_code for part in parts if part is not None)


@contextmanager
def _no_triton_kernels() -> Iterator[None]:
    # The table is the whole process's; loading an entry would put its numbers over those of the process that loads.
    kept = kernel_side_table.id_to_kernel, kernel_side_table.constant_args
    kernel_side_table.id_to_kernel, kernel_side_table.constant_args = {}, {}
    try:
        yield
    finally:
        kernel_side_table.id_to_kernel, kernel_side_table.constant_args = kept


def load_graph(graph: bytes, kernels: Mapping[str, bytes], options: Mapping[str, Any]) -> Callable[..., Any]:
    """Return what was kept as something to run."""
    with inductor_config.patch(dict(options)), supply_kernels(kernels):
        run: Callable[..., Any] = Bundle.deserialize_compile_artifacts(graph).compiled_fn
    return run


def hold(guards: str, inputs: Sequence[Any], *, install: bool) -> bool:
    """Tell whether guards hold, and put them into dynamo's shape environment if `install`."""
    if not guards:
        return True
    environment = _find_shapes()
    if environment is None or not is_plain(guards):
        return False
    sizes = [size for size in inputs if isinstance(size, torch.SymInt) and has_guarding_hint(size)]
    values = sizes if install else [guarding_hint_or_throw(size) for size in sizes]
    try:
        return bool(environment.evaluate_guards_expression(guards, values))
    except (ArithmeticError, KeyError, TypeError, ValueError) as error:
        _log.debug("guards %.200s cannot be evaluated: %s", guards, error)
        return False


def is_for_dynamo(error: Exception) -> bool:
    """Tell whether an error asks dynamo for something."""
    return isinstance(error, RestartAnalysis | SkipFrame)


def _find_shapes() -> ShapeEnv | None:
    context = TracingContext.try_get()
    return context.fake_mode.shape_env if context and context.fake_mode else None


def _describe(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__
