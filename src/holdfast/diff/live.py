"""Compares a snapshot with a tree in memory. Tensors on a device are hashed there; only what differs may be copied."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Final

from holdfast.diff.changes import Diff, LiveTree
from holdfast.diff.compare import TreeSide, compare_sides, open_side
from holdfast.diff.values import measure_changes
from holdfast.errors import NotFound
from holdfast.json_text import Json, parse_json
from holdfast.repo.format.entry import ChunkTable, Entry, count_bytes, digest_snapshot
from holdfast.repo.format.source import Source
from holdfast.repo.handle.repository import Repository
from holdfast.repo.names.snapshots import CommittedSnapshot
from holdfast.repo.read.reader import open_snapshot
from holdfast.repo.write.writer import Request, hash_request
from holdfast.snapshot.leaves import GRAD, PICKLE
from holdfast.snapshot.opened import Opened
from holdfast.snapshot.save import Leaves, SaveOptions, add_digests, make_leaves, verify_whole
from holdfast.trees.outline import TREE
from holdfast.trees.registered import Types

_READ_BYTES: Final = 64 << 20


def compare_with_tree(
    repo: Repository,
    snapshot: CommittedSnapshot,
    tree: object,
    *,
    types: Types,
    only: Sequence[str] = (),
    values: bool = False,
) -> Diff:
    """Return the differences from a snapshot to a tree in memory, which must not change until this returns.

    The tree is turned into entries as a save would do it, with gradients and pickled values if the snapshot has any.
    With `values`, tensors that differ are read on both sides; otherwise bytes are read only if the snapshot has the
    same tensor in other chunks or with another layout.
    """
    with Opened(open_snapshot(repo, snapshot)) as opened, opened.pausing_gc():
        leaves = _make_leaves(opened, tree, types)
        request = add_digests(Request(snapshot.name, leaves.sources, spec=leaves.spec))
        entries = hash_request(repo, request)
        live = LiveTree(digest_snapshot(request.spec, entries), len(entries), count_bytes(entries))
        if live.digest == snapshot.digest:
            return Diff(snapshot, live, (), live.num_entries, live.logical_bytes, live.logical_bytes)
        before = open_side(opened, only)
        node = parse_json(leaves.spec.data, where=live.name)[TREE]
        after = TreeSide(live.name, node, _LiveEntries(entries), _LiveBytes(leaves.sources), only=only)
        found = compare_sides(before, after, limit_bytes=repo.budget_bytes // 4)
        if found is None:
            raise NotFound(f"no leaf of {snapshot.name!r} or of the tree matches {' or '.join(map(repr, only))}")
        if values:
            found = found._replace(changes=tuple(measure_changes(found.changes, before, after)))
        return Diff(snapshot, live, *found)


def _make_leaves(opened: Opened, tree: object, types: Types) -> Leaves:
    tags = {leaf.tag for leaf in opened.leaves}
    options = SaveOptions(grads=GRAD in tags, allow_pickle=PICKLE in tags)
    leaves = make_leaves(tree, options, types)
    verify_whole(leaves, "a part of a tensor cannot be compared: save the tree on all ranks, and compare snapshots")
    return leaves


class _LiveEntries:
    """The entries of a tree in memory, by position."""

    def __init__(self, entries: Sequence[Entry]) -> None:
        self._entries = entries

    @cached_property
    def names(self) -> Sequence[str]:
        return [entry.name for entry in self._entries]

    def __len__(self) -> int:
        return len(self._entries)

    def entry(self, position: int) -> Entry:
        return self._entries[position]

    def find_facts(self, position: int) -> tuple[Json, int, int]:
        entry = self._entries[position]
        return entry.spec, entry.size_bytes, entry.alias

    def find_chunks(self, position: int) -> ChunkTable:
        chunks = self._entries[position].chunks
        return ChunkTable(0, tuple(ref.size_bytes for ref in chunks), b"".join(ref.digest for ref in chunks), ())


class _LiveBytes:
    """Reads the bytes of entries from the tensors and values in memory."""

    limit_bytes = _READ_BYTES

    def __init__(self, sources: Sequence[Source]) -> None:
        self._sources = sources

    @cached_property
    def _by_name(self) -> dict[str, Source]:
        return {source.name: source for source in self._sources}

    def announce(self, entries: Iterable[Entry]) -> None:
        """Do nothing: there is no server to wait for."""

    def read(self, entry: Entry, start: int, stop: int) -> bytearray:
        return bytearray(self._by_name[entry.name].read(start, stop))
