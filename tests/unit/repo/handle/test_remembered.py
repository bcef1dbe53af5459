"""Recent snapshots: the last one under each prefix, for a limited number of prefixes."""

from __future__ import annotations

import pytest

from holdfast.objects.memory import MemoryStore
from holdfast.repo.handle.repository import RecentSnapshots
from tests.kit.saving import new_repo, save_bytes, snapshot_of


def test_few_prefixes_are_remembered(store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.repo.handle.repository._RECENT_PREFIXES", 2)
    repo = new_repo(store)
    recent = RecentSnapshots()
    for name in ("a/1", "b/1", "a/2", "c/1"):
        save_bytes(repo, name, {"x": b"1"})
        recent.remember(snapshot_of(repo, name))
    assert [bool(recent.find(f"{prefix}/9")) for prefix in "abc"] == [True, False, True]
