"""Encodes trees of state as JSON, and back: containers and plain values here, other leaves by the caller."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass
from itertools import chain, islice
from types import FunctionType, MethodType, ModuleType
from typing import Any, Final

import numpy as np
import torch

from holdfast.errors import Corrupt, NewerFormat, TooLarge, Unsupported
from holdfast.json_text import DEFERRED, Json, canonical_json
from holdfast.trees import plain, plain_torch_numpy
from holdfast.trees.outline import FIELDS_START, ITEMS_START, KEYED_START, MAX_TREE_DEPTH, TreePath, join_name
from holdfast.trees.registered import (
    BUILDERS,
    Registered,
    Types,
    build_dict,
    build_record,
    find_kind,
    find_member,
    is_known_factory,
    list_fields,
    member_name,
)

EncodeLeaf = Callable[[object, TreePath], Json]
DecodeLeaf = Callable[[list[Json], TreePath], object]
_Child = tuple[object, Any, bool]
"""Its path element, the child, and whether it is inline: only plain values are allowed in it."""

MAX_INLINE: Final = 4096
"""Longer strings and bytes are leaves, which are stored, shared and verified as chunks."""
_MAX_WEIGHT: Final = 1 << 26
"""The limit of values in a tree; a container counts as 16. Lists that share lists could expand beyond any memory."""
LEAF_SIGN: Final = "@"
"""Tags of leaves, and only those, begin with this."""

_ENCODERS: Final[Mapping[type, plain.Encoder]] = {**plain.ENCODERS, **plain_torch_numpy.ENCODERS}
_DECODERS: Final[Mapping[str, plain.Decoder]] = {**plain.DECODERS, **plain_torch_numpy.DECODERS}
_LONG: Final = frozenset({str, bytes, bytearray})
_LEAF_CLASSES: Final = frozenset({torch.Tensor, torch.nn.Parameter, np.ndarray})

_WITH_ATTRIBUTES: Final = frozenset({"odict+", "counter+"})

# Path elements for values that have no key.
_IN_KEY: Final = "{key}"
_IN_SET: Final = "{}"
_IN_ATTRIBUTES: Final = "{attributes}"
_IN_SLICE: Final = ("start", "stop", "step")


def encode_tree(tree: object, *, types: Types, encode_leaf: EncodeLeaf) -> Json:
    """Encode a tree; equal trees have equal JSON. `encode_leaf` encodes what is neither plain nor a container."""
    return _Encoder(types, encode_leaf).run(tree)


def decode_tree(node: Json, *, types: Types, decode_leaf: DecodeLeaf) -> object:
    """Decode a tree; raises Corrupt, NewerFormat or Unsupported. Of user code only registered classes' hashes run."""
    return _Decoder(types, decode_leaf).run(node)


def refuse(value: object, path: TreePath) -> Unsupported:
    """Return the error for a leaf that cannot be saved: its path, what it is, and what to do."""
    return Unsupported(f"{_name(path)}: {_explain(value)}")


def _name(path: TreePath) -> str:
    return join_name(path)[:200] or "the tree"


def _explain(value: object) -> str:
    kind = type(value)
    if kind in _ENCODERS:
        try:
            _ENCODERS[kind](value)
        except Unsupported as error:
            return str(error)
    if kind is defaultdict:
        return "a defaultdict with a factory of its own cannot be saved; convert it to dict"
    if find_kind(kind) not in (None, "tensor"):
        return (
            f"a {kind.__qualname__} cannot be saved until its class is registered:"
            f" pass types=[{kind.__name__}] to holdfast.open(...)"
        )
    base = next((base for base in kind.__mro__[1:] if base in _ENCODERS or base in _CONTAINERS), None)
    if base is not None:
        return (
            f"a {kind.__qualname__}, a subclass of {base.__name__}, cannot be saved;"
            f" convert it to {base.__name__}, or pass allow_pickle=True"
        )
    return f"{_article(value)} cannot be saved; convert it, or pass allow_pickle=True"


def _article(value: object) -> str:
    if isinstance(value, FunctionType | MethodType):
        return "a function"
    if isinstance(value, ModuleType):
        return "a module"
    if isinstance(value, type):
        return f"a class ({value.__qualname__} itself)"
    if isinstance(value, torch.Tensor):
        return "a tensor"
    if isinstance(value, np.ndarray):
        return "an array"
    return f"an object of class {type(value).__module__}.{type(value).__qualname__}"


def _refuse_inline(value: object, path: TreePath) -> Unsupported:
    """Return the error for a leaf where only plain values are allowed, for instance in a set."""
    if isinstance(value, torch.Tensor | np.ndarray):
        return Unsupported(
            f"{_name(path)}: {_article(value)} cannot be saved here;"
            " keys of dicts, members of sets, bounds of slices and attributes are plain values"
        )
    return refuse(value, path)


@dataclass(frozen=True, slots=True)
class _OpenContainer:
    """A container that is being encoded: its node so far, and its remaining children."""

    value: object
    node: list[Json]
    path: TreePath
    is_inline: bool
    children: Iterator[_Child]


class _Encoder:
    """Encodes one tree without recursion, because the caller may already be close to the recursion limit."""

    def __init__(self, types: Types, encode_leaf: EncodeLeaf) -> None:
        self._types = types
        self._encode_leaf = encode_leaf
        self._stack: list[_OpenContainer] = []
        self._ids: set[int] = set()
        self._weight = 0

    def run(self, tree: object) -> Json:
        root = self._encode(tree, (), is_inline=False)
        while self._stack:
            top = self._stack[-1]
            for element, child, is_inline in top.children:
                top.node.append(self._encode(child, (*top.path, element), is_inline=is_inline or top.is_inline))
                if self._stack[-1] is not top:
                    break
            else:
                self._close(self._stack.pop())
        return root

    def _encode(self, value: Any, path: TreePath, *, is_inline: bool) -> Json:
        """Return the node of a value; a container is pushed on the stack, and its node has no children yet."""
        kind = type(value)
        if kind in _LEAF_CLASSES:
            return self._leaf(value, path, is_inline=is_inline)
        if kind in _LONG and len(value) > MAX_INLINE and not is_inline:
            return self._leaf(value, path, is_inline=False)
        encode = _ENCODERS.get(kind)
        if encode is not None:
            try:
                return encode(value)
            except Unsupported:
                return self._leaf(value, path, is_inline=is_inline)
        registered = self._types.find_by_class(kind)
        if registered is not None and registered.kind == "enum":
            return _named(path, lambda: ["enum", registered.type_id, member_name(registered, value)])
        if kind not in _CONTAINERS and (registered is None or registered.kind == "tensor"):
            return self._leaf(value, path, is_inline=is_inline)
        if kind is defaultdict and not is_known_factory(value.default_factory):
            return self._leaf(value, path, is_inline=is_inline)
        self._verify_may_open(value, path)
        node, children = _named(
            path, lambda: _start_record(registered, value) if registered else _CONTAINERS[kind](value)
        )
        self._stack.append(_OpenContainer(value, node, path, is_inline, children))
        return node

    def _verify_may_open(self, value: Any, path: TreePath) -> None:
        if id(value) in self._ids:
            raise Unsupported(f"{_name(path)}: a container that contains itself cannot be saved; break the cycle")
        if len(path) >= MAX_TREE_DEPTH:
            raise Unsupported(f"{_name(path)}: the tree is nested more than {MAX_TREE_DEPTH} deep; flatten it")
        self._ids.add(id(value))
        self._weight += 16 + (len(value) if isinstance(value, Sized) else 0)
        if self._weight > _MAX_WEIGHT:
            raise TooLarge(f"{_name(path)}: the tree has too many values; put them in tensors, or split it")

    def _close(self, done: _OpenContainer) -> None:
        self._ids.discard(id(done.value))
        if type(done.value) in (set, frozenset):
            done.node[1:] = sorted(done.node[1:], key=canonical_json)

    def _leaf(self, value: object, path: TreePath, *, is_inline: bool) -> Json:
        if is_inline:
            raise _refuse_inline(value, path)
        node = self._encode_leaf(value, path)
        assert node is DEFERRED or node[0].startswith(LEAF_SIGN)
        return node


def _named(path: TreePath, act: Callable[[], Any]) -> Any:
    """Run `act`, and add the name of the path to an Unsupported that it raises."""
    try:
        return act()
    except Unsupported as error:
        raise Unsupported(f"{_name(path)}: {error}") from error


def _start_record(registered: Registered, value: object) -> tuple[list[Json], Iterator[_Child]]:
    return _start_pairs([registered.kind, registered.type_id], list_fields(registered, value))


def _start_pairs(node: list[Json], items: Iterable[tuple[object, object]]) -> tuple[list[Json], Iterator[_Child]]:
    return node, _iter_pairs(items, node)


def _start_ordered(tag: str, value: dict[Any, Any]) -> tuple[list[Json], Iterator[_Child]]:
    """Encode a dict that can have attributes, as state dicts of modules do: `_metadata` has their versions."""
    attributes = vars(value)
    hiding = [name for name in attributes if name in dir(type(value))]
    if hiding:
        raise Unsupported(f"its attribute {hiding[0]!r} hides a method and cannot be saved; delete it")
    node, pairs = _start_pairs([tag + "+" if attributes else tag], value.items())
    return node, chain([(_IN_ATTRIBUTES, attributes, True)], pairs) if attributes else pairs


def _start_defaultdict(value: defaultdict[Any, Any]) -> tuple[list[Json], Iterator[_Child]]:
    factory: Any = value.default_factory
    return _start_pairs(["defaultdict", factory and factory.__name__], value.items())


def _iter_pairs(items: Iterable[tuple[object, object]], node: list[Json]) -> Iterator[_Child]:
    for key, item in items:
        if type(key) is str:
            node.append(plain.encode_text(key))  # a faster path than `_encode`, with the same result
        else:
            yield _IN_KEY, key, True
        yield key, item, False


def _iter_items(items: Iterable[object]) -> Iterator[_Child]:
    return ((index, item, False) for index, item in enumerate(items))


def _iter_members(items: Iterable[object]) -> Iterator[_Child]:
    return ((_IN_SET, item, True) for item in items)


def _iter_bounds(bounds: Iterable[object]) -> Iterator[_Child]:
    return ((name, bound, True) for name, bound in zip(_IN_SLICE, bounds, strict=True))


_CONTAINERS: Final[Mapping[type, Callable[[Any], tuple[list[Json], Iterator[_Child]]]]] = {
    dict: lambda value: _start_pairs(["dict"], value.items()),
    OrderedDict: lambda value: _start_ordered("odict", value),
    Counter: lambda value: _start_ordered("counter", value),
    defaultdict: _start_defaultdict,
    list: lambda value: (["list"], _iter_items(value)),
    tuple: lambda value: (["tuple"], _iter_items(value)),
    deque: lambda value: (["deque", value.maxlen], _iter_items(value)),
    set: lambda value: (["set"], _iter_members(value)),
    frozenset: lambda value: (["frozenset"], _iter_members(value)),
    slice: lambda value: (["slice"], _iter_bounds((value.start, value.stop, value.step))),
}


def _iter_nodes(node: list[Json], values: list[Any]) -> Iterator[_Child] | None:
    """Return the children of a container's node; None for another node. Raises ValueError if some are missing.

    The caller appends each decoded child to `values`; a decoded key is taken from there for its value's path.
    """
    tag = node[0]
    start = KEYED_START.get(tag)
    if start is not None:
        if len(node) < start or (len(node) - start) % 2:
            raise ValueError("a key without a value")
        attributes = [(_IN_ATTRIBUTES, node[1], True)] if tag in _WITH_ATTRIBUTES else []
        return chain(attributes, _iter_keyed(node, start, values))
    if tag in ITEMS_START:
        return _iter_items(node[ITEMS_START[tag] :])
    if tag in ("set", "frozenset"):
        return _iter_members(node[1:])
    if tag == "slice" and len(node) != 4:
        raise ValueError("a slice without three bounds")
    return _iter_bounds(node[1:]) if tag == "slice" else None


def _iter_keyed(node: list[Json], start: int, values: list[Any]) -> Iterator[_Child]:
    for key, child in zip(islice(node, start, None, 2), islice(node, start + 1, None, 2), strict=True):
        if type(key) is str:
            values.append(key)
        else:
            yield _IN_KEY, key, True
        # The key has been decoded by now and is the last of `values`.
        yield values[-1], child, False


def _damaged(path: TreePath, why: object) -> Corrupt:
    return Corrupt(f"{_name(path)}: the stored tree is damaged here ({str(why)[:120]}); run `holdfast check`")


@dataclass(frozen=True, slots=True)
class _OpenNode:
    """A container that is being decoded, and its decoded children so far."""

    node: list[Json]
    path: TreePath
    is_inline: bool
    values: list[Any]
    children: Iterator[_Child]


class _Decoder:
    """Decodes one tree without recursion; every malformed node raises an error with its path."""

    def __init__(self, types: Types, decode_leaf: DecodeLeaf) -> None:
        self._types = types
        self._decode_leaf = decode_leaf
        self._stack: list[_OpenNode] = []

    def run(self, node: Json) -> object:
        value = self._decode(node, (), is_inline=False)
        while self._stack:
            top = self._stack[-1]
            for element, child, is_inline in top.children:
                value = self._decode(child, (*top.path, element), is_inline=is_inline or top.is_inline)
                if self._stack[-1] is not top:
                    break
                top.values.append(value)
            else:
                self._stack.pop()
                value = self._build(top)
                if self._stack:
                    self._stack[-1].values.append(value)
        return value

    def _decode(self, node: Json, path: TreePath, *, is_inline: bool) -> object:
        """Return the value of a node; a container is pushed on the stack instead."""
        kind = type(node)
        if kind is str or kind is bool or node is None:
            return node
        if kind is int or kind is float:
            return _checked(path, lambda: plain.decode_int(node) if kind is int else plain.decode_float(node))
        if kind is not list or not node or type(node[0]) is not str:
            raise _damaged(path, "not a value")
        tag = node[0]
        if len(path) + (tag in BUILDERS or tag in FIELDS_START) > MAX_TREE_DEPTH:
            raise _damaged(path, f"nested more than {MAX_TREE_DEPTH} deep")
        if tag.startswith(LEAF_SIGN):
            if is_inline:
                raise _damaged(path, "a leaf where only a plain value is allowed")
            return self._decode_leaf(node, path)
        if tag == "enum":
            return self._find_member(node, path)
        if tag in _DECODERS:
            return _checked(path, lambda: plain.decode_checked(node, _DECODERS[tag], _ENCODERS))
        values: list[Any] = []
        children = _checked(path, lambda: _iter_nodes(node, values))
        if children is None:
            raise NewerFormat(f"{_name(path)}: a value of kind {tag[:40]!r} was saved by a later Holdfast: upgrade")
        self._stack.append(_OpenNode(node, path, is_inline, values, children))
        return None

    def _find_member(self, node: list[Json], path: TreePath) -> object:
        registered = self._find_class(node, path)
        if len(node) != 3 or type(node[2]) is not str:
            raise _damaged(path, "not the member of an enum")
        return _checked(path, lambda: find_member(registered, node[2]))

    def _find_class(self, node: list[Json], path: TreePath) -> Registered:
        if len(node) < 2 or type(node[1]) is not str:
            raise _damaged(path, "a class without a name")
        registered: Registered = _named(path, lambda: self._types.find_by_id(node[1]))
        if registered.kind != node[0]:
            raise Unsupported(
                f"{_name(path)}: it was saved as a {node[0]}, and class {registered.type_id} is now a"
                f" {registered.kind}: pass the class as it was in types="
            )
        return registered

    def _build(self, done: _OpenNode) -> object:
        tag = done.node[0]
        if tag not in FIELDS_START:
            return _checked(done.path, lambda: BUILDERS[tag](done.node, done.values))
        registered = self._find_class(done.node, done.path)
        return _checked(done.path, lambda: build_record(registered, build_dict(done.values)))


def _checked(path: TreePath, act: Callable[[], Any]) -> Any:
    """Run `act`, and turn its errors into ones that name the path."""
    try:
        return _named(path, act)
    except (ValueError, ArithmeticError) as error:
        raise _damaged(path, error) from error
