"""Undoes what other libraries change in torch when they are imported: a callable is not stored beside such changes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FunctionType

import pytest
import torch
import typing_extensions

from holdfast.compile_cache.code.known import is_known_file
from holdfast.compile_cache.whole import state

_MADE = ("<string>", typing_extensions.__file__)


@pytest.fixture(autouse=True)
def _plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore functions that were wrapped, and remove those that were added."""
    for owner, name, function in list(_iter_foreign()):
        original = getattr(function, "__wrapped__", None)
        if original is None:
            monkeypatch.delattr(owner, name)
        else:
            monkeypatch.setattr(owner, name, original)


def _iter_foreign() -> Iterator[tuple[object, str, FunctionType]]:
    for path, values in state._iter_namespaces():
        for name, value in values.items():
            if isinstance(value, FunctionType):
                file = value.__code__.co_filename
                if not is_known_file(file) and file not in _MADE:
                    yield _find_owner(path), name, value


def _find_owner(path: str) -> object:
    """Return a module, or a class in a module."""
    if path in sys.modules:
        return sys.modules[path]
    module, _, name = path.rpartition(".")
    return getattr(sys.modules.get(module, torch), name)
