"""The latest snapshot: the same answer whether all records are read or only those that can be it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.digest import hash_bytes
from holdfast.objects.memory import MemoryStore, VirtualClock
from holdfast.repo.format.layout import ManifestRef, generation_key, new_file_id, new_lease_id, snapshot_stem
from holdfast.repo.names.latest import MAX_AHEAD_S, find_latest, read_latest
from holdfast.repo.names.listed import RecordCache, list_user_names
from holdfast.repo.names.snapshots import CommittedSnapshot, commit_snapshot, delete_snapshot, read_name
from tests.kit.rounds import count_rounds
from tests.kit.waiting_store import WaitingStore

NOW_S = 1_800_000_000.0


class Ledger:
    """A store whose clock a test sets before each record."""

    def __init__(self) -> None:
        self.clock = VirtualClock(start_s=NOW_S)
        self.store = WaitingStore(clock=self.clock)
        self.damaged: set[str] = set()
        """Names that cannot be changed any more, because their newest record is damaged."""

    def commit(self, name: str, *, stored_s: float, ahead_s: float = 0.0) -> None:
        """Store a record at one time, by the store's clock, that states a time which is ahead of that."""
        self.clock.advance(stored_s - self.clock.now())
        manifest = ManifestRef(new_file_id(new_lease_id()), hash_bytes(b""), 1)
        time_s, generation = stored_s + ahead_s, read_name(self.store, name).next_generation
        snapshot = CommittedSnapshot(name, manifest, hash_bytes(b""), time_s, 0, 0, {}, "", generation, "w")
        commit_snapshot(self.store, snapshot)

    def delete(self, name: str, *, stored_s: float) -> None:
        self.clock.advance(stored_s - self.clock.now())
        if read_name(self.store, name).snapshot:
            delete_snapshot(self.store, name)

    def spoil(self, name: str, change: Callable[[bytes], bytes]) -> None:
        """Replace the newest record of a name by what `change` makes of it."""
        generation = read_name(self.store, name).next_generation - 1
        key = generation_key(snapshot_stem(name), max(generation, 0))
        if key in self.store.contents():
            data = change(self.store.read(key, limit_bytes=1 << 20))
            self.store.delete(key)
            self.store.create(key, data)

    def find(self, prefix: str, cache: RecordCache | None = None) -> str:
        found = read_latest(self.store, prefix, RecordCache() if cache is None else cache)
        return found.name if found else ""

    def expect(self, prefix: str) -> str:
        found = find_latest(list_user_names(self.store, prefix, RecordCache()))
        return found.name if found else ""


@pytest.fixture
def ledger() -> Ledger:
    return Ledger()


def count_reads(ledger: Ledger, prefix: str, cache: RecordCache | None = None) -> tuple[str, int, int]:
    """Return the latest name, and how many rounds and records that took."""
    with count_rounds(MemoryStore, "read") as rounds:
        name = ledger.find(prefix, cache)
    return name, rounds.greatest, len(rounds.requests)


def test_a_store_without_snapshots_has_no_latest(ledger: Ledger) -> None:
    assert ledger.find("") == ""
    ledger.commit("other/1", stored_s=NOW_S)
    assert ledger.find("run/") == ""


def test_the_latest_of_many_is_found_in_one_round_of_few_records(ledger: Ledger) -> None:
    for step in range(300):
        ledger.commit(f"run/{step}", stored_s=NOW_S + 60 * step)
    name, rounds, records = count_reads(ledger, "run/")
    assert (name, rounds) == ("run/299", 1)
    assert records <= MAX_AHEAD_S / 60 + 2


def test_the_order_of_names_decides_between_equal_times(ledger: Ledger) -> None:
    for step in (9, 100, 10):
        ledger.commit(f"run/{step}", stored_s=NOW_S)
    assert ledger.find("run/") == ledger.expect("run/") == "run/100"


def test_a_clock_that_is_behind_does_not_hide_a_later_commit(ledger: Ledger) -> None:
    ledger.commit("run/later", stored_s=NOW_S)
    for step in range(20):
        ledger.commit(f"run/{step}", stored_s=NOW_S + 3600 + step, ahead_s=-7200)
    assert ledger.find("run/") == ledger.expect("run/") == "run/later"


def test_a_clock_that_is_ahead_by_what_servers_accept_does_not_hide_a_later_commit(ledger: Ledger) -> None:
    ledger.commit("run/ahead", stored_s=NOW_S, ahead_s=MAX_AHEAD_S)
    for step in range(200):
        ledger.commit(f"run/{step}", stored_s=NOW_S + 4 * step)
    assert ledger.find("run/") == ledger.expect("run/") == "run/ahead"


def test_if_a_recent_record_is_from_the_future_all_records_are_read(ledger: Ledger) -> None:
    ledger.commit("run/next-year", stored_s=NOW_S, ahead_s=3e7)
    for step in range(100):
        ledger.commit(f"run/{step}", stored_s=NOW_S + 1e5 + 60 * step, ahead_s=1e6 if step == 99 else 0.0)
    assert ledger.find("run/") == ledger.expect("run/") == "run/next-year"


def test_snapshots_below_hundreds_of_deleted_names_are_found_in_few_rounds(ledger: Ledger) -> None:
    ledger.commit("run/kept", stored_s=NOW_S)
    for step in range(200):
        ledger.commit(f"run/{step}", stored_s=NOW_S - 1)
    for step in range(200):
        ledger.delete(f"run/{step}", stored_s=NOW_S + 1e6 + 1e4 * step)
    name, rounds, _ = count_reads(ledger, "run/")
    assert (name, rounds) == ("run/kept", 3)


def test_a_second_search_reads_only_what_is_new(ledger: Ledger) -> None:
    for step in range(100):
        ledger.commit(f"run/{step}", stored_s=NOW_S + 3600 * step)
    cache = RecordCache()
    assert ledger.find("run/", cache) == "run/99"
    ledger.commit("run/100", stored_s=NOW_S + 3600 * 100)
    assert count_reads(ledger, "run/", cache) == ("run/100", 1, 1)


def test_other_prefixes_and_reserved_names_do_not_count(ledger: Ledger) -> None:
    ledger.commit("run/1", stored_s=NOW_S)
    ledger.commit("run2/1", stored_s=NOW_S + 10)
    ledger.commit("@own/1", stored_s=NOW_S + 20)
    assert [ledger.find(prefix) for prefix in ("run/", "", "@own/")] == ["run/1", "run2/1", "@own/1"]


@pytest.mark.parametrize("change", [lambda data: data[:50], lambda data: data[:-2] + b"!\n"], ids=["torn", "damaged"])
def test_a_record_that_cannot_be_read_is_passed_over(ledger: Ledger, change: Callable[[bytes], bytes]) -> None:
    ledger.commit("run/1", stored_s=NOW_S)
    ledger.commit("run/2", stored_s=NOW_S + 1e5)
    ledger.spoil("run/2", change)
    assert ledger.find("run/") == ledger.expect("run/") == "run/1"


@dataclass(frozen=True)
class Event:
    """One thing that happens to a name."""

    kind: Literal["commit", "delete", "tear", "damage"]
    name: str
    after_s: float
    ahead_s: float


STEPS = st.sampled_from([str(step) for step in (*range(9), 10, 99, 100)])
EVENTS = st.builds(
    Event,
    kind=st.sampled_from(["commit"] * 6 + ["delete", "tear", "damage"]),
    name=st.builds(str.__add__, st.sampled_from(["run/", "run/", "run/a", "other/", "@own/"]), STEPS),
    after_s=st.sampled_from([0.0, 1.0, 60.0, 60.0, 300.0, 901.0, 86400.0]),
    ahead_s=st.sampled_from([0.0, 0.0, 0.0, 500.0, MAX_AHEAD_S, MAX_AHEAD_S, -1.0, -500.0, -86400.0, -1e9]),
)


PREFIXES = st.sampled_from(["", "", "run/", "run/a", "@own/", "no/"])


@pytest.mark.parametrize("first", [1, 16])
@given(events=st.lists(EVENTS, min_size=2, max_size=60), again=st.lists(EVENTS, max_size=5), prefix=PREFIXES)
def test_both_ways_agree_on_every_history(first: int, events: list[Event], again: list[Event], prefix: str) -> None:
    ledger, cache = Ledger(), RecordCache()
    # With one record at first, a short history is enough for several batches.
    with (
        patch("holdfast.repo.names.latest._FIRST", first),
        patch("holdfast.repo.names.latest._BATCH_GROWTH", 1 + first // 2),
    ):
        for part in (events, again):
            for event in part:
                happen(ledger, event)
            assert ledger.find(prefix) == ledger.expect(prefix)
            assert ledger.find(prefix, cache) == ledger.expect(prefix)


def happen(ledger: Ledger, event: Event) -> None:
    now_s = ledger.clock.now() + event.after_s
    if event.name in ledger.damaged:
        return
    if event.kind == "commit":
        ledger.commit(event.name, stored_s=now_s, ahead_s=event.ahead_s)
    elif event.kind == "delete":
        ledger.delete(event.name, stored_s=now_s)
    elif event.kind == "tear":
        ledger.spoil(event.name, lambda data: data[:50])
    else:
        ledger.spoil(event.name, lambda data: data[:-2] + b"!\n")
        ledger.damaged.add(event.name)
