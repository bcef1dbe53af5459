"""Copying between repositories: only what is missing moves, and nothing rotten on either side is relied on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from holdfast.digest import hash_bytes
from holdfast.errors import Corrupt, DigestMismatch, NameInUse, ReadOnlyStore
from holdfast.objects.memory import MemoryStore, VirtualClock
from holdfast.repo.format.entry import Entry
from holdfast.repo.format.layout import (
    LEASES,
    MANIFESTS,
    PACKS,
    SNAPSHOTS,
    ManifestRef,
    manifest_key,
    new_file_id,
    new_write_id,
    pack_key,
)
from holdfast.repo.format.manifest import encode_manifest
from holdfast.repo.handle.repository import Repository, open_repository
from holdfast.repo.names.snapshots import commit_snapshot
from holdfast.repo.upkeep.check import Checker
from holdfast.repo.upkeep.transfer import copy_snapshot
from holdfast.repo.write.writer import SaveResult
from tests.kit.saving import (
    MIB,
    keys,
    load_bytes,
    new_repo,
    noise,
    pack_of,
    read_entries,
    rot,
    save_bytes,
    snapshot_of,
    stored_bytes,
)

CONTENT = {"w": noise(MIB + 2000, 1), "v": noise(700, 2), "tiny": b"inline", "empty": b""}
TINY = len(CONTENT["tiny"])
"""Inline bytes, which every copy writes again."""


@pytest.fixture
def source(clock: VirtualClock) -> Repository:
    repo = new_repo(MemoryStore("memory://source", clock=clock))
    save_bytes(repo, "a", CONTENT, metadata={"lr": 0.1}, spec=["tree"])
    clock.advance(1000)
    return repo


def copy(source: Repository, target: Repository, name: str = "a", *, overwrite: bool = False) -> SaveResult:
    return copy_snapshot(source, snapshot_of(source, name), target, overwrite=overwrite)


def is_clean(repo: Repository) -> bool:
    return all(finding.severity == "note" for finding in Checker(repo.store, read=True).iter_findings())


def test_a_copy_is_the_same_in_all_that_counts(source: Repository, repo: Repository) -> None:
    result = copy(source, repo)
    one, other = snapshot_of(source, "a"), snapshot_of(repo, "a")
    assert load_bytes(repo, "a") == CONTENT
    assert (other.digest, other.time_s, other.metadata) == (one.digest, one.time_s, {"lr": 0.1})
    assert (other.num_entries, other.logical_bytes) == (one.num_entries, one.logical_bytes)
    assert (result.digest, result.existed, result.new_bytes) == (one.digest, False, MIB + 2700 + TINY)
    assert is_clean(repo)
    assert keys(repo.store, LEASES) == []


def test_the_source_is_only_read(source: Repository, repo: Repository) -> None:
    assert isinstance(source.store, MemoryStore)
    before = source.store.contents()
    copy(source, repo)
    assert source.store.contents() == before


def test_only_missing_chunks_are_copied(source: Repository, repo: Repository) -> None:
    save_bytes(repo, "held", {"other": CONTENT["w"]})
    before = stored_bytes(repo.store)
    result = copy(source, repo)
    assert (result.new_bytes, result.reused_bytes) == (700 + TINY, result.logical_bytes - 700 - TINY)
    assert stored_bytes(repo.store) - before < 5000


def test_a_repeated_copy_moves_nothing(source: Repository, repo: Repository, store: MemoryStore) -> None:
    copy(source, repo)
    before = store.contents()
    result = copy(source, repo)
    assert (result.existed, result.new_bytes, result.generation) == (True, 0, 0)
    assert store.contents() == before


def test_a_copy_that_was_cut_off_goes_on_where_it_was(source: Repository, repo: Repository) -> None:
    copy(source, repo)
    repo.store.delete(keys(repo.store, SNAPSHOTS)[0])
    repo.store.delete(keys(repo.store, MANIFESTS)[0])
    assert copy(source, repo).new_bytes == TINY
    assert load_bytes(repo, "a") == CONTENT


def test_a_name_that_holds_something_else_is_kept(source: Repository, repo: Repository, store: MemoryStore) -> None:
    save_bytes(repo, "a", {"mine": b"1"})
    before = store.contents()
    with pytest.raises(NameInUse, match=r"'a' is in use in memory:// and holds other content; nothing was copied"):
        copy(source, repo)
    assert store.contents() == before
    assert copy(source, repo, overwrite=True).generation == 1
    assert load_bytes(repo, "a") == CONTENT


def test_other_metadata_is_other_content(source: Repository, repo: Repository) -> None:
    save_bytes(repo, "a", CONTENT, spec=["tree"], metadata={"lr": 0.2})
    with pytest.raises(NameInUse):
        copy(source, repo)


@pytest.mark.parametrize("what", ["chunk", "manifest", "missing pack"])
def test_a_rotten_source_is_an_error_and_nothing_is_committed(source: Repository, repo: Repository, what: str) -> None:
    at = pack_of(source, "a", "w")
    if what == "chunk":
        rot(source.store, pack_key(at.pack_id), at.offset + 5)
    elif what == "manifest":
        rot(source.store, manifest_key(snapshot_of(source, "a").manifest.manifest_id), 50)
    else:
        source.store.delete(pack_key(at.pack_id))
    with pytest.raises(Corrupt):
        copy(source, repo)
    assert keys(repo.store, SNAPSHOTS) == keys(repo.store, MANIFESTS) == keys(repo.store, LEASES) == []


def restate(repo: Repository, **changes: Any) -> None:
    """Give `a` a new record that differs in `changes`, as a faulty program would."""
    old = snapshot_of(repo, "a")
    commit_snapshot(
        repo.store, replace(old, generation=old.generation + 1, write_id=new_write_id(), lease_id="", **changes)
    )


def put_manifest(repo: Repository, entries: Sequence[Entry]) -> ManifestRef:
    data = encode_manifest(["tree"], entries)
    manifest = ManifestRef(new_file_id("0" * 24), hash_bytes(data), len(data))
    repo.store.create(manifest_key(manifest.manifest_id), data)
    return manifest


def test_a_source_whose_record_states_other_content_is_an_error(source: Repository, repo: Repository) -> None:
    restate(source, digest=hash_bytes(b"other"))
    with pytest.raises(DigestMismatch) as caught:
        copy(source, repo)
    assert str(caught.value) == (
        "'a' in memory://source does not have the content that its record states;"
        " run `holdfast check` there, and save it again or restore it from a copy"
    )
    assert caught.value.key == manifest_key(snapshot_of(source, "a").manifest.manifest_id)
    assert keys(repo.store, SNAPSHOTS) == keys(repo.store, MANIFESTS) == keys(repo.store, LEASES) == []


def test_a_source_with_damaged_inline_bytes_is_an_error_that_names_the_entry(
    source: Repository, repo: Repository
) -> None:
    entries = read_entries(source, "a")
    (chunk,) = entries["tiny"].chunks
    entries["tiny"] = entries["tiny"]._replace(chunks=(chunk._replace(inline=b"INLINE"),))
    restate(source, manifest=put_manifest(source, list(entries.values())))
    with pytest.raises(DigestMismatch, match=r"'a', entry 'tiny', chunk .* inline in its manifest"):
        copy(source, repo)
    assert keys(repo.store, SNAPSHOTS) == keys(repo.store, MANIFESTS) == keys(repo.store, LEASES) == []


def test_a_source_that_has_another_copy_is_read_from_there(source: Repository, repo: Repository) -> None:
    at = pack_of(source, "a", "w")
    data = source.store.read(pack_key(at.pack_id), limit_bytes=1 << 30)
    source.store.delete(pack_key(at.pack_id))
    save_bytes(source, "again", CONTENT)
    source.store.create(pack_key(at.pack_id), data)
    rot(source.store, pack_key(at.pack_id), at.offset + 5)
    copy(source, repo)
    assert load_bytes(repo, "a") == CONTENT


def test_a_rotten_copy_in_the_target_is_not_relied_on(source: Repository, repo: Repository) -> None:
    save_bytes(repo, "held", {"w": CONTENT["w"], "v": CONTENT["v"]})
    at = pack_of(repo, "held", "w")
    rot(repo.store, pack_key(at.pack_id), at.offset + 5)
    assert copy(source, repo).new_bytes == MIB + TINY
    assert load_bytes(repo, "a") == CONTENT


def test_what_the_target_lists_as_bad_is_not_relied_on(source: Repository, repo: Repository) -> None:
    save_bytes(repo, "held", {"w": CONTENT["w"]})
    bad = pack_of(repo, "held", "w").pack_id
    repo.store.create(f"bad/{bad}@00000000", b"")
    copy(source, repo)
    assert pack_of(repo, "a", "w").pack_id != bad


def test_a_target_that_may_not_be_written_is_refused(source: Repository) -> None:
    target = MemoryStore()
    new_repo(target).verify_may_write()
    with pytest.raises(ReadOnlyStore):
        copy(source, open_repository(target.clone(read_only=True)))


def test_two_copies_share_what_they_have_in_common(source: Repository, repo: Repository) -> None:
    save_bytes(source, "b", {"w": CONTENT["w"], "own": noise(900, 7)})
    copy(source, repo)
    assert copy(source, repo, "b").new_bytes == 900
    assert len(keys(repo.store, PACKS)) == 2
