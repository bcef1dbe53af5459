"""Power is lost at every mutating call of gc, repack, repair and copy: nothing that was saved is lost, gc goes on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import pytest

from holdfast.errors import HoldfastError
from holdfast.objects.local.local_store import LocalStore
from holdfast.objects.protocol import ObjectStore
from holdfast.repo.names.snapshots import delete_snapshot
from holdfast.repo.upkeep.collect import Rules, plan_collect
from holdfast.repo.upkeep.collect import collect as collect_store
from holdfast.testing.faults import Crashed
from tests.faults.disk_scenario import ROOT, iter_survivors, open_disk
from tests.faults.gc_scenario import (
    COPY,
    REPACK,
    REPAIR,
    collect_all,
    prepare_half,
    prepare_sparse,
    prune_and_collect,
)
from tests.faults.scenario import State, Verb, check_store, random_bytes, read_state, save_content
from tests.faults.troubled_files import TroubledFiles
from tests.kit.power import SimulatedDisk
from tests.kit.thinning import keep


def _prepare_garbage(store: ObjectStore) -> None:
    """Leave dead packs, records that were replaced, and names that must stay."""
    prepare_sparse(store)
    save_content(store, "run/4", {"own": random_bytes("four", 1_000)})
    save_content(store, "run/4", {"own": random_bytes("five", 1_200)}, overwrite=True)
    save_content(store, "gone", {"own": random_bytes("gone", 900)})
    delete_snapshot(store, "gone")


def _repack_and_collect(store: ObjectStore) -> None:
    REPACK.act(store)
    collect_all(store)


WORK: Final = [
    Verb("collect", _prepare_garbage, collect_all),
    Verb("prune and collect", _prepare_garbage, prune_and_collect),
    Verb("repack and collect", _prepare_garbage, _repack_and_collect),
    REPAIR,
    COPY,
    Verb("copy into half of it", prepare_half, COPY.act),
]


@dataclass(frozen=True)
class Stage:
    """What is seen before and after, and how many mutating calls are between."""

    make: Callable[[], SimulatedDisk]
    old: State
    new: State
    mutations: int

    @classmethod
    def prepare(cls, verb: Verb) -> Stage:
        def make() -> SimulatedDisk:
            disk = SimulatedDisk(root=ROOT)
            verb.prepare(open_disk(disk))
            return disk

        disk = make()
        old = read_state(open_disk(disk))
        files = TroubledFiles(disk)
        verb.act(LocalStore(ROOT, files=files))
        return cls(make, old, read_state(open_disk(disk)), files.mutations)


def find_wrong(verb: Verb, disk: SimulatedDisk, allowed: list[State], new: State) -> list[str]:
    """Return what is wrong with a disk after power is back, and after the verb was repeated and all was collected."""
    store = open_disk(disk)
    wrong = _judge(store, allowed)
    try:
        verb.act(store)
        wrong += _judge(store, [new])
        # Twice: what a torn lease has kept is fenced first.
        collect_store(store, Rules(min_age_s=0.0, expire_s=0.0))
        collect_store(store, Rules(min_age_s=0.0, expire_s=0.0))
        wrong += [f"{info.key} is left" for info in plan_collect(store, min_age_s=0.0).dead] + _judge(store, [new])
        save_content(store, "later", {"own": random_bytes("later", 700)})
    except HoldfastError as error:
        wrong.append(f"{verb} or gc does not work any more: {type(error).__name__}: {error}")
    return wrong


def _judge(store: ObjectStore, allowed: list[State]) -> list[str]:
    try:
        state = read_state(store)
    except (HoldfastError, AssertionError) as error:
        return [f"the store cannot be read: {type(error).__name__}: {error}"]
    if state not in allowed:
        return [f"the state is {state}"]
    if not state.is_store:
        return []
    return [f"check found {finding}" for finding in check_store(store) if finding.severity == "error"]


@pytest.mark.parametrize("verb", WORK, ids=str)
@pytest.mark.parametrize(
    ("seeds", "step"), [(1, 9), pytest.param(6, 1, marks=pytest.mark.slow)], ids=["thinned", "whole"]
)
def test_power_lost_at_any_call_loses_nothing_that_was_saved(verb: Verb, seeds: int, step: int) -> None:
    stage = Stage.prepare(verb)
    between = [] if stage.old.is_store else [State(is_store=True)]
    wrong = []
    for stop_at in range(1 + WORK.index(verb) % step, stage.mutations + 1, step):
        disk = stage.make()
        try:
            verb.act(LocalStore(ROOT, files=TroubledFiles(disk, at=stop_at)))
            allowed = [stage.new]
        except Crashed:
            allowed = [stage.old, stage.new, *between]
        for number, survivor in enumerate(iter_survivors(disk, seeds=seeds)):
            found = find_wrong(verb, survivor, allowed, stage.new)
            wrong += [f"at call {stop_at}, survivor {number}: {why}" for why in found]
    assert wrong == []


@pytest.mark.parametrize("seeds", keep([4, 12], 4))
@pytest.mark.parametrize("verb", WORK, ids=str)
def test_what_returned_survives_the_loss_of_power(verb: Verb, seeds: int) -> None:
    stage = Stage.prepare(verb)
    disk = stage.make()
    verb.act(open_disk(disk))
    survivors = iter_survivors(disk, seeds=seeds)
    assert [why for survivor in survivors for why in find_wrong(verb, survivor, [stage.new], stage.new)] == []
    assert disk.open_handles == 0
