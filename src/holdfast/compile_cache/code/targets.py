"""What the nodes of a graph call, under names that find the very same function again in any process, or none."""

from __future__ import annotations

import operator
import sys
from collections.abc import Mapping
from types import BuiltinFunctionType, FunctionType, MethodDescriptorType
from typing import Any, Final

import torch
import torch._numpy
from torch._dynamo.utils import numpy_method_wrapper, numpy_operator_wrapper, numpy_to_tensor_wrapper

from holdfast.compile_cache.code.known import is_in_torch
from holdfast.compile_cache.key_parts import Uncacheable

# Modules whose functions are the same wherever the versions of torch and Python are.
_FOREIGN: Final = frozenset({"_operator", "operator", "math", "builtins"})

# Higher-order operators that are what their arguments and bodies say, and nothing else.
HIGHER_ORDER: Final = frozenset(
    {
        "associative_scan",
        "cond",
        "flex_attention",
        "flex_attention_backward",
        "invoke_subgraph",
        "map_impl",
        "scan",
        "tag_activation_checkpoint",
        "while_loop",
    }
)

# Namespaces of operators that come with torch, so that its version stands for their code.
BUILTIN_NAMESPACES: Final = frozenset(
    {
        "_native",
        "_quantized",
        "aten",
        "inductor",
        "inductor_prims",
        "mkl",
        "mkldnn",
        "mkldnn_prepacked",
        "onednn",
        "prim",
        "prims",
        "quantized",
        "rngprims",
        "sparse",
    }
)
# What they do depends on which processes there are, and that is not in a graph.
_COLLECTIVE_NAMESPACES: Final = frozenset(
    {"_c10d_functional", "_c10d_functional_autograd", "_dtensor", "c10d", "fsdp", "symm_mem"}
)

_WHY_NOT_HIGHER_ORDER: Final = {
    "autograd_function_apply": "the graph calls a torch.autograd.Function, whose code cannot be told from the graph",
    "triton_kernel_wrapper_mutation": "the graph launches a Triton kernel of yours, whose code is not in the graph",
    "triton_kernel_wrapper_functional": "the graph launches a Triton kernel of yours, whose code is not in the graph",
}


def name_target(target: object, versions: Mapping[str, str]) -> str:
    """Return a name for what a node calls; raises Uncacheable if a name does not stand for it.

    Args:
        target: a function, an operator or a method.
        versions: functions whose code the user vouches for, `module.name` -> version.
    """
    match target:
        case torch._ops.HigherOrderOperator():
            return _name_higher_order(target)
        case torch._ops.OpOverload():
            return _name_operator(target)
        case torch._ops.OpOverloadPacket():
            return _name_packet(target)
        case FunctionType() | BuiltinFunctionType():
            return _name_function(target, versions)
        case MethodDescriptorType():
            return _name_method(target)
        case type():
            return _name_function(target, versions)
        case numpy_to_tensor_wrapper() | numpy_operator_wrapper() | numpy_method_wrapper():
            return _name_numpy(target)
    raise Uncacheable(f"the graph calls {_shorten(target)}, which is neither a function nor an operator")


def name_operator(target: Any) -> str:  # Any: torch's own methods have no types here
    """Return an operator's name, `namespace::name` or with an overload `namespace::name.overload`."""
    if isinstance(target, torch._ops.OpOverloadPacket):
        return str(target._qualified_op_name)
    return str(target.name())


def is_builtin(operator_name: str) -> bool:
    """Tell whether an operator, `namespace::name`, comes with torch."""
    return operator_name.partition("::")[0] in BUILTIN_NAMESPACES


def _name_higher_order(target: torch._ops.HigherOrderOperator) -> str:
    name = name_operator(target)
    if name in _WHY_NOT_HIGHER_ORDER:
        raise Uncacheable(_WHY_NOT_HIGHER_ORDER[name])
    if name not in HIGHER_ORDER or getattr(torch.ops.higher_order, name, None) is not target:
        raise Uncacheable(f"the graph calls the higher-order operator {name}, which is not known to be cacheable")
    return f"higher_order.{name}"


def _name_operator(target: torch._ops.OpOverload) -> str:
    name = name_operator(target)
    namespace, _, rest = name.partition("::")
    packet = getattr(getattr(torch.ops, namespace, None), rest.partition(".")[0], None)
    overload = getattr(packet, target._overloadname, None)
    _verify_local(name)
    if overload is not target:
        raise Uncacheable(f"the graph calls an operator {name} that torch.ops does not have any more")
    return name


def _name_packet(target: torch._ops.OpOverloadPacket) -> str:
    name = name_operator(target)
    namespace, _, rest = name.partition("::")
    _verify_local(name)
    if getattr(getattr(torch.ops, namespace, None), rest, None) is not target:
        raise Uncacheable(f"the graph calls an operator {name} that torch.ops does not have any more")
    return f"{name} (any overload)"


def _verify_local(name: str) -> None:
    if name.partition("::")[0] in _COLLECTIVE_NAMESPACES:
        raise Uncacheable(f"the graph talks to other processes ({name}), and who they are is not in the graph")


def _name_method(target: MethodDescriptorType) -> str:
    owner = target.__objclass__
    if owner in (torch._C.TensorBase, torch.Tensor) and getattr(owner, target.__name__, None) is target:
        return f"Tensor.{target.__name__}"
    raise Uncacheable(f"the graph calls {_shorten(target)}, a method of no tensor")


def _name_function(target: FunctionType | BuiltinFunctionType | type, versions: Mapping[str, str]) -> str:
    # A qualified name is no identity: what a function makes has that of the maker, as `boolean_dispatch.<locals>.fn`.
    home, name = getattr(target, "__module__", None) or "", target.__name__
    if (version := versions.get(f"{home}.{name}")) is not None:
        return f"{home}.{name} version {version}"
    if home.partition(".")[0] != "torch" and home not in _FOREIGN:
        raise Uncacheable(
            f"the graph calls {home}.{name}, which is not torch's and may change;"
            f' if you vouch for it, pass versions={{"{home}.{name}": "1"}} and raise that when its code changes'
        )
    if getattr(sys.modules.get(home, operator), name, None) is not target:
        raise Uncacheable(f"the graph calls {_shorten(target)}, which is not what {home}.{name} is")
    if isinstance(target, FunctionType) and not is_in_torch(target.__code__.co_filename):
        raise Uncacheable(f"{home}.{name} was replaced by code of {target.__code__.co_filename}")
    return f"{home}.{name}"


def _name_numpy(target: Any) -> str:
    """Return the name of a function, an operator or a method of numpy, which torch does with tensors."""
    if isinstance(target, numpy_method_wrapper):
        return f"numpy method {target.method}"
    if isinstance(target, numpy_operator_wrapper):
        return f"numpy operator {name_target(target.op, {})}"
    name = target.f.__name__
    if getattr(torch._numpy, name, None) is not target.f:
        raise Uncacheable(f"the graph calls {_shorten(target)}, which is not what torch does for numpy.{name}")
    return f"numpy.{name}"


def _shorten(target: object) -> str:
    text = repr(target)
    return text if len(text) <= 80 else f"{text[:77]}..."
