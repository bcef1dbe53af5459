"""Finds the tensors that a pickle of `torch.save` describes, by its opcodes; unpickles, imports and calls nothing."""

from __future__ import annotations

import pickletools
from collections.abc import Callable, Mapping
from io import BytesIO
from typing import IO, Any, Final, NamedTuple

_MAX_OPCODES: Final = 800_000
"""A pickle with more opcodes is not read to its end. A tensor takes about 30."""
_MAX_DIMS: Final = 64
_UNTYPED: Final = "torch.storage UntypedStorage"
_MARK: Final = object()


class PickledTensor(NamedTuple):
    """A tensor as a pickle describes it: the storage by its key, and which items of it."""

    key: str
    storage_items: int
    """The number of items in the storage; of bytes, if the storage has no dtype."""
    is_typed: bool
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class _Storage(NamedTuple):
    """A persistent id that names a storage."""

    key: str
    num_items: int
    is_typed: bool


class _Effect(NamedTuple):
    """What an opcode does to the stack."""

    pops: int
    """How many values it takes; those above the last mark come on top of that."""
    takes_mark: bool
    pushes: int


def _find_effect(opcode: pickletools.OpcodeInfo) -> _Effect:
    before = opcode.stack_before
    takes_mark = pickletools.markobject in before
    pops = before.index(pickletools.markobject) if takes_mark else len(before)
    return _Effect(pops, takes_mark, len(opcode.stack_after))


def _read_global(stream: IO[bytes]) -> str:
    """Return a module and a name, which are two lines of text; pickletools would decode escapes in them."""
    return " ".join(stream.readline()[:-1].decode() for _ in range(2))


# Other opcodes whose argument is text with escapes belong to protocol 0, which torch.save does not write.
_TEXTUAL: Final = frozenset(("STRING", "UNICODE", "INT", "LONG", "FLOAT", "PERSID", "INST"))
_READERS: Final[Mapping[str, Callable[[IO[bytes]], Any]]] = {
    "GLOBAL": _read_global,
    **{each.name: each.arg.reader for each in pickletools.opcodes if each.arg and each.name != "GLOBAL"},
}
_OPCODES: Final = {
    each.code.encode("latin-1"): (each.name, _READERS.get(each.name), _find_effect(each))
    for each in pickletools.opcodes
    if each.name not in _TEXTUAL
}
_CONSTANTS: Final = frozenset(
    ("BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "GLOBAL")
)


def parse_tensors(data: bytes) -> list[PickledTensor]:
    """Return every tensor in a pickle; raises ValueError if it is malformed, too long or of an unknown kind."""
    stream = BytesIO(data)
    machine = _Machine()
    try:
        for _ in range(_MAX_OPCODES):
            name, reader, effect = _OPCODES[stream.read(1)]
            if name == "STOP":
                return machine.tensors
            machine.step(name, reader(stream) if reader else None, effect)
    except (KeyError, IndexError) as error:
        raise ValueError("the pickle is malformed") from error
    raise ValueError("the pickle is too long")


class _Machine:
    """The stack and memo of an unpickler, with numbers, strings and tuples of them; None for any other value."""

    def __init__(self) -> None:
        self.tensors: list[PickledTensor] = []
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def step(self, name: str, argument: Any, effect: _Effect) -> None:
        """Do what one opcode does; raises IndexError or KeyError if the stack or the memo lacks a value."""
        stack = self._stack
        if name in ("BINPUT", "LONG_BINPUT"):
            self._memo[argument] = stack[-1]
        elif name == "MEMOIZE":
            self._memo[len(self._memo)] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(self._memo[argument])
        elif name == "MARK":
            stack.append(_MARK)
        elif name in _CONSTANTS:
            stack.append(argument)
        else:
            value = self._evaluate(name, self._pop(effect))
            stack.extend([value] * effect.pushes)

    def _pop(self, effect: _Effect) -> list[Any]:
        stack = self._stack
        popped: list[Any] = []
        if effect.takes_mark:
            while (value := stack.pop()) is not _MARK:
                popped.append(value)
        popped += [stack.pop() for _ in range(effect.pops)]
        popped.reverse()
        return popped

    def _evaluate(self, name: str, popped: list[Any]) -> Any:
        if name in ("TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "EMPTY_TUPLE"):
            return tuple(popped)
        if name == "STACK_GLOBAL":
            return f"{popped[0]} {popped[1]}"
        if name == "BINPERSID":
            return _parse_storage(popped[0])
        if name == "REDUCE" and (tensor := _parse_tensor(popped[1])):
            self.tensors.append(tensor)
        return None


def _parse_storage(value: Any) -> _Storage | None:
    """Return the storage that a persistent id names: ("storage", class, key, location, number of items)."""
    match value:
        case ("storage", str(kind), str(key), _, int(num_items)) if num_items > 0:
            return _Storage(key, num_items, kind != _UNTYPED)
    return None


def _parse_tensor(arguments: Any) -> PickledTensor | None:
    """Return the tensor that a call rebuilds from (storage, offset, shape, stride, ...); None for any other call."""
    match arguments:
        case (_Storage() as storage, int(offset), tuple(shape), tuple(stride), *_):
            if _are_sizes(shape) and _are_sizes(stride) and len(shape) == len(stride) and offset >= 0:
                return PickledTensor(*storage, offset, shape, stride)
    return None


def _are_sizes(values: tuple[Any, ...]) -> bool:
    return len(values) <= _MAX_DIMS and all(type(value) is int and value >= 0 for value in values)
