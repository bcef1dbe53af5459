"""The leaves of an encoded tree, their names and short texts are listed without torch, as for the real tree."""

from __future__ import annotations

import enum
import subprocess
import sys
import time
from collections import Counter, OrderedDict, defaultdict, deque
from dataclasses import dataclass
from datetime import date, datetime, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from pathlib import PurePosixPath
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from holdfast.errors import Corrupt
from holdfast.json_text import Json
from holdfast.trees.encoding import encode_tree, refuse
from holdfast.trees.outline import MAX_TREE_DEPTH, TreePath, format_value, iter_leaves, join_name
from holdfast.trees.registered import Types


class Color(enum.Enum):
    RED = 1


class Right(enum.Flag):
    READ = 1
    WRITE = 2


class Point(NamedTuple):
    x: Any
    y: Any


@dataclass(frozen=True)
class Key:
    name: Any
    size: Any = 0


@dataclass(eq=False)
class Loose:
    items: Any


TYPES = Types([Color, Right, Point, Key, Loose])


def encode(tree: object) -> Json:
    def encode_leaf(value: object, path: TreePath) -> Json:
        if not isinstance(value, torch.Tensor):
            raise refuse(value, path)
        return ["@tensor", 0]

    return encode_tree(tree, types=TYPES, encode_leaf=encode_leaf)


def list_names(tree: object) -> list[tuple[str, str]]:
    return [(leaf.name, leaf.tag) for leaf in iter_leaves(encode(tree))]


def test_leaves_come_in_order_with_name_and_tag() -> None:
    tree = {
        "model": OrderedDict({"layers.0.weight": torch.zeros(1), "empty": {}}),
        "step": 3,
        3: [None, True, 0.5, "a", ()],
        "size": torch.Size([2]),
        "seen": {1, 2},
        "point": Point(Key("k"), deque([1], 2)),
        "counts": Counter("a"),
        "made": defaultdict(int, x=1),
    }
    assert list_names(tree) == [
        ("model.layers.0.weight", "@tensor"),
        ("model.empty", "dict"),
        ("step", "int"),
        ("3.0", "none"),
        ("3.1", "bool"),
        ("3.2", "float"),
        ("3.3", "str"),
        ("3.4", "tuple"),
        ("size", "size"),
        ("seen", "set"),
        ("point.x.name", "str"),
        ("point.x.size", "int"),
        ("point.y.0", "int"),
        ("counts.a", "int"),
        ("made.x", "int"),
    ]


def test_a_leaf_tells_its_typed_path_and_node() -> None:
    (first, second) = iter_leaves(encode({"a": {(1, 2): [7]}, "": 8}))
    assert (first.path_json, first.name, first.node) == (("a", ["tuple", 1, 2], 0), "a.(1, 2).0", 7)
    assert (second.path_json, second.name, second.node) == (("",), "", 8)


@pytest.mark.parametrize(("tree", "tag"), [(5, "int"), (None, "none"), ([], "list"), (torch.zeros(1), "@tensor")])
def test_a_tree_of_one_leaf_has_no_name(tree: object, tag: str) -> None:
    assert list_names(tree) == [("", tag)]


def test_attributes_of_a_state_dict_are_no_leaves() -> None:
    assert list_names(torch.nn.Linear(1, 1, bias=False).state_dict()) == [("weight", "@tensor")]


def test_empty_keys_keep_their_dots() -> None:
    assert list_names({"": {"": 1, "a": 2}}) == [(".", "int"), (".a", "int")]


KEYS = [
    "a.b",
    "\ud800",
    5,
    -(2**70),
    7**20_000,
    True,
    None,
    0.001,
    float("nan"),
    1j,
    b"\xff",
    (),
    (1,),
    (1, "a", (2.0, None)),
    frozenset({"b", "a", 3}),
    frozenset(),
    range(3),
    range(7**20_000),
    Fraction(1, 3),
    Fraction(7**20_000, 2),
    Decimal("1E+5"),
    PurePosixPath("a/b"),
    date(2026, 1, 2),
    datetime(2026, 1, 2, tzinfo=timezone.utc),
    timedelta(1),
    Color.RED,
    Right.READ,
    Right.READ | Right.WRITE,
    Right(0),
    Point(1, "a"),
    Key("a", Point(None, ())),
    Loose([1, {2}]),
    torch.float32,
    torch.device("cuda", 1),
    torch.device("cpu"),
    torch.Size([1, 2]),
    torch.strided,
    torch.channels_last,
    np.int64(-3),
    np.longlong(4),
    np.uint64(2**64 - 1),
    np.bool_(True),
    np.float16(0.1),
    np.float32(0.1),
    np.float32(1e8),
    np.float32("nan"),
    np.float64(0.1),
    np.complex64(1 - 2j),
    np.str_("a"),
    np.bytes_(b"a"),
    np.datetime64(5, ("s", 25)),
    np.timedelta64("NaT", "ms"),
    ((((((((((1,),),),),),),),),),),
]


@pytest.mark.parametrize("key", KEYS, ids=lambda key: type(key).__name__)
def test_a_key_has_the_same_text_in_memory_and_in_a_store(key: object) -> None:
    seen: list[TreePath] = []

    def encode_leaf(value: object, path: TreePath) -> Json:
        seen.append(path)
        return ["@x"]

    node = encode_tree({key: [torch.zeros(1)]}, types=TYPES, encode_leaf=encode_leaf)
    (leaf,) = iter_leaves(node)
    assert leaf.name == join_name(seen[0])


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.001, "0.001"),
        ("adamw", "'adamw'"),
        ((0.9, 0.999), "(0.9, 0.999)"),
        ((1,), "(1,)"),
        (True, "True"),
        (None, "None"),
        (float("-inf"), "-inf"),
        (2**64, "18446744073709551616"),
        (torch.float32, "torch.float32"),
        (torch.device("cuda", 0), "cuda:0"),
        (torch.Size([2, 3]), "torch.Size([2, 3])"),
        (date(2026, 1, 1), "2026-01-01"),
        (PurePosixPath("a/b"), "a/b"),
        (np.float32(0.1), "0.1"),
        (np.float16(65504), "65500.0"),
        (np.complex64(1 - 2j), "(1.0-2.0j)"),
        (np.datetime64(5, "s"), "datetime64[s](5)"),
        (Color.RED, "Color.RED"),
        (Right(0), "Right.0"),
        (Point(1, [2]), "Point(x=1, y=[2])"),
        ({"a": 1, 2: {}}, "{'a': 1, 2: {}}"),
        (OrderedDict(a=1), "OrderedDict({'a': 1})"),
        ({"b", "a"}, "{'a', 'b'}"),
        (set(), "set()"),
        (frozenset({1}), "frozenset({1})"),
        (deque([1], 3), "deque([1])"),
        (slice(1, None, 2), "slice(1, None, 2)"),
        (list(range(100)), "[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, ...]"),
        ([[[[1]]]], "[[[...]]]"),
        ("x" * 4000, "'" + "x" * 76 + "..."),
        (b"x" * 4000, "b'" + "x" * 75 + "..."),
        pytest.param(7**20_000, hex(7**20_000)[:77] + "...", id="wide"),
        (torch.zeros(1), "<tensor>"),
    ],
)
def test_a_value_is_shown_as_people_write_it(value: object, text: str) -> None:
    assert format_value(encode(value)) == text


def test_what_a_later_version_has_added_is_shown_by_its_tag() -> None:
    node = ["dict", "a", ["frob", 1, [2]]]
    assert [(leaf.name, leaf.tag) for leaf in iter_leaves(node)] == [("a", "frob")]
    assert format_value(node) == "{'a': <frob>}"


@pytest.mark.parametrize(
    ("node", "text"),
    [
        ({}, "the tree contains a JSON dict that is not a value; run `holdfast check`"),
        (["dict", "a", []], "the tree contains a JSON list that is not a value"),
        (["list", [5]], "the tree contains a JSON list that is not a value"),
        (["dict", "a"], "the tree contains a dict with missing items"),
        (["dataclass"], "the tree contains a dataclass with missing items"),
        (["dict", ["int", "x"], 1], "a int in the tree is damaged"),
        (["dict", ["numpy", "int8", "x"], 1], "a numpy scalar in the tree is damaged"),
        (["dict", ["dtype"], 1], "a dtype in the tree is damaged"),
        (["dict", ["size", "x"], 1], "a size in the tree is damaged"),
    ],
)
def test_a_malformed_tree_is_damage(node: Json, text: str) -> None:
    with pytest.raises(Corrupt, match=text):
        list(iter_leaves(node))
    with pytest.raises(Corrupt, match=text):
        format_value(node)


def test_a_tree_that_is_nested_too_deep_is_damage() -> None:
    node: Json = 1
    for _ in range(MAX_TREE_DEPTH):
        node = ["list", node]
    assert len(list(iter_leaves(node))) == 1
    with pytest.raises(Corrupt, match=f"the tree is nested more than {MAX_TREE_DEPTH} deep; run `holdfast check`"):
        list(iter_leaves(["list", node]))


def test_it_loads_neither_torch_nor_numpy() -> None:
    program = "import sys, holdfast.trees.outline; sys.exit(bool({'torch', 'numpy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


@pytest.mark.slow
def test_a_hundred_thousand_leaves_are_listed_fast() -> None:
    node = encode({f"layers.{number}": {"w": 1, "b": 2.0, "c": "s", "d": None} for number in range(25_000)})

    def measure() -> float:
        start = time.process_time()
        assert sum(1 for _ in iter_leaves(node)) == 100_000
        return time.process_time() - start

    assert min(measure() for _ in range(5)) < 0.3
