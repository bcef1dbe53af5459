"""Parts of a snapshot that another process commits: their leases, and chunks that are marked or damaged meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from holdfast.digest import Digest, hash_bytes
from holdfast.objects.memory import MemoryStore
from holdfast.repo.format.entry import Entry
from holdfast.repo.format.layout import LEASES, PACKS, SNAPSHOTS, pack_key
from holdfast.repo.format.source import BytesSource, Source, cut_sources
from holdfast.repo.handle.repository import Repository
from holdfast.repo.names.roots import read_leases
from holdfast.repo.names.snapshots import read_name
from holdfast.repo.write.part_writer import MakeSources, PlacedSource, WrittenPart, end_lease, write_part
from holdfast.repo.write.transaction import Draft, ManifestPart, SnapshotContent, Transaction
from holdfast.repo.write.writer import Placement
from tests.kit.saving import keys, load_bytes, new_repo, noise, only_pack, pack_of, rot, save_bytes
from tests.kit.standing import put_mark

X, Y = noise(2000, 1), noise(2000, 2)


def make_group(name: str, data: bytes, act: Callable[[], None] = lambda: None) -> MakeSources:
    """Return a group of one whole entry; `act` is called when its source is created."""

    def make() -> list[PlacedSource]:
        act()
        source = BytesSource(name, data)
        boxes = [(piece.start, piece.stop - piece.start) for piece in cut_sources([source])]
        return [PlacedSource(source, Placement(len(data), 1, boxes))]

    return make


def commit_parts(repo: Repository, name: str, *parts: WrittenPart) -> None:
    """Commit parts that together have the entries x and y."""
    root = ManifestPart(None, [Entry("x", len(X), (), dims=1), Entry("y", len(Y), (), dims=1)])
    with Transaction(repo, purpose="commit") as transaction:
        content = SnapshotContent(Draft(read_name(repo.store, name)), root=root, others=[part.ref for part in parts])
        with transaction.sealing(content):
            pass
        transaction.commit(content)


@pytest.fixture
def ready(repo: Repository) -> Repository:
    """A repository that was made a store."""
    repo.verify_may_write()
    return repo


def test_parts_become_visible_when_another_process_commits_them(ready: Repository) -> None:
    parts = [write_part(ready, "a", [make_group(*each)], purpose="part") for each in (("x", X), ("y", Y))]
    assert keys(ready.store, SNAPSHOTS) == []

    commit_parts(ready, "a", *parts)

    assert load_bytes(ready, "a") == {"x": X, "y": Y}
    assert [part.new_bytes for part in parts] == [len(X), len(Y)]


def test_the_lease_of_a_part_stays_until_it_is_ended(ready: Repository) -> None:
    part = write_part(ready, "a", [make_group("x", X), make_group("y", Y)], purpose="part")
    assert [lease.state for lease in read_leases(ready.store).values()] == ["live"]

    commit_parts(ready, "a", part)
    end_lease(ready.store, part.lease_id)

    assert keys(ready.store, LEASES) == []
    assert load_bytes(ready, "a") == {"x": X, "y": Y}


def test_a_part_that_fails_leaves_no_lease(ready: Repository) -> None:
    def fail() -> None:
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        write_part(ready, "a", [make_group("x", X), make_group("y", Y, fail)], purpose="part")

    assert keys(ready.store, LEASES) == keys(ready.store, PACKS) == []


def test_a_reused_chunk_that_is_marked_meanwhile_is_written_again_once(ready: Repository) -> None:
    save_bytes(ready, "old", {"x": X})
    old = pack_of(ready, "old", "x").pack_id
    made: list[str] = []

    def mark() -> None:
        made.append("y")
        if len(made) == 1:
            put_mark(ready.store, [pack_key(old)])

    groups = [make_group("x", X), make_group("again", X), make_group("y", Y, mark)]
    part = write_part(ready, "a", groups, purpose="part")
    commit_parts(ready, "a", part)

    assert part.new_bytes == len(X) + len(Y)
    assert pack_of(ready, "a", "x").pack_id != old
    assert made == ["y"], "a group without marked chunks is not created again"


def hash_all(sources: Sequence[Source]) -> dict[int, list[Digest | None]]:
    """Return the digests of sources of one chunk each, as if they were on a device."""
    return {number: [hash_bytes(source.read(0, source.size_bytes))] for number, source in enumerate(sources)}


@pytest.mark.parametrize("is_on_device", [False, True], ids=["in memory", "on a device"])
@pytest.mark.parametrize("is_needed_again", [False, True], ids=["once", "twice"])
def test_a_copy_that_a_later_group_finds_damaged_is_written_again(
    store: MemoryStore, is_on_device: bool, is_needed_again: bool
) -> None:
    save_bytes(new_repo(store), "old", {"x": X, "y": Y})
    repo = new_repo(store)
    pack = only_pack(store)

    def damage() -> None:
        for name in ("x", "y"):
            rot(store, pack, pack_of(repo, "old", name).offset + 10)

    make_y, make_x = make_group("y", Y, damage), make_group("again", X)
    later: MakeSources = (lambda: [*make_y(), *make_x()]) if is_needed_again else make_y
    digests = {"find_digests": hash_all} if is_on_device else {}
    part = write_part(repo, "a", [make_group("x", X), later], purpose="part", **digests)
    commit_parts(repo, "a", part)

    assert load_bytes(new_repo(store), "a") == {"x": X, "y": Y}
