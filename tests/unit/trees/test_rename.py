"""Names are changed by their longest prefix, once, and no two become equal."""

from __future__ import annotations

from collections import OrderedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import Mismatch
from holdfast.trees.pick import rename_name, rename_prefixes, replace_by_prefix


@pytest.mark.parametrize(
    ("name", "renames", "expected"),
    [
        ("module.w", {"module.": ""}, "w"),
        ("w", {"module.": ""}, "w"),
        ("w", {"": "model."}, "model.w"),
        ("a.b.c", {"a.": "x.", "a.b.": "y."}, "y.c"),
        ("a.b.c", {"a.b.": "y.", "a.": "x."}, "y.c"),
        ("a.a.c", {"a.": ""}, "a.c"),
        ("a.c", {"a.": "b.", "b.": "c."}, "b.c"),
        ("w", {}, "w"),
    ],
    ids=["removed", "no match", "added", "longest first", "longest last", "only once", "no chain", "no renames"],
)
def test_the_longest_prefix_is_replaced_once(name: str, renames: dict[str, str], expected: str) -> None:
    assert rename_name(name, renames) == expected


def test_a_mapping_is_renamed_into_a_new_dict_in_its_order() -> None:
    old = {"m.b": 1, "a": 2, "m.a": 3}

    assert list(rename_prefixes(old, {"m.": "n."}).items()) == [("n.b", 1), ("a", 2), ("n.a", 3)]
    assert list(old) == ["m.b", "a", "m.a"]


def test_two_prefixes_may_be_swapped() -> None:
    assert rename_prefixes({"a.w": 1, "b.w": 2}, {"a.": "b.", "b.": "a."}) == {"b.w": 1, "a.w": 2}


def test_keys_that_would_become_one_are_named() -> None:
    with pytest.raises(Mismatch) as caught:
        rename_prefixes({"m.a": 1, "m.b": 2, "a": 3, "b": 4}, {"m.": ""})

    assert str(caught.value) == (
        "'m.a' and 'a' would both become 'a' (and 1 more); nothing was renamed. Choose other prefixes"
    )
    assert caught.value.problems == ("'m.a' and 'a' would both become 'a'", "'m.b' and 'b' would both become 'b'")


def test_a_state_dict_is_renamed_in_place_and_in_order() -> None:
    state = OrderedDict({"m.b": 1, "x": 2, "m.a": 3})

    replace_by_prefix(state, "m.", "n.")

    assert list(state.items()) == [("n.b", 1), ("x", 2), ("n.a", 3)]


def test_a_new_prefix_may_contain_the_old_one() -> None:
    state = {"a": 1, "a.a": 2}

    replace_by_prefix(state, "a", "a.a")

    assert state == {"a.a": 1, "a.a.a": 2}


def test_a_state_dict_that_would_lose_a_value_is_left_alone() -> None:
    state = {"m.a": 1, "m.c": 2, "a": 3}

    with pytest.raises(Mismatch, match=r"^'m\.a' and 'a' would both become 'a'; nothing was renamed"):
        replace_by_prefix(state, "m.", "")

    assert list(state.items()) == [("m.a", 1), ("m.c", 2), ("a", 3)]


def test_a_prefix_is_not_replaced_by_itself() -> None:
    with pytest.raises(Mismatch, match=r"^the prefix 'm\.' would be replaced by itself; pass two different prefixes$"):
        replace_by_prefix({"m.a": 1}, "m.", "m.")


NAMES = st.text("ab.", max_size=4)


@given(st.dictionaries(NAMES, st.integers()), NAMES, NAMES)
def test_renaming_in_place_keeps_every_value_or_changes_nothing(state: dict[str, int], old: str, new: str) -> None:
    before = list(state.items())
    try:
        replace_by_prefix(state, old, new)
    except Mismatch:
        assert list(state.items()) == before
    else:
        assert list(state.values()) == [value for _, value in before]
