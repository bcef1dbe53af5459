"""Puts a function of a test in the place of another one, and fails the test if nothing calls it.

A test that kills, fails or pauses inside Holdfast would otherwise still pass when the code that it hooks is renamed,
moved or no longer used, and would then test nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import pytest


@contextmanager
def hooked(owner: Any, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Replace an attribute by `function`; fail at the end unless it was called."""
    calls = []

    def count(*args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        return function(*args, **kwargs)

    with mock.patch.object(owner, name, count):
        yield
    assert calls, f"nothing has called {name!r} of {owner!r}: the test does not reach what it replaces"


@contextmanager
def forbidden(owner: Any, name: str) -> Iterator[None]:
    """Replace an attribute by a function that fails; fail at the end, too, if it was called."""
    calls = []

    def refuse(*_: Any, **__: Any) -> None:
        calls.append(name)
        raise AssertionError(f"{name!r} of {owner!r} must not be called here")

    with mock.patch.object(owner, name, refuse):
        yield
    assert not calls, f"{name!r} of {owner!r} was called"


class Hook:
    """The same until the end of a test, as a fixture."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack

    def __call__(self, owner: Any, name: str, function: Callable[..., Any]) -> None:
        """Replace an attribute by `function`, which must be called before the test ends."""
        self._stack.enter_context(hooked(owner, name, function))

    def forbid(self, owner: Any, name: str) -> None:
        """Replace an attribute by a function that must not be called."""
        self._stack.enter_context(forbidden(owner, name))


@pytest.fixture
def hook() -> Iterator[Hook]:
    """Return what replaces functions until the test ends."""
    with ExitStack() as stack:
        yield Hook(stack)
