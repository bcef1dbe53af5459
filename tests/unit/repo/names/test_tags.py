"""Tags: set, moved only on request, removed, and listed beside damaged ones."""

from __future__ import annotations

import pytest

from holdfast.errors import BadName, Corrupt, NameInUse, NotFound
from holdfast.json_text import Json
from holdfast.objects.memory import MemoryStore
from holdfast.repo.format.layout import generation_key, tag_stem
from holdfast.repo.format.record import encode_record
from holdfast.repo.handle.repository import Repository
from holdfast.repo.names.snapshots import DamagedName, Tag, delete_tag, iter_tags, read_tag, set_tag
from tests.kit.saving import keys, rot, save_bytes, snapshot_of


@pytest.fixture
def tagged(repo: Repository) -> Repository:
    """Snapshots `a` and `b`, and a tag `best` that points to `a`."""
    save_bytes(repo, "a", {"x": b"1"})
    save_bytes(repo, "b", {"x": b"2"})
    set_tag(repo.store, "best", snapshot_of(repo, "a"))
    return repo


def test_a_tag_has_the_name_and_digest_of_its_snapshot(tagged: Repository) -> None:
    tag = read_tag(tagged.store, "best")
    assert tag is not None
    assert (tag.name, tag.snapshot_name, tag.digest) == ("best", "a", snapshot_of(tagged, "a").digest)


def test_a_tag_that_was_never_set_is_none(repo: Repository) -> None:
    assert read_tag(repo.store, "best") is None


def test_a_tag_and_a_snapshot_may_share_a_name(tagged: Repository) -> None:
    set_tag(tagged.store, "a", snapshot_of(tagged, "b"))
    tag = read_tag(tagged.store, "a")
    assert tag is not None
    assert tag.snapshot_name == "b"
    assert snapshot_of(tagged, "a").name == "a"


def test_setting_a_tag_as_it_is_changes_nothing(tagged: Repository, store: MemoryStore) -> None:
    before = store.contents()
    set_tag(store, "best", snapshot_of(tagged, "a"))
    assert store.contents() == before


def test_a_tag_is_moved_only_on_request(tagged: Repository) -> None:
    with pytest.raises(NameInUse, match=r"tag 'best' points to 'a'; move it with --move \(move=True\)"):
        set_tag(tagged.store, "best", snapshot_of(tagged, "b"))
    set_tag(tagged.store, "best", snapshot_of(tagged, "b"), move=True)
    tag = read_tag(tagged.store, "best")
    assert tag is not None
    assert tag.snapshot_name == "b"


def test_a_tag_on_an_overwritten_snapshot_is_set_again_only_on_request(tagged: Repository) -> None:
    save_bytes(tagged, "a", {"x": b"other"}, overwrite=True)
    with pytest.raises(NameInUse):
        set_tag(tagged.store, "best", snapshot_of(tagged, "a"))


def test_a_removed_tag_is_gone_and_its_snapshot_stays(tagged: Repository) -> None:
    assert delete_tag(tagged.store, "best").snapshot_name == "a"
    assert read_tag(tagged.store, "best") is None
    assert list(iter_tags(tagged.store)) == []
    assert snapshot_of(tagged, "a").name == "a"


def test_a_removed_tag_can_be_set_again(tagged: Repository) -> None:
    delete_tag(tagged.store, "best")
    set_tag(tagged.store, "best", snapshot_of(tagged, "b"))
    assert keys(tagged.store, "tags/") == [generation_key(tag_stem("best"), number) for number in range(3)]


def test_removing_no_tag_is_an_error_with_the_next_step(repo: Repository) -> None:
    with pytest.raises(NotFound, match="no tag 'best' in memory://; `holdfast tag` lists them"):
        delete_tag(repo.store, "best")


def test_a_tag_name_obeys_the_rules_of_names(tagged: Repository) -> None:
    for act in (read_tag, delete_tag):
        with pytest.raises(BadName, match="tag name"):
            act(tagged.store, "../x")


def test_tags_are_listed_beside_damaged_ones(tagged: Repository, store: MemoryStore) -> None:
    for name in ("c", "d"):
        set_tag(store, name, snapshot_of(tagged, "b"))
    rot(store, "tags/c@00000000", 130)
    found = list(iter_tags(store))
    assert [tag.name for tag in found if isinstance(tag, Tag)] == ["best", "d"]
    assert [tag.stem for tag in found if isinstance(tag, DamagedName)] == ["tags/c"]


def test_a_tag_under_the_name_of_another_is_damage(tagged: Repository, store: MemoryStore) -> None:
    store.create("tags/copy@00000000", store.read("tags/best@00000000", limit_bytes=10_000))
    (damaged,) = (tag for tag in iter_tags(store) if isinstance(tag, DamagedName))
    assert damaged.stem == "tags/copy"
    assert "belongs to another key" in str(damaged.error)


@pytest.mark.parametrize(
    "changes",
    [{"kind": "snapshot"}, {"state": "odd"}, {"snapshot": 5}, {"digest": "00"}, {"time": None}, {"name": "other"}],
)
def test_a_tag_of_the_wrong_shape_is_damage(tagged: Repository, store: MemoryStore, changes: dict[str, Json]) -> None:
    fields = {"kind": "tag", "name": "best", "state": "live", "snapshot": "a", "digest": "00" * 32, "time": 1.0}
    store.create("tags/best@00000001", encode_record({**fields, "generation": 1, **changes}))
    with pytest.raises(Corrupt, match="tags/best@00000001"):
        read_tag(store, "best")
