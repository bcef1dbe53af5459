"""Records, while dynamo compiles a callable, what another process needs to run it without dynamo; or why it cannot.

Everything that cannot be proven to be complete is refused: more than one graph, code around the graph with an effect,
guards on values that the description of the call does not contain, traced code that it does not contain.
"""

from __future__ import annotations

import dis
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import CellType, CodeType, MappingProxyType, ModuleType
from typing import Any, Final

import torch
from torch import Tensor
from torch._dynamo import external_utils
from torch._dynamo import source as sources
from torch._dynamo.convert_frame import register_bytecode_hook
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._functorch._aot_autograd.schemas import MutationType, OutputType
from torch._guards import Source, TracingContext
from torch._inductor.codecache import CppPythonBindingsCodeCache
from torch._inductor.select_algorithm import extern_kernels

from holdfast.compile_cache.bundle.kernels import name_kernels
from holdfast.compile_cache.code.known import is_known_file, is_known_module, name_known
from holdfast.compile_cache.key_parts import Uncacheable
from holdfast.compile_cache.whole.describe import CallWalk, Description
from holdfast.compile_cache.whole.generated import Reduced, reduce_code
from holdfast.compile_cache.whole.program import Autograd, GeneratedCode, Program, Tangent
from holdfast.compile_cache.whole.running import find_extern
from holdfast.compile_cache.whole.state import find_undescribed
from holdfast.json_text import Json

# Guards on global state, which the description contains. All others are on values.
_GLOBAL_GUARDS: Final = frozenset(
    {
        "AUTOGRAD_SAVED_TENSORS_HOOKS", "DEFAULT_DEVICE", "DETERMINISTIC_ALGORITHMS", "DISPATCH_KEY_SET_MATCH",
        "FSDP_TRAINING_STATE", "GLOBAL_STATE", "GRAD_MODE", "SHAPE_ENV", "TORCH_FUNCTION_STATE",
    }
)  # fmt: skip
_VALUE_GUARDS: Final = frozenset(
    {
        "BOOL_MATCH", "BUILTIN_MATCH", "CLASS_MATCH", "CLOSURE_MATCH", "CONSTANT_MATCH", "DICT_CONTAINS",
        "DICT_KEYS_MATCH", "DICT_LENGTH", "DICT_NOT_CONTAINS", "DICT_VERSION", "DUPLICATE_INPUT",
        "EMPTY_NN_MODULE_HOOKS_DICT", "EQUALS_MATCH", "FUNCTION_MATCH", "HASATTR", "ID_MATCH", "LIST_LENGTH",
        "MAPPING_KEYS_CHECK", "MODULE_MATCH", "NAME_MATCH", "NN_MODULE", "NONE_MATCH", "NOT_NONE_MATCH",
        "NOT_PRESENT_IN_GENERIC_DICT", "RANGE_ITERATOR_MATCH", "SEQUENCE_LENGTH", "TENSOR_MATCH", "TUPLE_ITERATOR_LEN",
        "TYPE_MATCH", "WEAKREF_ALIVE",
    }
)  # fmt: skip
_PLAIN: Final = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)


@dataclass(slots=True)
class Recording:
    """What dynamo has done during one call."""

    callable_: Any
    description: Description
    graphs: int = 0
    codes: list[tuple[CodeType, CodeType]] = field(default_factory=list)
    reason: str = ""
    """Why the callable cannot be stored; empty so far."""
    inputs: tuple[int, ...] = ()
    entry: Any = None
    kernels: Mapping[str, bytes] = field(default_factory=dict)
    outputs: Sequence[Any] = ()
    seconds: float = 0.0

    def refuse(self, reason: str) -> None:
        """Keep the first reason."""
        self.reason = self.reason or reason

    def note_code(self, code: CodeType, new_code: CodeType) -> CodeType | None:
        """Called by dynamo for each frame that it has compiled."""
        self.codes.append((code, new_code))
        return None

    def note_graph(self, graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> None:
        """Called when dynamo passes a graph to the backend: verify its guards, and find its inputs."""
        self.graphs += 1
        try:
            context = TracingContext.get()
            self.inputs = _find_inputs(inputs, self.description.walk)
            _verify_static(context, graph)
            _verify_guards(context, self.description.walk)
            _verify_traced(context, self.description.walk)
        except Uncacheable as error:
            self.refuse(error.reason)
        except Exception as error:  # noqa: BLE001 - the graph can be compiled, whatever the reason
            self.refuse(f"its guards could not be read ({type(error).__name__}: {str(error)[:200]})")


def watch_bytecode(recording: Recording) -> Any:
    """Return a handle; until its `remove` is called, compiled frames are noted in the recording."""
    return register_bytecode_hook(recording.note_code)


def _find_inputs(inputs: Sequence[Any], walk: CallWalk) -> tuple[int, ...]:
    numbers = {id(tensor): number for number, tensor in enumerate(walk.tensors)}
    found = []
    for each in inputs:
        if not isinstance(each, Tensor):
            raise Uncacheable("the graph has an input that is a number: dynamic sizes are not supported")
        if id(each) not in numbers:
            raise Uncacheable("the graph has an input that is not a tensor of the callable or of its arguments")
        found.append(numbers[id(each)])
    if len(set(found)) != len(found):
        raise Uncacheable("the graph has the same tensor as two inputs")
    return tuple(found)


def _verify_static(context: TracingContext, graph: torch.fx.GraphModule) -> None:
    mode = context.fake_mode
    shapes = mode.shape_env if mode is not None else None
    # Dynamo makes a symbol for the value of each integer tensor, used or not; others are sizes that depend on data.
    has_sizes = shapes is not None and (
        bool(shapes.guards) or any(not symbol.name.startswith("s") for symbol in shapes.var_to_range)
    )
    values = [node.meta.get("example_value") for node in graph.graph.nodes if node.op == "placeholder"]
    if has_sizes or any(not isinstance(each, Tensor) or each._has_symbolic_sizes_strides for each in values):
        raise Uncacheable("the graph has dynamic sizes, which are not supported")


def _verify_guards(context: TracingContext, walk: CallWalk) -> None:
    """Raise Uncacheable unless the description contains every value that dynamo has guarded."""
    translator: Any = InstructionTranslator.current_tx()
    scope = _Scope(translator.f_locals, translator.f_globals)
    for guard in context.guards_context.dynamo_guards:
        kind = guard.create_fn_name()
        if kind in _GLOBAL_GUARDS:
            continue
        if kind not in _VALUE_GUARDS:
            raise Uncacheable(f"dynamo has a guard of the kind {kind}, which is not supported")
        _verify_source(guard.originating_source, scope, walk)


@dataclass(frozen=True, slots=True)
class _Scope:
    locals: Mapping[str, Any]
    globals: Mapping[str, Any]


def _verify_source(source: Source, scope: _Scope, walk: CallWalk) -> None:
    value = _evaluate(source, scope)
    _verify_module(value, source, scope, walk)
    if isinstance(value, _PLAIN):
        # A plain value is described together with what contains it.
        base = getattr(source, "base", None)
        if base is not None:
            _verify_source(base, scope, walk)
        return
    if not _is_described(value, source, scope, walk):
        raise Uncacheable(f"dynamo has a guard on {source.name}, which the description of the call does not contain")


def _verify_module(value: Any, source: Source, scope: _Scope, walk: CallWalk) -> None:
    """Raise Uncacheable if a guard is on a name of a module that neither the key nor the description contains."""
    if not isinstance(source, sources.AttrSource) or isinstance(value, ModuleType):
        return
    owner = _evaluate(source.base, scope)
    if not isinstance(owner, ModuleType) or walk.has_read(owner, source.member):
        return
    # Only Python code can be edited or replaced: a module of torch without a file is part of its library.
    if not is_known_module(owner) or find_undescribed(getattr(owner, "__file__", None) or ""):
        raise Uncacheable(f"dynamo has a guard on {owner.__name__}.{source.member}, which is not in the key")


def _is_described(value: Any, source: Source, scope: _Scope, walk: CallWalk) -> bool:
    if walk.has_visited(value) or name_known(value):
        return True
    if isinstance(value, ModuleType):
        # The names that dynamo reads from it have guards of their own.
        return is_known_module(value) or walk.has_read(value) or any(value is each for each in walk.list_namespaces())
    if isinstance(value, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        return True
    base = getattr(source, "base", None)
    if base is None:
        # The arguments of a call, which were described one by one, and namespaces of Python and torch.
        if isinstance(source, sources.LocalSource):
            return source.local_name in ("args", "kwargs")
        return isinstance(source, sources.GlobalSource) and source.global_name.startswith("__builtins_dict__")
    owner = _evaluate(base, scope)
    if isinstance(owner, ModuleType) and is_known_module(owner):
        return True
    # Dictionaries of a module, and namespaces of classes and functions, are described with their owner.
    return isinstance(value, dict | list | tuple | set | MappingProxyType | CellType) and _is_described(
        owner, base, scope, walk
    )


def _evaluate(source: Source, scope: _Scope) -> Any:
    """Return the value that a source of dynamo refers to. Raises Uncacheable for kinds of sources that are unknown."""
    try:
        return _evaluate_known(source, scope)
    except (AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
        raise Uncacheable(f"dynamo has a guard on {source.name}, whose value cannot be read ({error!r})") from error


def _evaluate_known(source: Any, scope: _Scope) -> Any:
    if isinstance(source, sources.LocalSource):
        return scope.locals[source.local_name]
    if isinstance(source, sources.GlobalSource):
        return scope.globals[source.global_name]
    read = _READERS.get(type(source).__name__)
    if read is None:
        raise Uncacheable(f"dynamo has a guard on {source.name}, a {type(source).__name__}, which is not supported")
    return read(_evaluate_known(source.base, scope), source)


def _read_item(owner: Any, source: Any) -> Any:
    if isinstance(source.index, Source) or getattr(source, "index_is_slice", False):
        raise Uncacheable(f"dynamo has a guard on {source.name}, whose index is not a constant")
    return owner[source.index]


def _read_default(owner: Any, source: Any) -> Any:
    return (owner.__kwdefaults__ if source.is_kw else owner.__defaults__)[source.idx_key]


def _read_member(owner: Any, source: Any) -> Any:
    return getattr(owner, source.member)


# Class of a source -> a function that reads its value from that of its base.
_READERS: Final[dict[str, Callable[[Any, Any], Any]]] = {
    "AttrSource": _read_member,
    "CellContentsSource": lambda owner, source: owner.cell_contents,
    "ClosureSource": lambda owner, source: owner.__closure__,
    "CodeSource": lambda owner, source: owner.__code__,
    "ConstDictKeySource": lambda owner, source: list(owner)[source.index],
    "DefaultsSource": _read_default,
    "DictGetItemSource": _read_item,
    "GenericAttrSource": _read_member,
    "GetItemSource": _read_item,
    "NNModuleSource": lambda owner, source: owner,
    "SkipGuardSource": lambda owner, source: owner,
    "TypeDictSource": lambda owner, source: owner.__dict__,
    "TypeMROSource": lambda owner, source: owner.__mro__,
    "TypeSource": lambda owner, source: type(owner),
    "UnspecializedBuiltinNNModuleSource": lambda owner, source: owner,
    "UnspecializedNNModuleSource": lambda owner, source: owner,
    "UnspecializedParamBufferSource": _read_member,
}


def _verify_traced(context: TracingContext, walk: CallWalk) -> None:
    """Raise Uncacheable unless the description contains all code that dynamo has traced."""
    for code in context.traced_code:
        if is_known_file(code.co_filename):
            if module := find_undescribed(code.co_filename):
                raise Uncacheable(f"dynamo has traced {_name_code(code)} of {module}, whose code is not in the key")
        elif not walk.has_visited(code):
            raise Uncacheable(
                f"dynamo has traced {_name_code(code)}, which the description of the call does not contain"
            )


def make_program(recording: Recording, result: object) -> Program:
    """Return the program of a recorded call and its result. Raises Uncacheable."""
    if recording.graphs != 1 or len(recording.codes) != 1:
        raise Uncacheable(f"dynamo made {recording.graphs} graphs from {len(recording.codes)} frames, not one graph")
    _verify_frame(*recording.codes[0], recording.callable_)
    if recording.reason:
        raise Uncacheable(recording.reason)
    entry = recording.entry
    metadata = entry.runtime_metadata
    _verify_entry(entry, metadata)
    num_outputs = len(metadata.output_info)
    if len(recording.outputs) != num_outputs:
        raise Uncacheable("the graph returns more than its outputs")
    known = {id(tensor): number for number, tensor in enumerate(recording.outputs)}
    if len(known) != num_outputs:
        raise Uncacheable("the graph returns the same tensor twice")
    return Program(
        inputs=recording.inputs,
        num_outputs=num_outputs,
        result=_describe_result(result, known, recording.description.walk),
        mutated=tuple(metadata.mutated_graph_handled_indices_seen_by_autograd),
        changes_inputs=any(info.mutation_type != MutationType.NOT_MUTATED for info in metadata.input_info),
        disable_autocast=torch._C._is_any_autocast_enabled(),
        forward=_make_code(entry.compiled_fw.result, recording.kernels),
        backward=_make_code(entry.compiled_bw.result, recording.kernels) if entry.compiled_bw is not None else None,
        autograd=_make_autograd(entry, metadata) if entry.compiled_bw is not None else None,
    )


def _verify_frame(before: CodeType, after: CodeType, callable_: Any) -> None:
    """Raise Uncacheable unless the compiled frame is that of the callable, and only calls the graph."""
    from_torch = before.co_name == "inner" and before.co_filename == external_utils.__file__
    found = callable_.forward if isinstance(callable_, torch.nn.Module) else callable_
    if not from_torch and before is not getattr(found, "__code__", None):
        raise Uncacheable(f"dynamo has compiled {_name_code(before)}, not the callable itself")
    calls = 0
    for step in dis.get_instructions(after):
        name = step.opname
        if name.startswith("CALL") and not name.startswith("CALL_INTRINSIC"):
            calls += 1
        elif name.startswith(("STORE_", "DELETE_")) and not name.startswith(("STORE_FAST", "DELETE_FAST")):
            raise Uncacheable("the callable changes an object besides returning a value")
        elif name.startswith(_WITH_EFFECT):
            raise Uncacheable(f"the code around the graph has the instruction {name}")
    if calls != 1:
        raise Uncacheable("the code around the graph calls functions, which may have effects")


def _name_code(code: Any) -> str:
    return str(getattr(code, "co_qualname", code.co_name))  # Python before 3.11 has only the short name


_WITH_EFFECT: Final = ("IMPORT", "RAISE", "YIELD", "MAKE_FUNCTION", "SETUP_", "BEFORE_WITH", "SEND", "GET_", "FOR_ITER")


def _verify_entry(entry: Any, metadata: Any) -> None:
    """Raise Uncacheable if torch wraps the compiled code in ways that `running` does not."""
    checks = {
        "its sizes have guards": bool(entry.guards_expr),
        "it has tensor subclasses": entry.maybe_subclass_meta is not None or bool(metadata.act_input_indices),
        "its inputs overlap": any(each.needs_post_compile for each in entry.dispatch_wrappers),
        "it returns views of inputs or of other outputs": not all(
            info.output_type in (OutputType.non_alias, OutputType.unsafe_view_alias)
            and issubclass(info.raw_type, Tensor)
            and info.requires_grad == info.requires_grad_for_backward
            for info in metadata.output_info
        ),
        "it returns changed inputs": bool(metadata.mutated_inp_runtime_indices),
        "it returns intermediate values": bool(metadata.num_intermediate_bases),
        "it has ordered effects": bool(metadata.tokens) or bool(metadata.num_backward_tokens),
        "it changes the grad mode": metadata.grad_enabled_mutation is not None,
        "it saves random states": bool(metadata.num_graphsafe_rng_states) or bool(metadata.is_rng_op_functionalized),
        "it has dynamic sizes": bool(metadata.num_symints_saved_for_bw) or bool(metadata.dynamic_outputs),
        "it saves objects for its backward": bool(metadata.num_opaque_objects_saved_for_bw)
        or bool(metadata.num_tensors_saved_with_no_vc_check),
        "its backward changes inputs": bool(metadata.indices_of_inputs_that_requires_grad_with_mutations_in_bw),
        "it uses streams": any(each is not None for each in metadata.mutated_inp_stream_indices or ()),
        "its backward has a state": entry.compiled_bw is not None and bool(entry.compiled_bw.backward_state_indices),
    }
    for reason, is_so in checks.items():
        if is_so:
            raise Uncacheable(f"the graph cannot be stored as a whole: {reason}")
    for part in (entry.compiled_fw, entry.compiled_bw):
        if part is not None:
            _verify_compiled(part.result)


def _verify_compiled(graph: Any) -> None:
    if graph.constants or graph.frozen_param_names or graph.torchbind_constants or graph.opaque_value_type_classes:
        raise Uncacheable("the compiled graph contains constants")
    if set(graph.device_types) - {"cpu"} or graph.inputs_to_check or graph.guards_expr or graph.partition_maps:
        raise Uncacheable("the compiled graph is not for CPU alone")


def _make_autograd(entry: Any, metadata: Any) -> Autograd:
    tangents = []
    outputs = [number for number, info in enumerate(metadata.output_info) if info.requires_grad_for_backward]
    if len(outputs) != len(metadata.subclass_tangent_meta):
        raise Uncacheable("the backward takes gradients of more than the outputs")
    for output, meta in zip(outputs, metadata.subclass_tangent_meta, strict=True):
        layout = getattr(meta, "memory_format", None)
        if layout is None or layout.memory_format is not None or layout.size is None or layout.stride is None:
            raise Uncacheable("the gradient of an output has no fixed strides")
        tangents.append(Tangent(output, tuple(map(int, layout.size)), tuple(map(int, layout.stride))))
    return Autograd(
        num_saved=int(entry.num_fw_outs_saved_for_bw),
        detached=tuple(entry.indices_of_inps_to_detach),
        without_gradient=tuple(number for number, info in enumerate(metadata.output_info) if not info.requires_grad),
        unsafe_views=tuple(metadata.unsafe_view_out_indices),
        tangents=tuple(tangents),
        deterministic=metadata.deterministic is None or bool(metadata.deterministic),
        donated=bool(metadata.bw_donated_idxs) and bool(torch._functorch.config.donated_buffer),
    )


def _make_code(compiled: Any, kernels: Mapping[str, bytes]) -> GeneratedCode:
    reduced = reduce_code(compiled.source_code)
    for name in reduced.externs:
        if find_extern(name) is not getattr(extern_kernels, name, None):
            raise Uncacheable(f"the generated code calls extern_kernels.{name}, which is not torch.{name}")
    return GeneratedCode(reduced.source, _find_kernels(reduced, kernels), reduced.externs, reduced.operators)


def _find_kernels(reduced: Reduced, kernels: Mapping[str, bytes]) -> dict[str, str]:
    found = {}
    for binding in reduced.bindings:
        with name_kernels() as names:
            CppPythonBindingsCodeCache.load_pybinding_async(list(binding.types), binding.source)
        if len(names) != 1 or names[0] not in kernels:
            raise Uncacheable("a C++ kernel of the graph is not stored")
        found[binding.name] = names[0]
    return found


def _describe_result(value: Any, outputs: Mapping[int, int], walk: CallWalk) -> Json:
    if isinstance(value, Tensor):
        if id(value) not in outputs:
            raise Uncacheable("the callable returns a tensor that is not an output of the graph")
        return {"output": outputs[id(value)]}
    if value is None or type(value) in (bool, int, str):
        return value
    if walk.has_visited(value):
        raise Uncacheable("the callable returns an object of its own or of its arguments")
    if type(value) in (list, tuple):
        return {type(value).__name__: [_describe_result(each, outputs, walk) for each in value]}
    if type(value) is dict and all(type(key) is str for key in value):
        return {"dict": [[key, _describe_result(each, outputs, walk)] for key, each in value.items()]}
    raise Uncacheable(f"the callable returns a {type(value).__qualname__}, which is not supported")
