"""Notices, before each call, that something has changed on which a compiled callable depends."""

from __future__ import annotations

from abc import get_cache_token
from collections.abc import Callable, Mapping, Sequence, Sized
from operator import is_
from typing import Any, Final

from holdfast.compile_cache.code.digest import ValueParts

_ABSENT: Final = object()


class Watch:
    """What a description has read. Compares identities, so an equal copy counts as a change."""

    def __init__(self) -> None:
        self._states: list[tuple[Mapping[str, object], list[str], list[object]]] = []
        self._empty: list[Sized] = []
        self._reads: list[tuple[Mapping[str, object], str, object]] = []
        self._objects: list[tuple[object, ValueParts]] = []
        # Changes whenever `ABC.register` makes a class a subclass of another, which `isinstance` looks up.
        self._token = get_cache_token()

    def add_state(self, state: Mapping[str, object]) -> None:
        """Watch all values of a dictionary."""
        if state:
            self._states.append((state, list(state), list(state.values())))
        else:
            self.add_empty(state)

    def add_empty(self, container: Sized) -> None:
        """Watch an empty container."""
        self._empty.append(container)

    def add_read(self, owner: Mapping[str, object], name: str, value: object) -> None:
        """Watch one value of a dictionary, or its absence."""
        self._reads.append((owner, name, owner.get(name, _ABSENT)))

    def has_read(self, owner: Mapping[str, object], name: str = "") -> bool:
        """Return whether one value of a dictionary is watched; without a name, whether any is."""
        return any(each is owner and name in ("", found) for each, found, _ in self._reads)

    def add_object(self, value: object, parts: ValueParts) -> None:
        """Watch the parts of an object."""
        self._objects.append((value, parts))

    def is_unchanged(self, list_parts: Callable[[Any], ValueParts | None]) -> bool:
        """Return whether everything is as it was when it was added."""
        if any(self._empty) or get_cache_token() != self._token:
            return False
        for state, names, values in self._states:
            if len(state) != len(values) or list(state) != names or not all(map(is_, state.values(), values)):
                return False
        for owner, name, value in self._reads:
            if owner.get(name, _ABSENT) is not value:
                return False
        return all(_has_same_parts(list_parts(value), parts) for value, parts in self._objects)


def _has_same_parts(found: ValueParts | None, before: ValueParts) -> bool:
    return found is not None and found.text == before.text and is_same(found.values, before.values)


def is_same(found: Sequence[object], before: Sequence[object]) -> bool:
    """Return whether two sequences consist of the same objects. Plain values and tuples of the same count, too."""
    return len(found) == len(before) and all(map(_is_same_value, found, before))


def _is_same_value(found: object, before: object) -> bool:
    if found is before:
        return True
    # Some parts are made when they are listed: numbers, names, tuples of them.
    if type(found) is not type(before):
        return False
    if isinstance(found, tuple) and isinstance(before, tuple):
        return is_same(found, before)
    # As text: 0.0 and -0.0 are equal, but a compiled constant is one of them.
    return isinstance(found, bool | int | float | str | bytes) and repr(found) == repr(before)
