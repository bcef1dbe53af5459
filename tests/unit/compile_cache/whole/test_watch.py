"""Changes of watched values are noticed by identity."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from holdfast.compile_cache.code.digest import list_parts
from holdfast.compile_cache.whole.describe import Watch, is_same


def _double(x: int, factor: int = 2) -> int:
    return x * factor


@pytest.mark.parametrize(
    "change",
    [
        lambda state: state.update(a=[1]),
        lambda state: state.update(c=3),
        lambda state: state.pop("a"),
        lambda state: state.update(b=state.pop("a")),
    ],
)
def test_a_dictionary_changes_by_its_values_and_names(change: Callable[[dict[str, Any]], Any]) -> None:
    state: dict[str, Any] = {"a": [1], "b": 2}
    watch = Watch()
    watch.add_state(state)
    assert watch.is_unchanged(list_parts)

    change(state)

    assert not watch.is_unchanged(list_parts)


def test_an_empty_container_changes_when_something_is_added() -> None:
    hooks: dict[str, Any] = {}
    watch = Watch()
    watch.add_state(hooks)

    hooks["a"] = 1

    assert not watch.is_unchanged(list_parts)


def test_a_name_that_was_absent_is_watched() -> None:
    names: dict[str, Any] = {}
    watch = Watch()
    watch.add_read(names, "len", None)
    assert watch.is_unchanged(list_parts)

    names["len"] = max

    assert not watch.is_unchanged(list_parts)


def test_an_object_changes_by_its_parts() -> None:
    parts = list_parts(_double)
    assert parts is not None
    watch = Watch()
    watch.add_object(_double, parts)
    assert watch.is_unchanged(list_parts)

    _double.__defaults__ = (3,)
    try:
        assert not watch.is_unchanged(list_parts)
    finally:
        _double.__defaults__ = (2,)


def test_zero_changes_when_its_sign_does() -> None:
    assert is_same([0.0, (1, "a")], [0.0, (1, "a")])
    assert not is_same([0.0], [-0.0])
    assert not is_same([1], [True])
