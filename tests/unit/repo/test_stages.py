"""Where the time goes: every stage of a save and a load is counted, with its bytes."""

from __future__ import annotations

import threading

import pytest

from holdfast.objects.memory import MemoryStore
from holdfast.repo.engine import Stages
from holdfast.repo.handle.repository import open_repository
from tests.kit.saving import MIB, load_bytes, noise, save_bytes


def test_times_of_all_threads_add_up() -> None:
    stages = Stages()
    threads = [threading.Thread(target=stages.add, args=("hash", 0.5, 10)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = stages.read()["hash"]
    assert (found.seconds, found.size_bytes, found.calls) == (4.0, 80, 8)


def test_a_block_that_fails_is_timed_as_well() -> None:
    stages = Stages()
    with pytest.raises(ValueError, match="no"), stages.time("read", 7):
        raise ValueError("no")
    found = stages.read()["read"]
    assert (found.size_bytes, found.calls) == (7, 1)
    assert found.seconds > 0


def test_a_save_and_a_load_tell_what_each_stage_moved(store: MemoryStore) -> None:
    repo = open_repository(store, create=True)
    save_bytes(repo, "a", {"x": noise(3 * MIB)})
    saved = {name: stage.size_bytes for name, stage in repo.counters.read().stages.items()}
    assert saved == {"hash": 3 * MIB, "look up": 0, "append": 3 * MIB, "commit": 0}
    load_bytes(repo, "a")
    loaded = {name: stage.size_bytes for name, stage in repo.counters.read().stages.items()}
    assert loaded == saved | {"read": 3 * MIB, "verify": 3 * MIB}


def test_what_was_read_does_not_change_afterwards(store: MemoryStore) -> None:
    repo = open_repository(store, create=True)
    before = repo.counters.read()
    save_bytes(repo, "a", {"x": noise(MIB)})
    assert before.stages == {}
