"""Any tree keeps its shape and types, and every tensor in it is converted."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator

import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.trees.apply import apply_to_tensors
from tests.unit.trees.test_apply import (
    Frozen,
    HandSlotted,
    History,
    Labelled,
    Pair,
    Plain,
    Slotted,
    add_one,
    values_of,
)

LEAVES = st.one_of(st.none(), st.integers(), st.text(max_size=3), st.builds(lambda: torch.zeros(1)))
KEYS = st.one_of(st.text(max_size=3), st.integers())


def _containers(parts: st.SearchStrategy[object]) -> st.SearchStrategy[object]:
    return st.one_of(
        st.lists(parts, max_size=3),
        st.lists(parts, max_size=3).map(tuple),
        st.lists(parts, max_size=3).map(deque),
        st.lists(parts, max_size=3).map(History),
        st.lists(parts, max_size=3).map(Labelled),
        st.dictionaries(KEYS, parts, max_size=3),
        st.dictionaries(KEYS, parts, max_size=3).map(OrderedDict),
        st.dictionaries(KEYS, parts, max_size=3).map(lambda items: defaultdict(list, items)),
        *(st.builds(kind, parts, parts) for kind in (Pair, Plain, Frozen, Slotted, HandSlotted)),
        st.sets(LEAVES, max_size=3),
        st.frozensets(LEAVES, max_size=3),
    )


TREES = st.recursive(LEAVES, _containers, max_leaves=12)


def skeleton(tree: object) -> Iterator[object]:
    """Yield the types and keys of a tree in order, with every leaf but tensors; sets by their size."""
    yield type(tree)
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield key
            yield from skeleton(value)
    elif isinstance(tree, set | frozenset):
        yield len(tree)
    elif isinstance(tree, list | tuple | deque):
        for value in tree:
            yield from skeleton(value)
    elif isinstance(tree, Plain | Frozen | Slotted | HandSlotted):
        yield from skeleton(tree.x)
        yield from skeleton(tree.y)
    elif not isinstance(tree, torch.Tensor):
        yield tree


@given(TREES)
def test_any_tree_keeps_its_shape_and_every_tensor_is_converted(tree: object) -> None:
    result = apply_to_tensors(add_one, tree)

    assert list(skeleton(result)) == list(skeleton(tree))
    assert values_of(result) == [1.0] * len(values_of(tree))
    assert values_of(tree) == [0.0] * len(values_of(tree))


@given(TREES)
def test_any_tree_is_returned_itself_if_nothing_changes(tree: object) -> None:
    assert apply_to_tensors(lambda tensor: tensor, tree) is tree
