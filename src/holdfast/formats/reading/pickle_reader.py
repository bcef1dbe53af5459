"""Reads pickles without unpickling: builds plain containers, and asks the caller for every class and function by name.

Nothing is imported and nothing in the pickle is called. A class or function is a `Maker` of the caller's table, which
decides what its arguments become; a name that the table does not have is refused.
"""

from __future__ import annotations

import pickletools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from holdfast.errors import BadFile

MAX_PICKLE_BYTES: Final = 1 << 28
_MAX_INT_BYTES: Final = 1 << 10
_MAX_KEY_PARTS: Final = 1000
"""Of a key: hashing a tuple takes as long as it has parts, and a short pickle can nest one in itself many times."""
_MARK: Final = object()
_NUMBERS: Final = ("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT")
_TEXTS: Final = ("STRING", "BINSTRING", "SHORT_BINSTRING", "UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8")
_VALUES: Final = frozenset({*_NUMBERS, *_TEXTS, "BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8"})
"""Opcodes that push the value that follows them."""
_CONSTANTS: Final = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_FIXED_TUPLES: Final = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


@dataclass(frozen=True, slots=True)
class Maker:
    """Stands for a class or function: `make` gets the arguments that the pickle would call it with."""

    name: str
    make: Callable[[tuple[Any, ...]], object]


@dataclass(eq=False, slots=True)
class PickledObject:
    """An object of a class that is not made: the name of the class, and what the pickle says about it."""

    class_name: str
    args: tuple[Any, ...] = ()
    state: Any = None
    items: list[Any] = field(default_factory=list)

    def find(self, name: str) -> Any:
        """Return an attribute; None if the pickle does not set it."""
        return self.state.get(name) if isinstance(self.state, dict) else None


FindGlobal = Callable[[str, str], object]
"""Returns what a module and a name stand for: a Maker, or a value such as a dtype. MUST raise for any other name."""
LoadPersistent = Callable[[object], object]


def make_inert(name: str) -> Maker:
    """Return a maker of objects that only remember the name of their class."""
    return Maker(name, lambda args: PickledObject(name, args))


def read_pickle(data: bytes, find_global: FindGlobal, load_persistent: LoadPersistent, *, where: str) -> Any:
    """Return the object of a pickle; raises BadFile if it is malformed, and whatever `find_global` raises."""
    if len(data) > MAX_PICKLE_BYTES:
        raise BadFile(f"{where} has a pickle of {len(data)} bytes, more than {MAX_PICKLE_BYTES}", path=where)
    machine = _Machine(find_global, load_persistent)
    try:
        for opcode, argument, _ in _iter_opcodes(data):
            machine.run(opcode, argument)
        return machine.finish()
    except (ValueError, TypeError, IndexError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        if isinstance(error, BadFile):
            raise
        raise BadFile(f"{where} has a damaged pickle: {str(error)[:200]}", path=where) from error


def measure_pickle(data: bytes) -> int:
    """Return where the first pickle in `data` ends; raises ValueError if it does not end."""
    return [position for opcode, _, position in _iter_opcodes(data) if opcode == "STOP"][-1] + 1


def _iter_opcodes(data: bytes) -> Iterator[tuple[str, Any, int]]:
    for opcode, argument, position in pickletools.genops(data):
        yield opcode.name, argument, position or 0


class _Machine:
    """The stack and the memo of a pickle that is being read."""

    def __init__(self, find_global: FindGlobal, load_persistent: LoadPersistent) -> None:
        self._find_global = find_global
        self._load_persistent = load_persistent
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def finish(self) -> Any:
        """Return the result: the only value that is left."""
        if len(self._stack) != 1 or self._stack[0] is _MARK:
            raise ValueError(f"{len(self._stack)} values are left at its end")
        return self._stack[0]

    def run(self, opcode: str, argument: Any) -> None:
        """Carry out one instruction."""
        if opcode in _VALUES:
            self._push_value(argument)
        elif opcode in _CONSTANTS:
            self._stack.append(_CONSTANTS[opcode])
        elif opcode in _FIXED_TUPLES:
            self._push_tuple(_FIXED_TUPLES[opcode])
        elif opcode not in ("PROTO", "FRAME", "STOP"):
            action = getattr(self, f"_do_{opcode.lower()}", None)
            if action is None:
                raise ValueError(f"the instruction {opcode} is not used in checkpoints")
            action(argument)

    def _push_value(self, value: Any) -> None:
        if type(value) is int and value.bit_length() > 8 * _MAX_INT_BYTES:
            raise ValueError("a number is too long")
        self._stack.append(value)

    def _push_tuple(self, size: int) -> None:
        items = [self._pop() for _ in range(size)]
        self._stack.append(tuple(reversed(items)))

    def _pop(self) -> Any:
        value = self._stack.pop()
        if value is _MARK:
            raise ValueError("a value is missing")
        return value

    def _pop_marked(self) -> list[Any]:
        at = len(self._stack) - 1
        while self._stack[at] is not _MARK:
            at -= 1
            if at < 0:
                raise ValueError("a mark is missing")
        items = self._stack[at + 1 :]
        del self._stack[at:]
        return items

    @property
    def _top(self) -> Any:
        return self._stack[-1]

    # Each method below carries out the instruction of its name.

    def _do_mark(self, _: Any) -> None:
        self._stack.append(_MARK)

    def _do_pop(self, _: Any) -> None:
        self._stack.pop()

    def _do_pop_mark(self, _: Any) -> None:
        self._pop_marked()

    def _do_empty_list(self, _: Any) -> None:
        self._stack.append([])

    def _do_empty_dict(self, _: Any) -> None:
        self._stack.append({})

    def _do_empty_set(self, _: Any) -> None:
        self._stack.append(set())

    def _do_list(self, _: Any) -> None:
        self._stack.append(self._pop_marked())

    def _do_tuple(self, _: Any) -> None:
        self._stack.append(tuple(self._pop_marked()))

    def _do_frozenset(self, _: Any) -> None:
        items = self._pop_marked()
        verify_keys(items)
        self._stack.append(frozenset(items))

    def _do_dict(self, _: Any) -> None:
        self._stack.append(_pair_up(self._pop_marked()))

    def _do_append(self, _: Any) -> None:
        self._extend([self._pop()])

    def _do_appends(self, _: Any) -> None:
        self._extend(self._pop_marked())

    def _extend(self, items: list[Any]) -> None:
        target = self._top.items if isinstance(self._top, PickledObject) else self._top
        if type(target) is not list:
            raise ValueError("items are added to a value that is no list")
        target += items

    def _do_additems(self, _: Any) -> None:
        items = self._pop_marked()
        if type(self._top) is not set:
            raise ValueError("items are added to a value that is no set")
        verify_keys(items)
        self._top.update(items)

    def _do_setitem(self, _: Any) -> None:
        value = self._pop()
        self._update([self._pop(), value])

    def _do_setitems(self, _: Any) -> None:
        self._update(self._pop_marked())

    def _update(self, flat: list[Any]) -> None:
        pairs = _pair_up(flat)
        if isinstance(self._top, PickledObject):
            self._top.items += pairs.items()
        elif isinstance(self._top, dict):
            self._top.update(pairs)
        else:
            raise ValueError("keys are set in a value that is no dict")

    def _do_global(self, argument: Any) -> None:
        module, _, name = argument.partition(" ")
        self._stack.append(self._find_global(module, name))

    def _do_stack_global(self, _: Any) -> None:
        name, module = self._pop(), self._pop()
        if type(name) is not str or type(module) is not str:
            raise ValueError("the name of a class is no text")
        self._stack.append(self._find_global(module, name))

    def _do_reduce(self, _: Any) -> None:
        args, maker = self._pop(), self._pop()
        if not isinstance(maker, Maker) or type(args) is not tuple:
            raise ValueError("a value is called that is no function")
        self._stack.append(maker.make(args))

    _do_newobj = _do_reduce

    def _do_build(self, _: Any) -> None:
        state = self._pop()
        if isinstance(self._top, PickledObject):
            self._top.state = state
        elif type(self._top) is OrderedDict and type(state) is dict and all(type(key) is str for key in state):
            vars(self._top).update(state)
        else:
            raise ValueError(f"the attributes of a {type(self._top).__name__} are set")

    def _do_persid(self, _: Any) -> None:
        raise ValueError("a persistent id is no tuple")

    def _do_binpersid(self, _: Any) -> None:
        self._stack.append(self._load_persistent(self._pop()))

    def _do_memoize(self, _: Any) -> None:
        self._memo[len(self._memo)] = self._top

    def _do_put(self, argument: Any) -> None:
        self._memo[argument] = self._top

    _do_binput = _do_long_binput = _do_put

    def _do_get(self, argument: Any) -> None:
        self._stack.append(self._memo[argument])

    _do_binget = _do_long_binget = _do_get


def _pair_up(flat: list[Any]) -> dict[Any, Any]:
    if len(flat) % 2:
        raise ValueError("a key has no value")
    verify_keys(flat[::2])
    return dict(zip(flat[::2], flat[1::2], strict=True))


def verify_keys(keys: Iterable[Any]) -> None:
    """Raise ValueError if it would take long to hash one of these keys of a dict or items of a set."""
    for key in keys:
        left, parts = [key], 0
        while left:
            part = left.pop()
            if isinstance(part, tuple):
                parts += len(part)
                if parts > _MAX_KEY_PARTS:
                    raise ValueError("a key has too many parts")
                left += part
