"""The simulated disk, and the local store when power is lost on it at any point."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from holdfast.objects.local.local_store import LocalStore
from holdfast.testing.faults import Crashed
from tests.kit.power import SimulatedDisk, SyncSite


def write_file(disk: SimulatedDisk, path: str, data: bytes, *, sync: bool) -> None:
    handle = disk.create_file(path)
    disk.write_at(handle, 0, memoryview(data))
    if sync:
        disk.sync_file(handle)
    disk.close(handle)


def read_file(disk: SimulatedDisk, path: str) -> bytes:
    buffer = bytearray(disk.stat(path).size_bytes)
    handle = disk.open_file(path)
    disk.read_into(handle, 0, memoryview(buffer))
    disk.close(handle)
    return bytes(buffer)


def read_all(disk: SimulatedDisk) -> dict[str, bytes]:
    store = LocalStore("/store", files=disk)
    return {info.key: store.read(info.key, limit_bytes=1 << 20) for info in store.list("")}


def test_what_was_synced_survives() -> None:
    disk = SimulatedDisk()
    write_file(disk, "/one", b"data", sync=True)
    disk.sync_directory("/")
    assert read_file(disk.power_loss(), "/one") == b"data"


def test_a_file_without_a_synced_name_is_gone() -> None:
    disk = SimulatedDisk()
    write_file(disk, "/one", b"data", sync=True)
    assert disk.power_loss().list_directory("/") == []


def test_a_name_without_synced_data_is_an_empty_file() -> None:
    disk = SimulatedDisk()
    write_file(disk, "/one", b"data", sync=False)
    disk.sync_directory("/")
    assert read_file(disk.power_loss(), "/one") == b""


def test_a_file_in_a_directory_without_a_synced_name_is_gone() -> None:
    disk = SimulatedDisk()
    disk.make_directory("/a")
    write_file(disk, "/a/one", b"data", sync=True)
    disk.sync_directory("/a")
    assert disk.power_loss().list_directory("/") == []


def test_a_removal_that_was_not_synced_is_undone() -> None:
    disk = SimulatedDisk()
    write_file(disk, "/one", b"data", sync=True)
    disk.sync_directory("/")
    disk.unlink("/one")
    assert disk.power_loss().list_directory("/") == ["one"]
    disk.sync_directory("/")
    assert disk.power_loss().list_directory("/") == []


def test_one_file_under_two_names_stays_one() -> None:
    disk = SimulatedDisk()
    write_file(disk, "/one", b"data", sync=True)
    disk.link("/one", "/two")
    disk.sync_directory("/")
    survivor = disk.power_loss()
    assert survivor.stat("/one").identity == survivor.stat("/two").identity


def test_with_chance_every_mix_of_unsynced_changes_is_possible() -> None:
    disk = SimulatedDisk()
    write_file(disk, "/one", b"", sync=True)
    write_file(disk, "/two", b"", sync=True)
    seen = {tuple(sorted(disk.power_loss(random.Random(seed)).list_directory("/"))) for seed in range(50)}
    assert seen == {(), ("one",), ("two",), ("one", "two")}


def test_with_chance_unsynced_data_is_torn() -> None:
    disk = SimulatedDisk()
    write_file(disk, "/one", b"data", sync=False)
    disk.sync_directory("/")
    seen = {read_file(disk.power_loss(random.Random(seed)), "/one") for seed in range(200)}
    assert {b"", b"da", b"data", b"da\0", b"\0\0\0\0"} <= seen
    assert all(data.rstrip(b"\0") == b"data"[: len(data.rstrip(b"\0"))] for data in seen)


def test_a_disk_that_lost_power_does_not_share_with_the_old_one() -> None:
    disk = SimulatedDisk()
    write_file(disk, "/one", b"data", sync=True)
    disk.sync_directory("/")
    survivor = disk.power_loss()
    survivor.unlink("/one")
    assert disk.list_directory("/") == ["one"]


def test_a_stopped_disk_does_nothing_more() -> None:
    disk = SimulatedDisk(stop_at=2)
    disk.make_directory("/a")
    with pytest.raises(Crashed):
        disk.make_directory("/b")
    with pytest.raises(Crashed):
        disk.list_directory("/")
    assert disk.mutations == 2


def test_syncs_are_counted_by_site() -> None:
    disk = SimulatedDisk()
    LocalStore("/store", files=disk).create("packs/one", b"data")
    assert disk.syncs == {
        SyncSite("directory", ".."): 1,
        SyncSite("directory", "."): 1,
        SyncSite("directory", "packs"): 1,
        SyncSite("file", "packs"): 1,
    }


def create(store: LocalStore) -> None:
    store.create("packs/one", b"first object")
    store.create("snapshots/name/0", b"second object")


def create_after_what_is_not_durable(store: LocalStore) -> None:
    store.create("leases/lease/0", b"", durable=False)
    create(store)
    store.delete("leases/lease/0")


def upload(store: LocalStore) -> None:
    for key, parts in (("packs/one", (b"first ", b"object")), ("snapshots/name/0", (b"second object",))):
        with store.upload(key) as under_way:
            under_way.append(*parts)
            under_way.commit()


DURABLE = {"packs/one": b"first object", "snapshots/name/0": b"second object"}
WORK = [create, create_after_what_is_not_durable, upload]


@pytest.mark.parametrize("work", WORK)
def test_what_was_created_durably_survives_the_loss_of_power(work: Callable[[LocalStore], None]) -> None:
    disk = SimulatedDisk()
    work(LocalStore("/store", files=disk))
    for survivor in [disk.power_loss(), *(disk.power_loss(random.Random(seed)) for seed in range(20))]:
        found = read_all(survivor)
        assert {key: data for key, data in found.items() if not key.startswith("leases/")} == DURABLE
    assert disk.open_handles == 0


@pytest.mark.parametrize("work", WORK)
def test_power_lost_at_any_point_leaves_each_object_whole_or_absent(work: Callable[[LocalStore], None]) -> None:
    rehearsal = SimulatedDisk()
    work(LocalStore("/store", files=rehearsal))
    for stop_at in range(1, rehearsal.mutations + 1):
        disk = SimulatedDisk(stop_at=stop_at)
        with pytest.raises(Crashed):
            work(LocalStore("/store", files=disk))
        for survivor in [disk.power_loss(), *(disk.power_loss(random.Random(seed)) for seed in range(10))]:
            found = read_all(survivor)
            assert {
                key: data for key, data in found.items() if not key.startswith("leases/")
            }.items() <= DURABLE.items()
            # The order of creates is the order of survival: the second is never there without the first.
            assert "snapshots/name/0" not in found or "packs/one" in found


def test_a_store_that_lost_power_is_usable_again() -> None:
    rehearsal = SimulatedDisk()
    create(LocalStore("/store", files=rehearsal))
    for stop_at in range(1, rehearsal.mutations + 1):
        disk = SimulatedDisk(stop_at=stop_at)
        with pytest.raises(Crashed):
            create(LocalStore("/store", files=disk))
        survivor = disk.power_loss(random.Random(stop_at))
        LocalStore("/store", files=survivor).create("packs/later", b"later")
        assert read_all(survivor.power_loss())["packs/later"] == b"later"


SITES = [
    SyncSite("directory", ".."),
    SyncSite("directory", "."),
    SyncSite("directory", "packs"),
    SyncSite("directory", "snapshots"),
    SyncSite("directory", "snapshots/*"),
    SyncSite("file", "packs"),
    SyncSite("file", "snapshots"),
]


def test_the_sites_are_all_there_are() -> None:
    disk = SimulatedDisk()
    create(LocalStore("/store", files=disk))
    assert set(disk.syncs) == set(SITES)


@pytest.mark.parametrize("site", SITES, ids=str)
def test_no_fsync_can_be_left_out(site: SyncSite) -> None:
    disk = SimulatedDisk(ignore=[site])
    create(LocalStore("/store", files=disk))
    assert read_all(disk.power_loss()) != DURABLE
