"""Compiles, serialises and loads graphs and evaluates guards, with private names of torch 2.13.

Torch evaluates guards as Python code, so only guards that are plain arithmetic are saved or evaluated.
"""

from __future__ import annotations

import ast
import inspect
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Final

import torch

# Modules that the code of stored graphs imports, so that loading the first graph does not wait for them. The compiler
# itself is not among them: it takes another second.
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

from holdfast.compile_cache.inductor import CompiledGraph, compile_plainly, patch_compiler_config
from holdfast.compile_cache.key.key import make_key  # noqa: F401 - `inductor.make_key` calls it
from holdfast.compile_cache.torch_2_13.kernels import LOAD_PARAMETERS, record_kernels, supply_kernels
from holdfast.errors import CompileCacheError

_log = logging.getLogger(__name__)

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

MAX_GUARDS_CHARS: Final = 1 << 18
"""Enough for a graph with thousands of symbols; more does not fit into a record."""
_MAX_POWER: Final = 16
"""Shapes need squares and cubes; larger or nested powers could take forever to evaluate."""
# What guards may contain besides sizes and numbers; see `is_plain`.
_FUNCTIONS: Final = frozenset(
    {"max", "min", "abs", "IsNonOverlappingAndDenseIndicator", "cast_symbool_to_symint_guardless"}
)
_METHODS: Final = frozenset(
    {
        "math.floor", "math.ceil", "math.trunc", "math.sqrt", "math.log2", "math.inf",
        "torch.sym_float", "torch.sym_not", "torch._sym_sqrt",
    }
)  # fmt: skip
_OPERATORS: Final = (
    ast.Add, ast.Sub, ast.Mult, ast.FloorDiv, ast.Div, ast.Mod, ast.BitAnd, ast.BitOr, ast.BitXor,
)  # fmt: skip
_COMPARISONS: Final = (ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE)
_SIGNS: Final = (ast.Not, ast.USub, ast.UAdd)


class StrictError(CompileCacheError, ShortenTraceback):
    """Raised if `strict` is set; dynamo passes it on unchanged."""

    def __init__(self, text: str) -> None:
        super().__init__(text, first_useful_frame=None)


def find_obstacle() -> str:
    """Return why graphs cannot be cached, as a sentence; "" if they can."""
    if compiler_config.force_disable_caches:
        return "torch.compiler.config.force_disable_caches is set, which turns off every compile cache"
    found = tuple(inspect.signature(CppCodeCache.load_async).parameters)
    if found != LOAD_PARAMETERS:
        return f"torch {torch.__version__} loads C++ kernels in a way that the compile cache does not support"
    return ""


def compile_graph(
    graph: torch.fx.GraphModule, inputs: Sequence[Any], *, options: Mapping[str, Any], tag: str, system: str
) -> CompiledGraph:
    """Compile forward and backward so that they can be saved."""
    started = time.monotonic()
    with ExitStack() as stack:
        stack.enter_context(functorch_config.patch(_SETTINGS_TO_SAVE))
        stack.enter_context(patch_compiler_config(cache_key_tag=tag))
        kernels = stack.enter_context(record_kernels(system))
        try:
            run = compile_plainly(graph, inputs, options)
        except (RestartAnalysis, SkipFrame):
            raise
        except Exception as error:  # noqa: BLE001 - compile as usual: that raises again if the graph itself is at fault
            reason = f"compiling it together with its backward failed ({_describe(error)})"
        else:
            return _serialise(run, kernels.read, time.monotonic() - started)
    return _compile_unsaved(graph, inputs, options, reason)


def _compile_unsaved(
    graph: torch.fx.GraphModule, inputs: Sequence[Any], options: Mapping[str, Any], reason: str
) -> CompiledGraph:
    started = time.monotonic()
    run = compile_plainly(graph, inputs, options)
    return CompiledGraph(run, None, seconds=time.monotonic() - started, why_not_saved=reason)


def _serialise(
    run: Callable[..., Any], read_kernels: Callable[[str], dict[str, bytes]], seconds: float
) -> CompiledGraph:
    if not hasattr(run, "serialize"):
        return CompiledGraph(
            run, None, seconds=seconds, why_not_saved="torch returned a function that cannot be serialised"
        )
    try:
        entry = run.serialize()
        guards = entry.guards_expr or ""
        with _no_triton_kernels():
            data = Bundle.serialize_compile_artifacts(Bundle(run))
        kernels = read_kernels(_read_source(entry))
    except Exception as error:  # noqa: BLE001 - pickling runs user code, and the graph works without being saved
        return CompiledGraph(
            run, None, seconds=seconds, why_not_saved=f"it could not be serialised ({_describe(error)})"
        )
    if guards and not is_plain(guards):
        return CompiledGraph(
            run, None, seconds=seconds, why_not_saved=f"its guards are not plain arithmetic: {guards[:200]}"
        )
    return CompiledGraph(run, data, guards, kernels, seconds)


def _read_source(entry: Any) -> str:
    """Return the generated code, which names the kernels in use; autotuning builds others that are not used."""
    parts = (entry.compiled_fw, entry.compiled_bw)
    return "\n".join(part.result.source_code for part in parts if part is not None)


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


def load_graph(graph: bytes, kernels: Mapping[str, bytes], options: Mapping[str, Any]) -> Callable[..., Any]:
    """Return a callable for a graph that `compile_graph` serialised. Runs code from `graph`."""
    with inductor_config.patch(dict(options)), supply_kernels(kernels):
        run: Callable[..., Any] = Bundle.deserialize_compile_artifacts(graph).compiled_fn
    return run


def evaluate_guards(guards: str, inputs: Sequence[Any], *, install: bool) -> bool:
    """Return whether guards hold for the sizes among `inputs`. If `install`, add them to dynamo's shape environment."""
    if not guards:
        return True
    environment = _find_shape_env()
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
    """Return whether the compiler raised this error to make dynamo trace again or skip the frame."""
    return isinstance(error, RestartAnalysis | SkipFrame)


def _find_shape_env() -> ShapeEnv | None:
    context = TracingContext.try_get()
    return context.fake_mode.shape_env if context and context.fake_mode else None


def _describe(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


def is_plain(text: str) -> bool:
    """Return whether guards only compare and calculate with sizes.

    Torch evaluates guards as Python code, before the rest of an entry is verified. So a text that could do anything
    else must not reach it.
    """
    if len(text) > MAX_GUARDS_CHARS:
        return False
    try:
        return _is_plain(ast.parse(text, mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False


def _is_plain(node: ast.expr) -> bool:
    match node:
        case ast.Constant(value=bool() | int() | float()):
            return True
        case ast.Subscript(value=ast.Name(id="L"), slice=ast.Constant(value=str())):
            return True
        case ast.BoolOp(values=values):
            return all(map(_is_plain, values))
        case ast.Compare(left=left, ops=operators, comparators=others):
            known = all(isinstance(operator, _COMPARISONS) for operator in operators)
            return known and all(map(_is_plain, (left, *others)))
        case ast.UnaryOp(op=operator, operand=operand):
            return isinstance(operator, _SIGNS) and _is_plain(operand)
        case ast.BinOp(left=left, op=ast.Pow(), right=ast.Constant(value=int(power))):
            is_nested = any(isinstance(below, ast.Pow) for below in ast.walk(left))
            return 0 <= power <= _MAX_POWER and not is_nested and _is_plain(left)
        case ast.BinOp(left=left, op=operator, right=right):
            return isinstance(operator, _OPERATORS) and _is_plain(left) and _is_plain(right)
        case ast.IfExp(test=test, body=body, orelse=other):
            return all(map(_is_plain, (test, body, other)))
        case _:
            return _is_known_call(node)


def _is_known_call(node: ast.expr) -> bool:
    match node:
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]):
            return name in _FUNCTIONS and all(map(_is_plain, arguments))
        case ast.Call(func=ast.Attribute() as method, args=arguments, keywords=[]):
            return _is_known_call(method) and all(map(_is_plain, arguments))
        case ast.Attribute(value=ast.Name(id=owner), attr=name):
            return f"{owner}.{name}" in _METHODS
        case _:
            return False
