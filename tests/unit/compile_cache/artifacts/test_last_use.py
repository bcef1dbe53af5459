"""When artifacts were last used is recorded once a day."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.compile_cache.artifacts.catalog import DAY_S
from holdfast.compile_cache.artifacts.storing import USES, read_uses, record_use
from holdfast.objects.local.local_store import LocalStore
from holdfast.objects.memory import MemoryStore, VirtualClock
from holdfast.repo.handle.repository import Repository
from holdfast.repo.names.snapshots import iter_names
from tests.kit.compile_artifacts import find_variant, make_artifact, store_artifact
from tests.kit.saving import new_repo

START_S = 1_700_000_000.0


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock(start_s=START_S)


@pytest.fixture
def repo(clock: VirtualClock) -> Repository:
    return new_repo(MemoryStore(clock=clock))


def test_use_is_recorded_once_a_day_by_one_process(repo: Repository, clock: VirtualClock) -> None:
    found = [store_artifact(repo, make_artifact(seed)) for seed in "ab"]
    clock.advance(2 * DAY_S)

    assert record_use(repo, found[:1])
    assert not record_use(repo, found[:1])
    assert record_use(repo, found)
    assert not record_use(repo, found)
    clock.advance(1 * DAY_S)
    assert record_use(repo, found)

    assert read_uses(repo.store) == {each.key_digest: (START_S + 3 * DAY_S, 2) for each in found}
    assert sorted(each.name for each in iter_names(repo.store, USES)) == [  # type: ignore[union-attr]  # none is damaged
        "@compiled-use/2023-11-16",
        "@compiled-use/2023-11-17",
    ]


def test_use_on_the_first_day_is_not_recorded(repo: Repository, clock: VirtualClock) -> None:
    found = store_artifact(repo)
    clock.advance(0.5 * DAY_S)

    assert not record_use(repo, [found])
    assert not record_use(repo, [])
    assert read_uses(repo.store) == {}


def test_use_in_a_read_only_store_is_no_error(tmp_path: Path) -> None:
    store_artifact(new_repo(LocalStore(tmp_path)))
    repo = new_repo(LocalStore(tmp_path, read_only=True))
    found = find_variant(repo)
    assert found.snapshot is not None
    object.__setattr__(found.snapshot, "time_s", 0.0)

    assert not record_use(repo, [found])
