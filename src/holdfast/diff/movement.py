"""Measures how far groups of tensors move from one snapshot of a series to the next: relative L2 distances.

Of two tensors, only chunks that differ are read. Equal ones are read at most once in the series, and only if another
tensor of their group has moved: its distance is divided by the norm of the whole group.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import torch

from holdfast.diff.compare import PathKey, TreeSide, open_side
from holdfast.diff.facts import LeafFacts, ReadableEntry, is_filled, is_too_repetitive, iter_tiles, list_chunks
from holdfast.diff.values import StoredValues, count_repeats, open_values
from holdfast.repo.format.chunk import UNIT_BYTES, ChunkRef
from holdfast.repo.format.entry import Entry
from holdfast.repo.handle.repository import Repository
from holdfast.repo.names.snapshots import CommittedSnapshot
from holdfast.repo.read.reader import open_snapshot
from holdfast.snapshot.batches import iter_batches
from holdfast.snapshot.opened import Opened
from holdfast.tensors.memory import wrap_memory

FindGroup = Callable[[str, LeafFacts], str | None]
"""Returns the group that a leaf belongs to; None if it is not measured."""
_BLOCK_ITEMS: Final = 1 << 20
_BLOCK_BYTES: Final = 64 << 20


class MeasuredBytes(NamedTuple):
    """How much of a pair of snapshots has been measured."""

    pair: int
    done_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class PairMovement:
    """How far each group has moved between two snapshots that follow each other in a series."""

    pair: int
    """0 for the first two snapshots."""
    distances: dict[str, float | None]
    """|after - before| / |before| over finite values, by group; None if a tensor of it is new or changed its shape.

    NaN if values of it became NaN or infinite, or ceased to be.
    """
    read_bytes: int
    """Bytes that had to be read for this, of both sides."""


def iter_movement(
    repo: Repository, snapshots: Sequence[CommittedSnapshot], find_group: FindGroup
) -> Iterator[MeasuredBytes | PairMovement]:
    """Yield the movement between each two neighbours, and how far the work is; closing it closes all snapshots."""
    squares: dict[_ChunkKey, float] = {}
    before: TreeSide | None = None
    with ExitStack() as kept:
        for pair, snapshot in enumerate(snapshots, -1):
            with ExitStack() as opened:
                after = open_side(opened.enter_context(Opened(open_snapshot(repo, snapshot))))
                if before is not None:
                    yield from _Pair(pair, before, after, squares, find_group).iter_measured()
                kept.close()  # the snapshot before
                kept.enter_context(opened.pop_all())
            before = after


_ChunkKey = tuple[bytes, str]
"""Digest and dtype."""


@dataclass(slots=True)
class _Sums:
    """Sums of squares of one group: of the differences, and of the values before."""

    difference: float = 0.0
    before: float = 0.0
    is_known: bool = True
    is_finite: bool = True
    """Whether the same values are finite on both sides."""

    def add_difference(self, before: torch.Tensor, after: torch.Tensor, repeats: int = 1) -> None:
        gap = after - before
        self.difference += repeats * _sum_squares(gap)
        if not bool(gap.isfinite().all()) and not torch.equal(before.isfinite(), after.isfinite()):
            self.is_finite = False

    def find_distance(self) -> float | None:
        if not self.is_known:
            return None
        if not self.is_finite:
            return math.nan
        if not self.difference:
            return 0.0
        found = math.sqrt(self.difference / self.before) if self.before else math.inf
        return None if math.isnan(found) else found


class _LeafPair(NamedTuple):
    """A tensor that both snapshots have."""

    group: str
    before: StoredValues
    after: StoredValues
    is_equal: bool
    by_chunk: bool
    """Whether both are cut into chunks at the same places, and every byte of a chunk belongs to an item."""


@dataclass(slots=True)
class _Pair:
    """Two snapshots that follow each other; `squares` are those of chunks that were read before."""

    number: int
    before: TreeSide
    after: TreeSide
    squares: dict[_ChunkKey, float]
    find_group: FindGroup
    sums: dict[str, _Sums] = field(default_factory=dict)
    read_bytes: int = 0

    def iter_measured(self) -> Iterator[MeasuredBytes | PairMovement]:
        """Yield after each block how much was measured, and at the end the distances."""
        leaves = list(self._iter_leaves())
        moved = {leaf.group for leaf in leaves if not leaf.is_equal}
        work = [leaf for leaf in leaves if leaf.group in moved]
        total, done = sum(_count_bytes(leaf) for leaf in work), 0
        for batch in iter_batches(work, _count_bytes, self.before.ahead.limit_bytes):
            for side in (self.before, self.after):
                side.ahead.announce(entry for leaf in batch for entry in self._find_announced(leaf, side))
            for leaf in batch:
                for size in self._iter_leaf(leaf):
                    done += size
                    yield MeasuredBytes(self.number, done, total)
        # What the next pair may need: the chunks of the later snapshot.
        current = {
            (bytes(ref.digest), str(leaf.after.dtype)) for leaf in leaves for ref in leaf.after.readable.entry.chunks
        }
        for key in [key for key in self.squares if key not in current]:
            del self.squares[key]
        distances = {group: sums.find_distance() for group, sums in self.sums.items()}
        yield PairMovement(self.number, distances, self.read_bytes)

    def _iter_leaves(self) -> Iterator[_LeafPair]:
        for key, leaf in self.after.leaves.items():
            facts = self.after.find_facts(key)
            group = self.find_group(leaf.name, facts) if key in self.after.contents else None
            if group is None:
                continue
            sums = self.sums.setdefault(group, _Sums())
            values = [_open(side, key) for side in (self.before, self.after)]
            found = _pair(group, *values)
            if found is None:
                sums.is_known = False
            else:
                yield found

    def _find_announced(self, leaf: _LeafPair, side: TreeSide) -> Sequence[Entry]:
        """Return the entry of a leaf if most of it will be read."""
        a, b = leaf.before.readable.entry, leaf.after.readable.entry
        if leaf.by_chunk:
            pairs = zip(a.chunks, b.chunks, strict=True)
            if 2 * sum(x.size_bytes for x, y in pairs if x.digest != y.digest) < a.size_bytes:
                return ()
        return (a if side is self.before else b,)

    def _iter_leaf(self, leaf: _LeafPair) -> Iterator[int]:
        """Add a tensor to the sums of its group; yield the bytes of each block."""
        sums = self.sums[leaf.group]
        if not leaf.by_chunk:
            yield from self._iter_tiles(leaf, sums)
            return
        a, b = leaf.before.readable, leaf.after.readable
        dtype = leaf.before.dtype
        assert isinstance(dtype, torch.dtype)
        for run in _iter_runs(list(zip(a.entry.chunks, b.entry.chunks, strict=True)), str(dtype), self.squares):
            if run.is_changed or run.is_unread:
                self._read_run(run, (a, b), dtype, sums)
            sums.before += sum(self.squares[bytes(x.digest), str(dtype)] for x, _ in run.chunks)
            yield run.stop - run.start

    def _read_run(self, run: _Run, sides: tuple[ReadableEntry, ReadableEntry], dtype: torch.dtype, sums: _Sums) -> None:
        wanted = sides if run.is_changed else sides[1:]
        data = [wrap_memory(memoryview(side.read(run.start, run.stop))).view(dtype) for side in wanted]
        self.read_bytes += len(wanted) * (run.stop - run.start)
        at = 0
        for chunks in run.chunks:
            stop = at + chunks[0].size_bytes // dtype.itemsize
            blocks = [side[at:stop].double() for side in data]
            at = stop
            for block, ref in zip(blocks, chunks if run.is_changed else chunks[1:], strict=True):
                self.squares[bytes(ref.digest), str(dtype)] = _sum_squares(block)
            if run.is_changed:
                sums.add_difference(blocks[0], blocks[1])

    def _iter_tiles(self, leaf: _LeafPair, sums: _Sums) -> Iterator[int]:
        layouts = leaf.before.readable.layout, leaf.after.readable.layout
        repeats = count_repeats(*layouts)
        for tile in iter_tiles(*layouts, limit_bytes=_BLOCK_BYTES, limit_items=_BLOCK_ITEMS):
            before, after = (side.read(tile).double() for side in (leaf.before, leaf.after))
            sums.add_difference(before, after, repeats)
            sums.before += repeats * _sum_squares(before)
            size_bytes = before.numel() * layouts[0].item_bytes
            self.read_bytes += 2 * size_bytes
            yield size_bytes


def _open(side: TreeSide, key: PathKey) -> StoredValues | None:
    """Return a leaf that is one tensor of real numbers; None for anything else."""
    content = side.contents.get(key)
    part = content.parts.get("") if content and not content.shells else None
    values = open_values(side, part) if part is not None and part.kind == "tensor" else None
    is_real = values is not None and isinstance(values.dtype, torch.dtype) and values.dtype.is_floating_point
    return values if values is not None and is_real and values.can_convert() else None


def _pair(group: str, before: StoredValues | None, after: StoredValues | None) -> _LeafPair | None:
    """Return a tensor that can be measured; None if it cannot."""
    if before is None or after is None or before.shape != after.shape:
        return None
    a, b = before.readable, after.readable
    by_chunk = (
        before.dtype == after.dtype
        and not a.entry.dims
        and not b.entry.dims
        and a.layout.normalized == b.layout.normalized
        and is_filled(a.layout, a.entry.size_bytes)
        and [chunk.size_bytes for chunk in a.entry.chunks] == [chunk.size_bytes for chunk in b.entry.chunks]
        and all(chunk.size_bytes % a.layout.item_bytes == 0 for chunk in a.entry.chunks)
    )
    is_equal = a.entry.spec == b.entry.spec and list_chunks(a.entry) == list_chunks(b.entry)
    if not by_chunk and is_too_repetitive(a, b):
        return None
    return _LeafPair(group, before, after, is_equal, by_chunk)


def _count_bytes(leaf: _LeafPair) -> int:
    return leaf.before.readable.entry.size_bytes


@dataclass(slots=True)
class _Run:
    """Chunks of both sides, at the same places, that follow each other and are all read in the same way."""

    start: int
    stop: int
    chunks: list[tuple[ChunkRef, ChunkRef]]
    is_changed: bool
    is_unread: bool


def _iter_runs(
    chunks: Sequence[tuple[ChunkRef, ChunkRef]], dtype: str, squares: Mapping[_ChunkKey, float]
) -> Iterator[_Run]:
    """Yield runs of at most 8 MiB that cover an entry."""
    run: _Run | None = None
    start = 0
    for pair in chunks:
        is_changed = pair[0].digest != pair[1].digest
        is_unread = not is_changed and (bytes(pair[1].digest), dtype) not in squares
        stop = start + pair[1].size_bytes
        if run and (run.is_changed, run.is_unread) == (is_changed, is_unread) and stop - run.start <= UNIT_BYTES:
            run.chunks.append(pair)
            run.stop = stop
        else:
            if run:
                yield run
            run = _Run(start, stop, [pair], is_changed, is_unread)
        start = stop
    if run:
        yield run


def _sum_squares(block: torch.Tensor) -> float:
    """Return the sum of the squares of the finite values."""
    flat = block.flatten()
    total = float(torch.dot(flat, flat))
    if math.isfinite(total):
        return total
    finite = flat[flat.isfinite()]
    return float(torch.dot(finite, finite))
