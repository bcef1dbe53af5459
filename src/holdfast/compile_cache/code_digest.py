"""What a Python function does, as far as its code tells: bytecode, constants, closure, and functions that it calls."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator, Mapping
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, Final

import torch

from holdfast.compile_cache.parts import Uncacheable
from holdfast.digest import hash_kind

_PLAIN: Final = (bool, int, float, complex, str, bytes, type(None), type(...))
_TORCH_PLAIN: Final = (torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size)
# Code below these is as old as Python or torch, whose versions are in a key.
_KNOWN_ROOTS: Final = frozenset({*sys.stdlib_module_names, "torch", "numpy"})
_MAX_DEPTH: Final = 40


def hash_code(function: object, *, where: str) -> str:
    """Return the digest of what a function does, in hex; names of its variables and its file do not count.

    Raises Uncacheable, which says `where`, if it uses what has no digest, as an object of the user's.
    """
    walk = _Walk(where)
    walk.add(function, 0)
    return hash_kind("compiled code", [text.encode(errors="surrogatepass") for text in walk.texts]).hex()


class _Walk:
    """One walk over a function and all that it uses, each of them once."""

    def __init__(self, where: str) -> None:
        self.texts: list[str] = []
        self._where = where
        self._seen: dict[int, int] = {}
        self._alive: list[object] = []

    def add(self, value: object, depth: int) -> None:
        if depth > _MAX_DEPTH:
            raise Uncacheable(
                f"{self._where} uses more than {_MAX_DEPTH} levels of functions, too deep to look through"
            )
        if isinstance(value, _PLAIN + _TORCH_PLAIN):
            self.texts.append(f"{type(value).__name__} {value!r}\n")
        elif isinstance(value, tuple | list | set | frozenset | Mapping):
            self._add_container(value, depth)
        elif isinstance(value, CodeType):
            self._add_code(value, depth)
        elif name := _find_known_name(value):
            self.texts.append(f"known {name}\n")
        elif id(value) in self._seen:
            self.texts.append(f"again {self._seen[id(value)]}\n")
        else:
            self._seen[id(value)] = len(self._seen)
            self._alive.append(value)  # an id is one object's only as long as that lives
            self._add_function(value, depth)

    def _add_container(self, value: Any, depth: int) -> None:
        self.texts.append(f"{type(value).__name__} of {len(value)}\n")
        if isinstance(value, Mapping):
            value = [part for pair in value.items() for part in pair]
        elif isinstance(value, set | frozenset):
            value = sorted(value, key=repr)
        for each in value:
            self.add(each, depth + 1)

    def _add_function(self, value: object, depth: int) -> None:
        if isinstance(value, functools.partial):
            self.add((value.func, value.args, value.keywords), depth + 1)
        elif isinstance(value, MethodType) and isinstance(value.__self__, type):
            self.add(value.__func__, depth + 1)
        elif isinstance(value, FunctionType):
            self.add((value.__code__, value.__defaults__, value.__kwdefaults__), depth + 1)
            for cell in value.__closure__ or ():
                self.add(_read_cell(cell), depth + 1)
            for name, used in _iter_globals(value):
                self.texts.append(f"global {name}\n")
                self.add(used, depth + 1)
        else:
            kind = type(value) if not isinstance(value, type) else value
            raise Uncacheable(f"{self._where} uses {kind.__module__}.{kind.__qualname__}, whose code has no digest")

    def _add_code(self, code: CodeType, depth: int) -> None:
        self.texts.append(f"code {code.co_code.hex()} {code.co_flags} {code.co_argcount} {code.co_kwonlyargcount}\n")
        self.texts.append(f"{code.co_names!r} {code.co_exceptiontable.hex()}\n")
        self.add(code.co_consts, depth + 1)


def _find_known_name(value: object) -> str:
    """Return the name of what belongs to torch, Python or numpy, or nothing."""
    if isinstance(value, ModuleType):
        return f"module {value.__name__}"
    if isinstance(value, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        return str(value)
    home = getattr(value, "__module__", None) or ("builtins" if isinstance(value, BuiltinFunctionType) else "")
    if isinstance(home, str) and home.partition(".")[0] in _KNOWN_ROOTS:
        name = getattr(value, "__qualname__", "")
        # What a function of torch's has made may have a function of the user's inside.
        is_fixed = isinstance(value, type | BuiltinFunctionType) or (
            isinstance(value, FunctionType) and not value.__closure__
        )
        return f"{home}.{name}" if name and is_fixed else ""
    return ""


def _iter_globals(function: FunctionType) -> Iterator[tuple[str, object]]:
    """Yield the globals that a function names, and what it may name below a module of the user's."""
    names = sorted(_find_names(function.__code__))
    for name in names:
        if name not in function.__globals__:
            continue
        value = function.__globals__[name]
        yield name, value
        if isinstance(value, ModuleType) and value.__name__.partition(".")[0] not in _KNOWN_ROOTS:
            yield from ((f"{name}.{below}", getattr(value, below)) for below in names if hasattr(value, below))


def _find_names(code: CodeType) -> set[str]:
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= _find_names(constant)
    return names


def _read_cell(cell: Any) -> object:
    try:
        return cell.cell_contents
    except ValueError:
        return None  # not filled yet
