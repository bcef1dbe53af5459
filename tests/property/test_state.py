"""Laws of saving state: whatever tree is saved comes back equal, and digests are equal exactly if content is."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import hypothesis.strategies as st
import torch
from hypothesis import given

from holdfast.objects.memory import MemoryStore
from holdfast.repo.format.source import cut_sources
from holdfast.snapshot.save import SaveOptions, make_request
from holdfast.store import Store
from holdfast.trees.registered import Types
from tests.kit.tensors import assert_same_tensor, find_facts
from tests.tensor_zoo import DTYPES, QUANTISED

POOL_BYTES = 512
NAMES = sorted(name for name, dtype in DTYPES.items() if dtype not in QUANTISED and dtype != torch.bool)


@dataclass(frozen=True)
class Recipe:
    """How to make a view of memory that others may view as well; what does not fit in there is left out."""

    pool: int
    dtype: str
    start: int
    dims: list[tuple[int, int]]
    conj: bool
    neg: bool

    def make(self, pools: list[torch.Tensor]) -> torch.Tensor:
        dtype = DTYPES[self.dtype]
        items = pools[self.pool].view(dtype)
        start = self.start % items.numel()
        shape, stride, reach = [], [], items.numel() - start - 1
        for size, step in self.dims:
            if (size - 1) * step <= reach:
                shape.append(size)
                stride.append(step)
                reach -= max(size - 1, 0) * step
        view = items.as_strided(shape, stride, start)
        view = view.conj() if dtype.is_complex and self.conj else view
        has_sign = dtype.is_complex or dtype.is_floating_point
        return torch._neg_view(view) if has_sign and self.neg else view


@dataclass(frozen=True)
class Pick:
    """Stands in a tree for one of its tensors."""

    number: int


RECIPES = st.builds(
    Recipe,
    st.integers(0, 1),
    st.sampled_from(NAMES),
    st.integers(0, POOL_BYTES),
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 20)), max_size=3),
    st.booleans(),
    st.booleans(),
)


def make_pools(seed: int) -> list[torch.Tensor]:
    data = random.Random(seed).randbytes(2 * POOL_BYTES)
    return [torch.tensor(list(data[:POOL_BYTES]), dtype=torch.uint8) for data in (data, data[POOL_BYTES:])]


PLAIN = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.complex_numbers(),
    st.text(max_size=5),
    st.binary(max_size=5),
    st.sampled_from([torch.float32, torch.Size([1, 2]), torch.device("cpu"), range(3), slice(1, 2), frozenset({1})]),
)
KEYS = st.one_of(st.text(max_size=4), st.integers(), st.tuples(st.integers(), st.text(max_size=2)), st.none())


REST = st.recursive(
    st.one_of(PLAIN, st.builds(Pick, st.integers(0, 5))),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.tuples(inner, inner), st.dictionaries(KEYS, inner, max_size=4)
    ),
    max_leaves=12,
)


@dataclass(frozen=True)
class Plan:
    """How to make a tree of containers, plain values and tensors, some of which share memory."""

    seed: int
    recipes: list[Recipe]
    rest: Any

    def make(self) -> dict[str, Any]:
        pools = make_pools(self.seed)
        tensors = [recipe.make(pools) for recipe in self.recipes]
        return {"tensors": tensors, "rest": put(self.rest, tensors)}


def put(value: Any, tensors: list[torch.Tensor]) -> Any:
    """Return the tree with the tensors that were picked in their places."""
    if isinstance(value, Pick):
        return tensors[value.number % len(tensors)]
    if isinstance(value, dict):
        return {key: put(item, tensors) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(put(item, tensors) for item in value)
    return value


PLANS = st.builds(Plan, st.integers(0, 9), st.lists(RECIPES, min_size=1, max_size=6), REST)


def flatten(tree: Any, path: str = "") -> dict[str, Any]:
    """Return the leaves by path; containers are told apart, too."""
    if isinstance(tree, dict):
        children = list(tree.items())
    elif isinstance(tree, list | tuple):
        children = list(enumerate(tree))
    else:
        return {path: tree}
    found: dict[str, Any] = {f"{path}|": (type(tree), [repr(key) for key, _ in children])}
    for number, (_, child) in enumerate(children):
        found.update(flatten(child, f"{path}|{number}"))
    return found


def assert_same(found: Any, wanted: Any) -> None:
    one, other = flatten(found), flatten(wanted)
    assert one.keys() == other.keys()
    for path, value in other.items():
        if isinstance(value, torch.Tensor):
            assert_same_tensor(one[path], value)
        else:
            assert (type(one[path]), repr(one[path])) == (type(value), repr(value))


def find_sharing(tree: Any) -> list[list[bool]]:
    """Return which tensors have memory in common, pair by pair, as writing to one shows."""
    tensors = [value for value in flatten(tree).values() if isinstance(value, torch.Tensor)]
    spans = [_find_span(tensor) for tensor in tensors]
    return [[max(a[0], b[0]) < min(a[1], b[1]) for b in spans] for a in spans]


def _find_span(tensor: torch.Tensor) -> tuple[int, int]:
    if tensor.numel() == 0:
        return 0, 0
    start = tensor.untyped_storage().data_ptr() + int(tensor.storage_offset()) * tensor.element_size()
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.element_size()


def digest(tree: Any) -> bytes:
    """Return the content digest of a tree."""
    return Store(MemoryStore()).save("x", tree).digest


@given(PLANS)
def test_a_tree_comes_back_equal_and_shares_memory_as_it_did(plan: Plan) -> None:
    store, tree = Store(MemoryStore()), plan.make()
    store.save("x", tree)
    found = store.load("x")
    assert_same(found, tree)
    assert find_sharing(found) == find_sharing(tree)
    assert_same(store.load("x", aliases="fresh"), tree)


@given(PLANS)
def test_digests_of_equal_content_are_equal(plan: Plan) -> None:
    store = Store(MemoryStore())
    first = store.save("x", plan.make())
    again = store.save("x", plan.make())
    loaded = store.save("y", store.load("x"))
    assert (again.existed, again.digest) == (True, first.digest)
    assert loaded.digest == first.digest


@given(PLANS, RECIPES, st.integers(0, 5))
def test_digests_differ_if_anything_does(plan: Plan, recipe: Recipe, number: int) -> None:
    tree, other = plan.make(), plan.make()
    tensors = other["tensors"]
    tensors[number % len(tensors)] = recipe.make(make_pools(plan.seed + 1))
    is_same = all(find_facts(one) == find_facts(two) for one, two in zip(tensors, tree["tensors"], strict=True))
    assert is_same or digest(other) != digest(tree)
    assert digest({**tree, "more": None}) != digest(tree)


@given(PLANS, st.sets(st.integers(0, 5), min_size=1))
def test_a_part_of_a_tree_is_the_part_of_the_tree(plan: Plan, chosen: set[int]) -> None:
    store, tree = Store(MemoryStore()), plan.make()
    store.save("x", tree)
    numbers = sorted({number % len(tree["tensors"]) for number in chosen})
    found = store.load("x", only=[f"tensors.{number}" for number in numbers])["tensors"]
    wanted = [tree["tensors"][number] for number in numbers]
    assert_same([found[number] for number in numbers], wanted)
    assert find_sharing([found[number] for number in numbers]) == find_sharing(wanted)


@given(PLANS)
def test_chunks_cover_every_entry_without_gaps(plan: Plan) -> None:
    request = make_request("x", plan.make(), SaveOptions(), Types())
    ends = [0] * len(request.sources)
    for piece in cut_sources(request.sources):
        assert piece.start == ends[piece.position]
        ends[piece.position] = piece.stop
    assert ends == [source.size_bytes for source in request.sources]
