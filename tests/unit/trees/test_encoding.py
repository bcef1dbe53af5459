"""Trees keep types, order and attributes; equal ones have equal JSON; hostile input neither runs code nor crashes."""

from __future__ import annotations

import enum
import functools
import json
import time
from collections import Counter, OrderedDict, UserDict, defaultdict, deque, namedtuple
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import PurePosixPath
from typing import Any, ClassVar, NamedTuple
from zoneinfo import ZoneInfo

import numpy as np
import pytest
import torch

from holdfast.errors import NewerFormat, TooLarge, Unsupported
from holdfast.json_text import Json, canonical_json, parse_json
from holdfast.trees import encoding
from holdfast.trees.encoding import MAX_INLINE, decode_tree, encode_tree, refuse
from holdfast.trees.outline import MAX_TREE_DEPTH, TreePath
from holdfast.trees.registered import Types

HERE = __name__


class Color(enum.Enum):
    RED = 1
    ALSO_RED = RED
    BLUE = object()


class Level(enum.IntEnum):
    LOW = 1


class Right(enum.Flag):
    READ = 1
    WRITE = 2
    RUN = 4


class Loose(enum.IntFlag):
    ONE = 1


class Point(NamedTuple):
    x: Any
    y: Any = 0


@dataclass
class Config:
    lr: Any
    names: list[str] = field(default_factory=list)
    steps: int = field(default=0, init=False)
    shared: ClassVar[int] = 5

    def __post_init__(self) -> None:
        raise AssertionError("code of the class ran")

    @functools.cached_property
    def total(self) -> int:
        return 7


@dataclass(frozen=True, slots=True)
class Key:
    name: str


@dataclass(eq=False)
class Loop:
    inner: Any


CLASSES = (Color, Level, Right, Loose, Point, Config, Key, Loop)
TYPES = Types(CLASSES)


def make_config(lr: Any) -> Config:
    config = object.__new__(Config)
    config.lr, config.names, config.steps = lr, ["a"], 3
    return config


def refuse_leaf(value: object, path: TreePath) -> Json:
    raise refuse(value, path)


def encode(tree: object, *, types: Types = TYPES) -> Json:
    return encode_tree(tree, types=types, encode_leaf=refuse_leaf)


def decode(node: Json, *, types: Types = TYPES) -> Any:
    return decode_tree(node, types=types, decode_leaf=lambda node, path: ("leaf", node, path))


def through_text(node: Json) -> Json:
    return parse_json(canonical_json(node), where="x")


@pytest.mark.parametrize(
    ("tree", "node"),
    [
        (5, 5),
        ({}, ["dict"]),
        ({"a": 1, 2: [None], (1, "b"): ()}, ["dict", "a", 1, 2, ["list", None], ["tuple", 1, "b"], ["tuple"]]),
        ({None: 0, 1.5: 0, b"": 0}, ["dict", None, 0, 1.5, 0, ["bytes", ""], 0]),
        (OrderedDict(b=1, a=2), ["odict", "b", 1, "a", 2]),
        (Counter("aab"), ["counter", "a", 2, "b", 1]),
        (defaultdict(None, a=1), ["defaultdict", None, "a", 1]),
        (defaultdict(list, a=[1]), ["defaultdict", "list", "a", ["list", 1]]),
        (deque([1, 2], 5), ["deque", 5, 1, 2]),
        (deque(), ["deque", None]),
        ({3, 1, "b", "a"}, ["set", "a", "b", 1, 3]),
        (frozenset({(2,), (1,)}), ["frozenset", ["tuple", 1], ["tuple", 2]]),
        (slice(1, None, 2**70), ["slice", 1, None, ["int", "400000000000000000"]]),
        (Color.ALSO_RED, ["enum", f"{HERE}:Color", "RED"]),
        (Level.LOW, ["enum", f"{HERE}:Level", "LOW"]),
        (Right.READ | Right.RUN, ["enum", f"{HERE}:Right", "READ|RUN"]),
        (Right(0), ["enum", f"{HERE}:Right", ""]),
        (Point(1, [2]), ["namedtuple", f"{HERE}:Point", "x", 1, "y", ["list", 2]]),
        (Key("k"), ["dataclass", f"{HERE}:Key", "name", "k"]),
        ({Key("k"): 1}, ["dict", ["dataclass", f"{HERE}:Key", "name", "k"], 1]),
        (torch.Size([1]), ["size", 1]),
        (np.float64(0), ["numpy", "float64", "0000000000000000"]),
    ],
)
def test_a_tree_has_one_form_and_comes_back_from_it(tree: object, node: Json) -> None:
    assert encode(tree) == node
    found = decode(through_text(node))
    assert (type(found), found) == (type(tree), tree)


def test_order_of_keys_is_kept() -> None:
    assert list(decode(encode({"b": 1, "a": 2}))) == ["b", "a"]
    assert encode({"b": 1, "a": 2}) != encode({"a": 2, "b": 1})


def test_a_defaultdict_and_a_deque_still_work_after_coming_back() -> None:
    found = decode(encode([defaultdict(list), deque([1, 2], 2)]))
    found[0]["x"].append(1)
    found[1].append(3)
    assert found == [{"x": [1]}, deque([2, 3])]


def test_one_true_and_1_0_stay_apart() -> None:
    assert json.dumps(encode([1, True, 1.0, -0.0])) == '["list", 1, true, 1.0, -0.0]'
    assert [type(item) for item in decode(encode([1, True, 1.0]))] == [int, bool, float]


def test_a_dataclass_is_rebuilt_without_running_its_code() -> None:
    config = make_config(0.1)
    assert config.total == 7  # a cached value is no field, and no reason to refuse
    found = decode(through_text(encode(config)))
    assert (type(found), vars(found)) == (Config, {"lr": 0.1, "names": ["a"], "steps": 3})


def test_the_metadata_of_a_state_dict_comes_back() -> None:
    state = torch.nn.BatchNorm1d(2).state_dict()
    node = encode_tree(state, types=TYPES, encode_leaf=lambda value, path: ["@tensor", *path])
    found = decode_tree(through_text(node), types=TYPES, decode_leaf=lambda node, path: state[node[1]])
    assert type(found) is OrderedDict
    assert found == state
    assert vars(found) == {"_metadata": OrderedDict({"": {"version": 2}})}


def test_leaves_are_given_their_value_and_path() -> None:
    seen: list[tuple[type, TreePath]] = []

    def encode_leaf(value: object, path: TreePath) -> Json:
        seen.append((type(value), path))
        return ["@leaf", len(seen)]

    tree = {
        "t": torch.zeros(1),
        3: [np.zeros(1), "x" * (MAX_INLINE + 1)],
        "p": Point(b"x" * (MAX_INLINE + 1), bytearray(MAX_INLINE + 1)),
        (1, 2): make_config(print),
        "long": np.longdouble(1),
    }
    node = encode_tree(tree, types=TYPES, encode_leaf=encode_leaf)
    assert seen == [
        (torch.Tensor, ("t",)),
        (np.ndarray, (3, 0)),
        (str, (3, 1)),
        (bytes, ("p", "x")),
        (bytearray, ("p", "y")),
        (type(print), ((1, 2), "lr")),
        (np.longdouble, ("long",)),
    ]
    found = decode(through_text(node))
    assert found[3] == [("leaf", ["@leaf", 2], (3, 0)), ("leaf", ["@leaf", 3], (3, 1))]
    assert found["p"].y == ("leaf", ["@leaf", 5], ("p", "y"))


def test_short_strings_and_long_keys_are_no_leaves() -> None:
    tree = {"k" * 5000: "x" * MAX_INLINE, "set": {"m" * 5000}}
    assert decode(encode(tree)) == tree


def test_an_error_of_the_leaf_function_is_left_alone() -> None:
    def fail(node: list[Json], path: TreePath) -> object:
        raise ValueError("mine")

    with pytest.raises(ValueError, match=r"^mine$"):
        decode_tree(["list", ["@x"]], types=TYPES, decode_leaf=fail)


class Dict(dict[Any, Any]):
    pass


class Text(str):
    __slots__ = ()


class Number(int):
    pass


class Plain:
    pass


Bare = namedtuple("Bare", "x")


class Odd(enum.Enum):
    A = 1


@pytest.mark.parametrize(
    ("tree", "text"),
    [
        ({"model": {"lr_fn": lambda: 1}}, "^model.lr_fn: a function cannot be saved; convert it, or pass allow_pick"),
        ([Plain()], f"^0: an object of class {HERE}.Plain cannot be saved; convert it, or pass allow_pickle=True"),
        (Plain, r"^the tree: a class \(Plain itself\) cannot be saved"),
        ({"m": json}, "^m: a module cannot be saved"),
        ({"c": Dict(a=1)}, "^c: a Dict, a subclass of dict, cannot be saved; convert it to dict, or pass allow_pic"),
        ([Text("a")], "^0: a Text, a subclass of str, cannot be saved"),
        ([Number(1)], "^0: a Number, a subclass of int, cannot be saved"),
        ([UserDict()], "^0: an object of class collections.UserDict cannot"),
        ([Odd.A], r"^0: a Odd cannot be saved until its class is registered: pass types=\[Odd\] to holdfast.open"),
        ([Bare(1)], r"^0: a Bare cannot be saved until its class is registered: pass types=\[Bare\]"),
        ({"t": {torch.zeros(1)}}, r"^t.\{\}: a tensor cannot be saved here; keys of dicts, members of sets"),
        ({"t": {torch.zeros(1): 1}}, r"^t.\{key\}: a tensor cannot be saved here"),
        ({"t": slice(np.zeros(1))}, "^t.stop: an array cannot be saved here"),
        ({"d": defaultdict(lambda: 1)}, "^d: a defaultdict with a factory of its own cannot be saved; convert it to"),
        ({"when": datetime(2026, 1, 1, tzinfo=ZoneInfo("UTC"))}, "^when: a time with a ZoneInfo cannot be saved; conv"),
        ({"x": np.longdouble(1)}, "^x: a longdouble cannot be saved, because its layout"),
        ({"w": Loose(4)}, "^w: a Loose that is not a combination of its members cannot be saved"),
        ({(Plain(),): 1}, rf"^\{{key\}}.0: an object of class {HERE}.Plain cannot"),
    ],
)
def test_what_cannot_be_saved_is_named_with_the_next_step(tree: object, text: str) -> None:
    with pytest.raises(Unsupported, match=text):
        encode(tree)


def test_a_dataclass_with_more_than_its_fields_is_refused() -> None:
    config = make_config(1)
    vars(config)["extra"] = 1
    with pytest.raises(Unsupported, match=r"^c: a Config with the attribute 'extra', which is not a field, cannot"):
        encode({"c": config})


def test_a_dataclass_with_a_field_that_is_not_set_is_refused() -> None:
    config = make_config(1)
    del config.lr
    with pytest.raises(Unsupported, match=r"^c: a Config whose field 'lr' is not set cannot be saved; set it"):
        encode({"c": config})


def test_an_attribute_that_hides_a_method_is_refused() -> None:
    state: OrderedDict[str, int] = OrderedDict(a=1)
    vars(state)["items"] = 1
    with pytest.raises(Unsupported, match=r"^s: its attribute 'items' hides a method"):
        encode({"s": state})


def make_cycle() -> list[object]:
    tree: list[object] = [1]
    tree.append({"again": tree})
    return tree


def make_deep(depth: int) -> list[object]:
    tree: list[object] = []
    for _ in range(depth - 1):
        tree = [tree]
    return tree


def test_a_cycle_is_refused_where_it_closes() -> None:
    with pytest.raises(
        Unsupported, match=r"^1\.again: a container that contains itself cannot be saved; break the cycle"
    ):
        encode(make_cycle())


def test_a_cycle_through_a_registered_class_is_refused() -> None:
    loop = Loop(None)
    loop.inner = [loop]
    with pytest.raises(Unsupported, match=r"^inner\.0: a container that contains itself"):
        encode(loop)


def test_a_container_that_stands_twice_is_no_cycle() -> None:
    shared = [1]
    assert encode([shared, shared]) == ["list", ["list", 1], ["list", 1]]


def test_the_deepest_tree_fits_into_a_record_and_a_deeper_one_is_refused() -> None:
    node = encode(make_deep(MAX_TREE_DEPTH))
    assert decode(through_text({"spec": {"tree": node}})["spec"]["tree"]) == make_deep(MAX_TREE_DEPTH)
    with pytest.raises(Unsupported, match=f"the tree is nested more than {MAX_TREE_DEPTH} deep; flatten it"):
        encode(make_deep(MAX_TREE_DEPTH + 1))


def test_lists_that_share_lists_without_end_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding, "_MAX_WEIGHT", 10_000)
    tree: list[object] = []
    for _ in range(MAX_TREE_DEPTH - 1):
        tree = [tree, tree]
    with pytest.raises(TooLarge, match="the tree has too many values; put them in tensors, or split it"):
        encode(tree)


@pytest.mark.parametrize(
    ("node", "error", "text"),
    [
        (["frob", 1], NewerFormat, "^a: a value of kind 'frob' was saved by a later Holdfast: upgrade"),
        (["dtype", "float3"], Unsupported, "^a: torch .* has no dtype 'float3'"),
        (
            ["enum", "os:system", "x"],
            Unsupported,
            r"^a: it was saved as an object of class 'os:system', .* pass types=\[system\] to holdfast.open",
        ),
        (
            ["enum", f"{HERE}:Color", "GREEN"],
            Unsupported,
            "^a: member 'GREEN' was saved, and class .*:Color does not have it any more",
        ),
        (["enum", f"{HERE}:Color", "mro"], Unsupported, "member 'mro' was saved"),
        (["enum", f"{HERE}:Right", "READ|FLY"], Unsupported, r"member 'READ\|FLY' was saved"),
        (["enum", f"{HERE}:Key", "name"], Unsupported, f"saved as a enum, and class {HERE}:Key is now a dataclass"),
        (["dataclass", f"{HERE}:Key", "name", 1, "age", 2], Unsupported, "^a: field 'age' was saved"),
        (["dataclass", f"{HERE}:Key"], Unsupported, "^a: field 'name' of class .*:Key was not saved"),
        (["dataclass", f"{HERE}:Key", "__class__", 2], Unsupported, "field '__class__' was saved"),
        (["namedtuple", f"{HERE}:Point", "z", 1], Unsupported, "^a: field 'z' was saved, and class .*:Point"),
    ],
)
def test_what_this_program_does_not_know_is_named(node: Json, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        decode(["dict", "a", node])


def test_fields_that_were_added_since_get_their_defaults() -> None:
    found = decode(["tuple", ["dataclass", f"{HERE}:Config", "lr", 1], ["namedtuple", f"{HERE}:Point", "x", 1]])
    assert (vars(found[0]), found[1]) == ({"lr": 1, "names": [], "steps": 0}, Point(1, 0))


def best_of(times: int, act: Callable[[], object]) -> float:
    def measure() -> float:
        start = time.process_time()
        act()
        return time.process_time() - start

    return min(measure() for _ in range(times))


@pytest.mark.slow
def test_ten_thousand_scalars_are_encoded_fast() -> None:
    tree = {f"key.{number}": (1, 0.5, "text", None)[number % 4] for number in range(10_000)}
    assert best_of(5, lambda: encode(tree)) < 0.05


@pytest.mark.parametrize(
    "node",
    [["int", "f" * 4_000_000], ["decimal", "9" * 200_000 + "E5"], ["deque", (1 << 63) - 1]],
    ids=["int", "decimal", "deque"],
)
def test_a_hostile_number_costs_no_more_than_its_text(node: Json) -> None:
    assert best_of(3, lambda: decode(node)) < 0.5


def test_paths_in_keys_are_plain() -> None:
    assert decode(encode({PurePosixPath("a"): Color.BLUE})) == {PurePosixPath("a"): Color.BLUE}
