"""Which objects are replaced by their state, and where in a tree."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from typing import Any, NamedTuple

import pytest
import torch

import holdfast
from holdfast.errors import Unsupported
from holdfast.snapshot.stateful import expand, is_stateful
from holdfast.store import Store
from holdfast.tensors.sharding import PerRank, per_rank


class Counter:
    def __init__(self, count: int = 0) -> None:
        self.count = count

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


class Nested:
    def __init__(self) -> None:
        self.inner = Counter(3)

    def state_dict(self) -> dict[str, object]:
        return {"inner": self.inner, "list": [self.inner]}

    def load_state_dict(self, state: dict[str, object]) -> None:
        raise NotImplementedError


class Pair(NamedTuple):
    first: object
    second: object


def test_what_has_both_methods_is_stateful() -> None:
    class Half:
        def state_dict(self) -> dict[str, int]:
            return {}

    assert is_stateful(Counter())
    assert is_stateful(torch.nn.Linear(1, 1))
    assert not is_stateful(Half())
    assert not is_stateful(Counter)
    assert not is_stateful(torch.zeros(1))


def test_states_are_found_in_every_container_and_within_states() -> None:
    default: defaultdict[str, Any] = defaultdict(int, a=Counter(5))
    tree = {
        "list": [Counter(1), (Counter(2), 5)],
        "ordered": OrderedDict(a=Counter(4)),
        "default": default,
        "pair": Pair(Counter(6), 7),
        "nested": Nested(),
    }

    found: Any = expand(tree)

    assert found["list"] == [{"count": 1}, ({"count": 2}, 5)]
    assert found["ordered"] == OrderedDict(a={"count": 4})
    assert found["default"]["a"] == {"count": 5}
    assert found["default"].default_factory is int
    assert found["pair"] == Pair({"count": 6}, 7)
    assert found["nested"] == {"inner": {"count": 3}, "list": [{"count": 3}]}


def test_containers_without_states_are_not_copied_and_the_tree_stays_as_it_is() -> None:
    plain = {"a": [1, (2, 3)], "b": OrderedDict(c=4)}
    counter = Counter(1)
    tree = {"plain": plain, "counter": counter}

    found: Any = expand(tree)

    assert found["plain"] is plain
    assert tree["counter"] is counter


def test_a_tree_that_holds_itself_is_refused_by_name(store: Store) -> None:
    inner: list[object] = [Counter()]
    inner.append(inner)

    with pytest.raises(Unsupported, match=r"^run\.loop\.1: a container that contains itself"):
        store.save("x", {"run": {"loop": inner}})


def test_a_container_that_is_shared_is_walked_once() -> None:
    tree: list[object] = [Counter(1)]
    for _ in range(100):
        tree = [tree, tree]

    found: Any = expand(tree)

    for _ in range(100):
        assert found[0] is found[1]
        found = found[0]
    assert found == [{"count": 1}]


def test_an_object_is_saved_as_its_state_and_loaded_through_its_method(store: Store) -> None:
    store.save("x", {"counter": Counter(5), "list": [Counter(6)]})
    target = {"counter": Counter(), "list": [Counter()]}

    store.load_into("x", target)

    assert target["counter"].count == 5  # type: ignore[attr-defined]  # it is one
    assert target["list"][0].count == 6  # type: ignore[index]  # it is a list
    assert store.load("x") == {"counter": {"count": 5}, "list": [{"count": 6}]}


def test_what_is_declared_per_rank_is_so_leaf_by_leaf() -> None:
    tensor = torch.ones(2)

    tree: Any = expand({"mine": per_rank({"a": tensor, "b": [Counter(5), b"raw"], "c": Pair("text", None)})})

    mine = tree["mine"]
    assert [type(each) for each in (mine["a"], mine["b"][1], mine["c"].first)] == [PerRank] * 3
    assert (mine["a"].value is tensor, mine["b"][0], mine["c"].second) == (True, {"count": 5}, None)


def test_objects_declared_per_rank_are_saved_and_loaded(store: Store) -> None:
    saved: Any = {"rng": holdfast.RngState(), "counter": Counter(4)}
    store.save("x", per_rank(saved))
    drawn = torch.rand(3)
    target: Any = {"rng": holdfast.RngState(), "counter": Counter()}

    store.load_into("x", per_rank(target))

    assert torch.equal(torch.rand(3), drawn)
    assert target["counter"].count == 4
