"""A store in memory."""

from __future__ import annotations

import pytest

from holdfast.facade import Store
from holdfast.objects.memory import MemoryStore


@pytest.fixture
def store() -> Store:
    return Store(MemoryStore())
