"""Leaves of an open snapshot are found by name, by prefix and by path."""

from __future__ import annotations

import pytest
import torch

from holdfast.errors import AmbiguousName, Corrupt, NotFound
from holdfast.json_text import Json
from holdfast.snapshot.opened import EntryRef, Opened, find_saved_device
from holdfast.store import Store


@pytest.fixture
def opened(store: Store) -> Opened:
    store.save("run", {"model": {"weight": torch.ones(2), "bias": torch.ones(1)}, "a": {"b": 1}, "a.b": 2})
    return store.snapshot("run").open()


def encode(key: object) -> Json:
    assert isinstance(key, str)
    return key


def test_a_name_finds_a_leaf_and_a_prefix_all_leaves_below_it(opened: Opened) -> None:
    leaf, group = opened.find("model.weight"), opened.find("model")

    assert (leaf.is_leaf, [each.name for each in leaf.leaves]) == (True, ["model.weight"])
    assert (group.is_leaf, [each.name for each in group.leaves]) == (False, ["model.weight", "model.bias"])


def test_a_name_of_two_leaves_is_ambiguous_and_their_paths_are_not(opened: Opened) -> None:
    with pytest.raises(AmbiguousName) as caught:
        opened.find("a.b")

    assert caught.value.paths == (("a", "b"), ("a.b",))
    found = [opened.find_path(path, encode) for path in caught.value.paths]
    assert [each.leaves[0].node for each in found] == [1, 2]
    assert not opened.find_path(("model",), encode).is_leaf


@pytest.mark.parametrize(
    ("name", "hint"), [("model.wieght", "did you mean 'model.weight'"), ("zzz", "`holdfast show run`")]
)
def test_a_missing_name_has_a_hint(opened: Opened, name: str, hint: str) -> None:
    with pytest.raises(NotFound, match=hint):
        opened.find(name)


def test_a_missing_path_is_not_found(opened: Opened) -> None:
    with pytest.raises(NotFound, match=r"nothing at path \('model', 'x'\) in 'run'"):
        opened.find_path(("model", "x"), encode)


@pytest.mark.parametrize("number", [-1, 2])
def test_an_entry_that_does_not_exist_is_damage(opened: Opened, number: int) -> None:
    with pytest.raises(Corrupt, match=f"names entry {number}, which does not exist"):
        opened.entry(number)
    with pytest.raises(Corrupt, match=f"names entry {number}, which does not exist"):
        opened.find_facts(number)


def test_a_reference_finds_its_entry(opened: Opened) -> None:
    ref = EntryRef(opened, 1)

    assert (ref.name, ref.find().name, ref.find().size_bytes) == ("model.bias", "model.bias", 4)


@pytest.mark.parametrize(("note", "device"), [(None, None), ({}, None), ({"device": 5}, None), ({"device": "x"}, "x")])
def test_the_saved_device_is_a_text_of_the_note(opened: Opened, note: Json, device: str | None) -> None:
    assert find_saved_device(opened.entry(0)._replace(note=note)) == device
