"""Compiles graphs with their backward, serialises and loads them, evaluates guards, with every supported torch."""

from __future__ import annotations

import ast
import copy
import inspect
import logging
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
from torch._guards import TracingContext
from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table
from torch._inductor import config as inductor_config
from torch._inductor.codecache import CppCodeCache
from torch.compiler import config as compiler_config
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.symbolic_shapes import ShapeEnv, guarding_hint_or_throw, has_guarding_hint

from holdfast.compile_cache.bundle.generated import drop_compiler, running_without_compiler
from holdfast.compile_cache.bundle.kernels import LOAD_PARAMETERS, record_kernels, supply_kernels
from holdfast.compile_cache.inductor import CompiledGraph, LiftedGraph, compile_plainly, describe_error
from holdfast.compile_cache.key.key import make_key
from holdfast.compile_cache.key_parts import GraphKey, Uncacheable

_log = logging.getLogger(__name__)

MAX_GUARDS_CHARS: Final = 1 << 18
"""Enough for a graph with thousands of symbols; more does not fit into a record."""
_MAX_POWER: Final = 16
"""Shapes need squares and cubes; larger or nested powers could take forever to evaluate."""
_OPERATORS: Final = (
    ast.Add, ast.Sub, ast.Mult, ast.FloorDiv, ast.Div, ast.Mod, ast.BitAnd, ast.BitOr, ast.BitXor,
)  # fmt: skip
# Functions and constants that every supported version writes.
SHARED_NAMES: Final = frozenset(
    {
        "IsNonOverlappingAndDenseIndicator", "abs", "cast_symbool_to_symint_guardless", "math.ceil", "math.floor",
        "math.inf", "math.log2", "math.sqrt", "math.trunc", "torch._sym_sqrt", "torch.sym_float", "torch.sym_not",
    }
)  # fmt: skip
_COMPARISONS: Final = (ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE)
_SIGNS: Final = (ast.Not, ast.USub, ast.UAdd)


@dataclass(frozen=True, slots=True)
class GuardLanguage:
    """The language in which a version of torch writes guards."""

    names: frozenset[str]
    """Functions and constants that guards may contain besides sizes, numbers and operators, such as "math.floor"."""

    def evaluate(self, guards: str, inputs: Sequence[Any], *, install: bool) -> bool:
        """Return whether guards hold for the sizes among `inputs`. If `install`, add them to dynamo's guards."""
        if not guards:
            return True
        environment = _find_shape_env()
        if environment is None or not self.is_plain(guards):
            return False
        sizes = [size for size in inputs if isinstance(size, torch.SymInt) and has_guarding_hint(size)]
        values = sizes if install else [guarding_hint_or_throw(size) for size in sizes]
        try:
            return bool(environment.evaluate_guards_expression(guards, values))
        except (ArithmeticError, KeyError, TypeError, ValueError) as error:
            _log.debug("guards %.200s cannot be evaluated: %s", guards, error)
            return False

    def is_plain(self, text: str) -> bool:
        """Return whether guards only compare and calculate with sizes.

        Torch evaluates guards as Python code, before the rest of an entry is verified. So a text that could do
        anything else must not reach it.
        """
        if len(text) > MAX_GUARDS_CHARS:
            return False
        try:
            return self._is_plain(ast.parse(text, mode="eval").body)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return False

    def _is_plain(self, node: ast.expr) -> bool:
        match node:
            case ast.Constant(value=bool() | int() | float()):
                return True
            case ast.Subscript(value=ast.Name(id="L"), slice=ast.Constant(value=str())):
                return True
            case ast.BoolOp(values=values):
                return all(map(self._is_plain, values))
            case ast.Compare(left=left, ops=operators, comparators=others):
                known = all(isinstance(operator, _COMPARISONS) for operator in operators)
                return known and all(map(self._is_plain, (left, *others)))
            case ast.UnaryOp(op=operator, operand=operand):
                return isinstance(operator, _SIGNS) and self._is_plain(operand)
            case ast.BinOp(left=left, op=ast.Pow(), right=ast.Constant(value=int(power))):
                is_nested = any(isinstance(below, ast.Pow) for below in ast.walk(left))
                return 0 <= power <= _MAX_POWER and not is_nested and self._is_plain(left)
            case ast.BinOp(left=left, op=operator, right=right):
                return isinstance(operator, _OPERATORS) and self._is_plain(left) and self._is_plain(right)
            case ast.IfExp(test=test, body=body, orelse=other):
                return all(map(self._is_plain, (test, body, other)))
            case ast.Call(func=ast.Name() | ast.Attribute() as function, args=arguments, keywords=[]):
                return self._is_known(function) and all(map(self._is_plain, arguments))
            case _:
                return isinstance(node, ast.Attribute) and self._is_known(node)

    def _is_known(self, node: ast.expr) -> bool:
        match node:
            case ast.Name(id=name):
                return name in self.names
            case ast.Attribute(value=ast.Name(id=owner), attr=name):
                return f"{owner}.{name}" in self.names
            case _:
                return False


def _find_shape_env() -> ShapeEnv | None:
    context = TracingContext.try_get()
    return context.fake_mode.shape_env if context and context.fake_mode else None


@dataclass(frozen=True, slots=True)
class _Lifted:
    """A graph that owns no tensors, and the tensors that it owned before: its first inputs, in this order."""

    graph: GraphModule
    tensors: list[torch.Tensor]

    def bind(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that passes the tensors and its arguments to `run`, which was compiled from the graph."""
        tensors = self.tensors
        context = TracingContext.try_get()
        if context is not None:
            # Dynamo empties this list when the optimizer is deleted, so that its tensors can be freed.
            context.params_flat = tensors

        def call(*inputs: Any) -> Any:
            return run(*tensors, *inputs)

        return call


def lift_tensors(graph: GraphModule) -> LiftedGraph | None:
    """Return a copy of a graph with its parameters and buffers as first inputs; None if it has none.

    Raises Uncacheable if dynamo did not record where one of them comes from.
    """
    own: dict[str, torch.Tensor] = dict(graph.named_parameters()) | dict(graph.named_buffers())
    if not own:
        return None
    sources = getattr(graph, "_param_name_to_source", None)
    used = {str(node.target): node for node in reversed(graph.graph.nodes) if node.op == "get_attr"}
    if sources is None or any(name not in sources or name not in used for name in own):
        raise Uncacheable(f"the graph contains its own parameters or buffers ({', '.join(list(own)[:3])})")
    copied = Graph()
    placeholders = {name: _add_input(copied, number, used[name], sources[name]) for number, name in enumerate(own)}
    values: dict[Node, Node] = {}
    for node in graph.graph.nodes:
        if node.op == "get_attr" and node.target in placeholders:
            values[node] = placeholders[node.target]
            continue
        values[node] = copied.node_copy(node, values.__getitem__)
        if node.op == "placeholder":
            _set_source(values[node], getattr(node, "_dynamo_source", None))
    lifted = GraphModule(graph, copied)
    lifted.meta = copy.copy(graph.meta)
    # Torch expects it of every graph of dynamo; the graph has no parameters now.
    object.__setattr__(lifted, "_param_name_to_source", {})
    return _Lifted(lifted, list(own.values()))


def _add_input(graph: Graph, number: int, attribute: Node, source: object) -> Node:
    node = graph.placeholder(f"own_{number}")
    node.meta = copy.copy(attribute.meta)
    _set_source(node, source)
    return node


def _set_source(node: Any, source: object) -> None:  # Any: torch adds the attribute at run time
    node._dynamo_source = source


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
