"""Versions of a series: numbered upwards, whoever publishes and whatever clocks say; old ones go last."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from holdfast.errors import BadName, NameInUse, StoreError
from holdfast.objects.local.local_store import LocalStore
from holdfast.objects.memory import MemoryStore
from holdfast.repo.format.layout import PACKS, SNAPSHOTS, generation_key, new_write_id, snapshot_stem
from holdfast.repo.names.snapshots import commit_snapshot, read_snapshot
from holdfast.series import is_version, read_next
from holdfast.store import Store
from tests.faults.hooked_store import HookedStore


class Clocked(MemoryStore):
    """A store whose clock a test sets."""

    now_s = 1000.0

    def clock(self) -> float:
        return self.now_s


@pytest.fixture
def objects() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def store(objects: MemoryStore) -> Store:
    return Store(objects)


def names(store: Store) -> list[str]:
    return [each.name for each in store.snapshots()]


def noise(seed: int, size: int = 300_000) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def test_versions_are_numbered_and_old_ones_are_deleted(store: Store) -> None:
    results = [store.publish("policy", {"n": n}, metadata={"step": n}) for n in range(5)]

    assert [each.name for each in results] == [f"policy/0000000{n}" for n in range(1, 6)]
    assert names(store) == ["policy/00000004", "policy/00000005"]
    latest = store.latest("policy/")
    assert latest is not None
    assert latest.metadata == {"step": 4}


def test_a_series_may_be_named_with_a_slash_and_goes_on_after_a_restart(objects: MemoryStore) -> None:
    Store(objects).publish("policy/", {"n": 1})

    assert Store(objects).publish("policy", {"n": 1}).name == "policy/00000002", "equal content is a version, too"


def test_unchanged_chunks_are_not_written(store: Store) -> None:
    tree = {"a": noise(1, 4 << 18)}
    store.publish("p", tree)
    tree["a"][0] += 1

    assert store.publish("p", tree).new_bytes == 1 << 20


def test_a_number_is_not_used_again_when_its_version_was_deleted(store: Store) -> None:
    store.publish("p", {"n": 1})
    store.publish("p", {"n": 2})
    store.delete("p/00000002")

    assert store.publish("p", {"n": 3}).name == "p/00000003"


def test_tagged_versions_and_other_names_are_kept(store: Store) -> None:
    store.save("p/best", {"n": 0})
    store.save("p/1", {"n": 0})
    store.save("p/00000007/x", {"n": 0})
    store.publish("p", {"n": 1})
    store.tag("good", "p/00000001")
    for n in range(2, 5):
        store.publish("p", {"n": n}, keep=1)

    assert sorted(names(store)) == ["p/00000001", "p/00000004", "p/00000007/x", "p/1", "p/best"]


def test_bytes_are_freed_by_default_and_can_be_left(tmp_path: Path) -> None:
    store = Store(LocalStore(tmp_path))

    def count_packs() -> int:
        return len(store.repository.store.list(PACKS))

    for n in range(4):
        store.publish("p", {"a": noise(n)}, keep=1, gc=False)
    assert count_packs() == 4
    store.publish("p", {"a": noise(9)}, keep=1)

    assert count_packs() == 1


@pytest.mark.parametrize("keep", [0, -1])
def test_keeping_nothing_is_refused(store: Store, keep: int) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        store.publish("p", {"n": 1}, keep=keep)
    assert names(store) == []


@pytest.mark.parametrize("series", ["", "/", "@runs", "a//b", "../x", "a/\n", "x" * 300, "é" * 60])
def test_bad_names_are_refused_before_anything_is_written(objects: MemoryStore, series: str) -> None:
    with pytest.raises(BadName):
        Store(objects).publish(series, {"n": 1})
    assert objects.list("") == []


def test_a_version_cannot_be_overwritten(store: Store) -> None:
    with pytest.raises(TypeError, match="overwrite"):
        store.publish("p", {"n": 1}, overwrite=True)  # type: ignore[call-arg]  # that is what is tested


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("p/00000001", True),
        ("p/123456789", True),
        ("p/012345678", False),
        ("p/1", False),
        ("p/0000000x", False),
        ("p/\u0661\u0662\u0663\u0664\u0665\u0666\u0667\u0668", False),
        ("p/1234567890123456", False),
        ("q/00000001", False),
        ("p/00000001/x", False),
    ],
)
def test_only_names_of_one_form_are_versions(name: str, expected: bool) -> None:
    assert is_version(name, "p") is expected


def test_names_that_only_look_like_versions_do_not_move_the_numbers(store: Store) -> None:
    for name in ("p/1234567890123456", "p/99999999x", "p/012345678", "px/00000050", "p/00000050/x"):
        store.save(name, {"n": 0})

    assert store.publish("p", {"n": 1}).name == "p/00000001"


def test_numbers_may_have_more_digits_and_end_some_day(store: Store) -> None:
    store.save("p/99999999", {"n": 0})
    assert store.publish("p", {"n": 1}).name == "p/100000000"
    store.save(f"p/{10**15 - 1}", {"n": 0})

    with pytest.raises(BadName, match="used up its numbers"):
        store.publish("p", {"n": 2})


def test_a_publisher_whose_clock_is_behind_is_still_the_latest() -> None:
    objects = Clocked()
    store = Store(objects)
    first = store.publish("p", {"n": 1})
    follower = store.follow("p/", timeout_s=0.0)
    assert next(follower).name == first.name
    objects.now_s -= 600

    store.publish("p", {"n": 2}, keep=1)

    assert next(follower).name == "p/00000002"
    assert names(store) == ["p/00000002"], "the new version is never the one that is deleted"


def test_two_publishers_at_once_get_two_numbers(objects: MemoryStore) -> None:
    """The second one commits between the listing of the first and its commit."""
    other = Store(objects)
    intrusions = ["other"]

    def intrude(name: str, key: str) -> None:
        if name == "create" and key.startswith(SNAPSHOTS) and intrusions:
            intrusions.pop()
            other.publish("p", {"n": 2})

    result = Store(HookedStore(objects, before=intrude)).publish("p", {"n": 1})

    assert result.name == "p/00000002"
    assert other.load("p/00000001") == {"n": 2}
    assert other.load("p/00000002") == {"n": 1}


def test_equal_content_of_two_publishers_is_two_versions(objects: MemoryStore) -> None:
    other = Store(objects)
    intrusions = ["other"]

    def intrude(name: str, key: str) -> None:
        if name == "list" and key.startswith(SNAPSHOTS) and not intrusions:
            return
        if name == "create" and intrusions:
            intrusions.pop()
            other.publish("p", {"n": 1})

    result = Store(HookedStore(objects, before=intrude)).publish("p", {"n": 1})

    assert result.name == "p/00000002"


def test_many_publishers_publish_as_many_versions(objects: MemoryStore) -> None:
    taken: list[str] = []

    def run(own: int) -> None:
        store = Store(objects)
        taken.extend(store.publish("p", {"by": own, "n": n}, keep=100).name for n in range(5))

    threads = [threading.Thread(target=run, args=(own,)) for own in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert sorted(taken) == [f"p/{n:08d}" for n in range(1, 21)]
    assert names(Store(objects)) == sorted(taken)
    times = [each.time for each in Store(objects).snapshots("p/")]
    assert times == sorted(times)


def test_a_version_is_published_although_old_ones_could_not_be_deleted(
    objects: MemoryStore, caplog: pytest.LogCaptureFixture
) -> None:
    Store(objects).publish("p", {"n": 1})
    Store(objects).publish("p", {"n": 2})
    creates = []

    def fail(name: str, key: str) -> None:
        if name == "create" and key.startswith(SNAPSHOTS):
            creates.append(key)
            if len(creates) == 2:
                raise StoreError("the network is down")

    result = Store(HookedStore(objects, before=fail)).publish("p", {"n": 3}, keep=1)

    assert result.name == "p/00000003"
    assert "old versions of 'p' are still there" in caplog.text
    Store(objects).publish("p", {"n": 4}, keep=1)
    assert names(Store(objects)) == ["p/00000004"]


def test_the_next_version_is_found_with_one_listing(objects: MemoryStore) -> None:
    store = Store(objects)
    store.publish("p", {"n": 1})
    listed: list[str] = []
    hooked = Store(HookedStore(objects, before=lambda name, key: listed.append(f"{name} {key}")))
    listed.clear()

    assert read_next(hooked.repository, "p").name == "p/00000002"

    assert [each for each in listed if each.startswith("list")] == [f"list {SNAPSHOTS}"]


def test_a_save_under_the_name_of_a_version_is_refused_as_ever(store: Store) -> None:
    store.publish("p", {"n": 1})

    with pytest.raises(NameInUse):
        store.save("p/00000001", {"n": 2})


@pytest.mark.parametrize("time_s", [4e9, 0.0, -1e9])
def test_a_version_of_an_impossible_time_does_not_get_the_new_one_deleted(
    store: Store, objects: MemoryStore, time_s: float, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever can write to the store can write such a record; it must not harm what is published after it."""
    store.publish("p", {"n": 1})
    record = read_snapshot(objects, "p/00000001")
    commit_snapshot(objects, replace(record, name="p/00000002", generation=0, time_s=time_s, write_id=new_write_id()))

    result = store.publish("p", {"n": 3}, keep=1)

    assert result.name == "p/00000003"
    assert store.load("p/00000003") == {"n": 3}
    assert ("claims to be from the future" in caplog.text) == (time_s > 3e9)
    assert abs(store["p/00000003"].record.time_s - objects.clock()) < 3600


def test_records_that_nobody_can_read_do_not_stop_publishers_and_followers(store: Store, objects: MemoryStore) -> None:
    store.publish("p", {"n": 1})
    follower = store.follow("p/", timeout_s=0.0)
    next(follower)
    stem = snapshot_stem("p/00000002")
    objects.create(generation_key(stem, 0), b"holdfast-record 0001 garbage")
    objects.create(generation_key(snapshot_stem("p/00000007"), 3), b"")

    assert store.publish("p", {"n": 8}).name == "p/00000008"
    assert [each.name for each in follower] == ["p/00000008"]
