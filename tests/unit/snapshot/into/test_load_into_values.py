"""Loading plain values into an existing tree: which are replaced, and which must equal the saved ones."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from holdfast.objects.memory import MemoryStore
from holdfast.store import OpenOptions, Store
from tests.kit.loading import noise, problems_of


def test_plain_values_are_replaced_inside_dicts_and_lists(store: Store) -> None:
    saved = {"step": 5, "list": [1, "b", None], "set": {1}, "queue": deque([1], 4), "size": torch.Size([2]), "n": {}}
    store.save("x", saved)
    target: Any = {"step": 0, "list": [0, "", 0], "set": set(), "queue": deque(), "size": torch.Size([3]), "n": {}}
    inner = target["list"]

    store.load_into("x", target)

    assert target == saved
    assert target["list"] is inner
    assert target["queue"].maxlen == 4


def test_none_in_the_target_takes_whatever_was_saved(store: Store) -> None:
    store.save("x", {"a": {"b": noise(2)}, "c": noise(3)})
    target: Any = {"a": None, "c": None}

    store.load_into("x", target)

    assert torch.equal(target["a"]["b"], noise(2))
    assert torch.equal(target["c"], noise(3))


def test_arrays_and_long_texts_are_replaced(store: Store) -> None:
    store.save("x", {"array": np.arange(5), "text": "ä" * 5000, "data": b"x" * 5000})

    found = store.load_into("x", {"array": np.zeros(2), "text": "", "data": b""})

    assert found["array"].tolist() == [0, 1, 2, 3, 4]
    assert (found["text"], found["data"]) == ("ä" * 5000, b"x" * 5000)


class Pair(NamedTuple):
    weight: torch.Tensor
    step: int


@dataclass(frozen=True)
class Frozen:
    weight: torch.Tensor
    rate: float


@dataclass
class Open:
    weight: torch.Tensor
    rate: float


@pytest.mark.parametrize(
    ("saved", "target", "name"),
    [
        ((noise(2), 1), (torch.zeros(2), 2), "1"),
        (Pair(noise(2), 1), Pair(torch.zeros(2), 2), "step"),
        (Frozen(noise(2), 0.5), Frozen(torch.zeros(2), 0.25), "rate"),
    ],
)
def test_a_plain_value_that_differs_where_none_can_be_set_is_refused(saved: Any, target: Any, name: str) -> None:
    store = Store(MemoryStore(), OpenOptions(types=[Pair, Frozen]))

    problems = problems_of(store, {"a": noise(3), "t": saved}, {"a": torch.zeros(3), "t": target})

    assert problems == [f"t.{name}: it differs, and it is in a tuple or frozen dataclass, which cannot be changed"]


@pytest.mark.parametrize(
    "value", [1, 1.5, float("nan"), "text", "ä" * 5000, b"b" * 5000, np.arange(3), torch.float32, None, {1, 2}]
)
def test_a_plain_value_that_is_equal_may_stand_in_a_tuple(store: Store, value: object) -> None:
    store.save("x", (noise(2), value))
    target = (torch.zeros(2), value)

    found = store.load_into("x", target)

    assert found is target
    assert torch.equal(found[0], noise(2))


@pytest.mark.parametrize(("saved", "held"), [(1, True), (1, 1.0), (0.0, -0.0), (np.zeros(2), np.ones(2))])
def test_values_that_only_look_equal_differ(store: Store, saved: object, held: object) -> None:
    (problem,) = problems_of(store, (saved,), (held,))

    assert "differs" in problem


def test_fields_of_a_dataclass_that_is_not_frozen_are_replaced() -> None:
    store = Store(MemoryStore(), OpenOptions(types=[Open]))
    store.save("x", {"o": Open(noise(2), 0.5)})
    target = Open(torch.zeros(2), 0.0)
    place = target.weight

    store.load_into("x", {"o": target})

    assert target.weight is place
    assert torch.equal(place, noise(2))
    assert target.rate == 0.5


@pytest.mark.parametrize("value", [5, "text", None, (1, 2)])
def test_a_tree_that_is_one_plain_value_is_returned(store: Store, value: object) -> None:
    store.save("x", value)

    assert store.load_into("x", value if isinstance(value, tuple) else 0 if value is not None else None) == value
