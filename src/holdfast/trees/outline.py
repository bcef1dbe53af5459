"""Lists the leaves of an encoded tree, with names and short texts, without decoding it and without torch."""

from __future__ import annotations

import dataclasses
import struct
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from fractions import Fraction
from itertools import islice
from typing import Any, Final

from holdfast.errors import Corrupt, Unsupported
from holdfast.json_text import MAX_DEPTH, Json
from holdfast.texts import shorten
from holdfast.trees import plain

TreePath = tuple[object, ...]
"""The path of a value in its tree: keys of dicts, positions in sequences, names of fields."""

TREE: Final = "tree"
"""The key of the encoded tree in a snapshot's spec."""

MAX_TREE_DEPTH: Final = MAX_DEPTH - 50
"""The deepest nesting of containers; the remaining levels are for the record's own fields and for leaf nodes."""

_MAX_VALUE_CHARS: Final = 80
_MAX_VALUE_ITEMS: Final = 12
_MAX_VALUE_DEPTH: Final = 3
_MAX_KEY_DEPTH: Final = 8
_MAX_INT_BITS: Final = 256
"""Longer integers are shown in hexadecimal, which takes linear time and has no limit of digits."""

_TEXTS: Final = frozenset({"str", "bytes", "bytearray"})
"""Values that are entries if they are long, and are in the tree itself if they are short."""

# The index of a container's first child in its node, by tag; children of pairs and fields have a key before them.
PAIRS_START: Final = {"dict": 1, "odict": 1, "odict+": 2, "counter": 1, "counter+": 2, "defaultdict": 2}
FIELDS_START: Final = {"dataclass": 2, "namedtuple": 2}
ITEMS_START: Final = {"list": 1, "tuple": 1, "deque": 2}
KEYED_START: Final = {**PAIRS_START, **FIELDS_START}
_START: Final = {**KEYED_START, **ITEMS_START}
_NATIVE: Final[Mapping[type, str]] = {type(None): "none", bool: "bool", int: "int", float: "float", str: "str"}


@dataclass(frozen=True, slots=True)
class Leaf:
    """An end point of a walk over a tree: a stored leaf, a plain value or an empty container."""

    path_json: tuple[Json, ...]
    """The encoded keys that lead to it."""
    name: str
    tag: str
    node: Json


def join_name(path: Sequence[object]) -> str:
    """Return the name of the leaf at `path`: its keys joined by dots, unescaped."""
    # A list is faster than a generator here, and this runs for every leaf.
    return ".".join([key if type(key) is str else _describe(key) for key in path])


def iter_leaves(node: Json) -> Iterator[Leaf]:
    """Yield the leaves of an encoded tree, in order; a set is one leaf, and so is a node with an unknown tag."""
    return (Leaf(*found) for found in iter_found(node))


def iter_stored(node: Json) -> Iterator[tuple[str, list[Json]]]:
    """Yield the name and node of each leaf that is stored outside of the tree, such as a tensor."""
    return ((name, child) for _, name, tag, child in iter_found(node) if tag.startswith("@"))


def iter_found(node: Json) -> Iterator[tuple[tuple[Json, ...], str, str, Json]]:
    """Yield the fields of each `Leaf`, in order; for lists of very many leaves, of which few are needed as objects."""
    if not has_children(node):
        yield (), "", _find_tag(node), node
        return
    # The open containers, each with its path, the prefix of its children's names, and its remaining children.
    walks: list[tuple[tuple[Json, ...], str, Iterator[tuple[Json, Json]]]] = [((), "", iter_children(node))]
    while walks:
        path_json, prefix, children = walks[-1]
        for key, child in children:
            name = prefix + (key if type(key) is str else key_text(key))
            tag = _NATIVE.get(type(child))
            if tag is None and has_children(child):
                walks.append(((*path_json, key), name + ".", iter_children(child)))
                break
            yield (*path_json, key), name, tag or child[0], child
        else:
            walks.pop()
        if len(walks) > MAX_TREE_DEPTH:
            raise Corrupt(f"{prefix[:80]}: the tree is nested more than {MAX_TREE_DEPTH} deep; run `holdfast check`")


def iter_children(node: list[Json]) -> Iterator[tuple[Json, Json]]:
    """Yield the key and node of each child of a container; the key of an item of a sequence is its index."""
    start = _START[node[0]]
    if node[0] in KEYED_START:
        return zip(islice(node, start, None, 2), islice(node, start + 1, None, 2), strict=True)
    return enumerate(islice(node, start, None))


def _find_tag(node: Json) -> str:
    native = _NATIVE.get(type(node))
    if native is not None:
        return native
    if type(node) is not list or not node or type(node[0]) is not str:
        raise Corrupt(f"the tree contains a JSON {type(node).__name__} that is not a value; run `holdfast check`")
    return node[0]


def encode_short(leaf: Leaf) -> bytes | None:
    """Return the bytes of a text, or of bytes, that the tree itself contains: those that an entry of it would have.

    None for any other value.
    """
    if leaf.tag not in _TEXTS:
        return None
    value: Any = leaf.node if type(leaf.node) is str else _decode_plain(leaf.node)
    return value.encode(errors="surrogatepass") if isinstance(value, str) else bytes(value)


def has_children(node: Json) -> bool:
    """Return whether a node is a container with children; raises Corrupt if it is malformed."""
    tag = _find_tag(node)
    start = _START.get(tag)
    if start is None or type(node) is not list:
        return False
    if len(node) < start or (tag in KEYED_START and (len(node) - start) % 2):
        raise Corrupt(f"the tree contains a {tag} with missing items; run `holdfast check`")
    return len(node) > start


def format_value(node: Json) -> str:
    """Return a short readable text for an encoded value."""
    text = _format(node, _MAX_VALUE_ITEMS)
    return shorten(text, _MAX_VALUE_CHARS)


def key_text(node: Json) -> str:
    """Return the text that an encoded key has in a name."""
    if type(node) is list and node[:1] == ["str"]:
        return str(_decode_plain(node))
    # Never shortened: it is part of a name.
    return node if type(node) is str else _format(node, None)


def _format(node: Json, limit: int | None, depth: int = 0) -> str:
    tag = _find_tag(node)
    if type(node) is not list:
        # A prefix is enough for a value; only keys are needed in full.
        return _describe(node if limit is None or type(node) is not str else node[:_MAX_VALUE_CHARS])
    if tag in plain.DECODERS:
        return _describe(_decode_plain(node))
    if tag in _SHORT:
        return _SHORT[tag](node)
    if tag in _START or tag in _SHELLS:
        is_too_deep = depth >= (_MAX_KEY_DEPTH if limit is None else _MAX_VALUE_DEPTH)
        return "..." if is_too_deep else _format_container(node, limit, depth + 1)
    # A stored leaf, or a tag that a later version has added.
    return f"<{tag.removeprefix('@')[:40]}>"


def _decode_plain(node: list[Json]) -> object:
    try:
        return plain.decode_checked(node, plain.DECODERS[node[0]], plain.ENCODERS)
    except (ValueError, ArithmeticError, Unsupported) as error:
        raise Corrupt(f"a {node[0]} in the tree is damaged ({str(error)[:120]}); run `holdfast check`") from error


_SHELLS: Final[Mapping[str, tuple[str, str]]] = {
    "dict": ("{", "}"),
    "odict": ("OrderedDict({", "})"),
    "odict+": ("OrderedDict({", "})"),
    "counter": ("Counter({", "})"),
    "counter+": ("Counter({", "})"),
    "defaultdict": ("defaultdict({", "})"),
    "list": ("[", "]"),
    "tuple": ("(", ")"),
    "deque": ("deque([", "])"),
    "set": ("{", "}"),
    "frozenset": ("frozenset({", "})"),
    "slice": ("slice(", ")"),
}


def _format_container(node: list[Json], limit: int | None, depth: int) -> str:
    tag = node[0]
    has_children(node)
    start = _START.get(tag, 1)
    step = 2 if tag in KEYED_START else 1
    stop = len(node) if limit is None else min(len(node), start + step * limit)
    texts = [_format(node[at], limit, depth) for at in range(start + step - 1, stop, step)]
    if tag in FIELDS_START:
        texts = [f"{key_text(node[start + 2 * index])}={text}" for index, text in enumerate(texts)]
        shell = (_class_name(node) + "(", ")")
    else:
        shell = _SHELLS[tag]
    if tag in PAIRS_START:
        texts = [f"{_format(node[start + 2 * index], limit, depth)}: {text}" for index, text in enumerate(texts)]
    return _enclose(tag, shell, texts, is_cut=stop < len(node))


def _enclose(tag: str, shell: tuple[str, str], texts: list[str], *, is_cut: bool = False) -> str:
    if tag in ("set", "frozenset"):
        # By their texts: a set in memory has no order of its own, and must get the same text.
        texts = sorted(texts)
        shell = shell if texts else (f"{tag}(", ")")
    body = ", ".join([*texts, "..."] if is_cut else texts)
    return shell[0] + body + ("," if tag == "tuple" and len(texts) == 1 and not is_cut else "") + shell[1]


def _class_name(node: list[Json]) -> str:
    return _verify_text(node, 1).rpartition(":")[2]


def _verify_text(node: list[Json], at: int) -> str:
    if len(node) <= at or type(node[at]) is not str:
        raise Corrupt(f"a {node[0]} in the tree is damaged; run `holdfast check`")
    return str(node[at])


def _format_device(node: list[Json]) -> str:
    index = node[2] if len(node) > 2 and type(node[2]) is int else None
    return _verify_text(node, 1) + ("" if index is None else f":{_describe(index)}")


def _format_size(node: list[Json]) -> str:
    if any(type(length) is not int for length in node[1:]):
        raise Corrupt("a size in the tree is damaged; run `holdfast check`")
    return f"torch.Size([{', '.join(map(_describe, node[1:]))}])"


def _format_numpy(node: list[Json]) -> str:
    name = _verify_text(node, 1)
    try:
        if name == "str":
            return repr(plain.decode_text(node[2]))
        text = _verify_text(node, 2)
        return repr(plain.decode_base64(text)) if name == "bytes" else _format_number(name, bytes.fromhex(text))
    except (ValueError, IndexError, struct.error) as error:
        raise Corrupt(f"a numpy scalar in the tree is damaged ({str(error)[:120]}); run `holdfast check`") from error


def _format_number(name: str, data: bytes) -> str:
    letter = _FLOAT_LETTERS.get(name)
    if letter is not None:
        return _shortest(struct.unpack("<" + letter, data)[0], letter)
    letter = _COMPLEX_LETTERS.get(name)
    if letter is not None:
        real, imaginary = (_shortest(part, letter) for part in struct.unpack(f"<2{letter}", data))
        return f"({real}{'' if imaginary.startswith('-') else '+'}{imaginary}j)"
    number = int.from_bytes(data[:8], "little", signed=not name.startswith("u"))
    if name == "bool":
        return str(bool(number))
    if name.startswith(("datetime64", "timedelta64")):
        return f"{name}({'NaT' if number == -1 << 63 else number})"
    return str(number)


_FLOAT_LETTERS: Final = {"float16": "e", "float32": "f", "float64": "d"}
_COMPLEX_LETTERS: Final = {"complex64": "f", "complex128": "d"}


def _shortest(value: float, letter: str) -> str:
    """Return the fewest digits that round to this number in its own width: "0.1" for a float32."""
    packed = struct.pack(letter, value)
    for digits in range(1, 10):
        rounded = float(f"{value:.{digits}g}")
        try:
            if struct.pack(letter, rounded) == packed:
                return repr(rounded)
        except OverflowError:
            continue  # rounded up, beyond the narrow type's range
    return repr(value)


_SHORT: Final[Mapping[str, Callable[[list[Json]], str]]] = {
    "dtype": lambda node: f"torch.{_verify_text(node, 1)}",
    "layout": lambda node: f"torch.{_verify_text(node, 1)}",
    "memory_format": lambda node: f"torch.{_verify_text(node, 1)}",
    "device": _format_device,
    "size": _format_size,
    "numpy": _format_numpy,
    "enum": lambda node: f"{_class_name(node)}.{_verify_text(node, 2) or 0}",
}


def _describe(value: Any, depth: int = 0) -> str:
    """Return the same text as `_format` for this value's node, so that names in memory and in a store agree."""
    kind = type(value)
    if kind is int:
        return str(value) if value.bit_length() <= _MAX_INT_BITS else hex(value)
    if kind in (str, bytes, bytearray):
        return repr(value)
    if kind is range:
        return f"range({', '.join(map(_describe, (value.start, value.stop, value.step)))})"
    if kind is Fraction:
        return f"{_describe(value.numerator)}/{_describe(value.denominator)}"
    if isinstance(value, Enum):
        return _describe_member(value)
    if kind.__module__ == "numpy":
        return _describe_numpy(value)
    return _describe_container(value, depth)


def _describe_container(value: Any, depth: int) -> str:
    kind = type(value)
    names = _find_fields(value)
    if kind not in (tuple, frozenset, list, set, deque) and names is None:
        return str(value)
    if depth >= _MAX_KEY_DEPTH:
        return "..."
    if names is None:
        return _enclose(kind.__name__, _SHELLS[kind.__name__], [_describe(item, depth + 1) for item in value])
    texts = [f"{name}={_describe(getattr(value, name, None), depth + 1)}" for name in names]
    return _enclose("", (kind.__qualname__ + "(", ")"), texts)


def _find_fields(value: Any) -> Sequence[str] | None:
    if isinstance(value, tuple):
        return getattr(value, "_fields", None)
    return [field.name for field in dataclasses.fields(value)] if dataclasses.is_dataclass(value) else None


def _describe_member(value: Enum) -> str:
    names = [value._name_] if value._name_ in type(value).__members__ else [each._name_ for each in find_bits(value)]
    return f"{type(value).__qualname__}.{'|'.join(names) or 0}"


def find_bits(value: Any) -> list[Enum]:
    """Return the members that an enum value is a combination of; only a flag is one."""
    # Python 3.10 cannot iterate over a flag.
    members = type(value).__members__.items()
    bits = [each for name, each in members if each._name_ == name and each._value_.bit_count() == 1]
    return [each for each in bits if each._value_ & value._value_]


def _describe_numpy(value: Any) -> str:
    if isinstance(value, str):
        return repr(str.__str__(value))
    if isinstance(value, bytes):
        return repr(bytes(value))
    return _format_number(value.dtype.name, value.tobytes())


def share_tags(node: Json) -> None:
    """Make the nodes of a decoded tree share equal tags, to save memory: each was decoded as a separate string."""
    waiting = [node]
    known: dict[str, str] = {}
    while waiting:
        found = waiting.pop()
        if type(found) is list and found:
            if type(found[0]) is str:
                found[0] = known.setdefault(found[0], found[0])
            waiting += [item for item in found if type(item) is list]
