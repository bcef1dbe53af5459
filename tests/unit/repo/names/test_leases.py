"""A lease shows that a save is alive; a collector fences it by creating its next generation."""

from __future__ import annotations

import pytest

from holdfast.digest import Buffer
from holdfast.errors import LeaseLost, StoreError
from holdfast.objects.memory import MemoryStore, VirtualClock
from holdfast.repo.format.layout import lease_stem
from holdfast.repo.names.generations import create_generation, list_generations, read_newest
from holdfast.repo.names.leases import RENEW_S, Lease
from holdfast.testing.faults import Fault, FaultyStore
from tests.kit.saving import Watched, keys


def generations(store: MemoryStore, lease: Lease) -> list[int]:
    return list_generations(store, lease_stem(lease.lease_id))


def state(store: MemoryStore, lease: Lease) -> str:
    fields = read_newest(store, lease_stem(lease.lease_id)).fields
    assert fields
    fields.expect(kind="lease", lease=lease.lease_id)
    return fields.text("state")


def fence(store: MemoryStore, lease: Lease) -> None:
    stem = lease_stem(lease.lease_id)
    create_generation(store, stem, read_newest(store, stem).next_generation, {"state": "fenced", "write_id": "x"})


def test_a_new_lease_is_live_and_states_its_purpose(store: MemoryStore) -> None:
    lease = Lease(store, purpose="save 'a'")
    assert state(store, lease) == "live"
    fields = read_newest(store, lease_stem(lease.lease_id)).fields
    assert fields
    assert fields.text("purpose") == "save 'a'"
    assert fields.text("host")
    assert fields.integer("pid")


def test_a_lease_is_renewed_when_it_is_time_and_not_before(store: MemoryStore, clock: VirtualClock) -> None:
    lease = Lease(store, purpose="test")
    lease.keep_alive()
    clock.advance(RENEW_S - 1)
    lease.keep_alive()
    assert generations(store, lease) == [0]
    clock.advance(1)
    lease.keep_alive()
    lease.keep_alive()
    assert generations(store, lease) == [0, 1]


class RemovedOnRelease(Watched):
    """A collector deletes a released lease at once."""

    def create(self, key: str, data: Buffer, *, durable: bool = True) -> None:
        super().create(key, data, durable=durable)
        if b'"released"' in bytes(data):
            for name in [info.key for info in self.list("leases/")]:
                self.delete(name)


def test_a_release_that_a_collector_has_cleared_away_already_is_one(store: MemoryStore) -> None:
    lease = Lease(RemovedOnRelease(store), purpose="test")
    lease.release()
    assert keys(store, "leases/") == []


def test_a_lease_is_renewed_and_released_without_a_listing(store: MemoryStore) -> None:
    faulty = FaultyStore(store)
    lease = Lease(faulty, purpose="test")
    lease.renew()
    lease.release()
    lease.forget()
    assert [done.name for done in faulty.log if done.name != "hold"] == ["create"] * 3 + ["delete"] * 3


def test_an_unreleased_lease_is_forgotten_with_its_fence(store: MemoryStore) -> None:
    lease = Lease(store, purpose="test")
    fence(store, lease)
    lease.forget()
    assert keys(store, "") == []


def test_a_released_lease_has_ended(store: MemoryStore) -> None:
    lease = Lease(store, purpose="test")
    lease.renew()
    lease.release()
    assert state(store, lease) == "released"
    assert generations(store, lease) == [0, 1, 2]


@pytest.mark.parametrize("act", ["renew", "release"])
def test_a_fenced_lease_is_lost(store: MemoryStore, act: str) -> None:
    lease = Lease(store, purpose="save 'a'")
    fence(store, lease)
    with pytest.raises(LeaseLost, match=r"save 'a': a collector considered this save dead .* Save again"):
        getattr(lease, act)()


def test_a_lease_that_is_forgotten_leaves_no_files(store: MemoryStore) -> None:
    lease = Lease(store, purpose="test")
    lease.renew()
    lease.release()
    lease.forget()
    assert keys(store, "") == []


def test_the_generation_that_ended_a_lease_is_removed_last(store: MemoryStore) -> None:
    faulty = FaultyStore(store)
    lease = Lease(faulty, purpose="test")
    lease.renew()
    lease.release()
    lease.forget()
    assert [operation.key[-1] for operation in faulty.log if operation.name == "delete"] == ["0", "1", "2"]


def test_forgetting_that_fails_is_left_to_a_collector(store: MemoryStore) -> None:
    lease = Lease(store, purpose="test")
    lease.release()
    faulty = FaultyStore(store, fault=Fault.FOR_GOOD)
    lease._store = faulty
    lease.forget()
    assert generations(store, lease) == [0, 1]


def test_a_store_that_fails_is_not_a_lost_lease(store: MemoryStore) -> None:
    with pytest.raises(StoreError, match="as requested"):
        Lease(FaultyStore(store, fault=Fault.FOR_GOOD), purpose="test")
