"""A store in memory."""

from __future__ import annotations

import pytest

from holdfast.objects.memory import MemoryStore
from holdfast.store import Store


@pytest.fixture
def store() -> Store:
    return Store(MemoryStore())
