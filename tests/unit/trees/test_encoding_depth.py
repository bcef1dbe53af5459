"""The documented depth limit applies to every container and operation, however full the stack is."""

from __future__ import annotations

import sys
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Any

import pytest
import torch

import holdfast
from holdfast.errors import Corrupt, Unsupported
from holdfast.json_text import canonical_json, parse_json
from holdfast.tensors.sharding import per_rank
from holdfast.trees.encoding import decode_tree
from holdfast.trees.outline import MAX_TREE_DEPTH, iter_leaves
from holdfast.trees.registered import Types


@dataclass
class Box:
    """A dataclass that may hold another."""

    x: object


@dataclass(frozen=True)
class FrozenBox:
    """A frozen one."""

    x: object


Pair = namedtuple("Pair", "x")

KINDS: dict[str, Callable[[Any], Any]] = {
    "dict": lambda inner: {"a": inner},
    "OrderedDict": lambda inner: OrderedDict(a=inner),
    "defaultdict": lambda inner: defaultdict(list, a=inner),
    "Counter": lambda inner: Counter(a=inner),
    "list": lambda inner: [inner],
    "tuple": lambda inner: (inner,),
    "deque": lambda inner: deque([inner]),
    "dataclass": Box,
    "frozen dataclass": FrozenBox,
    "named tuple": Pair,
}
PLAIN_KINDS: dict[str, Callable[[Any], Any]] = {
    "frozenset": lambda inner: frozenset([inner]),
    "tuple in a key": lambda inner: (inner,),
}
"""What can hold plain values only."""


def nest(make: Callable[[Any], Any], depth: int, leaf: object) -> Any:
    for _ in range(depth):
        leaf = make(leaf)
    return leaf


@pytest.fixture
def store() -> holdfast.Store:
    return holdfast.open("memory://", types=[Box, FrozenBox, Pair])


@pytest.mark.parametrize("leaf", [torch.arange(3), 7, "x" * 5000], ids=["tensor", "int", "text"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_deepest_tree_is_saved_loaded_and_compared(store: holdfast.Store, kind: str, leaf: object) -> None:
    tree = nest(KINDS[kind], MAX_TREE_DEPTH, leaf)

    store.save("a", tree)
    store.save_async("b", tree).wait()
    loaded = store.load("a")
    store.load_into("a", tree)

    assert store.diff("a", "b").is_equal
    assert [found for found in store.check(read=True) if found.severity != "note"] == []
    for _ in range(MAX_TREE_DEPTH):
        (loaded,) = loaded.values() if isinstance(loaded, dict) else vars(loaded).values() if is_box(loaded) else loaded
    assert torch.equal(loaded, leaf) if isinstance(leaf, torch.Tensor) else loaded == leaf


def is_box(value: object) -> bool:
    return isinstance(value, Box | FrozenBox)


@pytest.mark.parametrize("kind", KINDS)
def test_one_level_more_is_refused_and_nothing_is_saved(store: holdfast.Store, kind: str) -> None:
    tree = nest(KINDS[kind], MAX_TREE_DEPTH + 1, torch.arange(3))

    for save in (store.save, lambda name, tree: store.save_async(name, tree).wait()):
        with pytest.raises(Unsupported, match=rf": the tree is nested more than {MAX_TREE_DEPTH} deep; flatten it$"):
            save("a", tree)

    assert store.snapshots() == []


@pytest.mark.parametrize("kind", PLAIN_KINDS)
def test_keys_and_sets_nest_as_deep(store: holdfast.Store, kind: str) -> None:
    def make(depth: int) -> object:
        inner = nest(PLAIN_KINDS[kind], depth - (kind != "frozenset"), 7)
        return inner if kind == "frozenset" else {inner: 1}

    store.save("a", make(MAX_TREE_DEPTH))
    assert store.load("a") == make(MAX_TREE_DEPTH)
    with pytest.raises(Unsupported, match=f"nested more than {MAX_TREE_DEPTH} deep"):
        store.save("b", make(MAX_TREE_DEPTH + 1))


def test_a_node_that_is_one_level_deeper_is_damage() -> None:
    def decode(depth: int, innermost: object) -> object:
        node = nest(lambda inner: ["list", inner], depth, innermost)
        assert list(iter_leaves(node))
        return decode_tree(node, types=Types(()), decode_leaf=lambda leaf, path: None)

    for innermost in (7, ["@tensor", 0], ["list"]):
        deepest = MAX_TREE_DEPTH - (innermost == ["list"])
        decode(deepest, innermost)
        with pytest.raises(Corrupt, match=f"nested more than {MAX_TREE_DEPTH} deep"):
            decode(deepest + 1, innermost)


# --- a stack that is nearly full


def call_at(depth: int, act: Callable[[], object]) -> object:
    """Call `act` below so many more frames."""
    return call_at(depth - 1, act) if depth else act()


def count_frames(act: Callable[[], object]) -> int:
    """Return how many free frames `act` needs; fewer make it raise RecursionError, and nothing else."""
    here = 0
    frame = sys._getframe()
    while frame.f_back:
        frame, here = frame.f_back, here + 1
    low, high = 0, sys.getrecursionlimit() - here
    while high - low > 1:
        middle = (low + high) // 2
        try:
            call_at(sys.getrecursionlimit() - here - middle, act)
        except RecursionError:
            low = middle
        else:
            high = middle
    return high


def act_on(store: holdfast.Store, tree: object, name: str) -> dict[str, Callable[[], object]]:
    numbers = count()
    return {
        "save": lambda: store.save(f"{name}/{next(numbers)}", tree),
        "save of values of a rank": lambda: store.save(f"{name}/{next(numbers)}", {"own": per_rank(tree)}),
        "save_async": lambda: store.save_async(f"{name}/{next(numbers)}", tree).wait(),
        "load": lambda: store.load(name),
        "load_into": lambda: store.load_into(name, tree),
        "diff": lambda: store.diff(name, name),
    }


SLACK = 12
"""Frames that are not counted: what runs when something is done for the first time, or a thread is started."""


def test_no_operation_needs_more_stack_for_a_deeper_tree(store: holdfast.Store) -> None:
    needed: dict[str, dict[str, int]] = {}
    for name, depth in (("flat", 1), ("deep", MAX_TREE_DEPTH - 1)):
        tree = nest(lambda inner: [{"a": inner}], depth // 2 or 1, torch.arange(3))
        store.save(name, tree)
        acts = act_on(store, tree, name)
        for act in acts.values():
            act()
        needed[name] = {what: count_frames(act) for what, act in acts.items()}

    grown = {what: (needed["flat"][what], frames) for what, frames in needed["deep"].items()}
    assert {what: pair for what, pair in grown.items() if pair[1] > pair[0] + SLACK} == {}


def test_json_that_fits_a_record_is_read_and_written_however_full_the_stack_is() -> None:
    value = nest(lambda inner: [inner], 240, 7)
    data = canonical_json(value)

    assert count_frames(lambda: canonical_json(value)) < 60
    assert count_frames(lambda: parse_json(data, where="x")) < 60
