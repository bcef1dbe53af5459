"""A store is copied file by file to another machine while a process here still writes to it: no wrong byte there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import pytest

from holdfast.errors import Corrupt, HoldfastError, NotFound
from holdfast.objects.memory import MemoryStore
from holdfast.objects.protocol import ObjectStore
from holdfast.repo.names.snapshots import CommittedSnapshot, delete_snapshot, iter_names, read_snapshot
from holdfast.repo.upkeep.collect import Rules, collect
from tests.faults.hooked_store import HookedStore
from tests.faults.scenario import Content, check_store, random_bytes, read_content, save_content

NOW: Final = Rules(min_age_s=0.0)
SHARED: Final = random_bytes("shared by all", 90_000)
LIMIT: Final = 1 << 22


def make_content(version: int) -> Content:
    return {"shared": SHARED, "own": random_bytes(f"version {version}", 60_000), "inline": str(version).encode()}


VERSIONS: Final = [make_content(version) for version in range(4)]
ORDERS: Final[dict[str, Callable[[list[str]], list[str]]]] = {
    "by name": sorted,
    "by name, backwards": lambda keys: sorted(keys, reverse=True),
    "without order": lambda keys: sorted(keys, key=lambda key: random_bytes(key, 8)),
}


def save_one_more(store: ObjectStore) -> None:
    save_content(store, "run/2", VERSIONS[2])


def overwrite(store: ObjectStore) -> None:
    save_content(store, "run/1", VERSIONS[3], overwrite=True)


def free(store: ObjectStore) -> None:
    delete_snapshot(store, "run/1")  # what it shares is in a pack of run/0
    collect(store, NOW)


def copy_keys(source: ObjectStore, target: ObjectStore, keys: Sequence[str]) -> None:
    """Copy files; those that are gone by now, or copied before, are left out, as by a program that copies folders."""
    for key in keys:
        try:
            target.create(key, source.read(key, limit_bytes=LIMIT))
        except (NotFound, HoldfastError):
            continue


def list_keys(store: ObjectStore, order: str) -> list[str]:
    return ORDERS[order]([info.key for info in store.iter_objects("")])


def copy_beside(
    act: Callable[[ObjectStore], None], order: str, at: int, *, lists_again: bool
) -> tuple[MemoryStore, bool]:
    """Copy a quarter of the files before the `at`-th operation of `act`, and the rest after it; return the copy.

    The rest is what is listed then, or what was listed first.
    """
    store, target = MemoryStore(), MemoryStore()
    for version in range(2):
        save_content(store, f"run/{version}", VERSIONS[version])
    left, listed = [at], list[str]()

    def hook(_met: str, _key: str) -> None:
        left[0] -= 1
        if left[0] == 0:
            listed.extend(list_keys(store, order))
            copy_keys(store, target, listed[: len(listed) // 4])

    act(HookedStore(store, before=hook))
    copy_keys(store, target, list_keys(store, order) if lists_again or not listed else listed)
    return target, left[0] <= 0


def read_names(store: ObjectStore) -> dict[str, bool]:
    """Return the names of a copy and whether each can be read; what is read must be a version that was saved."""
    found = {}
    for each in iter_names(store):
        name = each.name if isinstance(each, CommittedSnapshot) else each.stem
        try:
            assert isinstance(each, CommittedSnapshot)
            assert read_content(store, each) in VERSIONS
            found[name] = True
        except (Corrupt, NotFound):
            found[name] = False
    return found


@pytest.mark.slow  # a store, a copy and a check for each operation
@pytest.mark.parametrize("lists_again", [True, False])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("act", [save_one_more, overwrite, free])
def test_a_copy_of_a_store_in_use_has_right_bytes_or_findings(
    act: Callable[[ObjectStore], None], order: str, lists_again: bool
) -> None:
    at, broken = 1, 0
    while True:
        copy, has_copied = copy_beside(act, order, at, lists_again=lists_again)
        found = read_names(copy)
        told = " ".join(str(finding) for finding in check_store(copy) if finding.severity == "error")

        # Whatever cannot be read is named by `check`.
        assert [name for name, is_right in found.items() if not is_right and name not in told] == [], (at, told)
        broken += not all(found.values())
        # The copy is used on: a save there is right, and a collection takes nothing that could be read.
        save_content(copy, "there", VERSIONS[0])
        try:
            collect(copy, NOW)
            is_collected = True
        except HoldfastError:
            is_collected = False  # a root cannot be read, and `check` says so
        assert is_collected or told
        again = read_names(copy)
        assert again.pop("there")
        assert again == found
        assert read_content(copy, read_snapshot(copy, "there")) == VERSIONS[0]
        if not has_copied:
            break
        at += 1
    assert at > 5
    # Records first, and their packs after they were collected.
    assert broken or lists_again or (act, order) != (free, "by name, backwards")
