"""A writer and a collector simulated step by step: marked files are not reused, and a fenced save commits nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import pytest

from holdfast.errors import CommitUnknown, HoldfastError, LeaseLost, NotFound
from holdfast.objects.memory import MemoryStore, VirtualClock
from holdfast.objects.protocol import ObjectStore
from holdfast.repo.format.layout import LEASES, MANIFESTS, MARKS, PACKS, generation_key, pack_key
from holdfast.repo.format.manifest import read_manifest
from holdfast.repo.format.record import encode_record
from holdfast.repo.handle.repository import open_repository
from holdfast.repo.names.generations import iter_stems
from holdfast.repo.names.leases import RENEW_S
from holdfast.repo.names.roots import read_leases
from holdfast.repo.names.snapshots import read_snapshot
from holdfast.repo.upkeep.collect import Rules, collect
from holdfast.repo.write.writer import Request, save
from holdfast.testing.faults import Fault, FaultyStore
from tests.faults.hooked_store import Hook, HookedStore, nth, once
from tests.faults.scenario import Content, check_store, random_bytes, read_content, read_state, save_content

OLD: Content = {"shared": random_bytes("shared", 6_000), "own": random_bytes("old", 2_000), "inline": b"old"}
NEW: Content = {"shared": OLD["shared"], "own": random_bytes("new", 3_000), "inline": b"new"}


def keys(store: ObjectStore, prefix: str) -> list[str]:
    return [info.key for info in store.list(prefix)]


def used_packs(store: ObjectStore, name: str) -> set[str]:
    return {pack_key(pack_id) for pack_id in read_manifest(store, read_snapshot(store, name).manifest).packs}


def mark(store: ObjectStore, marked: list[str], *, mark_id: str = "collector") -> None:
    fields = {"kind": "mark", "keys": marked, "write_id": mark_id, "time": store.clock()}
    store.create(MARKS + mark_id, encode_record(fields), durable=False)


def fence(store: ObjectStore) -> None:
    """Take the next generation of every lease, as a collector does that has waited long enough."""
    for stem, generations in list(iter_stems(store, LEASES)):
        generation = generations[-1] + 1
        fields = {
            "kind": "lease", "lease": stem.removeprefix(LEASES), "state": "fenced", "write_id": "collector",
            "generation": generation, "purpose": "collect", "host": "", "pid": 0, "time": store.clock(),
        }  # fmt: skip
        store.create(generation_key(stem, generation), encode_record(fields))


@pytest.fixture
def store() -> MemoryStore:
    """Return a store that holds `a`, in one pack."""
    store = MemoryStore()
    save_content(store, "a", OLD)
    return store


def is_clean(store: ObjectStore) -> bool:
    return all(finding.severity == "note" for finding in check_store(store))


def test_a_pack_that_is_marked_is_not_relied_on(store: MemoryStore) -> None:
    mark(store, keys(store, PACKS))
    save_content(store, "b", NEW)
    assert used_packs(store, "a").isdisjoint(used_packs(store, "b"))


def test_without_a_mark_it_is_relied_on(store: MemoryStore) -> None:
    save_content(store, "b", NEW)
    assert used_packs(store, "a") < used_packs(store, "b")


@pytest.mark.parametrize("moment", ["before the manifest", "after the manifest", "after the renewal"])
def test_what_is_marked_after_it_was_chosen_is_written_anew(store: MemoryStore, moment: str) -> None:
    old_packs = keys(store, PACKS)

    def plant() -> None:
        mark(store, old_packs)

    hooks: dict[str, HookedStore] = {
        "before the manifest": HookedStore(store, before=once("create", "manifests/", plant)),
        "after the manifest": HookedStore(store, after=once("create", "manifests/", plant)),
        "after the renewal": HookedStore(store, before=nth(2, "list", MARKS, plant)),
    }
    save_content(hooks[moment], "b", NEW)
    for key in old_packs:
        store.delete(key)
    assert used_packs(store, "b").isdisjoint(old_packs)
    assert read_content(store, read_snapshot(store, "b")) == NEW


def test_marks_that_keep_coming_are_all_heeded(store: MemoryStore) -> None:
    for name in ("c", "d"):
        save_content(store, name, {"own": random_bytes(name, 1_000)})
    everything = {**NEW, "c": random_bytes("c", 1_000), "d": random_bytes("d", 1_000)}
    left = keys(store, PACKS)
    marked: list[str] = []

    def plant(name: str, key: str) -> None:
        if name == "create" and key.startswith("manifests/") and left:
            marked.append(left.pop())
            mark(store, marked[-1:], mark_id=f"collector-{len(left)}")

    save_content(HookedStore(store, before=plant), "b", everything)
    assert len(marked) == 3
    assert used_packs(store, "b").isdisjoint(marked)
    assert read_content(store, read_snapshot(store, "b")) == everything


@pytest.mark.parametrize("damage", [b"", b"\0" * 300, b"holdfast-record damaged" + bytes(200)])
def test_a_damaged_mark_neither_stops_a_save_nor_is_taken_for_none(store: MemoryStore, damage: bytes) -> None:
    mark(store, [])
    whole = store.contents()[MARKS + "collector"]
    store.delete(MARKS + "collector")
    # A mark that was cut short never counted; any other damage may hide what it meant.
    store.create(MARKS + "collector", damage or whole[:-20])
    save_content(store, "b", NEW)
    assert read_content(store, read_snapshot(store, "b")) == NEW
    assert used_packs(store, "a").isdisjoint(used_packs(store, "b")) == bool(damage)


def test_a_record_of_another_kind_among_the_marks_is_reported(store: MemoryStore) -> None:
    store.create(MARKS + "other", encode_record({"kind": "lease"}))
    assert [finding.key for finding in check_store(store) if finding.severity != "note"] == [MARKS + "other"]


def test_who_is_fenced_before_the_renewal_commits_nothing(store: MemoryStore) -> None:
    old = read_state(store)
    hooked = HookedStore(store, before=once("create", "manifests/", lambda: fence(store)))
    for overwritten in ("a", "b"):
        with pytest.raises(LeaseLost):
            save_content(hooked, overwritten, NEW, overwrite=True)
        assert read_state(store) == old
        hooked.before = once("create", "manifests/", lambda: fence(store))


def test_who_is_fenced_after_the_commit_has_saved_if_all_is_there(store: MemoryStore) -> None:
    hook = once("create", "snapshots/", lambda: fence(store))
    save_content(HookedStore(store, after=hook), "b", NEW)
    assert hook.has_acted
    assert read_content(store, read_snapshot(store, "b")) == NEW
    assert is_clean(store)


@dataclass(frozen=True)
class Taken:
    """What a collector does to a pack that the fenced save uses."""

    name: str
    act: Callable[[ObjectStore, str], None]

    def __str__(self) -> str:
        return self.name


def mark_and_delete(store: ObjectStore, key: str) -> None:
    mark(store, [key])
    store.delete(key)


TAKEN = [
    Taken("marked", lambda store, key: mark(store, [key])),
    Taken("deleted", lambda store, key: store.delete(key)),
    Taken("marked and deleted", mark_and_delete),
]


NOTHING_TAKEN = Taken("nothing taken", lambda _store, _key: None)


def fence_and_take(store: MemoryStore, taken: Taken, prefix: str) -> HookedStore:
    """Fence the save just after its commit and take what it wrote last below `prefix`."""
    before = set(keys(store, prefix))

    def act() -> None:
        fence(store)
        taken.act(store, next(key for key in keys(store, prefix) if key not in before))

    return HookedStore(store, after=once("create", "snapshots/", act))


@pytest.mark.parametrize("prefix", ["packs/", "manifests/"])
@pytest.mark.parametrize("taken", TAKEN, ids=str)
@pytest.mark.parametrize("name", ["a", "b"])
def test_who_is_fenced_and_has_lost_something_withdraws(
    store: MemoryStore, name: str, taken: Taken, prefix: str
) -> None:
    old = read_state(store)
    with pytest.raises(LeaseLost):
        save_content(fence_and_take(store, taken, prefix), name, NEW, overwrite=True)
    assert read_state(store) == old
    assert is_clean(store)


def test_two_collectors_at_once_make_no_difference(store: MemoryStore) -> None:
    old = read_state(store)

    def act() -> None:
        fence(store)
        fence(store)
        store.delete(keys(store, PACKS)[-1])
        store.delete(keys(store, PACKS)[0])

    with pytest.raises(LeaseLost):
        save_content(HookedStore(store, after=once("create", "snapshots/", act)), "b", NEW)
    assert "b" not in old.names
    with pytest.raises(NotFound):
        read_snapshot(store, "b")


@pytest.mark.parametrize("fault", [Fault.ONCE, Fault.FOR_GOOD, Fault.REPLY_LOST, Fault.NO_SPACE])
@pytest.mark.parametrize("taken", [NOTHING_TAKEN, *TAKEN], ids=str)
def test_a_fault_while_a_fenced_save_looks_around_is_never_passed_off_as_nothing(
    store: MemoryStore, taken: Taken, fault: Fault
) -> None:
    base = store
    old = read_state(base)
    for at in range(1, 200):
        clean = base.clone()
        hooked = fence_and_take(clean, taken, PACKS)
        faulty = FaultyStore(hooked, fault=fault, at=at)
        try:
            save_content(faulty, "b", NEW)
            assert read_content(clean, read_snapshot(clean, "b")) == NEW
        except CommitUnknown:
            pass
        except HoldfastError:
            assert read_state(clean) == old, (at, faulty.log[at - 1])
        if len(faulty.log) < at:
            return
    pytest.fail("the loop did not end")


class SlowSource:
    """Bytes whose reading takes time by the store's clock."""

    def __init__(self, name: str, data: bytes, clock: VirtualClock, seconds: float) -> None:
        self.name = name
        self.spec = None
        self.note = None
        self.alias = 0
        self.cuts = ()
        self.item_bytes = 1
        self.size_bytes = len(data)
        self._data = data
        self._clock = clock
        self._seconds = seconds

    def read(self, start: int, stop: int) -> memoryview:
        self._clock.advance(self._seconds)
        return memoryview(self._data)[start:stop]


def count_shown(store: MemoryStore, clock: VirtualClock, *, saves: int) -> list[float]:
    """Save 40 MiB slowly; return when a generation of its lease was shown by the last save."""
    shown: list[float] = []

    def note(name: str, key: str) -> None:
        if name == "create" and key.startswith(LEASES):
            shown.append(clock.now())

    data = random_bytes("large", 40 << 20)
    for number in range(saves):
        shown.clear()
        source = SlowSource("large", data, clock, RENEW_S / 8)
        save(open_repository(HookedStore(store, before=note), create=True), Request(f"n-{number}", [source]))
    return shown


@pytest.mark.parametrize("saves", [1, 2], ids=["all is new", "all is reused"])
def test_a_save_that_moves_bytes_keeps_showing_that_it_lives(saves: int) -> None:
    clock = VirtualClock()
    shown = count_shown(MemoryStore(clock=clock), clock, saves=saves)
    gaps = [after - before for before, after in pairwise(shown)]
    # Up to four batches of 8 MiB are read ahead, so the clock moves in steps of half a minute or more.
    assert max(gaps) <= 6 * RENEW_S
    assert len(shown) > 3


def test_no_lease_is_left_after_a_save(store: MemoryStore) -> None:
    save_content(store, "b", NEW)
    assert keys(store, LEASES) == []


def fail_at(prefix: str) -> Hook:
    def act() -> None:
        raise KeyboardInterrupt

    return once("create", prefix, act)


@pytest.mark.parametrize("prefix", ["manifests/", "index/"])
def test_a_save_that_fails_gives_its_lease_back(store: MemoryStore, prefix: str) -> None:
    with pytest.raises(KeyboardInterrupt):
        save_content(HookedStore(store, before=fail_at(prefix)), "b", NEW)
    assert keys(store, LEASES) == []


def test_a_save_that_is_interrupted_while_it_commits_keeps_its_lease_and_its_files(store: MemoryStore) -> None:
    """The record may still arrive, and what it needs must be there then."""
    with pytest.raises(KeyboardInterrupt):
        save_content(HookedStore(store, before=fail_at("snapshots/")), "b", NEW)
    files = keys(store, MANIFESTS) + keys(store, PACKS)
    collect(store, Rules(min_age_s=0.0))
    assert [lease.state for lease in read_leases(store).values()] == ["live"]
    assert keys(store, MANIFESTS) + keys(store, PACKS) == files
    assert len(files) == 4


@pytest.mark.parametrize("fault", [Fault.ONCE, Fault.REPLY_LOST, Fault.NO_SPACE], ids=lambda fault: fault.name.lower())
def test_whatever_fails_a_collector_need_not_wait_for_a_save_that_is_over(store: MemoryStore, fault: Fault) -> None:
    base = store
    left = []
    for at in range(1, 200):
        clean = base.clone()
        faulty = FaultyStore(clean, fault=fault, at=at)
        try:
            save_content(faulty, "b", NEW)
        except CommitUnknown:
            continue  # the commit may still arrive, and needs its lease until then
        except HoldfastError:
            left += [(at, faulty.log[at - 1], key) for key in keys(clean, LEASES)]
        if len(faulty.log) < at:
            break
    assert left == []
