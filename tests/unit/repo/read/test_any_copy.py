"""A single chunk is read from any intact copy, a delta with its base; what is lost is named."""

from __future__ import annotations

import pytest

from holdfast.errors import Corrupt, DigestMismatch, MissingChunk
from holdfast.objects.memory import MemoryStore
from holdfast.repo.format.chunk import DELTA, ChunkRef
from holdfast.repo.format.layout import pack_key
from holdfast.repo.handle.repository import Repository
from holdfast.repo.read.any_copy import AnyCopy, StoredChunk
from holdfast.repo.upkeep.repair import rebuild_index
from tests.kit.deltas import bases, delta_repo, save_step, trained
from tests.kit.saving import MIB, load_bytes, new_repo, pack_of, read_entries, rot, snapshot_of


def read(repo: Repository, name: str) -> StoredChunk:
    entry = read_entries(repo, name)["w"]
    return AnyCopy(repo, snapshot_of(repo, name)).read(entry, entry.chunks[0], 0)


def test_a_delta_is_returned_raw_and_as_it_is_stored() -> None:
    repo = delta_repo(steps=2)
    chunk = read(repo, "run/1")
    assert (bytes(chunk.raw), chunk.codec) == (trained(1)[:MIB], DELTA)
    assert len(chunk.stored) == pack_of(repo, "run/1", "w").stored_bytes


def test_a_location_that_does_not_state_its_base_is_enough() -> None:
    repo = delta_repo(steps=2)
    entry = read_entries(repo, "run/1")["w"]
    ref = entry.chunks[0]
    assert ref.location is not None
    bare = ref._replace(location=ref.location._replace(base=None))
    assert AnyCopy(repo, snapshot_of(repo, "run/1")).read(entry, bare, 0).raw == trained(1)[:MIB]


def test_a_base_can_be_read_by_itself() -> None:
    repo = delta_repo(steps=2)
    entry = read_entries(repo, "run/1")["w"]
    (base, *_) = bases(repo, "run/1")
    assert base is not None
    copies = AnyCopy(repo, snapshot_of(repo, "run/1"))
    for at in (base.location, None):
        assert copies.read_base(entry, ChunkRef(base.digest, MIB, at)).raw == trained(0)[:MIB]


@pytest.mark.parametrize(
    ("is_gone", "kind", "state"), [(True, MissingChunk, "gone"), (False, DigestMismatch, "damaged")]
)
def test_a_lost_base_is_named_as_such(is_gone: bool, kind: type[Corrupt], state: str) -> None:
    repo = delta_repo(steps=2)
    at = pack_of(repo, "run/0", "w")
    if is_gone:
        repo.store.delete(pack_key(at.pack_id))
    else:
        rot(repo.store, pack_key(at.pack_id), at.offset + 50)
    with pytest.raises(kind, match=f"is a delta: its base .* is {state} in {pack_key(at.pack_id)}") as lost:
        read(repo, "run/1")
    assert "'run/1', entry 'w'" in str(lost.value)
    assert "holdfast check --read" in str(lost.value)


def test_two_chunks_that_are_deltas_on_each_other_end_in_an_error() -> None:
    repo, other = delta_repo(MemoryStore(), steps=2), new_repo(MemoryStore())
    for name, step in (("x/0", 1), ("x/1", 0)):
        save_step(other, name, {"w": trained(step)})
    # Step 1 is a delta on step 0 here, and the other way round in the pack that is added.
    pack = pack_key(pack_of(other, "x/1", "w").pack_id)
    repo.store.create(pack, other.store.read(pack, limit_bytes=1 << 30))
    repo.store.delete(pack_key(pack_of(repo, "run/0", "w").pack_id))
    rebuild_index(repo)
    for name in ("run/0", "run/1"):
        with pytest.raises(MissingChunk):
            load_bytes(repo, name)
