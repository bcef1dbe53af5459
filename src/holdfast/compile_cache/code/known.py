"""Recognises code and operators of torch, Python and numpy, whose version identifies them, and what is pure."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Iterator
from types import (
    BuiltinFunctionType,
    ClassMethodDescriptorType,
    CodeType,
    FunctionType,
    GenericAlias,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodDescriptorType,
    MethodType,
    ModuleType,
    WrapperDescriptorType,
)
from typing import Any, Final

import torch

_ROOTS: Final = frozenset({*sys.stdlib_module_names, "torch", "numpy"})
_HEAP_TYPE: Final = 1 << 9
"""CPython's flag for classes created at run time, by Python code or by an extension."""

# Standard modules whose functions depend only on their arguments, or whose side effects do not affect graphs.
_PURE: Final = frozenset(
    {
        "_bisect", "_collections", "_collections_abc", "_functools", "_heapq", "_operator", "_struct", "_warnings",
        "abc", "bisect", "builtins", "cmath", "collections", "collections.abc", "contextlib", "dataclasses",
        "enum", "fractions", "functools", "heapq", "itertools", "logging", "math", "numbers",
        "operator", "re", "statistics", "string", "struct", "textwrap", "types", "typing", "warnings",
    }
)  # fmt: skip
# Exceptions: their results depend on files, on the process, on computed names, or on annotations.
_IMPURE: Final = frozenset(
    {
        "_operator.attrgetter", "_operator.methodcaller", "builtins.__import__", "builtins.breakpoint",
        "builtins.compile", "builtins.delattr", "builtins.dir", "builtins.eval", "builtins.exec", "builtins.getattr",
        "builtins.globals", "builtins.hasattr", "builtins.input", "builtins.locals",
        "builtins.setattr", "builtins.vars", "operator.attrgetter", "operator.methodcaller",
        "types.get_original_bases", "typing.get_overloads", "typing.get_type_hints",
    }
)  # fmt: skip
# Code of torch whose results depend only on its arguments, and on what is in a key. All other code of torch may read a
# state of the process, such as the seed of random numbers.
_PURE_TORCH: Final = frozenset(
    {
        "torch.cond", "torch.is_tensor", "torch.typename",
        # Their state is in the key.
        "torch.are_deterministic_algorithms_enabled", "torch.get_autocast_dtype", "torch.get_default_device",
        "torch.get_default_dtype", "torch.get_float32_matmul_precision", "torch.get_num_threads",
        "torch.is_anomaly_enabled", "torch.is_autocast_enabled", "torch.is_grad_enabled",
        "torch.is_inference_mode_enabled",
    }
)  # fmt: skip
_PURE_TORCH_PREFIXES: Final = (
    "torch.Size", "torch.Sym", "torch.Tensor", "torch.device", "torch.dtype", "torch.finfo", "torch.iinfo",
    "torch.layout", "torch.memory_format", "torch._C.TensorBase", "torch._C._fft.", "torch._C._functions.",
    "torch._C._linalg.", "torch._C._nn.", "torch._C._special.", "torch._VF.", "torch._assert", "torch._check",
    "torch._decomp.", "torch._functorch.",
    "torch._higher_order_ops.", "torch._inductor.", "torch._jit_internal.", "torch._library.",
    "torch._linalg_utils.", "torch._lowrank.", "torch._ops.", "torch._prims.", "torch._prims_common.", "torch._refs.",
    "torch._subclasses.", "torch._sym_", "torch._tensor.", "torch.amp.", "torch.autograd.", "torch.compiler.",
    "torch.func.", "torch.functional.", "torch.fx.", "torch.library.", "torch.nn.", "torch.overrides.",
    "torch.return_types.", "torch.special.", "torch.sym_", "torch.utils._contextlib.", "torch.utils._pytree.",
    "torch.utils.checkpoint.",
)  # fmt: skip
_IMPURE_NUMPY: Final = (
    "numpy.fromfile", "numpy.genfromtxt", "numpy.lib", "numpy.load", "numpy.memmap", "numpy.random",
)  # fmt: skip

# Frequent types in tables that contain no user code; they are skipped for speed.
_ATOMS: Final = frozenset({bool, float, int, str, type(None), torch._ops.OpOverload, torch._ops.OpOverloadPacket})
_DESCRIPTORS: Final = (
    ClassMethodDescriptorType,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodDescriptorType,
    WrapperDescriptorType,
)
_NUMPY_FUNCTIONS: Final = frozenset({"ufunc", "_ArrayFunctionDispatcher"})


def is_in_torch(filename: str) -> bool:
    """Return whether a source file is part of the installed torch."""
    directory = _find_directory("torch")
    return filename.startswith(directory) or os.path.abspath(filename).startswith(directory)


@functools.lru_cache(maxsize=4096)
def is_known_file(filename: str) -> bool:
    """Return whether a source file is part of torch, Python or numpy."""
    if is_in_torch(filename) or ("numpy" in sys.modules and filename.startswith(_find_directory("numpy"))):
        return True
    return filename.startswith(_find_directory("os")) and "-packages" not in filename


def is_known_module(module: ModuleType) -> bool:
    """Return whether a module is part of torch, Python or numpy."""
    return module.__name__.partition(".")[0] in _ROOTS


def is_made_at_run_time(kind: type) -> bool:
    """Return whether a class was created by Python code or an extension, not by the interpreter itself."""
    return bool(kind.__flags__ & _HEAP_TYPE)


def is_written_in_c(kind: type) -> bool:
    """Return whether a class has methods in C, so that its objects may have state that Python code cannot list."""
    methods = (each for each in vars(kind).values() if isinstance(each, MethodDescriptorType | WrapperDescriptorType))
    return any(each.__objclass__ is kind for each in methods)


def name_known(value: object) -> str:
    """Return the name of a function or class of torch, Python or numpy; "" if the value is user code."""
    if isinstance(value, GenericAlias):
        return ""  # `list[int]` looks like a class in Python 3.10
    if isinstance(value, type):
        return _name_class(value)
    if isinstance(value, FunctionType):
        return _name_function(value)
    if isinstance(value, BuiltinFunctionType):
        return _name_builtin(value)
    if isinstance(value, _DESCRIPTORS):
        owner = _name_class(value.__objclass__)
        return owner and f"{owner}.{value.__name__}"
    if type(value).__module__.partition(".")[0] == "numpy" and type(value).__name__ in _NUMPY_FUNCTIONS:
        return f"numpy.{getattr(value, '__name__', '')}"
    return ""


def name_code(code: CodeType) -> str:
    """Return a name for code in a known file, with the module that the file belongs to."""
    path = os.path.abspath(code.co_filename)
    roots = (root for root in ("torch", "numpy") if root in sys.modules and path.startswith(_find_directory(root)))
    root = next(roots, "")
    inner = path.removeprefix(_find_directory(root or "os")).removesuffix(".py").removesuffix(f"{os.sep}__init__")
    return ".".join(each for each in (root, *inner.split(os.sep), code.co_name) if each)


def is_pure(name: str) -> bool:
    """Return whether the result of a known function or class depends only on its arguments and on what is in a key."""
    root, _, short = name.partition(".")
    if root == "torch":
        is_operator = hasattr(torch._C._VariableFunctions, short)
        return is_operator or name in _PURE_TORCH or name.startswith(_PURE_TORCH_PREFIXES)
    if root == "numpy":
        return not name.startswith(_IMPURE_NUMPY)
    if name in _IMPURE:
        return False
    return any(name.startswith(f"{module}.") for module in _PURE)


def find_user_code(value: object, known: dict[int, object]) -> object:
    """Return a function or object in an entry of torch's tables that is not part of torch, Python or numpy; or None.

    Args:
        value: the entry, a callable or a container.
        known: id -> object, of objects without user code. This call adds to it.
    """
    if id(value) in known:
        return None
    seen: dict[int, object] = {}
    pending = [value]
    while pending:
        each = pending.pop()
        if type(each) in _ATOMS or id(each) in known or id(each) in seen:
            continue
        seen[id(each)] = each
        if type(each) is FunctionType:
            if not is_known_file(each.__code__.co_filename):
                return each
            pending += [read_cell(cell) for cell in each.__closure__ or ()]
            pending += each.__dict__.values()
        elif _find_root(each if isinstance(each, type) else type(each)) in _ROOTS:
            pending += _iter_parts(each)
        else:
            return each
    known |= seen
    return None


def read_cell(cell: Any) -> object:
    """Return the content of a closure cell; None if it is still empty."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _iter_parts(value: object) -> Iterator[object]:
    """Yield the contents of a container, or of an object that wraps functions."""
    if isinstance(value, functools.partial):
        yield from (value.func, *value.args, *value.keywords.values())
    elif isinstance(value, MethodType):
        yield value.__self__
        if not _is_generated(value):
            yield value.__func__
    elif isinstance(value, functools._lru_cache_wrapper):
        yield value.__wrapped__
    elif isinstance(value, list | tuple | set | frozenset):
        yield from value


def _is_generated(method: MethodType) -> bool:
    """Return whether a method of a torch class was generated by torch from a text, so that it has no file."""
    function: Any = method.__func__
    return getattr(getattr(function, "__code__", None), "co_filename", "") == "<string>" and any(
        vars(base).get(function.__name__) is function
        for base in type(method.__self__).__mro__
        if _find_root(base) == "torch"
    )


def _find_root(kind: type) -> str:
    return str(kind.__module__).partition(".")[0]


@functools.cache
def _find_directory(module: str) -> str:
    file = sys.modules[module].__file__
    assert file is not None, "only namespace packages have no file"
    return os.path.join(os.path.dirname(os.path.abspath(file)), "")


def _name_class(value: type) -> str:
    if _find_root(value) not in _ROOTS:
        return ""
    # Static C types are often not found under the module they name, but no user code can have created them.
    is_genuine = not is_made_at_run_time(value) or _find_by_name(value) is value
    return f"{value.__module__}.{value.__qualname__}" if is_genuine else ""


def _name_function(value: FunctionType) -> str:
    """Return the name of a function in a known file; "" if it has a closure and its name does not lead to it."""
    if not is_known_file(value.__code__.co_filename) or not isinstance(value.__module__, str):
        return ""
    name = f"{value.__module__}.{value.__qualname__}"
    if not value.__closure__ and not vars(value):
        return f"{name} line {value.__code__.co_firstlineno}" if "<" in name else name
    return name if _find_by_name(value) is value and find_user_code(value, {}) is None else ""


def _find_by_name(value: type | FunctionType) -> object:
    """Return the object that the qualified name of a class or function refers to."""
    found: object = sys.modules.get(value.__module__)
    for part in value.__qualname__.split("."):
        found = vars(found).get(part) if hasattr(found, "__dict__") else None
    return found


def _name_builtin(value: BuiltinFunctionType) -> str:
    owner = value.__self__
    home = value.__module__ or ""
    if isinstance(owner, ModuleType) or owner is None:
        home = home or getattr(owner, "__name__", "")
        return f"{home}.{value.__name__}" if home.partition(".")[0] in _ROOTS else ""
    if isinstance(owner, type):
        known = _name_class(owner)
        return known and f"{known}.{value.__name__}"
    return ""


# Higher-order operators that their arguments and subgraphs describe completely.
HIGHER_ORDER: Final = frozenset(
    {
        "associative_scan",
        "autograd_function_apply",
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

# Namespaces of operators that are part of torch, so that its version identifies their code.
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


def name_operator(target: Any) -> str:  # Any: torch does not type these methods
    """Return an operator's name, `namespace::name` or with an overload `namespace::name.overload`."""
    if isinstance(target, torch._ops.OpOverloadPacket):
        return str(target._qualified_op_name)
    return str(target.name())


def is_builtin(operator_name: str) -> bool:
    """Return whether an operator, `namespace::name`, is part of torch."""
    return operator_name.partition("::")[0] in BUILTIN_NAMESPACES
