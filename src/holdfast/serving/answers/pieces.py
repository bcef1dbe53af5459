"""Answers about the ranks of a snapshot: what each of them stored, and the pieces of one leaf.

A manifest has neither meshes nor placements, but the boxes that each rank stored. Of values that several ranks have,
each of them stores a share.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from typing import Final, NamedTuple

from holdfast.diff.facts import is_stored, parse_leaf
from holdfast.errors import NotFound
from holdfast.json_text import Json
from holdfast.repo.format.boxes import Box, Coordinates, whole
from holdfast.repo.format.chunk import ChunkRef
from holdfast.repo.format.entry import NO_RANK, Entry
from holdfast.repo.format.rank_manifests import Manifests
from holdfast.repo.handle.repository import Repository
from holdfast.repo.names.snapshots import CommittedSnapshot
from holdfast.repo.upkeep.usage import find_leases, find_new_bytes
from holdfast.serving.answer import choose_sort
from holdfast.serving.answers.snapshots import read_present
from holdfast.trees.outline import TREE, iter_leaves

MAX_PIECES: Final = 1000
"""Pieces, or ranks, of one page."""


class RankRow(NamedTuple):
    """What one rank stored of a snapshot."""

    rank: int
    entries: int
    """Tensors and long values of which it stored a part."""
    size_bytes: int
    new_bytes: int
    """Bytes that the store did not have before. A chunk that several ranks stored counts for the first of them."""
    stored_bytes: int
    """Its chunks in packs, each counted once, and its manifest."""


class StoredPiece(NamedTuple):
    """A part of an entry that one rank stored."""

    role: str
    """Of a tensor that is made of other tensors, the part that it belongs to; else empty."""
    rank: int
    box: Box | None
    """None if it is not a box of the tensor: a span of its items in C order."""
    span: tuple[int, int]
    """First item, and the one after the last; of bytes if the entry is not a tensor."""
    size_bytes: int
    new_bytes: int


@dataclass(slots=True)
class LeafPieces:
    """The pieces of one leaf."""

    kind: str
    """"whole": one rank stored it; "per rank": each rank has its own; "grid": cut as by `Shard(dim)`; "boxes": others;
    "shares": a tensor that is the same on all ranks, of which each stored a share."""
    grid: tuple[int, ...] = ()
    """The number of boxes in each dim, for a grid."""
    shape: Coordinates | None = None
    pieces: list[StoredPiece] = field(default_factory=list)


@dataclass
class RankedSnapshot:
    """A snapshot that several ranks saved, with its manifests."""

    snapshot: CommittedSnapshot
    manifests: Manifests

    @cached_property
    def ranks(self) -> list[RankRow]:
        """What each rank stored."""
        news = iter(find_new_bytes(self._leases, self.manifests.iter_entries()))
        rows = []
        for rank, (part, ref) in enumerate(zip(self.manifests.parts, self.manifests.root.parts, strict=True)):
            size_bytes, stored = 0, dict[tuple[str, int], int]()
            entries = 0
            for entry in part.iter_entries():
                entries += bool(entry.chunks)
                for chunk in entry.chunks:
                    size_bytes += chunk.size_bytes
                    if chunk.location:
                        stored[chunk.location.pack_id, chunk.location.offset] = chunk.location.stored_bytes
            new_bytes = sum(islice(news, len(part)))
            total = sum(stored.values()) + ref.manifest.size_bytes
            rows.append(RankRow(rank, entries, size_bytes, new_bytes, total))
        return rows

    @cached_property
    def _leases(self) -> frozenset[str]:
        return find_leases(self.snapshot, self.manifests)

    @cached_property
    def _entries(self) -> Mapping[str, tuple[tuple[str, str], ...]]:
        """By the name of a leaf: role and name of each of its entries."""
        root = self.manifests.root
        if not isinstance(root.spec, dict) or TREE not in root.spec:
            return {name: (("", name),) for name in root.names}
        found = {}
        for leaf in iter_leaves(root.spec[TREE]):
            if is_stored(leaf):
                parts = parse_leaf(root, leaf).parts
                found[leaf.name] = tuple((role, part.entry.name) for role, part in parts.items())
        return found

    def find_pieces(self, leaves: Collection[str]) -> dict[str, LeafPieces]:
        """Return the pieces of leaves, without those that have no entries."""
        wanted = {leaf: self._entries[leaf] for leaf in leaves if leaf in self._entries}
        names = {name for entries in wanted.values() for _, name in entries}
        stored: dict[str, list[tuple[int, Entry]]] = {name: [] for name in names}
        for rank, part in enumerate(self.manifests.parts):
            for position, name in enumerate(part.names):
                if name in names:
                    stored[name].append((rank, part.entry(position)))
        return {leaf: self._join(entries, stored) for leaf, entries in wanted.items()}

    def _join(
        self, entries: Sequence[tuple[str, str]], stored: Mapping[str, Sequence[tuple[int, Entry]]]
    ) -> LeafPieces:
        pieces: list[StoredPiece] = []
        shape: Coordinates | None = None
        is_own = is_shared = False
        for role, name in entries:
            shape = _find_shape([entry for _, entry in stored[name]])
            for rank, entry in stored[name]:
                is_own = is_own or entry.rank != NO_RANK
                is_shared = is_shared or (entry.dims == 1 and shape is not None and len(shape) > 1)
                pieces += self._iter_pieces(role, rank, entry, shape)
        if len(entries) != 1:
            return LeafPieces("per rank" if is_own else "boxes", (), None, pieces)
        if is_own:
            return LeafPieces("per rank", (), shape, pieces)
        if len({piece.rank for piece in pieces}) <= 1:
            return LeafPieces("whole", (), shape, pieces)
        if is_shared:
            return LeafPieces("shares", (), shape, pieces)
        grid = _find_grid([piece.box for piece in pieces])
        return LeafPieces("grid" if grid else "boxes", grid, shape, pieces)

    def _iter_pieces(self, role: str, rank: int, entry: Entry, shape: Coordinates | None) -> Iterator[StoredPiece]:
        items = 0 if shape is None else math.prod(shape)
        item_bytes = max(1, entry.size_bytes // items) if items and entry.size_bytes % items == 0 else 1
        if entry.rank != NO_RANK:
            size, new = sum(chunk.size_bytes for chunk in entry.chunks), sum(map(self._count_new, entry.chunks))
            yield StoredPiece(role, rank, None if shape is None else whole(shape), (0, size // item_bytes), size, new)
            return
        if entry.dims > 1:
            boxes = [(Box(each.box[: entry.dims], each.box[entry.dims :]), each) for each in entry.chunks]
            for box, size, new in _join_boxes((box, each.size_bytes, self._count_new(each)) for box, each in boxes):
                yield StoredPiece(role, rank, box, (0, 0), size, new)
            return
        for start, stop, new in _join_spans(entry, self._count_new):
            span = (start // item_bytes, stop // item_bytes)
            yield StoredPiece(role, rank, _find_box(span, shape), span, stop - start, new)

    def _count_new(self, chunk: ChunkRef) -> int:
        """Return the size of a chunk that this save wrote; 0 if it was in the store before."""
        is_new = chunk.location is None or chunk.location.pack_id.partition("-")[0] in self._leases
        return chunk.size_bytes if is_new else 0


def read_ranked(repo: Repository, snapshot: CommittedSnapshot) -> RankedSnapshot:
    """Read the manifests of a snapshot."""
    return RankedSnapshot(snapshot, read_present(repo, snapshot))


def _find_shape(entries: Iterable[Entry]) -> Coordinates | None:
    """Return the shape in the spec of an entry; None if it is not stored in C order, or not a tensor."""
    spec = next((entry.spec for entry in entries if isinstance(entry.spec, dict)), {})
    shape = spec.get("shape")
    if not isinstance(shape, list) or "stride" in spec or spec.get("order") == "F" or spec.get("offset"):
        return None
    return tuple(size for size in shape if isinstance(size, int))


def _find_box(span: tuple[int, int], shape: Coordinates | None) -> Box | None:
    """Return whole rows of a tensor as a box."""
    if shape is None:
        return None
    if not shape:
        return whole(shape)
    row = math.prod(shape[1:])
    if not row or span[0] % row or span[1] % row:
        return None
    rest = len(shape) - 1
    return Box((span[0] // row, *(0,) * rest), ((span[1] - span[0]) // row, *shape[1:]))


_Part = tuple[Box, int, int]


def _join_boxes(parts: Iterable[_Part]) -> list[_Part]:
    """Join boxes that are neighbours, the innermost dim first; each has a size and new bytes, which are added."""
    joined = list(parts)
    for dim in reversed(range(len(joined[0][0].starts)) if joined else ()):
        groups: dict[tuple[Coordinates, Coordinates], list[_Part]] = {}
        for part in joined:
            starts, sizes = part[0]
            key = ((*starts[:dim], *starts[dim + 1 :]), (*sizes[:dim], *sizes[dim + 1 :]))
            groups.setdefault(key, []).append(part)
        joined = [part for group in groups.values() for part in _join_along(dim, group)]
    return sorted(joined)


def _join_along(dim: int, parts: list[_Part]) -> Iterator[_Part]:
    parts.sort(key=lambda part: part[0].starts[dim])
    box, size, new = parts[0]
    for other, more, more_new in parts[1:]:
        if box.stops[dim] == other.starts[dim]:
            sizes = (*box.sizes[:dim], box.sizes[dim] + other.sizes[dim], *box.sizes[dim + 1 :])
            box, size, new = Box(box.starts, sizes), size + more, new + more_new
        else:
            yield box, size, new
            box, size, new = other, more, more_new
    yield box, size, new


def _join_spans(entry: Entry, count_new: Callable[[ChunkRef], int]) -> list[tuple[int, int, int]]:
    """Return start, stop and new bytes of each span of bytes that an entry consists of."""
    found: list[tuple[int, int, int]] = []
    end = 0
    for chunk in entry.chunks:
        start = chunk.box[0] if chunk.box else end
        end = start + chunk.size_bytes
        if found and found[-1][1] == start:
            first, _, new = found.pop()
            found.append((first, end, new + count_new(chunk)))
        else:
            found.append((start, end, count_new(chunk)))
    return found


def _find_grid(boxes: Sequence[Box | None]) -> tuple[int, ...]:
    """Return the number of boxes in each dim if they are a grid as `Shard(dim)` cuts it; else nothing."""
    known = [box for box in boxes if box is not None]
    dims = {len(box.starts) for box in known}
    if len(known) < len(boxes) or len(dims) != 1 or dims == {0}:
        return ()
    cuts = [sorted({(box.starts[dim], box.sizes[dim]) for box in known}) for dim in range(len(known[0].starts))]
    counts = tuple(map(len, cuts))
    is_full = math.prod(counts) == len(set(known)) == len(known)
    return counts if is_full and all(map(_is_even, cuts)) else ()


def _is_even(cut: Sequence[tuple[int, int]]) -> bool:
    """Return whether all parts of a dim follow each other and are as large as the first, but for the last."""
    step = cut[0][1]
    return all(at * step == start for at, (start, _) in enumerate(cut)) and all(size == step for _, size in cut[:-1])


_SORTS: Final = ("rank", "entries", "size_bytes", "new_bytes", "stored_bytes")


def describe_ranks(ranked: RankedSnapshot, sort: str, offset: int, limit: int) -> dict[str, Json]:
    """Return a part of the ranks; raises BadName for a field that cannot be sorted by."""
    by = choose_sort(sort, _SORTS)
    rows = sorted(ranked.ranks, key=lambda row: getattr(row, by), reverse=sort.startswith("-"))
    return {
        "total": len(rows),
        "offset": offset,
        "most_bytes": max((row.size_bytes for row in rows), default=0),
        "ranks": [row._asdict() for row in rows[offset : offset + limit]],
    }


def describe_cuts(ranked: RankedSnapshot, leaves: Collection[str]) -> dict[str, Json]:
    """Return how each leaf was cut, by name: its kind, and the numbers of boxes of a grid."""
    return {leaf: {"kind": found.kind, "grid": list(found.grid)} for leaf, found in ranked.find_pieces(leaves).items()}


def describe_pieces(ranked: RankedSnapshot, leaf: str, offset: int, limit: int) -> dict[str, Json]:
    """Return the pieces of a leaf, by rank; raises NotFound if there is no such leaf with bytes of its own."""
    found = ranked.find_pieces([leaf]).get(leaf)
    if found is None:
        raise NotFound(f"{leaf!r} has no pieces: it is a plain value, or not in the snapshot", name=leaf)
    return {
        "world": len(ranked.manifests.parts),
        "kind": found.kind,
        "grid": list(found.grid),
        "shape": None if found.shape is None else list(found.shape),
        "ranks": len({piece.rank for piece in found.pieces}),
        "total": len(found.pieces),
        "offset": offset,
        "pieces": [_describe_piece(piece) for piece in found.pieces[offset : offset + limit]],
    }


def _describe_piece(piece: StoredPiece) -> dict[str, Json]:
    return {
        "rank": piece.rank,
        "part": piece.role,
        "offsets": None if piece.box is None else list(piece.box.starts),
        "shape": None if piece.box is None else list(piece.box.sizes),
        "span": None if piece.box is not None else list(piece.span),
        "bytes": piece.size_bytes,
        "new_bytes": piece.new_bytes,
        "reused_bytes": piece.size_bytes - piece.new_bytes,
    }
