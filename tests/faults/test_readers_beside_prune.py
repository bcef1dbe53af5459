"""Somebody prunes, collects or repacks between any two operations of a reader: right bytes, or NotFound."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import pytest

from holdfast.errors import MissingChunk, NotFound
from holdfast.objects.memory import MemoryStore
from holdfast.objects.protocol import ObjectStore
from holdfast.repo.format.layout import PACKS
from holdfast.repo.handle.repository import open_repository
from holdfast.repo.names.roots import read_live
from holdfast.repo.names.snapshots import delete_snapshot, read_snapshot
from holdfast.repo.read.reader import open_snapshot
from holdfast.repo.upkeep.collect import Rules, collect
from holdfast.repo.upkeep.prune import Keep, apply_prune, read_prune_plan
from holdfast.repo.upkeep.transfer import apply_repack, plan_repack
from tests.faults.hooked_store import HookedStore
from tests.faults.scenario import Content, random_bytes, save_content

NOW: Final = Rules(min_age_s=0.0)
SHARED: Final = random_bytes("shared", (1 << 20) + 40_000)
CONTENT: Final[Content] = {"shared": SHARED, "own": random_bytes("own", 5_000), "inline": b"one"}


@pytest.fixture(scope="module")
def base() -> MemoryStore:
    """A store whose `run/2` needs a little of a pack that is otherwise dead."""
    store = MemoryStore()
    save_content(store, "run/1", {"shared": SHARED, "big": random_bytes("big", 3 << 20)})
    save_content(store, "run/2", CONTENT)
    save_content(store, "run/3", {"own": random_bytes("three", 9_000)})
    delete_snapshot(store, "run/1")
    return store


def repack(store: ObjectStore) -> None:
    repo = open_repository(store)
    assert apply_repack(repo, plan_repack(repo, read_live(store).current))
    collect(store, NOW)


def repack_again(store: ObjectStore) -> None:
    """Repack everything twice, and collect the packs in between."""
    repack(store)
    repo = open_repository(store)
    assert apply_repack(repo, plan_repack(repo, read_live(store).current, dead_share=-1.0))
    collect(store, NOW)


def prune_all_but_one(store: ObjectStore) -> None:
    apply_prune(store, read_prune_plan(store, "run/", Keep(last=1)))
    collect(store, NOW)


def overwrite(store: ObjectStore) -> None:
    save_content(store, "run/2", {"own": b"other" * 500}, overwrite=True)
    collect(store, NOW)


def repack_and_prune(store: ObjectStore) -> None:
    repack(store)
    prune_all_but_one(store)


def read_beside(base: MemoryStore, act: Callable[[ObjectStore], None], at: int) -> tuple[str, bool]:
    """Read `run/2`, letting `act` happen just before the `at`-th operation; return how it ended, and whether it did."""
    store = base.clone()
    left = [at]

    def hook(_met: str, _key: str) -> None:
        left[0] -= 1
        if left[0] == 0:
            act(store)

    repo = open_repository(store)
    snapshot = read_snapshot(store, "run/2")
    hooked = open_repository(HookedStore(store, before=hook))
    assert repo.config == hooked.config
    try:
        with open_snapshot(hooked, snapshot) as reader:
            found = {name: bytes(reader.read_entry(name)) for name in reader.manifest.names}
    except NotFound as error:
        return ("NotFound" if "run/2" in str(error) else f"NotFound of what? {error}"), left[0] <= 0
    assert found == CONTENT
    return "read", left[0] <= 0


def read_at_every_operation(base: MemoryStore, act: Callable[[ObjectStore], None]) -> set[str]:
    ends: set[str] = set()
    for at in range(3, 200):
        end, has_acted = read_beside(base, act, at)
        if not has_acted:
            return ends
        ends.add(end)
    raise AssertionError("the reader does not come to an end")


@pytest.mark.parametrize("act", [repack, repack_again])
def test_a_reader_does_not_notice_a_repack(base: MemoryStore, act: Callable[[ObjectStore], None]) -> None:
    assert read_at_every_operation(base, act) == {"read"}


@pytest.mark.parametrize("act", [prune_all_but_one, overwrite, repack_and_prune])
def test_a_reader_of_what_is_deleted_meanwhile_finishes_or_learns_that_it_is_gone(
    base: MemoryStore, act: Callable[[ObjectStore], None]
) -> None:
    ends = read_at_every_operation(base, act)
    assert "NotFound" in ends
    assert ends <= {"NotFound", "read"}


def test_what_is_lost_while_the_snapshot_stands_is_still_called_missing(base: MemoryStore) -> None:
    store = base.clone()
    with open_snapshot(open_repository(store), read_snapshot(store, "run/2")) as reader:
        for info in store.list(PACKS):
            store.delete(info.key)
        with pytest.raises(MissingChunk):
            reader.read_entry("shared")
