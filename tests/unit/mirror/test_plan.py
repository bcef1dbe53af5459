"""What a mirror lacks, decided from two lists of names."""

from __future__ import annotations

from dataclasses import replace

import pytest

from holdfast.digest import hash_bytes
from holdfast.json_text import Json
from holdfast.mirror.plan import DeletedName, LocalListing, MirrorListing, is_mirrored, plan_mirror
from holdfast.mirror.setting import MIRRORS
from holdfast.repo.format.layout import ManifestRef, new_file_id, new_lease_id, new_write_id
from holdfast.repo.names.snapshots import CommittedSnapshot, Tag


def snapshot(name: str, content: str = "", *, at: float = 1.0, **environment: Json) -> CommittedSnapshot:
    digest = hash_bytes((content or name).encode())
    manifest = ManifestRef(new_file_id(new_lease_id()), digest, 10)
    return CommittedSnapshot(
        name, manifest, digest, at, 1, 100, {}, "", write_id=new_write_id(), environment=environment
    )


def here(*snapshots: CommittedSnapshot, tags: tuple[Tag, ...] = ()) -> LocalListing:
    return LocalListing({each.name: each for each in snapshots}, {tag.name: tag for tag in tags})


def there(*snapshots: CommittedSnapshot, tags: tuple[Tag, ...] = ()) -> MirrorListing:
    return MirrorListing({each.name: each for each in snapshots}, {tag.name: tag for tag in tags})


def test_what_the_mirror_lacks_is_waiting_the_newest_first() -> None:
    old, new, own = snapshot("run/1", at=1), snapshot("run/2", at=2), snapshot("@runs/a", at=3)
    plan = plan_mirror(here(own, old, new), there())
    assert plan.waiting == (new, old, own)
    assert plan.waiting_bytes == 300
    assert not plan.is_complete


def test_segments_of_a_run_go_in_the_order_of_their_commits() -> None:
    first, last = snapshot("@runs/a/0", at=1), snapshot("@runs/a", at=2)
    assert plan_mirror(here(last, first), there()).waiting == (first, last)


def test_the_same_content_is_present_whatever_its_packs() -> None:
    plan = plan_mirror(here(snapshot("a", "x")), there(snapshot("a", "x", at=9.0)))
    assert [each.name for each in plan.present] == ["a"]
    assert plan.is_complete


def test_other_metadata_is_uploaded_again() -> None:
    one = snapshot("a", "x", at=2)
    other = replace(one, metadata={"loss": 1}, time_s=1.0)
    assert plan_mirror(here(one), there(other)).waiting == (one,)


def test_an_older_snapshot_does_not_replace_a_newer_one() -> None:
    plan = plan_mirror(here(snapshot("a", "x", at=1)), there(snapshot("a", "y", at=2)))
    assert [(each.snapshot.name, each.is_lacking) for each in plan.refused] == [("a", True)]
    assert "saved later" in plan.refused[0].reason
    assert not plan.waiting


CLOCKS = pytest.mark.parametrize("at", [-7200.0, 0.0, 5.0, 7200.0])


@CLOCKS
def test_content_that_was_deleted_in_the_mirror_stays_deleted(at: float) -> None:
    deleted = MirrorListing({"a": DeletedName(snapshot("a", at=5.0))})
    plan = plan_mirror(here(snapshot("a", at=at)), deleted)
    assert [(each.reason, each.is_lacking) for each in plan.refused] == [("it was deleted in the mirror", False)]


@CLOCKS
def test_content_that_the_mirror_never_had_is_uploaded_whatever_was_deleted_there(at: float) -> None:
    other = snapshot("a", "other", at=at)
    for deleted in (snapshot("a", at=5.0), replace(other, metadata={"loss": 1}), None):
        assert plan_mirror(here(other), MirrorListing({"a": DeletedName(deleted)})).waiting == (other,)


def test_the_plan_has_the_records_of_the_mirror() -> None:
    one, two = snapshot("a"), snapshot("b")
    copy = replace(one, generation=7)
    assert plan_mirror(here(one, two), there(copy), copied={"b"}).copies == {"a": copy}


def test_names_that_are_known_to_be_there_need_no_look() -> None:
    plan = plan_mirror(here(snapshot("a")), there(), copied={"a"})
    assert [each.name for each in plan.present] == ["a"]


def test_a_tag_follows_the_snapshot_that_it_points_to() -> None:
    one = snapshot("a", at=1)
    tag = Tag("best", "a", one.digest, 5.0)
    assert plan_mirror(here(one, tags=(tag,)), there()).tags == (tag,)
    assert plan_mirror(here(one, tags=(tag,)), there(one, tags=(tag,))).tags == ()
    assert plan_mirror(here(tags=(tag,)), there()).tags == ()


def test_a_tag_that_was_moved_later_wins() -> None:
    one, two = snapshot("a"), snapshot("b")
    old, new = Tag("best", "a", one.digest, 5.0), Tag("best", "b", two.digest, 6.0)
    assert plan_mirror(here(one, two, tags=(new,)), there(one, two, tags=(old,))).tags == (new,)
    assert plan_mirror(here(one, two, tags=(old,)), there(one, two, tags=(new,))).tags == ()


def test_a_mirror_of_single_saves_gets_those_that_name_it() -> None:
    assert is_mirrored(snapshot("a", mirror="s3://b/m"), "s3://b/m", "named")
    assert not is_mirrored(snapshot("a", mirror="s3://b/m"), "s3://b/other", "named")
    assert not is_mirrored(snapshot("a"), "s3://b/m", "named")
    assert is_mirrored(snapshot("a"), "s3://b/m", "all")


def test_the_lists_of_mirrors_and_uses_stay_here() -> None:
    assert not is_mirrored(snapshot(MIRRORS), "s3://b/m", "all")
    assert not is_mirrored(snapshot("@compiled-use/2026-01-01"), "s3://b/m", "all")
