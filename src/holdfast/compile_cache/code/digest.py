"""Digests of Python functions: of bytecode, closure and defaults, and of everything that the function reads."""

from __future__ import annotations

import _abc  # type: ignore[import-not-found]  # a part of Python without type stubs
import abc
import collections
import copyreg
import dataclasses
import dis
import enum
import functools
import logging
import re
import sys
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import resolve_name
from types import BuiltinFunctionType, CodeType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any, Final

import torch
from torch._library.custom_ops import CustomOpDef

from holdfast.compile_cache.code.known import (
    HIGHER_ORDER,
    is_known_file,
    is_known_module,
    is_made_at_run_time,
    is_pure,
    is_written_in_c,
    name_code,
    name_known,
    name_operator,
    read_cell,
)
from holdfast.compile_cache.key_parts import UnknownCode
from holdfast.digest import hash_kind

_GLOBAL_READS: Final = frozenset({"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"})
_ATTRIBUTE_READS: Final = frozenset({"LOAD_ATTR", "LOAD_METHOD"})
# Instructions that push nothing, or only the NULL marker of a call.
_IGNORED: Final = frozenset({"CACHE", "EXTENDED_ARG", "NOP", "PRECALL", "PUSH_NULL", "RESUME"})
ATTRIBUTE_FUNCTIONS: Final = {"delattr": delattr, "getattr": getattr, "hasattr": hasattr, "setattr": setattr}
"""Called with a constant name, these functions are plain attribute reads."""


@dataclass(frozen=True, slots=True)
class Import:
    """An import statement in a function."""

    module: str
    level: int
    """Number of leading dots of a relative import; 0 for an absolute one."""
    names: tuple[str, ...]
    """The names in `from module import ...`; empty for `import module`."""


@dataclass(frozen=True, slots=True)
class Reads:
    """What a code object and the code objects nested in it read."""

    chains: tuple[tuple[str, ...], ...]
    """Names of globals, each with the attributes read directly from it: `a.b.c` is ("a", "b", "c")."""
    imports: tuple[Import, ...]
    attributes: frozenset[str]
    """Attributes read from values that are only known when the code runs, such as arguments."""
    computed: frozenset[str]
    """Those of `getattr`, `setattr`, `hasattr`, `delattr` that are used without a constant name."""


@functools.lru_cache(maxsize=4096)
def read_code(code: CodeType) -> Reads:
    """Return what a code object and the code objects nested in it read."""
    steps = [step for step in dis.get_instructions(code) if step.opname not in _IGNORED]
    chains, attributes, computed = _read_names(steps)
    imports = list(_iter_imports(steps))
    for nested in code.co_consts:
        if isinstance(nested, CodeType):
            inner = read_code(nested)
            chains += inner.chains
            imports += inner.imports
            attributes |= inner.attributes
            computed |= inner.computed
    return Reads(
        tuple(dict.fromkeys(chains)), tuple(dict.fromkeys(imports)), frozenset(attributes), frozenset(computed)
    )


def _read_names(steps: Sequence[dis.Instruction]) -> tuple[list[tuple[str, ...]], set[str], set[str]]:
    chains: list[tuple[str, ...]] = []
    attributes: set[str] = set()
    computed: set[str] = set()
    position = 0
    while position < len(steps):
        step = steps[position]
        position += 1
        if step.opname in _GLOBAL_READS:
            below = _list_attributes(steps, position)
            position += len(below)
            chains.append((step.argval, *below))
            if step.argval in ATTRIBUTE_FUNCTIONS:
                name = _find_constant_name(steps, position)
                (computed if name is None else attributes).add(name or step.argval)
        elif step.opname in _ATTRIBUTE_READS or step.opname in ("LOAD_SUPER_ATTR", "IMPORT_FROM"):
            attributes.add(step.argval)
    return chains, attributes, computed


def _list_attributes(steps: Sequence[dis.Instruction], position: int) -> list[str]:
    """Return the chain of attributes that is read from the value on top of the stack."""
    found = []
    # At a jump target, the value may come from another branch, as in `(a if c else b).name`.
    while position < len(steps) and steps[position].opname in _ATTRIBUTE_READS and not steps[position].is_jump_target:
        found.append(steps[position].argval)
        position += 1
    return found


def _find_constant_name(steps: Sequence[dis.Instruction], position: int) -> str | None:
    """Return the name in `getattr(x, "name")`, with or without a default; None if the name is not a plain constant."""
    if position < len(steps) and steps[position].opname.startswith("LOAD_"):
        position += 1 + len(_list_attributes(steps, position + 1))
        if position < len(steps) and steps[position].opname == "LOAD_CONST" and not steps[position].is_jump_target:
            name = steps[position].argval
            return name if isinstance(name, str) and _is_end_of_call(steps[position + 1 : position + 3]) else None
    return None


def _is_end_of_call(steps: Sequence[dis.Instruction]) -> bool:
    """Return whether the next instructions are a call, or one more argument and then a call."""
    if steps and steps[0].opname.startswith("LOAD_"):
        steps = steps[1:]
    return bool(steps) and steps[0].opname.startswith("CALL")


def _iter_imports(steps: Sequence[dis.Instruction]) -> Iterator[Import]:
    for position, step in enumerate(steps):
        if step.opname == "IMPORT_NAME":
            level, names = steps[position - 2].argval, steps[position - 1].argval
            yield Import(step.argval, level, tuple(names or ()))


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
        "__builtins__", "__closure__", "__code__", "__defaults__", "__getattribute__", "__globals__",
        "__kwdefaults__", "__subclasses__", "f_builtins", "f_globals", "f_locals", "gi_frame", "tb_frame",
    }
)  # fmt: skip

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
_BASES: Final = (dict, list, tuple, set, frozenset, collections.deque, types.MappingProxyType, int, float, str)
# Bookkeeping of Python and torch in a class, which no digest covers. Code that reads it is refused.
_SKIPPED: Final = frozenset(
    {
        "__abstractmethods__", "__annotate_func__", "__annotations__", "__annotations_cache__", "__dict__", "__doc__",
        "__firstlineno__", "__module__", "__orig_bases__", "__parameters__", "__static_attributes__", "__weakref__",
        "_abc_impl", "_backward_cls",
    }
)  # fmt: skip
# Every abstract class is a subclass of these, and no code asks whether an object is an instance of them.
_ABSTRACT_ROOTS: Final = (abc.ABC, typing.Protocol)
# Modules that register their classes with those of Python when they are imported, which may be late.
_REGISTERED_LATE: Final = ("array.", "decimal.", "numpy.random.")


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
    walk = CodeWalk(where)
    walk.add(function, 0)
    walk.add_attributes()
    digest = hash_kind("compiled code", [text.encode(errors="surrogatepass") for text in walk.texts]).hex()
    return CodeDigest(digest, frozenset(walk.operators))


class CodeWalk:
    """Walks over a function and everything that it reads, visiting each object once.

    A derived class can describe more kinds of values, and can record what the walk has read (`note_parts`,
    `note_read`), to notice later that something has changed.
    """

    max_texts = _MAX_TEXTS

    def __init__(self, where: str) -> None:
        """Start errors with `where`, the subject of their sentence."""
        self.texts: list[str] = []
        self.operators: set[str] = set()
        self._where = where
        self._seen: dict[int, int] = {}
        self._alive: list[object] = []
        # Attributes read from values that are only known when the code runs. Such a value can be a tensor, or any of
        # the modules and classes that the code refers to. So each attribute is read from each of these.
        self._attributes: set[str] = set(_ARITHMETIC)
        self._namespaces: list[object] = [torch.Tensor]
        self._checked: set[tuple[int, str]] = set()
        # The functions whose reads are being followed, innermost last.
        self._readers: list[str] = []
        self._abstract: list[abc.ABCMeta] = []

    def add(self, value: Any, depth: int) -> None:
        """Add the texts of a value and of everything that it consists of."""
        if depth > _MAX_DEPTH:
            self._refuse(f"uses more than {_MAX_DEPTH} nested levels of functions, which is the limit")
        if len(self.texts) > self.max_texts:
            self._refuse(f"reads more than {self.max_texts} values, which is the limit")
        if (text := find_plain_text(value)) is not None:
            self.texts.append(text)
        elif isinstance(value, torch._ops.OperatorBase | torch._ops.OpOverloadPacket | CustomOpDef):
            self._add_operator(value)
        elif is_namespace(value):
            self._add_namespace(value)
        elif name := name_known(value):
            self._add_known(name)
        elif self.is_new(value):
            self._add_parts(value, depth)

    def is_new(self, value: object) -> bool:
        """Return whether this is the first visit of an object. For later visits, add a text that refers to it."""
        if id(value) in self._seen:
            self.texts.append(f"again {self._seen[id(value)]}\n")
            return False
        self._seen[id(value)] = len(self._seen)
        self._alive.append(value)  # an id is unique only as long as its object is alive
        return True

    @property
    def num_visited(self) -> int:
        """How many objects the walk keeps alive."""
        return len(self._alive)

    def forget(self, num_kept: int) -> None:
        """Release the objects that were visited after the first `num_kept`. The walk must not be continued."""
        del self._alive[num_kept:]

    def has_visited(self, value: object) -> bool:
        """Return whether the walk has visited an object."""
        return id(value) in self._seen

    def list_namespaces(self) -> list[object]:
        """Return the modules and classes in which attributes of unknown values are looked up."""
        return list(self._namespaces)

    def note_parts(self, value: object, parts: ValueParts) -> None:
        """Called with each visited object and its parts."""

    def note_read(self, owner: Mapping[str, object], name: str, value: object) -> None:
        """Called with each value that the walk has read from a namespace by its name."""

    def add_attributes(self) -> None:
        """Read all attributes of unknown values from all namespaces, until there are no new combinations."""
        while pending := [
            (owner, name)
            for owner in self._namespaces
            for name in sorted(self._attributes)
            if (id(owner), name) not in self._checked
        ]:
            for owner, name in pending:
                self._checked.add((id(owner), name))
                if (found := self._find_attribute(owner, name)) is not MISSING:
                    self.texts.append(f"may read {self.name_owner(owner)}.{name}\n")
                    self.add(found, 0)
        for kind in self._abstract:
            self._add_registered(kind)

    def _add_registered(self, kind: abc.ABCMeta) -> None:
        """Add the classes that `ABC.register` has made subclasses of an abstract class, which `isinstance` looks up."""
        subclasses: list[type] = kind.__subclasses__()
        for subclass in subclasses:
            if isinstance(subclass, abc.ABCMeta):
                self._add_registered(subclass)
        registered = [reference() for reference in _abc._get_dump(kind)[0]]
        for each in registered:
            if each is not None and self.has_visited(each):
                self._refuse(f"uses {each.__qualname__}, which is registered as a subclass of {kind.__qualname__}")
        # Objects of other classes of the user do not occur in the code.
        names = {name_known(each) for each in registered if each is not None} - {""}
        names = {name for name in names if not name.startswith(_REGISTERED_LATE)}
        self.texts += [f"registered {name}\n" for name in sorted(names)]

    def name_owner(self, owner: object) -> str:
        """Return the name of a namespace."""
        return name_namespace(owner)

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

    def _add_namespace(self, value: object) -> None:
        if isinstance(value, type):
            self._note_abstract(value)
            self._add_known(name_namespace(value))
        else:
            self.texts.append(f"module {name_namespace(value)}\n")
        if not any(value is each for each in self._namespaces):
            self._namespaces.append(value)

    def _note_abstract(self, kind: type) -> None:
        known = (*_ABSTRACT_ROOTS, *self._abstract)
        if isinstance(kind, abc.ABCMeta) and not any(kind is each for each in known):
            self._abstract.append(kind)

    def _add_known(self, name: str) -> None:
        self._verify_pure(name)
        version = getattr(sys.modules["numpy"], "__version__", "") if name.startswith("numpy.") else ""
        self.texts.append(f"known {name} {version}\n")

    def _verify_pure(self, name: str) -> None:
        if not is_pure(name):
            reader = f" in {self._readers[-1]}" if self._readers else ""
            self._refuse(f"uses {name}{reader}, whose result may depend on something that is not in the key")

    def _add_parts(self, value: object, depth: int) -> None:
        if isinstance(value, CodeType):
            self._add_code(value, depth)
            return
        parts = self.list_parts(value)
        if parts is None:
            kind = type(value)
            raise UnknownCode(f"{self._where} uses a {kind.__module__}.{kind.__qualname__}, which has no digest")
        self.note_parts(value, parts)
        if isinstance(value, type):
            self._note_abstract(value)
        elif isinstance(value, FunctionType) and not parts.has_code:
            self._verify_pure(name_code(value.__code__))
        self.texts.append(f"{parts.text} of {len(parts.values)}\n")
        for each in parts.values:
            self.add(each, depth + 1)
        if isinstance(value, FunctionType) and parts.has_code:
            self._add_reads(value, read_code(value.__code__), depth + 1)

    def list_parts(self, value: object) -> ValueParts | None:
        """Return the parts of a value, or None if it has state that cannot be read."""
        return list_parts(value)

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
        if found := sorted(named & (_INTROSPECTION | _SKIPPED)):
            self._refuse(f"reads {found[0]}, which gives access to more than can be followed")
        self._readers.append(function.__qualname__)
        for chain in reads.chains:
            self._add_chain(function, chain, reads.computed, depth)
        for imported in reads.imports:
            self._add_import(function, imported, depth)
        self._readers.pop()

    def _add_chain(self, function: FunctionType, chain: tuple[str, ...], computed: frozenset[str], depth: int) -> None:
        """Add a global, or the attribute that a chain such as `a.b.c` leads to, as far as no user code has to run."""
        name, *below = chain
        value = function.__globals__.get(name, MISSING)
        self.note_read(function.__globals__, name, value)
        if value is MISSING:
            untyped: Any = function  # some type stubs lack the attribute
            value = untyped.__builtins__.get(name, MISSING)
            self.note_read(untyped.__builtins__, name, value)
        if value is MISSING:
            self.texts.append(f"no global {name}\n")
            self._attributes.update(below)
            return
        if value is ATTRIBUTE_FUNCTIONS.get(name, MISSING) and name not in computed:
            return
        while below and is_namespace(value) and (found := self._find_attribute(value, below[0])) is not MISSING:
            name, value = f"{name}.{below.pop(0)}", found
        self.texts.append(f"reads {name}\n")
        self._attributes.update(below)
        self.add(value, depth)

    def _find_attribute(self, owner: object, name: str) -> object:
        found = find_attribute(owner, name)
        if isinstance(owner, ModuleType) and (name in vars(owner) or not is_known_module(owner)):
            self.note_read(vars(owner), name, found)
        if found is MISSING and computes_attributes(owner):
            self._refuse(f"reads {name_namespace(owner)}.{name}, which the module computes when it is read")
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


@dataclasses.dataclass(frozen=True, slots=True)
class ValueParts:
    """The parts of a value: a text, and the values that it consists of."""

    text: str
    values: Sequence[object]
    has_code: bool = False
    """Whether the value is a user function, whose code reads more than these parts."""


def find_plain_text(value: object) -> str | None:
    """Return the text of a value that has no parts; None if it has parts."""
    if type(value) in _PLAIN or isinstance(value, _TORCH_PLAIN):
        return f"{type(value).__name__} {value!r}\n"
    if isinstance(value, re.Pattern):
        return f"pattern {value.pattern!r} {value.flags}\n"
    if isinstance(value, logging.Logger):
        return "logger\n"  # logging does not affect a graph
    if type(value).__module__ == "typing" and not typing.get_args(value):
        return f"annotation {value!r}\n"
    return None


def is_namespace(value: object) -> bool:
    """Return whether a value is described by the attributes read from it: a module, or a class not of the user."""
    return isinstance(value, ModuleType) or (isinstance(value, type) and bool(name_known(value)))


def name_namespace(value: object) -> str:
    """Return the name of a value for which `is_namespace` is true."""
    return value.__name__ if isinstance(value, ModuleType) else name_known(value)


def find_attribute(owner: object, name: str) -> object:
    """Return an attribute of a namespace, or MISSING. Runs no user code."""
    if isinstance(owner, type):
        return next((vars(base)[name] for base in owner.__mro__ if name in vars(base)), MISSING)
    assert isinstance(owner, ModuleType), "only modules and classes are namespaces"
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
    if typing.get_args(value):
        return _list_annotation(value)
    if isinstance(value, FunctionType):
        return _list_function(value)
    if isinstance(value, type):
        return ValueParts(f"class {value.__qualname__}", list(_iter_class(value)))
    if name_known(type(value)) and (wrapped := _list_wrapped(value)) is not None:
        return wrapped
    if isinstance(value, enum.Enum):
        return ValueParts("member", (type(value), value.name, value.value))
    if (items := _list_items(value)) is not None:
        return items
    if _has_python_state(type(value)):
        return ValueParts("object", (type(value), *_iter_state(value)))
    return None


def _list_annotation(value: Any) -> ValueParts:
    return ValueParts("annotation", (typing.get_origin(value), *value.__args__, *getattr(value, "__metadata__", ())))


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
    for name in sorted(vars(kind).keys() - _SKIPPED):
        yield from (name, vars(kind)[name])


def _has_python_state(kind: type) -> bool:
    """Return whether the state of objects of a class is entirely in `__dict__` and `__slots__`."""
    if kind in (object, typing.Generic, types.SimpleNamespace):
        return True
    # Extension classes have neither; their state cannot be read.
    has_names = not {"__dict__", "__slots__"}.isdisjoint(vars(kind)) or kind.__base__ is not object
    is_python = is_made_at_run_time(kind) and not is_written_in_c(kind)
    return is_python and has_names and all(_has_python_state(base) for base in kind.__bases__)


def _iter_state(value: object) -> Iterator[object]:
    yield from _flatten(getattr(value, "__dict__", {}))
    for name in copyreg._slotnames(type(value)):  # type: ignore[attr-defined]  # pickle uses it, too
        yield from (name, getattr(value, name, None))


def _flatten(mapping: Any) -> Iterator[object]:
    for key, value in mapping.items():
        yield from (key, value)
