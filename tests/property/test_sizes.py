"""Sizes add up: what a save or copy says it wrote and reused, what `show` calls new, and what lies in the store."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.objects.memory import MemoryStore
from holdfast.repo.format.chunk import INLINE_BYTES
from holdfast.repo.format.entry import Entry
from holdfast.repo.format.layout import PACKS
from holdfast.repo.format.pack import read_footer
from holdfast.repo.format.rank_manifests import read_manifests
from holdfast.repo.format.source import BytesSource
from holdfast.repo.handle.repository import Repository
from holdfast.repo.names.snapshots import CommittedSnapshot, read_snapshot
from holdfast.repo.upkeep.transfer import copy_snapshot
from holdfast.repo.upkeep.usage import find_leases, find_new_bytes, read_usage, sum_new_bytes
from holdfast.repo.write.transaction import ManifestPart
from holdfast.repo.write.writer import Placement, Request, SaveResult, save
from tests.kit.saving import keys, new_repo, noise, save_bytes
from tests.kit.thread_ranks import run_threads

SIZES = st.sampled_from([0, 1, INLINE_BYTES, INLINE_BYTES + 1, 3000])
CONTENT = st.dictionaries(st.sampled_from("abcdef"), st.tuples(SIZES, st.integers(0, 2)), min_size=1)
"""Entries by name: the size of each, and which bytes it holds. Few different ones, so that much is shared."""


def make_bytes(content: dict[str, tuple[int, int]]) -> dict[str, bytes]:
    return {name: noise(size, seed) for name, (size, seed) in content.items()}


def count_packed_bytes(repo: Repository) -> int:
    """Return the bytes of all chunks in all packs, before compression."""
    rows = [row for key in keys(repo.store, PACKS) for row in read_footer(repo.store, key.removeprefix(PACKS)).chunks]
    return sum(row.size_bytes for row in rows)


def count_inline_bytes(repo: Repository, snapshot: CommittedSnapshot) -> int:
    entries = read_manifests(repo.store, snapshot.manifest).iter_entries()
    return sum(chunk.size_bytes for entry in entries for chunk in entry.chunks if chunk.location is None)


def verify(repo: Repository, result: SaveResult, *, packed_before: int, content_bytes: int) -> None:
    """Compare what a result says with what was saved, with what the store gained, and with what others say of it."""
    snapshot = read_snapshot(repo.store, result.name)
    inline = 0 if result.existed else count_inline_bytes(repo, snapshot)
    assert result.new_bytes == count_packed_bytes(repo) - packed_before + inline
    assert min(result.new_bytes, result.reused_bytes) >= 0
    assert result.new_bytes + result.reused_bytes == content_bytes
    if not result.existed:
        manifests = read_manifests(repo.store, snapshot.manifest)
        new = find_new_bytes(find_leases(snapshot, manifests), manifests.iter_entries())
        assert sum(new) == sum_new_bytes(find_leases(snapshot, manifests), manifests) == result.new_bytes
    for usage in read_usage(repo.store, [snapshot]).snapshots:
        assert 0 <= usage.own_bytes <= usage.stored_bytes
        assert usage.shared_bytes >= 0


@settings(max_examples=30)
@given(st.lists(CONTENT, min_size=1, max_size=4))
def test_what_one_process_saves_adds_up(contents: list[dict[str, tuple[int, int]]]) -> None:
    repo = new_repo()
    for number, content in enumerate(contents):
        before = count_packed_bytes(repo)
        result = save_bytes(repo, f"run/{number}", make_bytes(content))
        assert result.new_bytes + result.reused_bytes == result.logical_bytes
        verify(repo, result, packed_before=before, content_bytes=result.logical_bytes)
        again = save_bytes(repo, f"run/{number}", make_bytes(content))
        assert (again.existed, again.new_bytes, again.reused_bytes) == (True, 0, result.logical_bytes)


@settings(max_examples=30)
@given(st.lists(CONTENT, min_size=1, max_size=3), CONTENT)
def test_what_is_copied_adds_up(contents: list[dict[str, tuple[int, int]]], held: dict[str, tuple[int, int]]) -> None:
    source, target = new_repo(), new_repo(MemoryStore("memory://target"))
    save_bytes(target, "run/held", make_bytes(held))
    for number, content in enumerate(contents):
        result = save_bytes(source, f"run/{number}", make_bytes(content))
        for existed in (False, True):
            before = count_packed_bytes(target)
            copied = copy_snapshot(source, read_snapshot(source.store, f"run/{number}"), target)
            assert copied.existed is existed
            verify(target, copied, packed_before=before, content_bytes=result.logical_bytes)


def make_share(rank: int, world_size: int, content: dict[str, tuple[int, int]], shared: bytes) -> Request:
    """Return what one rank saves: its share of one entry, and values of its own under names that all ranks have."""
    edges = [len(shared) * at // world_size for at in range(world_size + 1)]
    start, stop = edges[rank], edges[rank + 1]
    own = {name: noise(size, seed + rank % 2) for name, (size, seed) in content.items()}
    sources = [BytesSource("shared", shared[start:stop]), *(BytesSource(name, data) for name, data in own.items())]
    boxes = [(start, stop - start)] if stop > start else []
    places = {0: Placement(len(shared), 1, boxes)}
    places |= {at: Placement(len(data), 0, (), rank) for at, data in enumerate(own.values(), start=1)}
    entries = [Entry("shared", len(shared), (), dims=1)]
    entries += [Entry(name, len(data), (), dims=1) for name, data in own.items()]
    return Request("run/1", sources, places=places, root=ManifestPart({"tree": 1}, entries))


@settings(max_examples=30)
@given(CONTENT, SIZES, st.integers(2, 3))
def test_what_many_ranks_save_and_what_is_copied_of_it_adds_up(
    content: dict[str, tuple[int, int]], shared_bytes: int, world_size: int
) -> None:
    repo, target = new_repo(), new_repo(MemoryStore("memory://target"))
    shared = noise(shared_bytes, 9)
    own_bytes = sum(size for size, _ in content.values())

    for existed in (False, True):
        before = count_packed_bytes(repo)
        results = run_threads(
            world_size, lambda ranks: save(repo, make_share(ranks.rank, world_size, content, shared), ranks=ranks)
        )
        for result in results:
            assert isinstance(result, SaveResult), result
            assert result.existed is existed
            assert result.logical_bytes == shared_bytes + own_bytes
            verify(repo, result, packed_before=before, content_bytes=shared_bytes + world_size * own_bytes)

    for existed in (False, True):
        before = count_packed_bytes(target)
        copied = copy_snapshot(repo, read_snapshot(repo.store, "run/1"), target)
        assert copied.existed is existed
        verify(target, copied, packed_before=before, content_bytes=shared_bytes + world_size * own_bytes)
