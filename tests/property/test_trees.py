"""Laws of trees: what can be saved comes back exactly, equal trees have equal JSON, and no JSON crashes a decoder."""

from __future__ import annotations

import enum
import random
import struct
from collections import Counter, OrderedDict, defaultdict, deque
from dataclasses import dataclass, field
from datetime import timedelta, timezone
from decimal import Decimal
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import Corrupt, HoldfastError, NewerFormat, Unsupported
from holdfast.json_text import Json, canonical_json, parse_json
from holdfast.trees.encoding import decode_tree, encode_tree, refuse
from holdfast.trees.outline import TreePath, format_value, iter_leaves, join_name
from holdfast.trees.registered import Types

HERE = __name__


class Color(enum.Enum):
    RED = 1
    BLUE = "blue"


class Right(enum.IntFlag):
    READ = 1
    WRITE = 2
    RUN = 4


class Point(NamedTuple):
    x: Any
    y: Any = 0


@dataclass
class Config:
    lr: Any
    steps: Any = field(default=0, init=False)

    def __post_init__(self) -> None:
        raise AssertionError("code of the class ran")


@dataclass(frozen=True, slots=True)
class Key:
    name: Any


TYPES = Types([Color, Right, Point, Config, Key])


def make_config(lr: Any, steps: Any) -> Config:
    config = object.__new__(Config)
    config.lr, config.steps = lr, steps
    return config


def encode(tree: object) -> Json:
    """Encode a tree whose leaves are tensors of one number, which stands in the node."""

    def encode_leaf(value: object, path: TreePath) -> Json:
        if not isinstance(value, torch.Tensor):
            raise refuse(value, path)
        return ["@tensor", int(value)]

    return encode_tree(tree, types=TYPES, encode_leaf=encode_leaf)


def decode(node: Json) -> Any:
    def decode_leaf(node: list[Json], path: TreePath) -> object:
        join_name(path)
        match node:
            case ["@tensor", int(number)] if abs(number) < 1 << 60:
                return torch.tensor(number)
        raise Corrupt("no such leaf")

    return decode_tree(node, types=TYPES, decode_leaf=decode_leaf)


NUMPY_BYTES = st.binary(min_size=16, max_size=16)
NUMPY_CODES = ["i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16", "q", "Q"]
NUMPY_TIMES = ["M8[ns]", "M8[25s]", "M8[D]", "m8[h]", "m8[as]"]
UNHASHABLE_TIMES = st.builds(
    lambda data, code: np.frombuffer(data, code)[0], NUMPY_BYTES, st.sampled_from(["M8", "m8"])
)
NUMPY = st.one_of(
    st.builds(lambda data, code: np.frombuffer(data, code)[0], NUMPY_BYTES, st.sampled_from(NUMPY_CODES + NUMPY_TIMES)),
    st.booleans().map(np.bool_),
    st.text(max_size=5).map(np.str_),
    st.binary(max_size=5).map(np.bytes_),
)
DOUBLES = st.binary(min_size=8, max_size=8).map(lambda data: struct.unpack(">d", data)[0])
ZONES = st.builds(
    lambda minutes, name: timezone(timedelta(minutes=minutes), *name),
    st.integers(-1439, 1439),
    st.lists(st.text(max_size=3), max_size=1),
)
ANY_TEXT = st.text(st.characters(), max_size=5)
DECIMALS = st.one_of(
    st.decimals(),
    st.sampled_from(["sNaN", "-NaN77", "-0E-99", "1E+999999999999999999", "Infinity"]).map(Decimal),
)
TORCH: list[object] = [
    *(torch.float32, torch.float8_e4m3fn, torch.sparse_coo, torch.channels_last_3d, torch.preserve_format),
    *(torch.device("cpu"), torch.device("cuda", 7), torch.device("meta"), torch.Size([]), torch.Size([3, 0, 1 << 40])),
]
HASHABLE = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(1 << 200), 1 << 200),
    st.floats(),
    DOUBLES,
    st.complex_numbers(),
    st.text(max_size=5),
    ANY_TEXT,
    st.binary(max_size=5),
    st.builds(range, st.integers(), st.integers(), st.integers(min_value=1)),
    ANY_TEXT.map(PurePosixPath),
    st.sampled_from([PureWindowsPath("C:/a"), PureWindowsPath("//h/s/x")]),
    st.dates(),
    st.datetimes(timezones=st.one_of(st.none(), ZONES)),
    st.builds(lambda moment, fold: moment.replace(fold=fold), st.datetimes(), st.integers(0, 1)),
    st.times(timezones=st.one_of(st.none(), ZONES)),
    st.timedeltas(),
    ZONES,
    st.fractions(),
    DECIMALS.filter(lambda number: not number.is_snan()),
    st.sampled_from(TORCH),
    NUMPY,
    st.sampled_from([*Color]),
    st.integers(0, 7).map(Right),
)
KEYS = st.recursive(
    HASHABLE,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map(tuple),
        st.frozensets(inner, max_size=3),
        inner.map(Key),
        st.builds(Point, inner, inner),
    ),
    max_leaves=4,
)
LEAVES = st.integers(0, 1000).map(torch.tensor)
FACTORIES = st.sampled_from([None, int, float, str, list, dict, set, tuple, bool, bytes, deque, Counter, OrderedDict])


def _with_attributes(made: Any, attributes: dict[str, Any]) -> Any:
    vars(made).update(attributes)
    return made


def _containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    items = st.lists(inner, max_size=4)
    dicts = st.dictionaries(KEYS, inner, max_size=4)
    attributes = st.dictionaries(st.sampled_from(["_metadata", "x"]), KEYS, max_size=2)
    return st.one_of(
        items,
        items.map(tuple),
        dicts,
        st.builds(_with_attributes, dicts.map(OrderedDict), attributes),
        st.builds(_with_attributes, st.dictionaries(KEYS, st.integers(), max_size=3).map(Counter), attributes),
        st.builds(defaultdict, FACTORIES, dicts),
        st.builds(deque, items, st.sampled_from([None, 0, 2, 100])),
        st.sets(KEYS, max_size=4),
        st.builds(slice, KEYS, KEYS, KEYS),
        st.builds(make_config, inner, inner),
        st.builds(Point, inner, inner),
    )


TREES = st.recursive(
    st.one_of(KEYS, LEAVES, st.binary(max_size=5).map(bytearray), DECIMALS, UNHASHABLE_TIMES),
    _containers,
    max_leaves=12,
)


def identical(left: Any, right: Any) -> bool:
    """Tell whether two values are the same to the last bit, types and order included."""
    if type(left) is not type(right):
        return False
    attributes = identical({**vars(left)}, {**vars(right)}) if isinstance(left, OrderedDict | Counter) else True
    match left:
        case dict():
            pairs = zip(left.items(), right.items(), strict=len(left) == len(right))
            factory = getattr(left, "default_factory", None) is getattr(right, "default_factory", None)
            return factory and attributes and len(left) == len(right) and all(identical(a, b) for a, b in pairs)
        case set() | frozenset():
            return len(left) == len(right) and sorted(map(describe, left)) == sorted(map(describe, right))
        case list() | tuple() | deque():
            limits = getattr(left, "maxlen", None) == getattr(right, "maxlen", None)
            return limits and len(left) == len(right) and all(map(identical, left, right))
        case slice():
            return all(identical(getattr(left, name), getattr(right, name)) for name in ("start", "stop", "step"))
        case Config():
            return identical(vars(left), vars(right))
        case Key():
            return identical(left.name, right.name)
    return describe(left) == describe(right)


def describe(value: Any) -> str:
    """Return a text that differs whenever two values do."""
    match value:
        case float() if type(value) is float:
            return struct.pack(">d", value).hex()
        case complex() if type(value) is complex:
            return struct.pack(">dd", value.real, value.imag).hex()
        case np.str_() | np.bytes_():
            return f"{type(value)} {list(value)}"
        case np.generic():
            return f"{type(value)} {value.dtype} {value.tobytes().hex()}"
        case timezone():
            return f"{value.utcoffset(None)!r} {value.tzname(None)!r}"
        case Decimal():
            return repr(value.as_tuple())
        case tuple() | frozenset() if not isinstance(value, torch.Size):
            texts = [describe(item) for item in value]
            return f"{type(value)} {texts if isinstance(value, tuple) else sorted(texts)}"
        case Key():
            return f"Key {describe(value.name)}"
    return f"{type(value)} {value!r} {getattr(value, 'fold', 0)}"


@given(TREES)
def test_a_tree_decodes_to_itself_to_the_last_bit(tree: object) -> None:
    node = parse_json(canonical_json(encode(tree)), where="x")
    assert identical(decode(node), tree)


@given(TREES)
def test_the_form_of_what_comes_back_is_the_same(tree: object) -> None:
    node = encode(tree)
    assert canonical_json(encode(decode(node))) == canonical_json(node)


@given(st.sets(KEYS, max_size=8), st.randoms())
def test_the_form_of_a_set_does_not_depend_on_how_it_grew(members: set[object], luck: random.Random) -> None:
    shuffled = list(members)
    luck.shuffle(shuffled)
    assert canonical_json(encode(set(shuffled))) == canonical_json(encode(members))


@given(TREES)
def test_every_leaf_is_listed_under_the_name_it_was_encoded_with(tree: object) -> None:
    seen: list[str] = []

    def encode_leaf(value: object, path: TreePath) -> Json:
        seen.append(join_name(path))
        return ["@leaf"]

    node = encode_tree(tree, types=TYPES, encode_leaf=encode_leaf)
    assert [leaf.name for leaf in iter_leaves(node) if leaf.tag == "@leaf"] == seen


TAGS = [
    *("dict", "odict", "odict+", "counter", "counter+", "defaultdict", "list", "tuple", "deque", "set", "frozenset"),
    *("slice", "enum", "dataclass", "namedtuple", "int", "float", "str", "complex", "bytes", "bytearray", "range"),
    *("path", "date", "datetime", "time", "timedelta", "timezone", "fraction", "decimal", "dtype", "layout"),
    *("memory_format", "device", "size", "numpy", "@tensor", "frob"),
]
WORDS = [
    *("", "0", "ff" * 8, "7ff0000000000001", "YQ==", "cuda", "float32", "datetime64[s]", "PosixPath", "NaN", "1E5"),
    *("2026-01-01", "2026-01-01T00:00:00", "12:00", *(f"{HERE}:{cls.__name__}" for cls in TYPES.classes)),
    *("x", "y", "lr", "steps", "name", "RED", "READ|RUN", "int", "items"),
]
SCRAPS = st.one_of(
    st.sampled_from([*TAGS, *WORDS, None, True, 0, 1, -1, 1 << 62, 1 << 63, 1 << 200, 0.5, float("nan")]), st.text()
)
NODES = st.recursive(
    SCRAPS,
    lambda inner: st.one_of(
        st.builds(lambda tag, items: [tag, *items], st.sampled_from(TAGS), st.lists(inner, max_size=5)),
        st.lists(inner, max_size=3),
        st.dictionaries(st.text(max_size=3), inner, max_size=2),
    ),
    max_leaves=12,
)


def look_at(node: Json) -> None:
    """Do all that is done with an encoded tree; only errors of our own may come of it."""
    for act in (decode, format_value, lambda node: [format_value(leaf.node) for leaf in iter_leaves(node)]):
        try:
            act(node)
        except HoldfastError as error:
            assert isinstance(error, Corrupt | Unsupported | NewerFormat)  # noqa: PT017 - any other is the failure


@given(NODES)
def test_any_json_is_decoded_or_refused(node: Json) -> None:
    look_at(node)


@given(TREES, st.randoms(use_true_random=False), SCRAPS)
def test_an_honest_tree_that_was_changed_is_decoded_or_refused(tree: object, luck: random.Random, scrap: Json) -> None:
    root = ["list", parse_json(canonical_json(encode(tree)), where="x")]
    for _ in range(luck.randint(1, 3)):
        _change(root, luck, scrap)
    look_at(root)


def _change(root: list[Json], luck: random.Random, scrap: Json) -> None:
    """Replace, drop, double or move one item somewhere in a tree of lists."""
    node = root
    while (inner := [item for item in node if isinstance(item, list) and item]) and luck.random() < 0.7:
        node = luck.choice(inner)
    at = luck.randrange(len(node))
    match luck.randrange(4):
        case 0:
            node[at] = scrap
        case 1 if len(node) > 1:
            del node[at]
        case 2:
            node.insert(at, node[at])
        case _:
            luck.shuffle(node)


def nest(tag: str, depth: int) -> Json:
    node: Json = 1
    for _ in range(depth):
        node = [tag, node]
    return node


@pytest.mark.parametrize(
    "node",
    [
        {},
        {"dict": 1},
        [],
        [None],
        [["dict"]],
        [5, 6],
        1 << 63,
        float("nan"),
        ["dict", "a"],
        ["dict", "a", 1, "a", 2],
        ["dict", 1, 1, True, 2],
        ["dict", ["list"], 1],
        ["dict", ["tuple", ["dict"]], 1],
        ["dict", ["decimal", "sNaN"], 1],
        ["dict", ["@tensor", 1], 1],
        ["dict", ["dataclass", f"{HERE}:Config", "lr", 1, "steps", 1], 1],
        ["odict", 1],
        ["odict+"],
        ["odict+", ["list"]],
        ["odict+", ["dict", 5, 1]],
        ["odict+", ["dict", "items", 1]],
        ["odict+", ["dict", "__class__", 1]],
        ["counter+", ["dict", "x", ["@tensor"]]],
        ["defaultdict"],
        ["defaultdict", "exec"],
        ["defaultdict", ["list"]],
        ["defaultdict", False],
        ["deque"],
        ["deque", 1, 1, 2],
        ["deque", -1],
        ["deque", 1 << 63],
        ["deque", True],
        ["set", 1, 1],
        ["set", 1, 1.0],
        ["set", ["list"]],
        ["set", ["@tensor", 1]],
        ["frozenset", ["set"]],
        ["slice", 1, 2],
        ["slice", 1, 2, 3, 4],
        ["slice", 1, 2, ["@tensor"]],
        ["enum"],
        ["enum", 5, "RED"],
        ["enum", f"{HERE}:Color"],
        ["enum", f"{HERE}:Color", None],
        ["namedtuple", f"{HERE}:Point", "x"],
        ["namedtuple", f"{HERE}:Point", 5, 1],
        ["namedtuple", f"{HERE}:Point", "x", 1, "x", 1],
        ["int", "5"],
        ["bytes", 5],
        pytest.param(nest("list", 100_000), id="deep"),
        pytest.param(nest("tuple", 300), id="deeper than a record"),
    ],
)
def test_a_malformed_tree_is_damage(node: Json) -> None:
    with pytest.raises(Corrupt, match=r"^a\.0.*: the stored tree is damaged here \(.*\); run `holdfast check`$"):
        decode(["dict", "a", ["list", node]])
