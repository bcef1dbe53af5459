"""What the tests of disks and of power do to a local store on a simulated disk, and how they judge what is left."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from holdfast.errors import HoldfastError
from holdfast.objects.local.local_store import LocalStore
from holdfast.repo.format.layout import BAD, INDEX, LEASES, MARKS
from holdfast.repo.format.record import encode_record
from holdfast.repo.names.snapshots import delete_snapshot, delete_tag, read_snapshot, set_tag
from tests.faults.scenario import ENCODED, INIT, Content, State, check_store, random_bytes, read_state, save_content
from tests.kit.power import SimulatedDisk

ROOT: Final = "/store"
# What is not fsynced may be torn; nothing that was saved depends on it.
_VOLATILE: Final = (LEASES, MARKS, INDEX, BAD)
_LEFT_BEHIND: Final = frozenset({"pack-unused", "manifest-unused", "record-torn"})

SMALL: Final[Content] = {"inline": b"one", "packed": random_bytes("packed", 2_000), "own": random_bytes("one", 900)}
OTHER: Final[Content] = {"inline": b"two", "packed": SMALL["packed"], "own": random_bytes("two", 1_500)}


def open_disk(disk: SimulatedDisk) -> LocalStore:
    return LocalStore(ROOT, files=disk)


def _nothing(_store: LocalStore) -> None:
    return


def _prepare(store: LocalStore) -> None:
    save_content(store, "a", SMALL)
    set_tag(store, "t", read_snapshot(store, "a"))
    # A collector that was at work when power was lost: its mark is as volatile as a lease.
    store.create(MARKS + "of-a-collector", encode_record({"kind": "mark", "keys": []}), durable=False)


@dataclass(frozen=True, slots=True)
class Work:
    """A verb of the local store."""

    name: str
    prepare: Callable[[LocalStore], None]
    act: Callable[[LocalStore], object]

    def __str__(self) -> str:
        return self.name


ENCODE: Final = Work("compressed save", _prepare, lambda store: save_content(store, "c", ENCODED, compression="fast"))
"""Declares the codec first."""
WORK: Final = [
    Work("init", _nothing, INIT.act),
    Work("first save", _nothing, lambda store: save_content(store, "a", SMALL)),
    Work("save beside", _prepare, lambda store: save_content(store, "b", OTHER)),
    Work("overwrite", _prepare, lambda store: save_content(store, "a", OTHER, overwrite=True)),
    Work("delete", _prepare, lambda store: delete_snapshot(store, "a")),
    Work("set tag", _prepare, lambda store: set_tag(store, "u", read_snapshot(store, "a"))),
    Work("delete tag", _prepare, lambda store: delete_tag(store, "t")),
    ENCODE,
]


def prepared_disk(work: Work) -> SimulatedDisk:
    disk = SimulatedDisk(root=ROOT)
    work.prepare(open_disk(disk))
    return disk


def iter_survivors(disk: SimulatedDisk, *, seeds: int) -> Iterator[SimulatedDisk]:
    """Yield what may be found when power is back: first, nothing but what was fsynced."""
    yield disk.power_loss()
    for seed in range(seeds):
        yield disk.power_loss(random.Random(seed))


def find_wrong(disk: SimulatedDisk, allowed: list[State]) -> list[str]:
    """Return what is wrong with a disk after power is back."""
    store = open_disk(disk)
    try:
        state = read_state(store)
    except (HoldfastError, AssertionError) as error:
        return [f"the store cannot be read: {type(error).__name__}: {error}"]
    if state not in allowed:
        return [f"the state is {state}"]
    wrong = [
        f"{finding.severity} {finding.code}: {finding.message}"
        for finding in (check_store(store) if state.is_store else [])
        if not (finding.severity == "note" and finding.code in _LEFT_BEHIND)
        and not (finding.severity in ("note", "warning") and finding.key.startswith(_VOLATILE))
    ]
    try:
        save_content(store, "a", {**OTHER, "later": random_bytes("later", 700)}, overwrite=True)
        read_state(open_disk(disk.power_loss()))
    except HoldfastError as error:
        wrong.append(f"saving does not work any more: {type(error).__name__}: {error}")
    return wrong
