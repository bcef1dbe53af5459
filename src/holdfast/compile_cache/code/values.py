"""Describes the values that code reads: as text, by their parts, or by the attributes that are read from them."""

from __future__ import annotations

import collections
import copyreg
import dataclasses
import enum
import functools
import logging
import re
import sys
import types
import typing
from collections.abc import Iterator, Sequence
from types import BuiltinFunctionType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any, Final

import torch

from holdfast.compile_cache.code.known import is_known_file, is_known_module, is_made_at_run_time, name_known, read_cell

MISSING: Final = object()
"""Returned by `find_attribute` if there is no such attribute."""

_PLAIN: Final = frozenset(
    {bool, int, float, complex, str, bytes, range, slice, type(None), type(...), type(NotImplemented)}
)
_TORCH_PLAIN: Final = (
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    torch.Size,
    torch.finfo,
    torch.iinfo,
)
_ANNOTATIONS: Final = (types.GenericAlias, types.UnionType)
_BASES: Final = (dict, list, tuple, set, frozenset, collections.deque, types.MappingProxyType, int, float, str)
# Bookkeeping of Python and torch in a class. What matters of it is described elsewhere, or by the class's functions.
_SKIPPED: Final = frozenset(
    {
        "__abstractmethods__", "__annotate_func__", "__annotations__", "__annotations_cache__", "__dataclass_fields__",
        "__dataclass_params__", "__dict__", "__doc__", "__firstlineno__", "__module__", "__orig_bases__",
        "__parameters__", "__static_attributes__", "__weakref__", "_abc_impl", "_backward_cls",
    }
)  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True)
class ValueParts:
    """The parts of a value: a text, and the values that it consists of."""

    text: str
    values: Sequence[object]
    has_code: bool = False
    """Whether the value is a user function, whose code reads more than these parts."""


def find_plain_text(value: object) -> str | None:
    """Return the text of a value that has no parts; None if it has parts."""
    if type(value) in _PLAIN or isinstance(value, _TORCH_PLAIN + _ANNOTATIONS):
        return f"{type(value).__name__} {value!r}\n"
    if isinstance(value, re.Pattern):
        return f"pattern {value.pattern!r} {value.flags}\n"
    if isinstance(value, logging.Logger):
        return "logger\n"  # logging does not affect a graph
    if type(value).__module__ == "typing":
        return f"annotation {value!r}\n"
    return None


def is_open(value: object) -> bool:
    """Return whether a value is described by the attributes read from it: a module, or a class not of the user."""
    return isinstance(value, ModuleType) or (isinstance(value, type) and bool(name_known(value)))


def name_open(value: object) -> str:
    """Return the name of a value for which `is_open` is true."""
    return value.__name__ if isinstance(value, ModuleType) else name_known(value)


def find_attribute(owner: object, name: str) -> object:
    """Return an attribute of an open value, or MISSING. Runs no user code."""
    if isinstance(owner, type):
        return next((vars(base)[name] for base in owner.__mro__ if name in vars(base)), MISSING)
    assert isinstance(owner, ModuleType), "only modules and classes are open"
    if name in vars(owner):
        return vars(owner)[name]
    if is_known_module(owner):
        # `getattr` because torch loads some submodules on first use; dunder names would find methods of ModuleType.
        return MISSING if name.startswith("__") else getattr(owner, name, MISSING)
    return sys.modules.get(f"{owner.__name__}.{name}", MISSING)


def computes_attributes(owner: object) -> bool:
    """Return whether a user module runs code to compute missing attributes."""
    if not isinstance(owner, ModuleType) or is_known_module(owner):
        return False
    return type(owner) is not ModuleType or "__getattr__" in vars(owner)


def list_parts(value: object) -> ValueParts | None:
    """Return the parts of a value, or None if it has state that cannot be read."""
    if isinstance(value, FunctionType):
        return _list_function(value)
    if isinstance(value, type):
        return ValueParts(f"class {value.__qualname__}", list(_iter_class(value)))
    if (wrapped := _list_wrapped(value)) is not None:
        return wrapped
    if isinstance(value, enum.Enum):
        return ValueParts("member", (type(value), value.name, value.value))
    if (items := _list_items(value)) is not None:
        return items
    if _has_python_state(type(value)):
        return ValueParts("object", (type(value), *_iter_state(value)))
    return None


def _list_function(function: FunctionType) -> ValueParts:
    cells = [read_cell(cell) for cell in function.__closure__ or ()]
    values = [function.__defaults__, function.__kwdefaults__, *cells, *_flatten(vars(function))]
    if is_known_file(function.__code__.co_filename):
        # A version identifies its code, but not the functions that it wraps.
        name = f"{function.__module__}.{function.__qualname__} line {function.__code__.co_firstlineno}"
        return ValueParts(f"known function {name}", values)
    return ValueParts(f"function {function.__qualname__}", [function.__code__, *values], has_code=True)


def _list_wrapped(value: Any) -> ValueParts | None:
    """Return the parts of an object that wraps a function or a field; None for other values."""
    match value:
        case functools.partial():
            return ValueParts("partial", (value.func, value.args, value.keywords, *_flatten(vars(value))))
        case MethodType():
            return ValueParts("method", (value.__func__, value.__self__))
        case BuiltinFunctionType():
            return ValueParts(f"method {value.__name__}", (value.__self__,))
        case functools._lru_cache_wrapper():
            return ValueParts("cached function", (value.__wrapped__, *_flatten(vars(value))))
        case staticmethod() | classmethod():
            return ValueParts(type(value).__name__, (value.__func__,))
        case property():
            return ValueParts("property", (value.fget, value.fset, value.fdel))
        case functools.cached_property():
            return ValueParts("cached property", (value.func,))
        case MemberDescriptorType():
            return ValueParts(f"slot {value.__name__}", ())
        case collections._tuplegetter():  # type: ignore[attr-defined]  # the type of named tuple fields
            return ValueParts(f"field {value.__reduce__()[1][0]}", ())
    return None


def _list_items(value: Any) -> ValueParts | None:
    """Return the parts of a container, or of an object derived from a container, a number or a string."""
    base: Any = next((base for base in _BASES if isinstance(value, base)), None)
    if base is None:
        return None
    if base in (set, frozenset):
        if any(find_plain_text(each) is None for each in value):
            return None  # the order of objects differs between processes
        items: list[object] = sorted(value, key=repr)
    elif base in (dict, types.MappingProxyType):
        items = list(_flatten(value))
    else:
        items = [base(value)] if base in (int, float, str) else list(value)
    if type(value) is base:
        return ValueParts(base.__name__, items)
    factory = [value.default_factory] if isinstance(value, collections.defaultdict) else []
    return ValueParts(f"derived {base.__name__}", (type(value), *factory, *items, *_iter_state(value)))


def _iter_class(kind: type) -> Iterator[object]:
    yield from (type(kind), *kind.__bases__)
    if dataclasses.is_dataclass(kind):
        yield tuple((field.name, field.init, field.kw_only) for field in dataclasses.fields(kind))
    for name in sorted(vars(kind).keys() - _SKIPPED):
        yield from (name, vars(kind)[name])


def _has_python_state(kind: type) -> bool:
    """Return whether the state of objects of a class is entirely in `__dict__` and `__slots__`."""
    if kind in (object, typing.Generic, types.SimpleNamespace):
        return True
    # Extension classes have neither; their state cannot be read.
    has_names = not {"__dict__", "__slots__"}.isdisjoint(vars(kind)) or kind.__base__ is not object
    return is_made_at_run_time(kind) and has_names and all(_has_python_state(base) for base in kind.__bases__)


def _iter_state(value: object) -> Iterator[object]:
    yield from _flatten(getattr(value, "__dict__", {}))
    for name in copyreg._slotnames(type(value)):  # type: ignore[attr-defined]  # pickle uses it, too
        yield from (name, getattr(value, name, None))


def _flatten(mapping: Any) -> Iterator[object]:
    for key, value in mapping.items():
        yield from (key, value)
