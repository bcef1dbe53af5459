"""Digests of Python functions: of the bytecode, closure and defaults, and of everything that the function reads.

Reads are followed recursively: through globals, attributes of modules, imports inside functions, attributes of
functions, classes with their methods, and objects. If a read cannot be followed, the graph is not cached.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib import import_module
from importlib.util import resolve_name
from types import CodeType, FunctionType, ModuleType
from typing import Any, Final

import torch
from torch._library.custom_ops import CustomOpDef

from holdfast.compile_cache.code.known import is_known_module, is_pure, name_known
from holdfast.compile_cache.code.reads import Import, Reads, read_code
from holdfast.compile_cache.code.targets import HIGHER_ORDER, name_operator
from holdfast.compile_cache.code.values import (
    MISSING,
    computes_attributes,
    find_attribute,
    find_plain_text,
    is_open,
    list_parts,
    name_open,
)
from holdfast.compile_cache.key_parts import UnknownCode
from holdfast.digest import hash_kind

_MAX_DEPTH: Final = 40
_MAX_TEXTS: Final = 20_000

# Methods that operators such as + read from the class of a tensor.
_ARITHMETIC: Final = frozenset(
    f"__{prefix}{name}__"
    for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor")
    for prefix in ("", "r", "i")
) | {f"__{name}__" for name in ("abs", "eq", "ge", "getitem", "gt", "invert", "le", "lt", "ne", "neg", "setitem")}
# Attributes that give access to namespaces, names and files, which no digest covers.
_INTROSPECTION: Final = frozenset(
    {
        "__annotations__", "__builtins__", "__closure__", "__code__", "__defaults__", "__dict__", "__doc__",
        "__getattribute__", "__globals__", "__kwdefaults__", "__module__", "__subclasses__", "f_builtins",
        "f_globals", "f_locals", "gi_frame", "tb_frame",
    }
)  # fmt: skip
# Called with a constant name, these functions are plain attribute reads.
_ATTRIBUTE_FUNCTIONS: Final = {"delattr": delattr, "getattr": getattr, "hasattr": hasattr, "setattr": setattr}


@dataclass(frozen=True, slots=True)
class CodeDigest:
    """The digest that represents a function in a key."""

    digest: str
    """In hex."""
    operators: frozenset[str]
    """Operators that the function may call, as `namespace::name`. The digest covers their names, not their code."""


def digest_code(function: object, *, where: str) -> CodeDigest:
    """Return the digest of a function. It does not depend on the names of local variables or on the file.

    Raises UnknownCode, whose reason starts with `where`, if the function reads something without a digest, such as a
    file.
    """
    walk = _Walk(where)
    walk.add(function, 0)
    walk.add_attributes()
    digest = hash_kind("compiled code", [text.encode(errors="surrogatepass") for text in walk.texts]).hex()
    return CodeDigest(digest, frozenset(walk.operators))


class _Walk:
    """Walks over a function and everything that it reads, visiting each object once."""

    def __init__(self, where: str) -> None:
        self.texts: list[str] = []
        self.operators: set[str] = set()
        self._where = where
        self._seen: dict[int, int] = {}
        self._alive: list[object] = []
        # Attributes read from values that are only known when the code runs. Such a value can be a tensor, or any of
        # the modules and classes that the code refers to. So each attribute is read from each of these.
        self._attributes: set[str] = set(_ARITHMETIC)
        self._open: list[object] = [torch.Tensor]
        self._checked: set[tuple[int, str]] = set()

    def add(self, value: Any, depth: int) -> None:
        """Add the texts of a value and of everything that it consists of."""
        if depth > _MAX_DEPTH:
            self._refuse(f"uses more than {_MAX_DEPTH} nested levels of functions, which is the limit")
        if len(self.texts) > _MAX_TEXTS:
            self._refuse(f"reads more than {_MAX_TEXTS} values, which is the limit")
        if (text := find_plain_text(value)) is not None:
            self.texts.append(text)
        elif isinstance(value, torch._ops.OperatorBase | torch._ops.OpOverloadPacket | CustomOpDef):
            self._add_operator(value)
        elif is_open(value):
            self._add_open(value)
        elif name := name_known(value):
            self._add_known(name)
        elif id(value) in self._seen:
            self.texts.append(f"again {self._seen[id(value)]}\n")
        else:
            self._seen[id(value)] = len(self._seen)
            self._alive.append(value)  # an id is unique only as long as its object is alive
            self._add_parts(value, depth)

    def add_attributes(self) -> None:
        """Read all attributes of unknown values from all open values, until there are no new combinations."""
        while pending := [
            (owner, name)
            for owner in self._open
            for name in sorted(self._attributes)
            if (id(owner), name) not in self._checked
        ]:
            for owner, name in pending:
                self._checked.add((id(owner), name))
                if (found := self._find_attribute(owner, name)) is not MISSING:
                    self.texts.append(f"may read {name_open(owner)}.{name}\n")
                    self.add(found, 0)

    def _refuse(self, what: str) -> None:
        raise UnknownCode(f"{self._where} {what}")

    def _add_operator(self, value: Any) -> None:
        if isinstance(value, torch._ops.HigherOrderOperator):
            name = name_operator(value)
            if name not in HIGHER_ORDER:
                self._refuse(f"uses the higher-order operator {name}, which the cache does not support")
            self.texts.append(f"operator {name}\n")
            return
        name = value._qualname if isinstance(value, CustomOpDef) else name_operator(value)
        self.texts.append(f"operator {name}\n")
        self.operators.add(name.partition(".")[0])

    def _add_open(self, value: object) -> None:
        if isinstance(value, type):
            self._add_known(name_open(value))
        else:
            self.texts.append(f"module {name_open(value)}\n")
        if not any(value is each for each in self._open):
            self._open.append(value)

    def _add_known(self, name: str) -> None:
        self._verify_pure(name)
        version = getattr(sys.modules["numpy"], "__version__", "") if name.startswith("numpy.") else ""
        self.texts.append(f"known {name} {version}\n")

    def _verify_pure(self, name: str) -> None:
        if not is_pure(name):
            self._refuse(f"uses {name}, whose result may depend on something that is not in the key")

    def _add_parts(self, value: object, depth: int) -> None:
        if isinstance(value, CodeType):
            self._add_code(value, depth)
            return
        parts = list_parts(value)
        if parts is None:
            kind = type(value)
            raise UnknownCode(f"{self._where} uses a {kind.__module__}.{kind.__qualname__}, which has no digest")
        self.texts.append(f"{parts.text} of {len(parts.values)}\n")
        for each in parts.values:
            self.add(each, depth + 1)
        if isinstance(value, FunctionType) and parts.has_code:
            self._add_reads(value, read_code(value.__code__), depth + 1)

    def _add_code(self, code: CodeType, depth: int) -> None:
        # Callers can pass arguments by name; the names of local variables have no effect.
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        numbers = (code.co_flags, code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount)
        table = getattr(code, "co_exceptiontable", b"")  # Python before 3.11 has it in the bytecode
        self.texts.append(f"code {code.co_code.hex()} {numbers} {names} {code.co_names} {table.hex()}\n")
        for each in code.co_consts:
            self.add(each, depth + 1)

    def _add_reads(self, function: FunctionType, reads: Reads, depth: int) -> None:
        self._attributes |= reads.attributes
        named = reads.attributes.union(*(chain[1:] for chain in reads.chains))
        if found := sorted(named & _INTROSPECTION):
            self._refuse(f"reads {found[0]}, which gives access to more than can be followed")
        for chain in reads.chains:
            self._add_chain(function, chain, reads.computed, depth)
        for imported in reads.imports:
            self._add_import(function, imported, depth)

    def _add_chain(self, function: FunctionType, chain: tuple[str, ...], computed: frozenset[str], depth: int) -> None:
        """Add a global, or the attribute that a chain such as `a.b.c` leads to, as far as no user code has to run."""
        name, *below = chain
        value = function.__globals__.get(name, MISSING)
        if value is MISSING:
            untyped: Any = function  # some type stubs lack the attribute
            value = untyped.__builtins__.get(name, MISSING)
        if value is MISSING:
            self.texts.append(f"no global {name}\n")
            self._attributes.update(below)
            return
        if value is _ATTRIBUTE_FUNCTIONS.get(name, MISSING) and name not in computed:
            return
        while below and is_open(value) and (found := self._find_attribute(value, below[0])) is not MISSING:
            name, value = f"{name}.{below.pop(0)}", found
        self.texts.append(f"reads {name}\n")
        self._attributes.update(below)
        self.add(value, depth)

    def _find_attribute(self, owner: object, name: str) -> object:
        found = find_attribute(owner, name)
        if found is MISSING and computes_attributes(owner):
            self._refuse(f"reads {name_open(owner)}.{name}, which the module computes when it is read")
        if isinstance(found, dict | list) and isinstance(owner, ModuleType) and is_known_module(owner):
            self._verify_pure(f"{owner.__name__}.{name}")
        return found

    def _add_import(self, function: FunctionType, imported: Import, depth: int) -> None:
        name = imported.module
        if imported.level:
            package = function.__globals__.get("__package__") or function.__globals__.get("__name__", "")
            name = resolve_name("." * imported.level + name, package)
        module = self._load(name)
        if module is not None and not imported.names:
            self.add(module, depth)
            self.add(sys.modules[name.partition(".")[0]], depth)
        for each in imported.names if module is not None else ():
            found = self._find_attribute(module, each)
            self.texts.append(f"imports {name}.{each}\n")
            self.add(self._load(f"{name}.{each}") if found is MISSING else found, depth)

    def _load(self, name: str) -> ModuleType | None:
        """Import a module, as the code does when it runs; None if there is no such module."""
        try:
            return import_module(name)
        except ImportError:
            self.texts.append(f"no module {name}\n")
            return None
        except Exception as error:  # importing runs user code
            raise UnknownCode(f"{self._where} imports {name}, which raises {type(error).__name__}") from error
