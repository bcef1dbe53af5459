"""Power is lost at every mutating call: what had returned is there, every name is old or new, and no fsync is idle."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import pytest

from holdfast.errors import NotAStore, NotFound
from holdfast.objects.local.local_store import LocalStore
from holdfast.repo.format.chunk import RAW
from holdfast.repo.handle.config import read_config
from holdfast.repo.names.snapshots import read_snapshot, set_tag
from holdfast.repo.read.any_copy import iter_footers
from holdfast.repo.upkeep.collect import collect
from holdfast.testing.faults import Crashed
from tests.faults.disk_scenario import (
    ENCODE,
    OTHER,
    ROOT,
    SMALL,
    WORK,
    Work,
    find_wrong,
    iter_survivors,
    open_disk,
    prepared_disk,
)
from tests.faults.scenario import State, read_state, save_content
from tests.faults.thinning import THINNED, find_first
from tests.faults.troubled_files import TroubledFiles
from tests.kit.encoded import halves
from tests.kit.power import SimulatedDisk, SyncSite


@pytest.mark.parametrize("work", WORK, ids=str)
@THINNED
def test_power_lost_at_any_call_leaves_the_old_or_the_new_state(work: Work, step: int) -> None:
    rehearsal = prepared_disk(work)
    old = read_state(open_disk(rehearsal))
    files = TroubledFiles(rehearsal)
    work.act(LocalStore(ROOT, files=files))
    new = read_state(open_disk(rehearsal))
    assert old != new
    # The directories and the config come first; a place that has become a store holds nothing yet.
    between = [State(is_store=True)] if not old.is_store else []

    wrong = []
    for stop_at in range(find_first(WORK.index(work), step), files.mutations + 1, step):
        disk = prepared_disk(work)
        try:
            work.act(LocalStore(ROOT, files=TroubledFiles(disk, at=stop_at)))
            allowed = [new]  # housekeeping came after the moment at which it was done
        except Crashed:
            allowed = [old, new, *between]
        for number, survivor in enumerate(iter_survivors(disk, seeds=3)):
            wrong += [f"at call {stop_at}, survivor {number}: {why}" for why in find_wrong(survivor, allowed)]
    assert wrong == []


@pytest.mark.parametrize("work", WORK, ids=str)
def test_what_returned_survives_the_loss_of_power(work: Work) -> None:
    disk = prepared_disk(work)
    work.act(open_disk(disk))
    new = read_state(open_disk(disk))
    assert [why for survivor in iter_survivors(disk, seeds=12) for why in find_wrong(survivor, [new])] == []
    assert disk.open_handles == 0


def find_undeclared(disk: SimulatedDisk) -> list[str]:
    """Return the packs with an encoded chunk, if the config does not declare the codec."""
    store = open_disk(disk)
    config = read_config(store)
    if config is not None and config.has_codec:
        return []
    return [
        pack_id
        for pack_id, footer in iter_footers(store)
        if any(chunk.location.codec != RAW for chunk in footer.chunks)
    ]


def save_until(disk: SimulatedDisk, stop_at: int) -> None:
    with suppress(Crashed):
        ENCODE.act(LocalStore(ROOT, files=TroubledFiles(disk, at=stop_at)))


def test_a_compressed_chunk_never_outlives_the_declaration_of_its_codec() -> None:
    files = TroubledFiles(prepared_disk(ENCODE))
    ENCODE.act(LocalStore(ROOT, files=files))
    wrong = []
    for stop_at in range(1, files.mutations + 1):
        disk = prepared_disk(ENCODE)
        save_until(disk, stop_at)
        wrong += [(stop_at, pack) for survivor in iter_survivors(disk, seeds=3) for pack in find_undeclared(survivor)]
        # Another writer, before power is lost: it may find a declaration that is not durable yet.
        save_content(open_disk(disk), "d", {"weights": halves(6_000, 3)}, compression="small")
        wrong += [(stop_at, pack) for survivor in iter_survivors(disk, seeds=3) for pack in find_undeclared(survivor)]
    assert wrong == []


def live(disk: SimulatedDisk) -> list[str]:
    """Use each kind of record once, and lose power after each step; return what was then wrong."""
    store = open_disk(disk)
    wrong = []
    for act in (
        lambda: save_content(store, "a", SMALL),
        lambda: save_content(store, "a", OTHER, overwrite=True),
        lambda: set_tag(store, "t", read_snapshot(store, "a")),
    ):
        act()
        wrong += find_wrong(disk.power_loss(), [read_state(store)])
    return wrong


def list_sites() -> list[SyncSite]:
    disk = SimulatedDisk(root=ROOT)
    assert live(disk) == []
    return sorted(disk.syncs, key=str)


def test_the_protocol_syncs_files_and_directories_of_what_must_last_and_of_nothing_else() -> None:
    tops = ("config", "manifests", "packs", "snapshots", "tags")
    wanted = {SyncSite("file", top) for top in tops} | {SyncSite("directory", top) for top in (*tops, ".", "..")}
    assert set(list_sites()) == wanted | {SyncSite("directory", "snapshots/*")}


@pytest.mark.parametrize("site", list_sites(), ids=str)
def test_without_any_one_fsync_something_is_lost(site: SyncSite) -> None:
    assert live(SimulatedDisk(root=ROOT, ignore=[site])) != []


def test_a_small_save_costs_six_fsyncs_and_none_for_leases_marks_and_index() -> None:
    disk = prepared_disk(WORK[2])
    before = disk.syncs
    save_content(open_disk(disk), "b", OTHER)
    files = [SyncSite("file", top) for top in ("packs", "manifests", "snapshots")]
    directories = [SyncSite("directory", place) for place in ("packs", "manifests", "snapshots/*")]
    assert disk.syncs - before == dict.fromkeys((*files, *directories), 1)


Between = Callable[[SimulatedDisk], None]
"""What happens between the death of a process and the work of the next one."""


def _nothing(_disk: SimulatedDisk) -> None:
    return


def _collect(disk: SimulatedDisk) -> None:
    """Collect alone: the leases of dead processes are removed, so that what they have committed counts as settled."""
    disk.close_all()
    with suppress(NotAStore):  # there may be no store yet
        collect(open_disk(disk))


def save_after_a_death(work: Work, stop_at: int, between: Between) -> SimulatedDisk | None:
    """Let one process die and the next do the same; None if there was nothing left to do."""
    disk = prepared_disk(work)
    with pytest.raises(Crashed):
        work.act(LocalStore(ROOT, files=TroubledFiles(disk, at=stop_at)))
    between(disk)
    try:
        work.act(open_disk(disk))
    except (NotFound, NotAStore):
        return None
    return disk


@pytest.mark.parametrize("between", [_nothing, _collect])
@pytest.mark.parametrize("work", WORK, ids=str)
@THINNED
def test_what_returned_survives_even_if_it_builds_on_what_a_dead_process_left(
    work: Work, between: Between, step: int
) -> None:
    rehearsal = prepared_disk(work)
    files = TroubledFiles(rehearsal)
    work.act(LocalStore(ROOT, files=files))
    new = read_state(open_disk(rehearsal))
    wrong = []
    for stop_at in range(find_first(WORK.index(work) + (between is _collect), step), files.mutations + 1, step):
        disk = save_after_a_death(work, stop_at, between)
        if disk is not None:
            wrong += [f"after a death at call {stop_at}: {why}" for why in find_wrong(disk.power_loss(), [new])]
    assert wrong == []
