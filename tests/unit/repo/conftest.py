"""A clock, a store in memory and a repository in it."""

from __future__ import annotations

import pytest

from holdfast.objects.memory import MemoryStore, VirtualClock
from holdfast.repo.handle.repository import Repository
from tests.kit.saving import new_repo


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
def store(clock: VirtualClock) -> MemoryStore:
    return MemoryStore(clock=clock)


@pytest.fixture
def repo(store: MemoryStore) -> Repository:
    return new_repo(store)
