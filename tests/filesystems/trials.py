"""Trials that every filesystem must pass, run by test_filesystems.py with pytest's temporary directories there.

Run it by hand as `pytest tests/filesystems/trials.py --basetemp=/some/mounted/place/tmp`.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict
from itertools import count
from pathlib import Path
from typing import Final

import pytest

from holdfast.errors import StoreError
from holdfast.objects.local.local_store import LocalStore
from holdfast.objects.protocol import ObjectStore
from holdfast.repo.names.snapshots import delete_snapshot
from holdfast.repo.upkeep.collect import Rules, collect
from holdfast.testing.faults import Fault
from holdfast.testing.store_contract import StoreContract
from tests.faults.fault_loop import find_wrong, iter_runs
from tests.faults.scenario import (
    DELETE,
    FIRST,
    FIRST_SAVE,
    MOVE_TAG,
    OVERWRITE,
    SECOND,
    Verb,
    check_store,
    holds,
    random_bytes,
    read_state,
    save_content,
)
from tests.faults.test_kill import Supervisor, kill_often
from tests.faults.unsynced import UnsyncedFiles
from tests.filesystems.features import probe_features
from tests.filesystems.places import needs_single_writer, open_place
from tests.kit.patience import PATIENCE_S

_STEP: Final = 11
_KILLS: Final = 40
_CACHED_S: Final = 2.0
"""What FUSE shows of a file may be a second old."""
NOW: Final = Rules(min_age_s=0.0, grace_s=0.0)


def find_problems(store: ObjectStore) -> list[str]:
    return [str(finding) for finding in check_store(store) if finding.severity != "note"]


def test_features_are_found(tmp_path: Path) -> None:
    features = json.dumps(asdict(probe_features(tmp_path)))
    # For the table in the docs; pytest shows it with -rP.
    print(f"features: {features}")  # noqa: T201


class TestContract(StoreContract):
    def make_store(self, place: Path, *, read_only: bool = False) -> ObjectStore:
        return open_place(place / "store", read_only=read_only)

    def test_a_version_is_stable_and_the_same_in_listings(self, store: ObjectStore) -> None:
        """On FUSE and NFS the times of a new file may be shown as they were some seconds ago: wait until they stay."""
        if not store.traits.shared_by_hosts:
            super().test_a_version_is_stable_and_the_same_in_listings(store)
            return
        store.create("packs/one", b"first")
        end_s = time.monotonic() + PATIENCE_S
        version = ""
        while version != (version := store.stat("packs/one").version):
            assert time.monotonic() < end_s
            time.sleep(_CACHED_S)
        store.read("packs/one", limit_bytes=100)
        store.create("packs/two", b"second")
        assert store.stat("packs/one").version == version
        assert [info.version for info in store.list("packs/one")] == [version]


@pytest.mark.parametrize("fault", Fault, ids=lambda fault: fault.name.lower())
@pytest.mark.parametrize("verb", [FIRST_SAVE, OVERWRITE, DELETE, MOVE_TAG], ids=str)
def test_a_fault_leaves_the_old_or_the_new_state(verb: Verb, fault: Fault, tmp_path: Path) -> None:
    base, finished = tmp_path / "base", tmp_path / "finished"
    verb.prepare(open_place(base, files=UnsyncedFiles()))
    old = read_state(open_place(base))
    _copy(base, finished)
    verb.act(open_place(finished, files=UnsyncedFiles()))
    new = read_state(open_place(finished))
    numbers = count()

    def open_copy() -> LocalStore:
        root = tmp_path / f"copy-{next(numbers)}"
        _copy(base, root)
        return open_place(root, files=UnsyncedFiles())

    for run in iter_runs(verb, fault, open_copy, ats=count(1 + list(Fault).index(fault) % _STEP, _STEP)):
        assert find_wrong(run, old, new) == []


def _copy(base: Path, target: Path) -> None:
    if base.exists():
        shutil.copytree(base, target)


@pytest.fixture
def supervisor() -> Iterator[Supervisor]:
    supervisor = Supervisor()
    yield supervisor
    supervisor.close()


def test_whatever_a_killed_process_said_was_saved_is_there(supervisor: Supervisor, tmp_path: Path) -> None:
    num_saved, num_cut_short = kill_often(supervisor, str(tmp_path), kills=_KILLS, chance=random.Random(20))

    assert num_cut_short > _KILLS // 4
    assert num_saved > _KILLS // 4


def test_large_entries_come_back_whole_and_are_collected(tmp_path: Path) -> None:
    """Large enough for direct I/O, where the filesystem has it."""
    store = open_place(tmp_path / "store")
    content = {str(number): random_bytes(f"large {number}", (9 << 20) + 12_345 * number) for number in range(4)}
    save_content(store, "large", content)

    assert holds(read_state(open_place(tmp_path / "store")), "large", content)

    save_content(store, "small", FIRST)
    delete_snapshot(store, "large")
    collected = collect(store, NOW)
    if not store.traits.shared_by_hosts:
        assert collected.freed_bytes > 30 << 20
    assert holds(read_state(store), "small", FIRST)
    assert find_problems(store) == []


@pytest.mark.parametrize("names", [("Run", "run", "RUN"), ("a:b?c*d", 'a<b>c|d"', "con", "aux.", "nul ")])
def test_names_that_differ_only_in_case_or_are_odd_are_kept_apart(names: tuple[str, ...], tmp_path: Path) -> None:
    store = open_place(tmp_path / "store")
    saved = {}
    for number, name in enumerate(names):
        saved[name] = {"own": random_bytes(name, 700 + number)}
        save_content(store, name, saved[name])

    state = read_state(open_place(tmp_path / "store"))

    assert set(state.names) == set(names)
    assert all(holds(state, name, content) for name, content in saved.items())
    assert find_problems(store) == []


def test_a_file_that_is_deleted_while_it_is_open_is_not_listed(tmp_path: Path) -> None:
    """NFS keeps it as `.nfs...` until it is closed."""
    store = open_place(tmp_path / "store")
    save_content(store, "first", FIRST)
    (info,) = store.list("packs/")
    with open(tmp_path / "store" / info.key, "rb"):
        store.delete(info.key)
        assert store.list("packs/") == []
        left = os.listdir((tmp_path / "store" / info.key).parent)
        assert all(name.startswith(".") for name in left)
        save_content(store, "second", SECOND)
        collect(store, NOW)

    delete_snapshot(store, "first")
    assert holds(read_state(store), "second", SECOND)


def test_more_than_one_writer_is_refused_where_names_cannot_be_created_exclusively(tmp_path: Path) -> None:
    if not needs_single_writer(tmp_path):
        save_content(LocalStore(tmp_path / "store"), "x", FIRST)
        return
    with pytest.raises(StoreError, match="pass single_writer=True if there is only one"):
        save_content(LocalStore(tmp_path / "store"), "x", FIRST)
    assert LocalStore(tmp_path / "store").list("") == []
    save_content(LocalStore(tmp_path / "store", single_writer=True), "x", FIRST)
    assert find_problems(LocalStore(tmp_path / "store")) == []
