"""Every operation of every verb fails in every way: the state is old or new, and check accepts it."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from itertools import count

import pytest

from holdfast.errors import ObjectExists
from holdfast.objects.memory import MemoryStore
from holdfast.objects.protocol import ObjectStore
from holdfast.testing.faults import Fault, FaultyStore, Operation
from tests.faults.fault_loop import find_wrong, iter_runs
from tests.faults.hooked_store import HookedStore, once
from tests.faults.scenario import (
    FIRST,
    FIRST_SAVE,
    OVERWRITE,
    SAVE_BESIDE,
    SECOND,
    SHARED,
    THIRD,
    VERBS,
    Names,
    State,
    Verb,
    holds,
    read_state,
    save_content,
)
from tests.faults.thinning import STEP, find_first
from tests.kit.thinning import keep


def prepared(verb: Verb) -> MemoryStore:
    store = MemoryStore()
    verb.prepare(store)
    return store


def done(verb: Verb, base: MemoryStore) -> State:
    store = base.clone()
    verb.act(store)
    return read_state(store)


def kind(operation: Operation) -> tuple[str, str]:
    return operation.name, operation.key.partition("/")[0]


@pytest.mark.parametrize("fault", Fault, ids=lambda fault: fault.name.lower())
@pytest.mark.parametrize("verb", VERBS, ids=str)
# Thinned, the faults take turns, and each second operation meets one of them; which ones, the next verb turns round.
@pytest.mark.parametrize("step", keep([2 * len(Fault), 1], 2 * len(Fault)), ids=["thinned", "whole"])
def test_a_fault_at_any_operation_leaves_the_old_or_the_new_state(verb: Verb, fault: Fault, step: int) -> None:
    base = prepared(verb)
    old, new = read_state(base), done(verb, base)
    rehearsal = FaultyStore(base.clone())
    verb.act(rehearsal)

    first = find_first(list(Fault).index(fault) + len(Fault) * VERBS.index(verb), step)
    runs = list(iter_runs(verb, fault, base.clone, ats=count(first, step)))
    assert [reason for run in runs for reason in find_wrong(run, old, new)] == []

    # The loop itself: it has met the operations of the undisturbed run in turn, the whole loop each of them.
    assert [run.at for run in runs] == list(range(first, len(rehearsal.log) + 1, step))
    kinds = {kind(run.met) for run in runs}
    assert step > 1 or kinds == {kind(operation) for operation in rehearsal.log}


def test_the_states_between_which_the_loop_decides_are_what_was_saved() -> None:
    base = prepared(SAVE_BESIDE)
    old = read_state(base)
    assert holds(old, "run/step-1", FIRST)
    assert holds(old, "run/step-2", SECOND)
    assert old.names.keys() == {"run/step-1", "run/step-2"}
    assert old.tags == {"best": ("run/step-1", old.names["run/step-1"][0])}
    beside = {**THIRD, "two chunks": SHARED["two chunks"], "inline": b"third"}
    assert holds(done(SAVE_BESIDE, base), "run/step-3", beside)
    assert holds(done(OVERWRITE, base), "run/step-2", THIRD)
    assert holds(done(FIRST_SAVE, MemoryStore()), "run/step-1", SECOND)


def test_the_verbs_meet_every_operation_of_a_store() -> None:
    met = set()
    for verb in VERBS:
        store = FaultyStore(prepared(verb))
        verb.act(store)
        met |= {operation.name for operation in store.log}
    assert met == {
        "prepare", "sync", "create", "upload", "append", "commit", "read", "read_into", "list", "stat", "delete",
        "find_free_bytes", "hold",
    }  # fmt: skip


@pytest.mark.parametrize("fault", Fault, ids=lambda fault: fault.name.lower())
def test_a_save_that_fails_takes_nothing_from_another_that_relies_on_its_packs(fault: Fault) -> None:
    base = prepared(SAVE_BESIDE)
    old, new = read_state(base), done(SAVE_BESIDE, base)
    shared = {**THIRD, "inline": b"of the other writer"}
    new_bytes: list[int] = []

    def add_other(clean: ObjectStore) -> ObjectStore:
        def save_other() -> None:
            new_bytes.append(save_content(clean, "other", shared).new_bytes)

        # At this moment the pack is sealed and in the index, and nothing refers to it yet.
        return HookedStore(clean, before=once("create", "manifests/", save_other))

    ats = count(find_first(list(Fault).index(fault), STEP), STEP)
    for run in iter_runs(SAVE_BESIDE, fault, base.clone, wrap=add_other, ats=ats):
        others = {name: held for name, held in read_state(run.store).names.items() if name == "other"}
        assert holds(State(names=others), "other", shared) == bool(others)
        assert find_wrong(run, with_names(old, others), with_names(new, others)) == []
    assert len(new_bytes) > 3
    assert set(new_bytes) == {len(shared["inline"])}, "the other writer did not rely on the pack of the first"


def with_names(state: State, names: Names) -> State:
    return replace(state, names={**state.names, **names})


def test_the_loop_reports_a_failure_that_was_not_invisible() -> None:
    def act(store: ObjectStore) -> None:
        SAVE_BESIDE.act(store)
        store.list("tags/")

    verb = Verb("a save that goes on after its commit", SAVE_BESIDE.prepare, act)
    base = prepared(verb)
    runs = [run for run in iter_runs(verb, Fault.ONCE, base.clone) if run.met == Operation("list", "tags/")]
    assert len(runs) == 1
    assert "neither old nor new" in find_wrong(runs[0], read_state(base), done(verb, base))[0]


def test_the_loop_reports_a_record_that_comes_before_its_bytes() -> None:
    def act(store: ObjectStore) -> None:
        done_store = prepared(SAVE_BESIDE)
        SAVE_BESIDE.act(done_store)
        # The last first: what a writer would do that commits before it has written.
        for key, data in sorted(done_store.contents().items(), reverse=True):
            with suppress(ObjectExists):
                store.create(key, data)

    verb = Verb("a save in the wrong order", lambda store: None, act)
    run = next(run for run in iter_runs(verb, Fault.CRASH, MemoryStore) if run.met.key.startswith("packs/"))
    assert find_wrong(run, State(), State()) != []
