"""Trees as plain containers, for pickles that run no code."""

from __future__ import annotations

import dataclasses
import enum
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import holdfast
from holdfast.formats.writing import pickle_text
from holdfast.formats.writing.pickle_text import PlainTree, TensorRef, is_plain_value
from holdfast.formats.writing.plan import select_tree

Convert = Callable[..., tuple[Any, dict[str, str]]]
Point = namedtuple("Point", "x y")  # as users write it


@dataclasses.dataclass
class Settings:
    """A class of a user."""

    rate: float = 0.5


class Mode(enum.Enum):
    """An enum of a user."""

    FAST = 1


@pytest.fixture
def convert(tmp_path: Path) -> Convert:
    """Return what saves a tree, and returns it as plain values and what was left out, by name."""
    store = holdfast.open(tmp_path / "store", types=[Settings, Mode, Point])

    def run(tree: Any, **options: Any) -> tuple[Any, dict[str, str]]:
        store.save("a", tree, **options)
        opened = store.snapshot("a").open()
        plain = PlainTree(opened, select_tree(opened, "", ()))
        found = plain.convert()
        return found, {each.name: each.reason for each in plain.left_out}

    return run


def test_plain_trees_are_unchanged(convert: Convert) -> None:
    tree = {"a": [1, (2.5, None)], 3: OrderedDict(k=True), "t": "text", "b": b"bytes", "s": {1, 2}, "e": [{}, ()]}

    assert convert(tree) == (tree, {})


def test_tensors_become_references_to_their_entries(convert: Convert) -> None:
    found, _ = convert({"x": torch.ones(1), "y": [torch.zeros(2)]})

    assert found == {"x": TensorRef(0), "y": [TensorRef(1)]}


def test_long_texts_and_bytes_are_read(convert: Convert) -> None:
    tree = {"text": "é" * 5000, "bytes": b"x" * 5000, "array": bytearray(b"y" * 5000)}

    found, _ = convert(tree)

    assert found == tree
    assert [type(each) for each in found.values()] == [str, bytes, bytearray]


def test_a_value_that_is_too_long_for_memory_is_left_out(convert: Convert, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pickle_text, "_MAX_VALUE_BYTES", 10_000)

    found, left_out = convert({"text": "x" * 10_001, "n": 1})

    assert found == {"n": 1}
    assert left_out == {"text": "a str of 10001 bytes, which is too long for a pickle"}


def test_what_needs_code_is_left_out_of_dicts_and_none_in_lists(convert: Convert) -> None:
    found, left_out = convert({"enum": Mode.FAST, "list": [1, np.zeros(3), Decimal(2)], "n": 1})

    assert found == {"list": [1, None, None], "n": 1}
    assert set(left_out) == {"enum", "list.1", "list.2"}
    assert left_out["list.1"] == "an array, which only a pickle that runs code can contain"


def test_other_containers_become_plain_ones_and_that_is_reported(convert: Convert) -> None:
    tree = {
        "default": defaultdict(int, a=1),
        "count": Counter("aab"),
        "queue": deque([1, 2]),
        "point": Point(1, 2),
        "data": Settings(0.25),
    }

    found, left_out = convert(tree)

    assert found == {
        "default": {"a": 1},
        "count": {"a": 2, "b": 1},
        "queue": [1, 2],
        "point": {"x": 1, "y": 2},
        "data": {"rate": 0.25},
    }
    assert left_out["point"] == "a named tuple, written as a dict of its fields"
    assert set(left_out) == set(tree)


def test_attributes_of_state_dicts_are_kept(convert: Convert) -> None:
    state = torch.nn.BatchNorm1d(2).state_dict()

    found, left_out = convert({"model": state})

    assert vars(found["model"]) == {"_metadata": state._metadata}  # type: ignore[attr-defined]  # torch sets it
    assert left_out == {}


def test_pickled_objects_are_left_out(convert: Convert) -> None:
    found, left_out = convert({"f": print, "n": 1}, allow_pickle=True)

    assert found == {"n": 1}
    assert list(left_out) == ["f"]


@pytest.mark.parametrize("value", [2**5000, object(), [Mode.FAST], {"k": {1: np.float32(1)}}, Point(1, 2)])
def test_only_what_weights_only_readers_accept_is_plain(value: object) -> None:
    assert not is_plain_value(value)
