"""Names for what the nodes of a graph call. A name refers to the same function in every process."""

from __future__ import annotations

import operator
import sys
from collections.abc import Mapping
from types import BuiltinFunctionType, FunctionType, MethodDescriptorType
from typing import Any, Final

import torch
import torch._numpy
from torch._dynamo.utils import numpy_method_wrapper, numpy_operator_wrapper, numpy_to_tensor_wrapper

from holdfast.compile_cache.code.known import HIGHER_ORDER, is_in_torch, name_operator
from holdfast.compile_cache.key_parts import Uncacheable
from holdfast.texts import shorten

# Modules other than torch whose functions are determined by the Python version.
_PYTHON_MODULES: Final = frozenset({"_operator", "operator", "math", "builtins"})

# What these do depends on the process group, which is not in the graph.
_COLLECTIVE_NAMESPACES: Final = frozenset(
    {"_c10d_functional", "_c10d_functional_autograd", "_dtensor", "c10d", "fsdp", "symm_mem"}
)

_WHY_NOT_HIGHER_ORDER: Final = {
    "triton_kernel_wrapper_mutation": "the graph launches a Triton kernel of yours, whose code is not in the graph",
    "triton_kernel_wrapper_functional": "the graph launches a Triton kernel of yours, whose code is not in the graph",
}


def name_target(target: object, versions: Mapping[str, str]) -> str:
    """Return a name for what a node calls. Raises Uncacheable if no name identifies it in other processes.

    Args:
        target: a function, an operator or a method.
        versions: `module.name` -> version, of user functions; the user changes the version with the code.
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


def _name_higher_order(target: torch._ops.HigherOrderOperator) -> str:
    name = name_operator(target)
    if name in _WHY_NOT_HIGHER_ORDER:
        raise Uncacheable(_WHY_NOT_HIGHER_ORDER[name])
    if name not in HIGHER_ORDER or getattr(torch.ops.higher_order, name, None) is not target:
        raise Uncacheable(f"the graph calls the higher-order operator {name}, which the cache does not support")
    return f"higher_order.{name}"


def _name_operator(target: torch._ops.OpOverload) -> str:
    name = name_operator(target)
    namespace, _, rest = name.partition("::")
    packet = getattr(getattr(torch.ops, namespace, None), rest.partition(".")[0], None)
    overload = getattr(packet, target._overloadname, None)
    _verify_local(name)
    if overload is not target:
        raise Uncacheable(f"the graph calls the operator {name}, which is no longer registered in torch.ops")
    return name


def _name_packet(target: torch._ops.OpOverloadPacket) -> str:
    name = name_operator(target)
    namespace, _, rest = name.partition("::")
    _verify_local(name)
    if getattr(getattr(torch.ops, namespace, None), rest, None) is not target:
        raise Uncacheable(f"the graph calls the operator {name}, which is no longer registered in torch.ops")
    return f"{name} (any overload)"


def _verify_local(name: str) -> None:
    if name.partition("::")[0] in _COLLECTIVE_NAMESPACES:
        raise Uncacheable(f"the graph communicates with other processes ({name}), which the key does not describe")


def _name_method(target: MethodDescriptorType) -> str:
    owner = target.__objclass__
    if owner in (torch._C.TensorBase, torch.Tensor) and getattr(owner, target.__name__, None) is target:
        return f"Tensor.{target.__name__}"
    raise Uncacheable(f"the graph calls {_shorten(target)}, which is not a tensor method")


def _name_function(target: FunctionType | BuiltinFunctionType | type, versions: Mapping[str, str]) -> str:
    # A qualified name is not unique: all functions made by `boolean_dispatch` are `boolean_dispatch.<locals>.fn`.
    home, name = getattr(target, "__module__", None) or "", target.__name__
    if (version := versions.get(f"{home}.{name}")) is not None:
        return f"{home}.{name} version {version}"
    if home.partition(".")[0] != "torch" and home not in _PYTHON_MODULES:
        raise Uncacheable(
            f"the graph calls {home}.{name}, which is not part of torch, so its code may change; to cache the graph,"
            f' pass versions={{"{home}.{name}": "1"}} and change the version whenever the code changes'
        )
    if getattr(sys.modules.get(home, operator), name, None) is not target:
        raise Uncacheable(f"the graph calls {_shorten(target)}, which is not the function that {home}.{name} refers to")
    if isinstance(target, FunctionType) and not is_in_torch(target.__code__.co_filename):
        raise Uncacheable(f"{home}.{name} was replaced by code from {target.__code__.co_filename}")
    return f"{home}.{name}"


def _name_numpy(target: Any) -> str:
    """Return the name of a numpy function, operator or method that torch runs on tensors."""
    if isinstance(target, numpy_method_wrapper):
        return f"numpy method {target.method}"
    if isinstance(target, numpy_operator_wrapper):
        return f"numpy operator {name_target(target.op, {})}"
    name = target.f.__name__
    if getattr(torch._numpy, name, None) is not target.f:
        raise Uncacheable(f"the graph calls {_shorten(target)}, which is not torch's implementation of numpy.{name}")
    return f"numpy.{name}"


def _shorten(target: object) -> str:
    text = repr(target)
    return shorten(text, 80)
