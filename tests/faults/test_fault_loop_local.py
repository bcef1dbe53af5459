"""The fault loop on a real directory: also, no temporary file is left by a failure or shown after a crash."""

from __future__ import annotations

import shutil
from itertools import count
from pathlib import Path
from typing import Final

import pytest

from holdfast.objects.local.files import PosixFiles
from holdfast.objects.local.local_store import LocalStore
from holdfast.objects.local.upload import TEMP_PREFIX
from holdfast.testing.faults import Fault
from tests.faults.fault_loop import Run, find_wrong, iter_runs
from tests.faults.scenario import DELETE, FIRST_SAVE, MOVE_TAG, OVERWRITE, SAVE_ENCODED, Verb, read_state
from tests.kit.thinning import keep

# A whole loop runs on the memory store; here each fault takes every 14th operation, the next fault another, and the
# next verb others; in the slow tests every seventh.
_STEP: Final = 14
VERBS: Final = (FIRST_SAVE, OVERWRITE, SAVE_ENCODED, DELETE, MOVE_TAG)
_CRASHES: Final = frozenset({Fault.CRASH, Fault.CRASH_AFTER, Fault.TORN_WRITE})


class UnsyncedFiles(PosixFiles):
    """The calls of the kernel, but durability costs nothing: no power is lost here."""

    def sync_file(self, handle: int) -> None:
        return

    def sync_directory(self, path: str) -> None:
        return


def open_local(root: Path) -> LocalStore:
    return LocalStore(root, files=UnsyncedFiles())


def find_temps(root: Path) -> list[str]:
    return [path.name for path in root.rglob(TEMP_PREFIX + "*")]


def is_fault_of_the_harness(run: Run) -> bool:
    """Tell whether the fault itself keeps a temporary file: the abort is not performed, or its handle is lost."""
    return (
        run.met.name == "abort"
        or run.fault is Fault.FOR_GOOD
        or (run.met.name, run.fault.name)
        == (
            "upload",
            "REPLY_LOST",
        )
    )


@pytest.mark.parametrize("fault", Fault, ids=lambda fault: fault.name.lower())
@pytest.mark.parametrize("verb", VERBS, ids=str)
@pytest.mark.parametrize("step", keep([_STEP, 7], _STEP), ids=["thinned", "half"])
def test_a_fault_leaves_the_old_or_the_new_state_and_no_file_in_sight(
    verb: Verb, fault: Fault, step: int, tmp_path: Path
) -> None:
    base, finished = tmp_path / "base", tmp_path / "finished"
    verb.prepare(open_local(base))
    old = read_state(open_local(base))
    copy(base, finished)
    verb.act(open_local(finished))
    new = read_state(open_local(finished))

    roots = [base]

    def open_copy() -> LocalStore:
        roots.append(tmp_path / f"copy-{len(roots)}")
        copy(base, roots[-1])
        return open_local(roots[-1])

    first = 1 + (list(Fault).index(fault) + len(Fault) * VERBS.index(verb)) % step
    for run in iter_runs(verb, fault, open_copy, ats=count(first, step)):
        assert [info.key for info in run.store.list("") if TEMP_PREFIX in info.key] == []
        if fault not in _CRASHES and not is_fault_of_the_harness(run):
            assert find_temps(roots[-1]) == [], run
        assert find_wrong(run, old, new) == []


def copy(base: Path, target: Path) -> None:
    if base.exists():
        shutil.copytree(base, target)


def test_a_crash_leaves_a_temporary_file_that_is_never_listed_and_harms_nobody(tmp_path: Path) -> None:
    stores: list[Path] = []

    def open_next() -> LocalStore:
        stores.append(tmp_path / str(len(stores)))
        return open_local(stores[-1])

    runs = list(iter_runs(FIRST_SAVE, Fault.CRASH, open_next))
    left = [(run, root) for run, root in zip(runs, stores, strict=False) if find_temps(root)]
    assert {run.met.name for run, _ in left} == {"append", "commit"}
    for run, _ in left:
        assert all(TEMP_PREFIX not in info.key for prefix in ("", "packs/") for info in run.store.list(prefix))
        FIRST_SAVE.act(run.store)


@pytest.mark.parametrize("fault", [Fault.ONCE, Fault.REPLY_LOST, Fault.NO_SPACE], ids=lambda fault: fault.name.lower())
def test_no_failure_leaves_a_temporary_file_behind(fault: Fault, tmp_path: Path) -> None:
    stores: list[Path] = []

    def open_next() -> LocalStore:
        stores.append(tmp_path / str(len(stores)))
        return open_local(stores[-1])

    runs = zip(iter_runs(FIRST_SAVE, fault, open_next), stores, strict=False)
    assert [str(run) for run, root in runs if find_temps(root) and not is_fault_of_the_harness(run)] == []
