"""Writes pickles of plain values and tensors, opcode by opcode: only what torch's weights-only reader accepts."""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch

from holdfast.errors import HoldfastError
from holdfast.formats.receipt import LeftOut
from holdfast.formats.writing.plan import SelectedTree
from holdfast.json_text import Json
from holdfast.snapshot.leaves import BLOBS, GRAD, PAYLOAD, TENSOR, decode_plain, describe_node
from holdfast.snapshot.opened import Opened
from holdfast.snapshot.pickled import load_payload
from holdfast.tensors.spec import dtype_name
from holdfast.trees.outline import ITEMS_START, PAIRS_START, has_children, iter_children, key_text
from holdfast.trees.registered import Types

_MAX_VALUE_BYTES: Final = 64 << 20
"""Longer texts and bytes are left out: a pickle is built in memory."""
_LEFT_OUT: Final = object()
_PLAIN_TYPES: Final = (type(None), bool, int, float, complex, str, bytes, bytearray, torch.dtype, torch.device)
_SIMPLER: Final[Mapping[str, str]] = {
    "counter": "a Counter, written as a dict",
    "counter+": "a Counter, written as a dict",
    "defaultdict": "a defaultdict, written as a dict",
    "deque": "a deque, written as a list",
    "namedtuple": "a named tuple, written as a dict of its fields",
    "dataclass": "a dataclass, written as a dict of its fields",
}


@dataclass(frozen=True, slots=True)
class TensorRef:
    """Stands for a tensor in a tree of plain values: the number of its entry."""

    number: int


class PlainTree:
    """Converts one selected tree; `left_out` has what the result lacks, by names in the snapshot."""

    def __init__(self, opened: Opened, tree: SelectedTree) -> None:
        self._opened = opened
        self._tree = tree
        self._types = Types(())
        self.left_out: list[LeftOut] = []

    def convert(self) -> Any:
        """Return the tree with plain containers and values, and a TensorRef for each tensor."""
        found = self._convert(self._tree.node, "")
        return None if found is _LEFT_OUT else found

    def _convert(self, node: Json, name: str) -> Any:
        if has_children(node):
            return self._convert_container(node, name)
        tag = node[0] if isinstance(node, list) and node else ""
        if tag == TENSOR:
            return TensorRef(node[1])
        if tag == GRAD:
            return self._convert(node[1], name)
        if str(tag).startswith("@"):
            return self._read_value(node, name)
        return self._decode(node, name)

    def _convert_container(self, node: list[Json], name: str) -> Any:
        tag = node[0]
        if tag in _SIMPLER:
            self._leave_out(name, _SIMPLER[tag])
        prefix = f"{name}." if name else ""
        children = [(key, self._convert(child, prefix + key_text(key))) for key, child in iter_children(node)]
        if tag in ITEMS_START:
            items = [None if child is _LEFT_OUT else child for _, child in children]
            return tuple(items) if tag == "tuple" else items
        pairs: dict[Any, Any] = OrderedDict() if tag.startswith("odict") else {}
        for key, child in children:
            decoded = self._decode(key, prefix + key_text(key)) if tag in PAIRS_START else key
            if child is not _LEFT_OUT and decoded is not _LEFT_OUT:
                pairs[decoded] = child
        if tag == "odict+":
            self._set_attributes(pairs, node[1], name)
        return pairs

    def _set_attributes(self, pairs: dict[Any, Any], node: Json, name: str) -> None:
        """Keep the attributes of an OrderedDict: torch keeps the versions of modules there."""
        attributes = self._decode(node, f"{name}.__dict__".lstrip("."))
        if isinstance(attributes, dict):
            vars(pairs).update(attributes)

    def _decode(self, node: Json, name: str) -> Any:
        try:
            value = decode_plain(node, self._types)
        except HoldfastError:
            value = None if node is None else _LEFT_OUT
        if value is _LEFT_OUT or not is_plain_value(value):
            return self._leave_out(name, f"{describe_node(node)}, which only a pickle that runs code can contain")
        return value

    def _read_value(self, node: list[Json], name: str) -> Any:
        """Return a long text, bytes, or what torch.save wrote for DCP, if it is plain."""
        tag, what = node[0], describe_node(node)
        if tag not in BLOBS and tag != PAYLOAD:
            return self._leave_out(name, f"{what}, which only a pickle that runs code can contain")
        entry = self._opened.entry(node[1])
        if entry.size_bytes > _MAX_VALUE_BYTES:
            return self._leave_out(name, f"{what} of {entry.size_bytes} bytes, which is too long for a pickle")
        data = self._opened.reader.read_entry(entry.name)
        if tag == PAYLOAD:
            return self._load(data, name)
        return data.decode(errors="surrogatepass") if tag == "@str" else BLOBS[tag](data)

    def _load(self, data: bytearray, name: str) -> Any:
        try:
            value = load_payload(data, what=self._tree.join(name), weights_only=True)
        except HoldfastError:
            value = _LEFT_OUT
        if value is _LEFT_OUT or not is_plain_value(value):
            return self._leave_out(name, "a pickled object, which only a pickle that runs code can contain")
        return value

    def _leave_out(self, name: str, reason: str) -> Any:
        self.left_out.append(LeftOut(self._tree.join(name), reason))
        return _LEFT_OUT


def is_plain_value(value: object) -> bool:
    """Return whether a value consists of what a weights-only reader of torch accepts, without tensors."""
    kind = type(value)
    if kind in _PLAIN_TYPES or isinstance(value, torch.dtype | torch.device):
        return kind is not int or abs(value).bit_length() < 2032  # type: ignore[arg-type]  # an int
    if kind in (list, tuple, set, torch.Size):
        return all(map(is_plain_value, value))  # type: ignore[call-overload]  # a sequence
    if kind in (dict, OrderedDict):
        return all(is_plain_value(key) and is_plain_value(each) for key, each in value.items())  # type: ignore[attr-defined]
    return False


_PROTOCOL: Final = b"\x80\x02"
_STOP: Final = b"."
_MARK, _TUPLE, _REDUCE, _PERSISTENT = b"(", b"t", b"R", b"Q"
_EMPTY_DICT, _EMPTY_LIST, _SET_ITEMS, _APPEND_ITEMS = b"}", b"]", b"u", b"e"
_CONSTANTS: Final = {None: b"N", True: b"\x88", False: b"\x89"}
_LONG1: Final = b"\x8a"
_BUILD: Final = b"b"


class PickleText:
    """Encodes one value as a pickle; `encode_tensor` returns the opcodes for a tensor."""

    def __init__(self, encode_tensor: Callable[[TensorRef], bytes]) -> None:
        self._encode_tensor = encode_tensor

    def encode(self, value: Any) -> bytes:
        """Return a whole pickle."""
        return _PROTOCOL + self.encode_value(value) + _STOP

    def encode_value(self, value: Any) -> bytes:
        """Return the opcodes for a value inside a pickle."""
        kind = type(value)
        if isinstance(value, TensorRef):
            return self._encode_tensor(value)
        if value is None or kind is bool:
            return _CONSTANTS[value]
        if isinstance(value, torch.dtype):
            return name_global("torch", dtype_name(value))
        if isinstance(value, torch.device):
            return call("torch", "device", [encode_text(str(value))])
        return self._encode_container(value) if kind in _CONTAINERS else _SCALARS[kind](value)

    def _encode_container(self, value: Any) -> bytes:
        kind = type(value)
        if kind in (dict, OrderedDict):
            pairs = b"".join(self.encode_value(each) for pair in value.items() for each in pair)
            start = _EMPTY_DICT if kind is dict else EMPTY_ORDERED_DICT
            attributes = vars(value) if kind is OrderedDict else {}
            return start + _MARK + pairs + _SET_ITEMS + (self.encode_value(attributes) + _BUILD if attributes else b"")
        items = [self.encode_value(each) for each in value]
        if kind is tuple:
            return encode_tuple(items)
        if kind is torch.Size:
            return call("torch", "Size", [encode_tuple(items)])
        listed = _EMPTY_LIST + _MARK + b"".join(items) + _APPEND_ITEMS
        return call("builtins", "set", [listed]) if kind is set else listed


def name_global(module: str, name: str) -> bytes:
    """Return the opcode for a class or function by name."""
    return f"c{module}\n{name}\n".encode()


def encode_tuple(items: Iterable[bytes]) -> bytes:
    """Return the opcodes for a tuple of encoded items."""
    return _MARK + b"".join(items) + _TUPLE


def call(module: str, name: str, arguments: Iterable[bytes]) -> bytes:
    """Return the opcodes for a call of a function or class."""
    return name_global(module, name) + encode_tuple(arguments) + _REDUCE


def refer(arguments: Iterable[bytes]) -> bytes:
    """Return the opcodes for a persistent reference, which the reader resolves."""
    return encode_tuple(arguments) + _PERSISTENT


def encode_int(value: int) -> bytes:
    """Return the opcode for an integer of at most 255 bytes."""
    if 0 <= value < 1 << 8:
        return b"K" + bytes((value,))
    if -1 << 31 <= value < 1 << 31:
        return b"J" + struct.pack("<i", value)
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return _LONG1 + bytes((len(data),)) + data


def encode_text(value: str) -> bytes:
    """Return the opcode for a text."""
    data = value.encode(errors="surrogatepass")
    return b"X" + struct.pack("<I", len(data)) + data


def encode_flag(*, value: bool) -> bytes:
    """Return the opcode for a bool."""
    return _CONSTANTS[value]


def _encode_bytes(value: bytes) -> bytes:
    return call("_codecs", "encode", [encode_text(value.decode("latin1")), encode_text("latin1")])


def _encode_float(value: float) -> bytes:
    return b"G" + struct.pack(">d", value)


EMPTY_ORDERED_DICT: Final = call("collections", "OrderedDict", [])
_CONTAINERS: Final = frozenset({dict, OrderedDict, list, tuple, set, torch.Size})
_SCALARS: Final[dict[type, Callable[[Any], bytes]]] = {
    int: encode_int,
    float: _encode_float,
    str: encode_text,
    bytes: _encode_bytes,
    bytearray: lambda value: call("builtins", "bytearray", [_encode_bytes(bytes(value))]),
    complex: lambda value: call("builtins", "complex", [_encode_float(value.real), _encode_float(value.imag)]),
}
