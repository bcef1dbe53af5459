"""Selecting a part of an encoded tree, and renaming its keys."""

from __future__ import annotations

import pytest

from holdfast.errors import Mismatch
from holdfast.json_text import Json
from holdfast.trees.outline import iter_leaves
from holdfast.trees.pick import matches, pick, rename_keys

TREE: Json = [
    "dict",
    "model",
    ["odict", "layers.0.weight", ["@tensor", 0], "layers.1.weight", ["@tensor", 1]],
    "optim",
    ["list", ["@tensor", 2], ["@tensor", 3]],
    "step",
    7,
]


def names(node: Json) -> list[str]:
    return [leaf.name for leaf in iter_leaves(node)]


@pytest.mark.parametrize(
    ("patterns", "wanted"),
    [
        (["model.*"], ["model.layers.0.weight", "model.layers.1.weight"]),
        (["model"], ["model.layers.0.weight", "model.layers.1.weight"]),
        (["*.weight", "step"], ["model.layers.0.weight", "model.layers.1.weight", "step"]),
        (["model.layers.1.weight"], ["model.layers.1.weight"]),
        (["mod"], []),
    ],
)
def test_patterns_choose_leaves_by_name(patterns: list[str], wanted: list[str]) -> None:
    assert [name for name in names(TREE) if matches(name, patterns)] == wanted


def test_what_is_not_wanted_is_left_out_of_dicts() -> None:
    picked = pick(TREE, lambda name: name == "model.layers.1.weight")
    assert picked == ["dict", "model", ["odict", "layers.1.weight", ["@tensor", 1]]]


def test_what_is_not_wanted_is_none_where_others_would_move_up() -> None:
    assert pick(TREE, lambda name: name == "optim.1") == ["dict", "optim", ["list", None, ["@tensor", 3]]]


def test_attributes_of_a_state_dict_are_kept() -> None:
    node = ["odict+", ["dict", "_metadata", ["dict"]], "a", ["@tensor", 0], "b", ["@tensor", 1]]
    assert pick(node, lambda name: name == "b") == [*node[:2], "b", ["@tensor", 1]]


def test_nothing_wanted_is_none() -> None:
    assert pick(TREE, lambda name: False) is None


def test_an_empty_key_is_part_of_a_name() -> None:
    node = ["dict", "", ["dict", "a", 1], "a", 2]
    assert names(node) == [".a", "a"]
    assert pick(node, lambda name: name == ".a") == ["dict", "", ["dict", "a", 1]]


def test_prefixes_are_renamed_at_every_level_and_once() -> None:
    node = ["dict", "model", ["dict", "module.module.x", 1, "y", 2]]
    assert rename_keys(node, {"module.": ""}) == ["dict", "model", ["dict", "module.x", 1, "y", 2]]


def test_only_text_keys_of_dicts_are_renamed() -> None:
    node = ["dict", 1, ["tuple", "a"], "b", ["namedtuple", "m:P", "a", 3]]
    assert rename_keys(node, {"a": "z", "m": "z"}) == node


def test_two_keys_that_become_one_are_refused() -> None:
    with pytest.raises(Mismatch, match=r"'module\.x' and 'x' would both become 'x'"):
        rename_keys(["dict", "module.x", 1, "x", 2], {"module.": ""})


def test_all_keys_of_a_dict_that_become_one_are_listed() -> None:
    with pytest.raises(Mismatch) as caught:
        rename_keys(["dict", "m.x", 1, "x", 2, "m.y", 3, "y", 4], {"m.": ""})

    assert len(caught.value.problems) == 2
