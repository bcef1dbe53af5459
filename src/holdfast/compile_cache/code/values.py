"""How each kind of value that code may read is described: as a text, by its parts, or attribute by attribute."""

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
"""What `find_attribute` returns if there is none."""

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
# Bookkeeping of Python and torch in a class; what of it counts is described by itself, or by the class's functions.
_SKIPPED: Final = frozenset(
    {
        "__abstractmethods__", "__annotate_func__", "__annotations__", "__annotations_cache__", "__dataclass_fields__",
        "__dataclass_params__", "__dict__", "__doc__", "__firstlineno__", "__module__", "__orig_bases__",
        "__parameters__", "__static_attributes__", "__weakref__", "_abc_impl", "_backward_cls",
    }
)  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True)
class ValueParts:
    """What a value consists of."""

    text: str
    values: Sequence[object]
    has_code: bool = False
    """Whether it is a function of the user's, which reads more than its parts."""


def find_plain_text(value: object) -> str | None:
    """Return the text of a value that has no parts, or None."""
    if type(value) in _PLAIN or isinstance(value, _TORCH_PLAIN + _ANNOTATIONS):
        return f"{type(value).__name__} {value!r}\n"
    if isinstance(value, re.Pattern):
        return f"pattern {value.pattern!r} {value.flags}\n"
    if isinstance(value, logging.Logger):
        return "logger\n"  # what it writes is not part of a graph
    if type(value).__module__ == "typing":
        return f"annotation {value!r}\n"
    return None


def is_open(value: object) -> bool:
    """Tell whether a value is described by what is read from it: a module, or a class not the user's."""
    return isinstance(value, ModuleType) or (isinstance(value, type) and bool(name_known(value)))


def name_open(value: object) -> str:
    """Return the name of a value for which `is_open` holds."""
    return value.__name__ if isinstance(value, ModuleType) else name_known(value)


def find_attribute(owner: object, name: str) -> object:
    """Return an attribute of an open value, or MISSING; no code of the user's runs."""
    if isinstance(owner, type):
        return next((vars(base)[name] for base in owner.__mro__ if name in vars(base)), MISSING)
    assert isinstance(owner, ModuleType), "only modules and classes are open"
    if name in vars(owner):
        return vars(owner)[name]
    if is_known_module(owner):
        # Torch loads some of its modules when they are first asked for. Methods of modules themselves are not meant.
        return MISSING if name.startswith("__") else getattr(owner, name, MISSING)
    return sys.modules.get(f"{owner.__name__}.{name}", MISSING)


def computes_attributes(owner: object) -> bool:
    """Tell whether a module of the user's runs code for attributes that it does not have."""
    if not isinstance(owner, ModuleType) or is_known_module(owner):
        return False
    return type(owner) is not ModuleType or "__getattr__" in vars(owner)


def list_parts(value: object) -> ValueParts | None:
    """Return what a value consists of, or None if there is more to it than can be seen."""
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
    given = [function.__defaults__, function.__kwdefaults__, *cells, *_flatten(vars(function))]
    if is_known_file(function.__code__.co_filename):
        # A version stands for its code, but not for what it wraps.
        name = f"{function.__module__}.{function.__qualname__} line {function.__code__.co_firstlineno}"
        return ValueParts(f"known function {name}", given)
    return ValueParts(f"function {function.__qualname__}", [function.__code__, *given], has_code=True)


def _list_wrapped(value: Any) -> ValueParts | None:
    """Return the parts of what wraps a function, or None if the value does not."""
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
        case collections._tuplegetter():  # type: ignore[attr-defined]  # what fields of named tuples are
            return ValueParts(f"field {value.__reduce__()[1][0]}", ())
    return None


def _list_items(value: Any) -> ValueParts | None:
    """Return the parts of a container, or of an object that is derived from one or from a number."""
    base: Any = next((base for base in _BASES if isinstance(value, base)), None)
    if base is None:
        return None
    if base in (set, frozenset):
        if any(find_plain_text(each) is None for each in value):
            return None  # objects have no order that is the same in every process
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
    """Tell whether all that objects of a class hold is in their `__dict__` and `__slots__`."""
    if kind in (object, typing.Generic, types.SimpleNamespace):
        return True
    # Classes of extensions have neither of the two; they keep what they hold to themselves.
    has_names = not {"__dict__", "__slots__"}.isdisjoint(vars(kind)) or kind.__base__ is not object
    return is_made_at_run_time(kind) and has_names and all(_has_python_state(base) for base in kind.__bases__)


def _iter_state(value: object) -> Iterator[object]:
    yield from _flatten(getattr(value, "__dict__", {}))
    for name in copyreg._slotnames(type(value)):  # type: ignore[attr-defined]  # what pickle calls, too
        yield from (name, getattr(value, name, None))


def _flatten(mapping: Any) -> Iterator[object]:
    for key, value in mapping.items():
        yield from (key, value)
