"""The check: every code has a test that produces it, with its severity and the names of what is hit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from holdfast.digest import hash_bytes
from holdfast.errors import NotFound
from holdfast.objects.memory import MemoryStore
from holdfast.objects.protocol import ObjectInfo, ObjectStore
from holdfast.repo.format.chunk import ChunkRef
from holdfast.repo.format.entry import Entry, digest_snapshot
from holdfast.repo.format.layout import ManifestRef, manifest_key, new_file_id, pack_key
from holdfast.repo.format.manifest import encode_manifest
from holdfast.repo.format.pack import PackBuilder
from holdfast.repo.format.rank_manifests import iter_manifests
from holdfast.repo.handle.repository import Repository
from holdfast.repo.names.snapshots import CommittedSnapshot, commit_snapshot, delete_snapshot
from holdfast.repo.upkeep.check import Checker, Finding
from tests.kit.saving import (
    MIB,
    Watched,
    append_run,
    codes,
    inline_ref,
    keys,
    new_repo,
    noise,
    pack_of,
    read_entries,
    record_key,
    replace_object,
    rot,
    save_bytes,
    snapshot_of,
)

DATA = noise(3 * MIB + 600)


def check(store: ObjectStore, *, read: bool = True) -> list[Finding]:
    return list(Checker(store, read=read).iter_findings())


def errors(findings: Sequence[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.severity == "error"]


@pytest.fixture
def saved(repo: Repository) -> Repository:
    """Snapshots `a` and `b`, each with a pack of its own."""
    save_bytes(repo, "a", {"weights": DATA, "step": b"1"})
    save_bytes(repo, "b", {"other": noise(5000, 1)})
    return repo


@pytest.fixture
def pack(saved: Repository) -> str:
    """The key of the pack of `a`."""
    return pack_key(pack_of(saved, "a", "weights").pack_id)


def copy_chunks(store: MemoryStore) -> str:
    """Seal another pack with copies of all chunks of DATA; return its id."""
    pack_id = f"{7:024x}-{7:016x}"
    builder = PackBuilder(store, pack_id)
    chunks = [DATA[start : start + MIB] for start in range(0, len(DATA), MIB)]
    append_run(builder, [(hash_bytes(data), memoryview(data)) for data in chunks], alignment=64)
    builder.seal()
    return pack_id


@pytest.mark.parametrize("read", [True, False])
def test_a_clean_store_has_no_findings(saved: Repository, store: MemoryStore, read: bool) -> None:
    assert check(store, read=read) == []


def test_a_check_writes_nothing(saved: Repository, store: MemoryStore, pack: str) -> None:
    rot(store, pack, 5000)
    before = store.contents()
    check(store.clone(read_only=True))
    assert store.contents() == before


def test_the_tally_counts_what_was_checked(saved: Repository, store: MemoryStore) -> None:
    checker = Checker(store, read=True)
    list(checker.iter_findings())
    tally = checker.tally
    assert tally.objects == len(store.contents())
    assert (tally.snapshots, tally.manifests, tally.packs, tally.chunks) == (2, 2, 2, 5)
    files = [*keys(store, "packs/"), *keys(store, "manifests/")]
    assert tally.bytes_read == tally.stored_bytes == sum(store.stat(key).size_bytes for key in files)


def test_a_quick_check_reads_no_chunk(saved: Repository, store: MemoryStore) -> None:
    watched = Watched(store)
    checker = Checker(watched)
    assert list(checker.iter_findings()) == []
    assert checker.tally.bytes_read == 0
    assert max(size for _, _, size in watched.reads) < 10_000


def test_progress_adds_up(saved: Repository, store: MemoryStore) -> None:
    told: list[int] = []

    class Counting:
        def begin(self, task: str, total_bytes: int) -> None:
            told.append(-total_bytes)

        def advance(self, num_bytes: int) -> None:
            told.append(num_bytes)

        def end(self) -> None:
            told.append(0)

    list(Checker(store, read=True, progress=Counting()).iter_findings())
    assert told[0] == -sum(store.stat(key).size_bytes for key in keys(store, "packs/"))
    assert 0 < sum(told[1:]) <= -told[0]
    assert told[-1] == 0


def test_rot_in_a_chunk_is_found_only_by_reading_and_names_all(
    saved: Repository, store: MemoryStore, pack: str
) -> None:
    at = pack_of(saved, "a", "weights")
    rot(store, pack, at.offset + MIB + 5)
    assert check(store, read=False) == []
    found = check(store)
    assert codes(found) == {"chunk-damaged": 1, "chunk-lost": 1}
    (lost,) = errors(found)
    chunk = hash_bytes(DATA[MIB : 2 * MIB]).hex()
    assert (lost.snapshot, lost.entry, lost.chunk, lost.pack) == ("a", "weights", chunk, at.pack_id)
    assert lost.key == pack
    for part in ("snapshot 'a'", "entry 'weights'", f"at byte {MIB}", at.pack_id, "no other copy"):
        assert part in lost.message
    assert "restore the pack" in lost.advice
    (damaged,) = (finding for finding in found if finding.code == "chunk-damaged")
    assert (damaged.severity, damaged.chunk, damaged.pack) == ("warning", chunk, at.pack_id)


def test_a_chunk_with_another_copy_is_hit_but_not_lost(saved: Repository, store: MemoryStore, pack: str) -> None:
    rot(store, pack, pack_of(saved, "a", "weights").offset)
    copy = copy_chunks(store)
    found = check(store)
    assert errors(found) == []
    (hit,) = (finding for finding in found if finding.code == "chunk-hit")
    assert (hit.severity, hit.snapshot, hit.entry) == ("warning", "a", "weights")
    assert f"an intact copy in pack {copy} is read instead" in hit.message


@pytest.mark.parametrize("read", [True, False])
def test_a_missing_pack_loses_every_chunk_in_it(saved: Repository, store: MemoryStore, pack: str, read: bool) -> None:
    store.delete(pack)
    found = check(store, read=read)
    assert codes(found) == {"chunk-lost": 4}
    assert {finding.snapshot for finding in found} == {"a"}
    assert all("the pack is missing" in finding.message for finding in found)


def test_a_damaged_footer_is_an_error_and_its_chunks_are_judged_by_their_bytes(
    saved: Repository, store: MemoryStore, pack: str
) -> None:
    rot(store, pack, store.stat(pack).size_bytes - 100)
    found = check(store)
    assert codes(found) == {"pack-damaged": 1}
    assert (found[0].severity, found[0].pack) == ("error", pack_of(saved, "a", "weights").pack_id)
    assert codes(check(store, read=False)) == {"pack-damaged": 1, "chunk-lost": 4}


def test_padding_that_is_not_zero_is_a_warning(saved: Repository, store: MemoryStore, pack: str) -> None:
    rot(store, pack, 70)
    assert check(store, read=False) == []
    (finding,) = check(store)
    assert (finding.severity, finding.code, finding.key) == ("warning", "padding", pack)


class Unreadable(Watched):
    """Cannot read the chunks of one pack, though header and footer are fine."""

    def read_into(self, key: str, start: int, buffer: memoryview) -> None:
        if buffer.nbytes > 10_000:
            self.failing.add(key)
        super().read_into(key, start, buffer)
        self.failing.discard(key)


def test_a_pack_that_cannot_be_read_is_an_error(saved: Repository, store: MemoryStore, pack: str) -> None:
    found = check(Unreadable(store))
    assert {finding.key for finding in found if finding.code == "pack-unreadable"} == {pack}
    assert {finding.entry for finding in found if finding.code == "chunk-lost"} == {"weights"}
    assert all(finding.severity == "error" for finding in found if finding.code == "pack-unreadable")


def test_a_pack_on_a_bad_disk_does_not_end_the_check(saved: Repository, store: MemoryStore, pack: str) -> None:
    watched = Watched(store)
    watched.failing.add(pack)
    rot(store, pack_key(pack_of(saved, "b", "other").pack_id), 100)
    found = check(watched)
    assert codes(found)["pack-damaged"] == 1
    assert {finding.snapshot for finding in found if finding.code == "chunk-lost"} == {"a", "b"}


@pytest.mark.parametrize("damage", ["rot", "gone"])
def test_a_manifest_that_is_damaged_or_gone_is_an_error(
    saved: Repository, store: MemoryStore, pack: str, damage: str
) -> None:
    key = manifest_key(snapshot_of(saved, "a").manifest.manifest_id)
    if damage == "rot":
        rot(store, key, 60)
    else:
        store.delete(key)
    found = check(store, read=False)
    (finding,) = errors(found)
    assert (finding.code, finding.key, finding.snapshot) == ("manifest-damaged", key, "a")
    assert codes(found) == {"manifest-damaged": 1, "pack-unused": 1}


def commit_forged(repo: Repository, name: str, entries: Sequence[Entry], **changes: object) -> CommittedSnapshot:
    """Commit a manifest that no save would write."""
    lease_id = "0" * 24
    data = encode_manifest(None, entries)
    ref = ManifestRef(new_file_id(lease_id), hash_bytes(data), len(data))
    repo.store.create(manifest_key(ref.manifest_id), data)
    size = sum(entry.size_bytes for entry in entries)
    snapshot = CommittedSnapshot(
        name, ref, digest_snapshot(None, entries), 1.0, len(entries), size, {}, lease_id, 0, "w"
    )
    snapshot = replace(snapshot, **changes)  # type: ignore[arg-type]  # each test knows its field
    commit_snapshot(repo.store, snapshot)
    return snapshot


@pytest.mark.parametrize("changes", [{"digest": hash_bytes(b"")}, {"num_entries": 9}, {"logical_bytes": 9}])
def test_a_record_that_states_other_content_is_an_error(saved: Repository, changes: dict[str, object]) -> None:
    commit_forged(saved, "odd", [Entry("x", 1, (inline_ref(b"1"),))], **changes)
    (finding,) = check(saved.store, read=False)
    assert (finding.severity, finding.code, finding.snapshot) == ("error", "digest-mismatch", "odd")


def test_a_hint_into_something_else_is_found_without_reading(saved: Repository) -> None:
    (chunk,) = read_entries(saved, "b")["other"].chunks
    assert chunk.location
    wrong = ChunkRef(chunk.digest, chunk.size_bytes, chunk.location._replace(offset=chunk.location.offset + 64))
    commit_forged(saved, "odd", [Entry("x", 5000, (wrong,))])
    (finding,) = check(saved.store, read=False)
    assert (finding.severity, finding.code, finding.snapshot) == ("warning", "chunk-hit", "odd")
    assert "has something else at that offset" in finding.message


def test_damaged_inline_bytes_are_an_error(saved: Repository) -> None:
    lie = inline_ref(b"1234")._replace(inline=b"1235")
    commit_forged(saved, "odd", [Entry("x", 4, (lie,))])
    (finding,) = check(saved.store, read=False)
    assert (finding.severity, finding.code, finding.entry, finding.pack) == ("error", "chunk-lost", "x", "")
    assert "inline bytes are damaged" in finding.message


def test_what_no_snapshot_uses_is_a_note(saved: Repository, store: MemoryStore) -> None:
    delete_snapshot(store, "a")
    found = check(store)
    assert codes(found) == {"pack-unused": 1, "manifest-unused": 1}
    assert {finding.severity for finding in found} == {"note"}


def test_a_damaged_manifest_that_no_snapshot_needs_is_a_warning(saved: Repository, store: MemoryStore) -> None:
    key = manifest_key(snapshot_of(saved, "a").manifest.manifest_id)
    delete_snapshot(store, "a")
    rot(store, key, 60)
    (finding,) = (finding for finding in check(store) if finding.code == "manifest-damaged")
    assert (finding.severity, finding.key) == ("warning", key)


def test_a_damaged_index_is_a_warning(saved: Repository, store: MemoryStore) -> None:
    first, second = keys(store, "index/")
    rot(store, first, 70)
    rot(store, second, store.stat(second).size_bytes - 1)
    assert [finding.key for finding in check(store, read=False)] == [first]
    found = check(store)
    assert [(finding.severity, finding.code, finding.key) for finding in found] == [
        ("warning", "index-damaged", first),
        ("warning", "index-damaged", second),
    ]


def test_a_store_without_readable_config_is_checked_all_the_same(
    saved: Repository, store: MemoryStore, pack: str
) -> None:
    rot(store, "config/00000000", 130)
    rot(store, pack, pack_of(saved, "a", "weights").offset)
    assert codes(check(store)) == {"config-damaged": 1, "chunk-damaged": 1, "chunk-lost": 1}


def test_many_problems_at_once_are_all_reported(repo: Repository, store: MemoryStore) -> None:
    for number in range(10):
        save_bytes(repo, f"s{number}", {"x": noise(5000, number), "y": noise(700, 100 + number)})
    for number in range(8):
        at = pack_of(repo, f"s{number}", "x")
        rot(store, pack_key(at.pack_id), at.offset + number)
    rot(store, manifest_key(snapshot_of(repo, "s8").manifest.manifest_id), 40)
    replace_object(store, record_key("s9"), b"")
    store.create("stray", b"")
    found = check(store)
    counted = codes(found)
    assert (counted["chunk-lost"], counted["chunk-damaged"], counted["manifest-damaged"]) == (8, 8, 1)
    assert (counted["record-torn"], counted["unknown-object"]) == (1, 1)
    assert {finding.snapshot for finding in errors(found)} == {f"s{number}" for number in range(9)}


class Collected(Watched):
    """Lists a pack that is gone when it is looked at."""

    def stat(self, key: str) -> ObjectInfo:
        if key.startswith("packs/"):
            raise NotFound(f"no object {key}", name=key)
        return super().stat(key)


def test_objects_that_vanish_during_the_check_are_no_damage(repo: Repository, store: MemoryStore) -> None:
    save_bytes(repo, "a", {"x": noise(5000)})
    delete_snapshot(store, "a")
    store.create("packs/no-pack", b"")
    found = codes(check(Collected(store)))
    assert found == {"pack-unused": 1, "manifest-unused": 1, "unknown-object": 1}


def test_footers_are_cached_within_the_budget(store: MemoryStore) -> None:
    repo = new_repo(store)
    for number in range(6):
        save_bytes(repo, f"s{number}", {"x": noise(5000, number)})
    checker = Checker(store, budget_bytes=0)
    assert list(checker.iter_findings()) == []
    assert len(checker._footers) == 1


@pytest.mark.parametrize("is_overwritten", [False, True])
def test_a_snapshot_that_is_collected_during_the_check_is_no_error(
    saved: Repository, monkeypatch: pytest.MonkeyPatch, is_overwritten: bool
) -> None:
    doomed = snapshot_of(saved, "a").manifest.manifest_id

    def collect_first(store: ObjectStore, refs: Sequence[ManifestRef]) -> Iterator[object]:
        if is_overwritten:
            save_bytes(saved, "a", {"weights": b"new"}, overwrite=True)
        else:
            delete_snapshot(saved.store, "a")
        store.delete(manifest_key(doomed))
        return iter_manifests(store, refs)

    monkeypatch.setattr("holdfast.repo.upkeep.check.iter_manifests", collect_first)

    assert errors(check(saved.store, read=False)) == []
