"""What two stores have, read with few requests."""

from __future__ import annotations

from holdfast.compile_cache.artifacts.catalog import artifact_name
from holdfast.mirror.plan import compare_stores
from holdfast.mirror.setting import MirrorSetting
from holdfast.objects.cloud.cloud_store import CloudStore
from holdfast.repo.handle.repository import Repository
from holdfast.repo.names.snapshots import delete_snapshot, set_tag
from holdfast.repo.upkeep.collect import Rules, collect
from holdfast.repo.upkeep.transfer import copy_snapshot
from tests.kit.compile_artifacts import SECRET, make_artifact, make_key, store_artifact
from tests.kit.rounds import count_rounds
from tests.kit.saving import noise, record_key, save_bytes, snapshot_of


def copy(local: Repository, mirror: Repository, *names: str) -> None:
    for name in names:
        copy_snapshot(local, snapshot_of(local, name), mirror)


def test_a_mirror_that_does_not_exist_lacks_everything(local: Repository, setting: MirrorSetting) -> None:
    save_bytes(local, "a", {"x": b"1"})
    plan = compare_stores(local, setting.open(local.budget_bytes))
    assert [each.name for each in plan.waiting] == ["a"]


def test_what_is_copied_deleted_and_overwritten_is_told_apart(local: Repository, setting: MirrorSetting) -> None:
    mirror = setting.open(local.budget_bytes)
    for name in ("same", "changed", "removed", "new"):
        save_bytes(local, name, {"x": name.encode()})
    copy(local, mirror, "same", "changed", "removed")
    delete_snapshot(mirror.store, "removed")
    save_bytes(local, "changed", {"x": b"other"}, overwrite=True)
    plan = compare_stores(local, mirror)
    assert [each.name for each in plan.present] == ["same"]
    assert {each.name for each in plan.waiting} == {"changed", "new"}
    assert [each.snapshot.name for each in plan.refused] == ["removed"]


def test_a_name_that_was_deleted_in_the_mirror_can_be_saved_again(local: Repository, setting: MirrorSetting) -> None:
    mirror = setting.open(local.budget_bytes)
    save_bytes(local, "a", {"x": b"1"})
    copy(local, mirror, "a")
    save_bytes(local, "a", {"x": b"2"}, overwrite=True)
    delete_snapshot(mirror.store, "a")  # later by the clock, but what is deleted is the first content
    assert [each.name for each in compare_stores(local, mirror).waiting] == ["a"]


def test_what_a_collected_deletion_removed_is_not_known_and_uploaded(local: Repository, setting: MirrorSetting) -> None:
    mirror = setting.open(local.budget_bytes)
    save_bytes(local, "a", {"x": b"1"})
    copy(local, mirror, "a")
    delete_snapshot(mirror.store, "a")
    assert not compare_stores(local, mirror).waiting
    collect(mirror.store, Rules(min_age_s=0.0))
    assert [each.name for each in compare_stores(local, mirror).waiting] == ["a"]


def test_a_record_under_the_wrong_key_is_no_copy(local: Repository, setting: MirrorSetting) -> None:
    mirror = setting.open(local.budget_bytes)
    for name in ("a", "b"):
        save_bytes(local, name, {"x": b"1"})
    copy(local, mirror, "a")
    mirror.store.create(record_key("b"), mirror.store.read(record_key("a"), limit_bytes=1 << 20))
    assert [each.name for each in compare_stores(local, mirror).waiting] == ["b"]


def test_tags_are_compared(local: Repository, setting: MirrorSetting) -> None:
    mirror = setting.open(local.budget_bytes)
    save_bytes(local, "a", {"x": b"1"})
    tag = set_tag(local.store, "best", snapshot_of(local, "a"))
    copy(local, mirror, "a")
    assert compare_stores(local, mirror).tags == (tag,)
    set_tag(mirror.store, "best", snapshot_of(mirror, "a"), time_s=tag.time_s)
    assert compare_stores(local, mirror).is_complete


def test_many_names_are_looked_up_in_few_rounds(local: Repository, bucket: MirrorSetting) -> None:
    names = [f"run/{number}" for number in range(40)]
    for name in names:
        save_bytes(local, name, {"x": name.encode()})
    mirror = bucket.open(local.budget_bytes)
    copy(local, mirror, *names[:38])
    with count_rounds(CloudStore, "_ask") as rounds:
        plan = compare_stores(local, mirror)
    assert {each.name for each in plan.waiting} == {"run/38", "run/39"}
    # All shelves of snapshots are listed at once, then the records are read at once.
    assert len(rounds.requests) <= 33 + 38
    assert rounds.greatest <= 3


def test_what_is_known_costs_no_request(local: Repository, bucket: MirrorSetting) -> None:
    for name in ("a", "b"):
        save_bytes(local, name, {"x": noise(100)})
    mirror = bucket.open(local.budget_bytes)
    copy(local, mirror, "a")
    known = frozenset({("a", snapshot_of(local, "a").write_id)})
    with count_rounds(CloudStore, "_ask") as rounds:
        plan = compare_stores(local, mirror, known=known)
    assert [each.name for each in plan.waiting] == ["b"]
    assert len(rounds.requests) <= 2


def test_a_compiled_graph_is_there_under_any_number(local: Repository, setting: MirrorSetting) -> None:
    mirror = setting.open(local.budget_bytes)
    store_artifact(mirror, make_artifact(guards="s0 < 9", graph=b"other"))
    store_artifact(local, make_artifact(graph=b"mine"), secret=SECRET)
    (waiting,) = compare_stores(local, mirror).waiting
    assert waiting.name == artifact_name(make_key().digest, 0)
    store_artifact(mirror, make_artifact(graph=b"compiled elsewhere"), secret=SECRET)
    # Signed with the same key, but of other bytes: another signature, so it does not replace this one.
    assert compare_stores(local, mirror).waiting == (waiting,)
    copy_snapshot(local, waiting, mirror, name=artifact_name(make_key().digest, 2))
    assert compare_stores(local, mirror).is_complete
