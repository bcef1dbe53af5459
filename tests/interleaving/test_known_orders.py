"""Orders of three and more processes that an exploration of pairs does not reach, each played by hand."""

from __future__ import annotations

import pytest

from holdfast.errors import LeaseLost, NameInUse
from holdfast.objects.memory import MemoryStore
from holdfast.repo.format.layout import LEASES, PACKS, SNAPSHOTS
from holdfast.repo.names.roots import LeaseView, is_settled, read_leases
from holdfast.repo.names.snapshots import delete_snapshot, read_snapshot
from holdfast.repo.upkeep.collect import collect, fence
from tests.faults.hooked_store import HookedStore, nth, once
from tests.faults.scenario import save_content
from tests.interleaving.scenes import COLLECT, DEAD, EAGER, NEW, OLD, OTHER, OVERWRITE, OVERWRITE_TOO
from tests.interleaving.schedule import Stretch, direct
from tests.interleaving.theatre import Theatre
from tests.interleaving.verdict import iter_left, read_held


@pytest.fixture
def store() -> MemoryStore:
    """Return a store that holds `old`, and a dead pack."""
    store = MemoryStore()
    save_content(store, "gone", DEAD)
    save_content(store, "old", OLD)
    delete_snapshot(store, "gone")
    return store


@pytest.fixture
def theatre(store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> Theatre:
    return Theatre(store, monkeypatch)


def test_a_fence_that_comes_while_a_lease_is_removed_does_not_make_its_save_look_fenced(store: MemoryStore) -> None:
    """A collector saw one generation; the owner has shown two more since, and removed the lower ones."""
    seen: list[LeaseView] = []

    def look() -> None:
        seen.extend(read_leases(store).values())

    def fence_late() -> None:
        assert not fence(store, seen[0])

    hooked = HookedStore(store, before=nth(3, "delete", LEASES, fence_late), after=once("create", LEASES, look))
    save_content(hooked, "old", NEW, overwrite=True)
    assert is_settled(store, read_snapshot(store, "old"))
    assert list(iter_left(store)) == []
    assert read_leases(store) == {}


def test_two_fences_that_come_when_a_lease_is_gone_do_not_make_its_save_look_fenced(store: MemoryStore) -> None:
    seen: list[LeaseView] = []

    def look() -> None:
        seen.extend(read_leases(store).values())

    hooked = HookedStore(store)
    hooked.after = lambda name, key: look() if name == "create" and key.startswith(LEASES) else None
    save_content(hooked, "old", NEW, overwrite=True)
    first, second = seen[:2]

    def fence_too() -> None:
        fence(store, second)

    late = HookedStore(store, after=once("create", LEASES, fence_too))
    fence(late, first)
    assert is_settled(store, read_snapshot(store, "old"))
    collect(store, EAGER)
    assert read_leases(store) == {}


def test_a_doomed_save_that_was_overtaken_does_not_look_as_if_it_had_ended_well(theatre: Theatre) -> None:
    """If the one that overtook it is withdrawn, what comes back is what was there before both."""
    first, second, *collectors = range(5)
    run = direct(
        theatre.play([OVERWRITE, OVERWRITE_TOO, COLLECT, COLLECT, COLLECT]),
        [
            Stretch(first, "create", SNAPSHOTS),
            Stretch(collectors[0]),  # fences the first and takes its bytes
            Stretch(first, "list", SNAPSHOTS),  # it commits, and has not looked again
            Stretch(second, "create", SNAPSHOTS),
            Stretch(collectors[1]),  # fences the second and takes its bytes, too
            Stretch(second, "create", LEASES),  # it commits
            Stretch(first),  # it finds that it was overtaken
            Stretch(collectors[2]),
            Stretch(second),
        ],
    )
    assert [type(outcome.error) for outcome in run.outcomes[:2]] == [NameInUse, LeaseLost]
    assert read_held(theatre.store)["old"] == OLD


def test_a_save_that_finds_the_record_it_replaces_collected_is_told_that_the_name_changed(theatre: Theatre) -> None:
    overwriting, changing, collector = range(3)
    run = direct(
        theatre.play([OVERWRITE, OVERWRITE_TOO, COLLECT]),
        [
            Stretch(overwriting, "commit", PACKS),
            # It looks for what a withdrawal would bring back.
            Stretch(overwriting, "read", SNAPSHOTS),
            Stretch(changing),
            Stretch(collector),
            Stretch(overwriting),
        ],
    )
    assert isinstance(run.outcomes[overwriting].error, (NameInUse, LeaseLost))
    assert read_held(theatre.store)["old"] == OTHER


def test_the_index_keeps_a_pack_that_is_sealed_while_it_is_tidied(store: MemoryStore) -> None:
    def save() -> None:
        save_content(store, "new", NEW)

    for count in range(1, 5):
        collect(HookedStore(store, after=nth(count, "list", PACKS, save)), EAGER)
    assert list(iter_left(store)) == []
