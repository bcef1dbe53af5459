"""Turns a stored tree into plain containers for a pickle: tensors become references, and other values stay plain.

Values that a weights-only reader of torch refuses are left out of dicts, become None in sequences, and are reported.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch

from holdfast.errors import HoldfastError
from holdfast.formats.receipt import LeftOut
from holdfast.formats.writing.plan import SelectedTree
from holdfast.json_text import Json
from holdfast.snapshot.leaves import BLOBS, GRAD, PAYLOAD, TENSOR, decode_plain, describe_node
from holdfast.snapshot.load.opened import Opened
from holdfast.snapshot.pickled import load_payload
from holdfast.trees.outline import ITEMS_START, PAIRS_START, has_children, iter_children, key_text
from holdfast.trees.registered import Types

_MAX_VALUE_BYTES: Final = 64 << 20
"""Longer texts and bytes are left out: a pickle is built in memory."""
_LEFT_OUT: Final = object()
_SCALARS: Final = (type(None), bool, int, float, complex, str, bytes, bytearray, torch.dtype, torch.device)
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
    if kind in _SCALARS or isinstance(value, torch.dtype | torch.device):
        return kind is not int or abs(value).bit_length() < 2032  # type: ignore[arg-type]  # an int
    if kind in (list, tuple, set, torch.Size):
        return all(map(is_plain_value, value))  # type: ignore[call-overload]  # a sequence
    if kind in (dict, OrderedDict):
        return all(is_plain_value(key) and is_plain_value(each) for key, each in value.items())  # type: ignore[attr-defined]
    return False
