"""Values that cannot be saved are refused by name before anything is written; stored nodes are checked before use."""

from __future__ import annotations

import inspect
import json
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from holdfast.errors import Corrupt, Unsupported
from holdfast.objects.memory import MemoryStore
from holdfast.snapshot.leaves import LeafWriter, iter_entry_numbers, list_parts, renumber
from holdfast.store import OpenOptions, Store
from holdfast.tensors.storage import free_storage
from holdfast.trees.registered import Types
from tests.kit.capabilities import needs_ability
from tests.kit.tensors import ORDINARY, SUBCLASSES, TENSORS, assert_same_tensor
from tests.tensor_zoo import Scaled


class Bare(torch.Tensor):
    """A class that has no __tensor_flatten__ and __tensor_unflatten__."""


VIEWS_OF_PACKED = needs_ability("view a part of a tensor with several items in a byte")


class Plain:
    pass


def encode_nodes(writer: LeafWriter, nodes: list[Any]) -> Any:
    return json.loads(writer.encode_nodes(nodes).data)


def make_freed() -> torch.Tensor:
    tensor = torch.ones(1000)
    free_storage(tensor)
    return tensor


def make_fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.empty(3)


def make_cycle() -> list[Any]:
    cycle: list[Any] = [1]
    cycle.append(cycle)
    return cycle


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "freed storage": (make_freed, "the memory of this tensor was freed: it needs 4000 bytes, and its storage has 0"),
    "fake": (make_fake, "a fake tensor has no values: save a real one"),
    "subclass without parts": (
        lambda: torch.ones(2).as_subclass(Bare),
        "class Bare has no __tensor_flatten__ and __tensor_unflatten__",
    ),
    "lazy parameter": (lambda: torch.nn.LazyLinear(3).weight, "has no shape yet: run its module once"),
    "mkldnn": (lambda: torch.ones(2).to_mkldnn(), "save its to_dense"),
    "object array": (lambda: np.array([None]), "an array of dtype object cannot be saved; convert it"),
    "record array": (lambda: np.zeros(1, "i4,f4"), "cannot be saved; convert it"),
    "unregistered object": (Plain, "an object of class .*Plain cannot be saved; convert it, or pass allow_pickle=True"),
    "function": (lambda: make_freed, "a function cannot be saved; convert it, or pass allow_pickle=True"),
    "lambda": (lambda: lambda: 1, "a function cannot be saved"),
    "class": (lambda: Plain, r"a class \(Plain itself\) cannot be saved"),
    "module": (lambda: pytest, "a module cannot be saved"),
    "lock": (threading.Lock, "an object of class _thread.lock cannot be saved"),
    "generator": (torch.Generator, "an object of class torch.*Generator cannot be saved"),
    "storage": (lambda: torch.ones(1).untyped_storage(), "an object of class .*UntypedStorage cannot be saved"),
    "tensor in a set": (lambda: {torch.ones(1)}, "a tensor cannot be saved here"),
    "tensor as a key": (lambda: {torch.ones(1): 1}, "a tensor cannot be saved here"),
}


REFUSED_VIEWS: dict[str, tuple[Callable[[], object], str]] = {
    "part of quint4x2": (lambda: ORDINARY["quint4x2/whole"]()[2:], "at the wrong item: save the whole"),
    "gappy quint4x2": (lambda: ORDINARY["quint4x2/whole"]()[::2], "a slice of a torch.quint4x2 tensor cannot be saved"),
}


@pytest.mark.parametrize("case", [*REFUSED, *(pytest.param(case, marks=VIEWS_OF_PACKED) for case in REFUSED_VIEWS)])
def test_what_has_no_form_is_refused_by_name_and_nothing_is_written(case: str) -> None:
    make, words = {**REFUSED, **REFUSED_VIEWS}[case]
    store = Store(MemoryStore())
    with pytest.raises(Unsupported, match=rf"^model\.layers\.1\b.*: .*{words}"):
        store.save("x", {"fine": torch.ones(3), "model": {"layers": [None, make()]}})
    assert store.repository.store.list("") == []


def test_an_unregistered_tensor_class_says_how_to_register_it() -> None:
    with pytest.raises(Unsupported, match=r"^w: .*class Scaled cannot be saved until it is registered: pass types="):
        Store(MemoryStore()).save("x", {"w": TENSORS["subclass/whole"]()})


def test_a_registered_tensor_class_comes_back() -> None:
    store = Store(MemoryStore(), OpenOptions(types=SUBCLASSES))
    tensor = TENSORS["subclass/of a subclass"]()
    store.save("x", {"w": tensor})
    found = store.load("x")["w"]
    assert type(found) is Scaled
    assert_same_tensor(found, tensor)


def test_a_tensor_class_is_not_made_by_a_store_that_was_not_told() -> None:
    inner = MemoryStore()
    Store(inner, OpenOptions(types=SUBCLASSES)).save("x", {"w": TENSORS["subclass/whole"]()})
    with pytest.raises(Unsupported, match=r"^'x', w: it was saved as an object of class 'tests.tensor_zoo:Scaled'"):
        Store(inner).load("x")


def test_tensors_made_of_tensors_have_a_limit() -> None:
    tensor = TENSORS["subclass/whole"]()
    for _ in range(12):
        tensor = Scaled(tensor, torch.ones(1), {})
    with pytest.raises(Unsupported, match=r"^w: it is made of tensors that are made of tensors, nested too deep"):
        Store(MemoryStore(), OpenOptions(types=SUBCLASSES)).save("x", {"w": tensor})


@pytest.mark.parametrize("tree", [make_cycle(), {"deep": make_cycle()}], ids=["alone", "below"])
def test_a_tree_that_holds_itself_is_refused(tree: object) -> None:
    with pytest.raises(Unsupported, match="contains itself"):
        Store(MemoryStore()).save("x", tree)


def test_leaves_of_one_name_become_entries_of_different_names() -> None:
    writer = LeafWriter(Types())
    for path in (("a.b",), ("a", "b"), ()):
        writer.encode(torch.ones(1), path)
    assert [source.name for source in writer.make_sources()] == ["a.b", "a.b#2", "value"]


def test_the_same_tensor_twice_names_its_first_place() -> None:
    writer = LeafWriter(Types())
    tensor = torch.ones(1)
    nodes = [writer.encode(value, (number,)) for number, value in enumerate([tensor, torch.ones(1), tensor])]

    assert encode_nodes(writer, nodes) == [["@tensor", 0], ["@tensor", 1], ["@tensor", 2, 0]]


def test_tensors_among_other_leaves_have_the_numbers_of_their_entries() -> None:
    writer = LeafWriter(Types())
    tensor = torch.ones(1)
    values = [np.zeros(2), tensor, "x" * 5000, torch.ones(2), tensor]
    nodes = [writer.encode(value, (number,)) for number, value in enumerate(values)]

    assert encode_nodes(writer, nodes) == [
        ["@array", 0],
        ["@tensor", 1],
        ["@str", 2],
        ["@tensor", 3],
        ["@tensor", 4, 1],
    ]
    assert [source.name for source in writer.make_sources()] == ["0", "1", "2", "3", "4"]


def test_nodes_are_the_same_if_the_encoder_has_to_begin_again_for_want_of_stack() -> None:
    writer = LeafWriter(Types())
    nodes: list[Any] = [writer.encode(torch.ones(1), (0,))]
    for depth in range(1, 60):
        nodes = [writer.encode(torch.ones(1), (depth,)), nodes]

    def encode_deep(left: int) -> bytes:
        return encode_deep(left - 1) if left else writer.encode_nodes(nodes).data

    frames = sys.getrecursionlimit() - len(inspect.stack())
    found = {encode_deep(frames - room) for room in range(30, 90, 10)}

    assert found == {writer.encode_nodes(nodes).data}


def test_gradients_are_kept_only_if_asked_for() -> None:
    weight = TENSORS["grad/parameter"]()
    for grads, expected in ((False, ["@tensor", 0]), (True, ["@grad", ["@tensor", 0], ["@tensor", 1]])):
        writer = LeafWriter(Types(), grads=grads)
        assert encode_nodes(writer, [writer.encode(weight, ("w",))]) == [expected]


def test_the_numbers_of_a_node_are_found() -> None:
    node = ["@grad", ["@tensor", 3], ["@parts", "sparse_coo", {}, None, "indices", ["@tensor", 4], "v", ["@tensor", 5]]]
    assert list(iter_entry_numbers(node, what="x")) == [3, 4, 5]
    assert list(iter_entry_numbers(["complex", 1.0, 2.0], what="x")) == []


@pytest.mark.parametrize(
    "node",
    [
        ["@tensor"],
        ["@tensor", "0"],
        ["@tensor", True],
        ["@tensor", 0, None],
        ["@tensor", 0, 0, 0],
        ["@array", 0, 0],
        ["@later", 0],
        ["@grad", ["@tensor", 0]],
        ["@grad", ["@tensor", 0], 1],
        ["@parts", "nested", {}],
        ["@parts", "nested", {}, None, "role"],
        ["@parts", [], {}, None],
        ["@parts", "nested", {}, []],
        ["@parts", "nested", {}, {}],
        ["@parts", "nested", {}, None, "role", [["@tensor"], 0]],
        ["@parts", "nested", {}, None, "role", []],
    ],
    ids=str,
)
def test_a_node_that_makes_no_sense_is_refused_by_name(node: list[Any]) -> None:
    with pytest.raises(Corrupt, match=r"^'run', w: the stored tree has a malformed leaf"):
        list(iter_entry_numbers(node, what="'run', w"))


def test_a_node_nested_without_end_is_refused() -> None:
    node: list[Any] = ["@tensor", 0]
    for _ in range(100):
        node = ["@grad", node, ["@tensor", 0]]
    with pytest.raises(Corrupt, match="malformed leaf"):
        list(iter_entry_numbers(node, what="x"))


def test_parts_have_one_role_each() -> None:
    node: list[Any] = ["@parts", "nested", {}, None, "a", ["@tensor", 0], "a", ["@tensor", 1]]
    with pytest.raises(Corrupt, match="malformed leaf"):
        list_parts(node, what="x")


def test_a_tensor_that_occurs_again_names_the_entry_of_the_first() -> None:
    writer = LeafWriter(Types())
    tensor, empty, view = torch.zeros(3), torch.zeros(0), torch.zeros(4)
    leaves = [("text", "x" * 5), *[(f"t{number}", each) for number, each in enumerate([tensor, empty, view[:2]])]]
    leaves += [("again", tensor), ("alias", tensor.view(3)), ("empty", empty), ("third", tensor), ("rest", view[2:])]

    nodes = [writer.encode(value, (name,)) for name, value in leaves]
    sources = writer.make_sources()

    assert encode_nodes(writer, nodes) == [
        ["@str", 0],
        ["@tensor", 1],
        ["@tensor", 2],
        ["@tensor", 3],
        ["@tensor", 4, 1],
        ["@tensor", 5],
        ["@tensor", 6, 2],
        ["@tensor", 7, 1],
        ["@tensor", 8],
    ]
    assert [source.alias for source in sources] == [0, 1, 0, 2, 1, 1, 0, 1, 2]


def test_entry_numbers_of_every_kind_of_leaf_are_replaced() -> None:
    node = ["dict", "a", ["@tensor", 1, 0], "b", ["@grad", ["@tensor", 0], ["@str", 2]], "c", 5]
    parts = ["@parts", "sparse_coo", {"shape": [1]}, 0, "indices", ["@tensor", 0], "values", ["@tensor", 1]]

    assert renumber([*node, "d", parts], {0: 10, 1: 11, 2: 12}) == [
        *["dict", "a", ["@tensor", 11, 10], "b", ["@grad", ["@tensor", 10], ["@str", 12]], "c", 5, "d"],
        ["@parts", "sparse_coo", {"shape": [1]}, 10, "indices", ["@tensor", 10], "values", ["@tensor", 11]],
    ]
