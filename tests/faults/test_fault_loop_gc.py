"""Every operation of gc, prune, repack, repair and copy fails in every way: names stay, and a repetition succeeds."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Final

import pytest

from holdfast.errors import HoldfastError
from holdfast.objects.local.local_store import LocalStore
from holdfast.objects.memory import MemoryStore
from holdfast.objects.protocol import ObjectStore
from holdfast.repo.format.layout import INDEX, LEASES, MARKS
from holdfast.repo.format.manifest import read_manifest
from holdfast.repo.handle.repository import open_repository
from holdfast.repo.names.roots import read_leases, read_live
from holdfast.repo.names.snapshots import read_name, read_snapshot
from holdfast.repo.upkeep.collect import plan_collect
from holdfast.repo.upkeep.transfer import plan_repack
from holdfast.repo.write.existing import ExistingChunks, read_base, read_bases
from holdfast.testing.faults import Fault, FaultyStore
from tests.faults.fault_loop import Run, attempt, iter_runs
from tests.faults.gc_scenario import (
    BIG,
    COLLECT,
    COPY,
    COPY_HALF,
    GC_VERBS,
    PRUNE,
    REPACK,
    REPAIR,
    SOURCE,
    collect_all,
    copy,
)
from tests.faults.scenario import State, Verb, check_store, read_state
from tests.faults.unsynced import UnsyncedFiles
from tests.kit.thinning import keep

# A whole loop runs on the memory store; on files each fault takes every so-manieth operation.
_STEP: Final = 29
_QUICK_ON_FILES: Final = (Fault.CRASH_AFTER, Fault.TORN_WRITE, Fault.NO_SPACE)


def find_left(verb: Verb, store: ObjectStore) -> list[str]:
    """Return what a verb that has returned should have done and has not."""
    left = []
    live = read_live(store)
    if verb in (COLLECT, PRUNE):
        left += [f"dead {info.key}" for info in plan_collect(store, min_age_s=0.0).dead]
        left += [f"dead records {records}" for records in live.dead_records]
        left += [f"mark {info.key}" for info in store.list(MARKS)]
        # One that was fenced after its commit explains why what it replaced stays.
        fenced = [lease for lease in read_leases(store).values() if lease.state == "fenced"]
        left += [f"lease {lease.lease_id}" for lease in read_leases(store).values() if lease not in fenced]
    if verb is REPACK:
        left += [f"victim {pack}" for pack in plan_repack(open_repository(store), live.current).victims]
    if verb is REPAIR:
        left += [finding.message for finding in check_store(store) if finding.code in ("chunk-hit", "index-damaged")]
        left += [] if store.list(INDEX) else ["no index"]
    return left


def find_errors(store: ObjectStore) -> list[str]:
    """Return what check says that a user has to care about."""
    if not store.list(""):
        return []
    return [f"check found {finding}" for finding in check_store(store) if finding.severity == "error"]


def find_wrong(run: Run, old: State, new: State) -> list[str]:
    """Return what is wrong after a fault, and after the verb was then repeated without one."""
    between = [] if old.is_store else [State(is_store=True)]
    wrong = _judge(run.store, [new] if run.outcome == "returned" else [old, new, *between]) + find_errors(run.store)
    outcome, error = attempt(run.verb, run.store)
    if outcome != "returned":
        wrong.append(f"the next attempt ended with {outcome}: {error!r}")
    wrong += _judge(run.store, [new]) + find_left(run.verb, run.store)
    return [f"{run}: {reason}" for reason in wrong]


def _judge(store: ObjectStore, allowed: list[State]) -> list[str]:
    try:
        state = read_state(store)
    except HoldfastError as error:
        return [f"the store cannot be read: {type(error).__name__}: {error}"]
    return [] if state in allowed else [f"the state is neither old nor new: {state}"]


@dataclass(frozen=True)
class Stage:
    """A prepared store, and what is seen of it before and after the verb."""

    base: MemoryStore
    old: State
    new: State

    @classmethod
    def prepare(cls, verb: Verb) -> Stage:
        base = MemoryStore()
        verb.prepare(base)
        after = base.clone()
        verb.act(after)
        assert find_left(verb, after) == []
        assert find_errors(after) == []
        return cls(base, read_state(base), read_state(after))


@pytest.fixture(scope="module")
def stages() -> dict[str, Stage]:
    return {verb.name: Stage.prepare(verb) for verb in GC_VERBS}


@pytest.mark.parametrize("fault", Fault, ids=lambda fault: fault.name.lower())
@pytest.mark.parametrize("verb", GC_VERBS, ids=str)
@pytest.mark.parametrize("step", keep([2 * len(Fault), 1], 2 * len(Fault)), ids=["thinned", "whole"])
def test_a_fault_at_any_operation_loses_nothing_and_who_repeats_it_gets_done(
    verb: Verb, fault: Fault, step: int, stages: dict[str, Stage]
) -> None:
    stage = stages[verb.name]
    rehearsal = FaultyStore(stage.base.clone())
    verb.act(rehearsal)
    # Thinned, the seven faults take turns: together they meet each second operation; the next verb, the others.
    first = 1 + (list(Fault).index(fault) + len(Fault) * GC_VERBS.index(verb)) % step
    runs = list(iter_runs(verb, fault, stage.base.clone, ats=count(first, step)))
    assert [reason for run in runs for reason in find_wrong(run, stage.old, stage.new)] == []
    assert [run.at for run in runs] == list(range(first, len(rehearsal.log) + 1, step))


def test_the_verbs_meet_every_operation_of_a_store(stages: dict[str, Stage]) -> None:
    met = set()
    for verb in GC_VERBS:
        store = FaultyStore(stages[verb.name].base.clone())
        verb.act(store)
        met |= {operation.name for operation in store.log}
    assert met >= {"create", "upload", "append", "commit", "read", "read_into", "list", "stat", "delete", "hold"}
    assert "remove_debris" in met


def test_the_stages_hold_what_the_verbs_are_for(stages: dict[str, Stage]) -> None:
    garbage = stages["collect"].base
    live = read_live(garbage)
    assert len(plan_collect(garbage, min_age_s=0.0).dead) >= 2
    assert live.superseded
    assert live.dead_records
    assert len(garbage.list(MARKS)) == 2
    assert len(read_leases(garbage)) == 3
    assert stages["prune and collect"].new.names.keys() < stages["prune and collect"].old.names.keys()
    sparse = stages["repack"].base
    assert len(plan_repack(open_repository(sparse), read_live(sparse).current).victims) == 1
    codes = {finding.code for finding in check_store(stages["repair"].base)}
    assert codes >= {"chunk-damaged", "chunk-hit", "record-torn"}


def count_missing_bytes(store: ObjectStore) -> int:
    """Return how many bytes of what is to be copied no indexed pack of `store` holds."""
    snapshot = read_snapshot(SOURCE, "run/1")
    target = open_repository(store, create=True)
    if target.config is None:
        bases = []
    else:
        bases = read_bases(store, [read_name(store, "run/1").snapshot, read_base(target, "run/1")])
    target.index.refresh()
    holdings = ExistingChunks(target, bases, avoid=frozenset())
    missing = {}
    for entry in read_manifest(SOURCE, snapshot.manifest).iter_entries():
        for ref in entry.chunks:
            found = holdings.find(ref.digest, ref.size_bytes)
            if ref.location and not any(holdings.is_copy(at, ref.digest, ref.size_bytes) for at in found):
                missing[ref.digest] = ref.size_bytes
    return sum(missing.values())


def count_inline_bytes() -> int:
    """Return how many of the bytes to be copied are inline in the manifest."""
    entries = read_manifest(SOURCE, read_snapshot(SOURCE, "run/1").manifest).iter_entries()
    return sum(ref.size_bytes for entry in entries for ref in entry.chunks if ref.location is None)


@pytest.mark.parametrize("fault", Fault, ids=lambda fault: fault.name.lower())
@pytest.mark.parametrize("verb", [COPY, COPY_HALF], ids=str)
def test_a_copy_that_was_cut_moves_only_what_is_missing_when_it_is_repeated(
    verb: Verb, fault: Fault, stages: dict[str, Stage]
) -> None:
    whole, inline = count_missing_bytes(stages[verb.name].base), count_inline_bytes()
    moved = []
    for run in iter_runs(verb, fault, stages[verb.name].base.clone, ats=count(1, 3)):
        missing = count_missing_bytes(run.store)
        moved.append(copy(run.store))
        # The new manifest holds the small values again, unless the snapshot is there already.
        assert moved[-1] == missing + inline or (moved[-1] == missing == 0), run
        assert copy(run.store) == 0
    # Cut early, all of it moves again; cut late, nothing does.
    assert max(moved) == whole + inline > inline
    assert whole >= len(BIG["own"])
    assert min(moved) == 0


def test_repeating_everything_in_turn_comes_to_rest(stages: dict[str, Stage]) -> None:
    store = stages["collect"].base.clone()
    for verb in (COLLECT, REPACK, COLLECT, REPAIR, COLLECT):
        verb.act(store)
    before = {info.key for info in store.list("") if not info.key.startswith(LEASES)}
    for verb in (COLLECT, REPACK, REPAIR, COLLECT):
        verb.act(store)
    assert {info.key for info in store.list("") if not info.key.startswith(LEASES)} == before


@dataclass(frozen=True, slots=True)
class FileStage:
    """A prepared directory, and what is seen of it before and after the verb."""

    base: Path
    old: State
    new: State

    @classmethod
    def prepare(cls, verb: Verb, folder: Path) -> FileStage:
        base = folder / "base"
        verb.prepare(LocalStore(base, files=UnsyncedFiles()))
        finished = copy_tree(base, folder / "finished")
        verb.act(finished)
        return cls(base, read_state(LocalStore(base)), read_state(finished))


@pytest.fixture(scope="module")
def file_stages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, FileStage]:
    return {verb.name: FileStage.prepare(verb, tmp_path_factory.mktemp("stage")) for verb in GC_VERBS}


@pytest.mark.parametrize(
    "fault",
    [pytest.param(each, marks=[] if each in _QUICK_ON_FILES else pytest.mark.slow) for each in Fault],
    ids=lambda fault: fault.name.lower(),
)
@pytest.mark.parametrize("verb", GC_VERBS, ids=str)
def test_on_files_a_fault_loses_nothing_and_gc_leaves_no_temporary_file(
    verb: Verb, fault: Fault, file_stages: dict[str, FileStage], tmp_path: Path
) -> None:
    stage = file_stages[verb.name]
    numbers = count(1)

    def open_copy() -> LocalStore:
        return copy_tree(stage.base, tmp_path / f"copy-{next(numbers)}")

    ats: Iterable[int] = count(1 + list(Fault).index(fault) % _STEP, _STEP)
    for run in iter_runs(verb, fault, open_copy, ats=ats):
        assert find_wrong(run, stage.old, stage.new) == []
        collect_all(run.store)
        root = Path(run.store.url)
        assert [path.name for path in root.rglob(".tmp-*")] == []
        assert plan_collect(run.store, min_age_s=0.0).dead == ()
        shutil.rmtree(root)


def copy_tree(base: Path, target: Path) -> LocalStore:
    if base.exists():
        shutil.copytree(base, target)
    return LocalStore(target, files=UnsyncedFiles())
