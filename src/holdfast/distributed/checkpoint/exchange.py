"""Finds the chunks that each rank needs of a snapshot of many parts, while each part manifest is read by one rank only.

Each of W ranks reads N/W of the N part manifests. Every entry name has an owner, which is one of the ranks. A rank
sends the rows that it has read to the owners of their names, together with the regions that it wants of those names.
The owner answers with the rows of the chunks that contain these regions. There are about sqrt(W) owners: with more
there would be many messages, with fewer the messages would be long.
"""

from __future__ import annotations

import json
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from math import isqrt, prod
from typing import Any, Final, NamedTuple, Protocol
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from holdfast.errors import Corrupt, NotFound, SnapshotGone
from holdfast.objects.protocol import ObjectStore
from holdfast.repo.format.boxes import Box, is_span, span_of, volume
from holdfast.repo.format.entry import NO_RANK, Entry
from holdfast.repo.format.layout import ManifestRef, manifest_key
from holdfast.repo.format.manifest import Manifest, decode_manifest, read_manifest, read_verified
from holdfast.repo.format.manifest_encoding import build_table, encode_manifest
from holdfast.repo.format.rank_manifests import Manifests, join_entry, merge
from holdfast.repo.read.read_plan import Region
from holdfast.repo.write.world import Ranks
from holdfast.snapshot.load.merge_trees import find_variants

OWNED_BYTES: Final = 8 << 20
"""Bytes of part manifests per owner. Beyond that, there are more than sqrt(W) owners."""
_WHERE: Final = "the parts of a snapshot"
_BYTE_RANGES: Final = 1
"""The `dims` of an entry that lists none or only some of its chunks: each chunk then has an explicit byte range."""

Wanted = tuple[Region, ...] | None
"""The regions that are wanted of a tensor; None for all bytes of the entry."""
_Rows = NDArray[np.int64]


class ExchangeRanks(Ranks, Protocol):
    """Ranks that can also send a different value to each rank."""

    def all_to_all(self, step: str, map: Callable[[], Sequence[Any]]) -> list[Any]:
        """Call `map` for one value per rank; return the values received, by rank. b"" is not sent."""


def open_together(store: ObjectStore, ref: ManifestRef, ranks: ExchangeRanks, *, name: str = "") -> ChunkExchange:
    """Read the manifests of the snapshot `name`, each on one rank; raise RankError on all if one is lost or damaged."""
    cache = store.cache

    def read_root() -> bytes:
        with _lost_is_gone(name):
            return read_verified(store, ref, cache=cache)

    data = ranks.broadcast("root", read_root)
    root = decode_manifest(data, where=manifest_key(ref.manifest_id))
    mine = range(ranks.rank, len(root.parts), ranks.world_size)
    parts: dict[int, Manifest] = {}
    if root.parts:
        with ranks.gathering("parts"), _lost_is_gone(name):
            for number in mine:
                parts[number] = read_manifest(store, root.parts[number].manifest, cache=cache)
                ranks.beat()
    return ChunkExchange(ranks, root, parts)


@contextmanager
def _lost_is_gone(name: str) -> Iterator[None]:
    """Turn NotFound of a manifest into SnapshotGone."""
    try:
        yield
    except NotFound as error:
        text = f"{name!r} is gone: its manifest was collected or lost; list the snapshots again"
        raise SnapshotGone(text, name=name) from error


class ChunkExchange:
    """Finds, on one rank, the chunks that it needs, by exchanging rows of part manifests with the others."""

    def __init__(self, ranks: ExchangeRanks, root: Manifest, parts: Mapping[int, Manifest]) -> None:
        """Use the root manifest, and the part manifests that this rank has read, by number."""
        self._ranks = ranks
        self._root = root
        self._parts = parts
        # Loaded on as many ranks as saved it, each rank gets the values that the same rank saved.
        self._rank = ranks.rank if len(root.parts) == ranks.world_size else None
        self.heads = self._make_heads() if root.parts else root
        """The tree and its entries as this rank must load them, without chunks."""

    def locate(self, wants: Mapping[int, Wanted]) -> Manifest:
        """Return `heads` with the chunks of the wanted entries, which are given by number; all ranks must call this.

        If regions of an entry are wanted, only the chunks that intersect them are included. Raises RankError on all
        ranks if the parts do not add up to an entry that a rank wants.
        """
        if not self._root.parts:
            return self._root
        # A single rank has read all parts, so it need not ask others.
        if self._ranks.world_size == 1:
            parts = tuple(self._parts[number] for number in sorted(self._parts))
            return merge(Manifests(self._root, parts, 0), self._rank)
        entries = list(self.heads.iter_entries())
        # A region without items needs no chunks, so nothing is asked about it.
        asked = {number: wanted for number, wanted in wants.items() if wanted is None or any(map(_has_items, wanted))}
        router = Router.plan(self._root, self._ranks.world_size)
        sent = self._ranks.all_to_all(
            "rows", lambda: pack_questions(router, self._parts, [(entries[n], asked[n]) for n in asked], self._rank)
        )
        answers = self._ranks.all_to_all("places", lambda: answer_all(sent))
        found = {entry.name: entry for each in answers if each for entry in decode_rows(each)}
        for number in asked:
            entries[number] = _add_chunks(entries[number], found[entries[number].name])
        return Manifest(build_table(self.heads.spec, entries), _WHERE)

    def list_variants(self) -> list[str]:
        """Return the names of values that differed between the saving ranks; all ranks must call this.

        The list is empty on as many ranks as saved the snapshot: each then gets its own value back.
        """
        if self._rank is not None or not self._root.parts:
            return []
        by_rank = self._ranks.all_gather("variants", lambda: find_variants(self._root, self._parts.values()))
        return sorted({name for names in by_rank for name in names})

    @property
    def num_parts(self) -> int:
        """How many ranks have saved the snapshot."""
        return len(self._root.parts)

    def _make_heads(self) -> Manifest:
        own = self._parts.get(self._rank) if self._rank is not None else None
        # A part has a spec only if the tree of its rank differed from that of the root.
        base = own if own is not None and own.spec is not None else self._root
        variants = (
            {} if own is None else {entry.name: entry for entry in own.iter_entries() if entry.rank == self._rank}
        )
        entries = []
        for entry in base.iter_entries():
            seen = variants.get(entry.name, entry)
            entries.append(
                entry._replace(size_bytes=seen.size_bytes, spec=seen.spec, chunks=(), dims=_BYTE_RANGES, rank=NO_RANK)
            )
        return Manifest(build_table(base.spec, entries), _WHERE)


def _has_items(region: Region) -> bool:
    return volume(region.box) > 0


def _add_chunks(entry: Entry, found: Entry) -> Entry:
    """Return an entry with the chunks that were found for it."""
    if found.rank != NO_RANK and (found.size_bytes, found.spec) != (entry.size_bytes, entry.spec):
        raise Corrupt(
            f"{entry.name!r}: size or spec in the manifest of rank {found.rank} differ from those in the root manifest;"
            " run `holdfast check`",
            key=entry.name,
        )
    return entry._replace(chunks=found.chunks, dims=found.dims)


@dataclass(frozen=True, slots=True)
class Router:
    """Decides which rank owns a name."""

    world_size: int
    owners: int
    positions: Mapping[str, int]
    """Position of each name in the root manifest. Names are dealt out by position, so owners have equally many."""

    @classmethod
    def plan(cls, root: Manifest, world_size: int) -> Router:
        """Return the router of a snapshot; it is the same on all ranks."""
        part_bytes = sum(part.manifest.size_bytes for part in root.parts)
        owners = min(world_size, max(isqrt(world_size - 1) + 1, part_bytes // OWNED_BYTES))
        return cls(world_size, owners, {name: number for number, name in enumerate(root.names)})

    def find_owner(self, name: str) -> int:
        """Return the rank that owns a name. Rank 0, often the coordinator, is an owner only if most ranks are."""
        # For a name that the root lacks any rank will do, if all ranks choose the same; `hash` differs by process.
        number = self.positions.get(name)
        index = (crc32(name.encode(errors="surrogatepass")) if number is None else number) % self.owners
        # Owners are spread evenly over the ranks, down from the last one.
        return (index + 1) * self.world_size // self.owners - 1


def pack_questions(
    router: Router, parts: Mapping[int, Manifest], asked: Iterable[tuple[Entry, Wanted]], rank: int | None
) -> list[Any]:
    """Return the message for each rank: the rows of `parts` whose names it owns, and what is wanted of its names."""
    # Rows are encoded per part, because the owner joins them in the order of the parts.
    rows: dict[int, list[tuple[int, bytes]]] = {}
    for number, part in parts.items():
        by_owner: dict[int, list[Entry]] = {}
        for entry in part.iter_entries():
            if entry.chunks or not entry.size_bytes:
                by_owner.setdefault(router.find_owner(entry.name), []).append(_strip(entry))
        for owner, entries in by_owner.items():
            rows.setdefault(owner, []).append((number, encode_manifest(None, entries)))
    # The questions are sent as JSON, which is encoded and decoded in C: there is one for each tensor of a model.
    wants: dict[int, list[Any]] = {}
    for entry, wanted in asked:
        regions = wanted and [(each.shape, each.item_bytes, *each.box) for each in wanted if _has_items(each)]
        wants.setdefault(router.find_owner(entry.name), []).append((entry.name, entry.size_bytes, regions))
    return [
        (rank, rows.get(owner, []), json.dumps(wants.get(owner, [])).encode())
        if owner in rows or owner in wants
        else b""
        for owner in range(router.world_size)
    ]


def _strip(entry: Entry) -> Entry:
    """Return an entry without the fields that the owner of its name does not need."""
    return entry._replace(note=None, alias=0, spec=entry.spec if entry.rank != NO_RANK else None)


def decode_rows(data: bytes) -> Iterator[Entry]:
    """Yield the entries of a message from another rank."""
    return decode_manifest(data, where="a message from another rank").iter_entries()


def answer_all(questions: Sequence[Any]) -> list[bytes]:
    """Return the answer to each rank about the names that this rank owns; raise Corrupt if their rows do not add up."""
    parts = sorted((part for each in questions if each for part in each[1]), key=lambda part: part[0])
    by_name: dict[str, list[Entry]] = {}
    for _, data in parts:
        for entry in decode_rows(data):
            by_name.setdefault(entry.name, []).append(entry)
    owned = {name: _Owned(found) for name, found in by_name.items()}
    answers = []
    for each in questions:
        entries = []
        for name, size_bytes, regions in json.loads(each[2]) if each else ():
            # If no part has rows of a name, `find` raises Corrupt, unless the entry has no bytes.
            joined = owned.setdefault(name, _Owned([])).find(name, size_bytes, each[0])
            wanted = regions and [
                Region(Box(tuple(starts), tuple(sizes)), tuple(shape), item_bytes)
                for shape, item_bytes, starts, sizes in regions
            ]
            entries.append(joined.entry if wanted is None else joined.cut(wanted))
        answers.append(encode_manifest(None, entries) if entries else b"")
    return answers


class _View(NamedTuple):
    """A variant of an entry; ranks with the same view get the same chunks."""

    size_bytes: int
    rank: int
    """The rank whose own value it is; NO_RANK if all ranks share one value."""


@dataclass(slots=True)
class _Owned:
    """The rows of one name from all parts, in the order of the parts."""

    found: list[Entry]
    variants: tuple[int, ...] = ()
    joined: dict[_View, _Joined] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.variants = tuple(entry.rank for entry in self.found if entry.rank != NO_RANK)

    def find(self, name: str, size_bytes: int, rank: int | None) -> _Joined:
        """Return the complete entry as `rank` must load it."""
        # A rank that saved a value of its own gets that one; any other rank gets the value of the lowest rank.
        chosen = NO_RANK
        if self.variants:
            chosen = rank if rank in self.variants else min(self.variants)
        view = _View(size_bytes, chosen)
        if view not in self.joined:
            entry = join_entry(Entry(name, size_bytes, ()), self.found, rank)
            self.joined[view] = _Joined(entry._replace(rank=chosen))
        return self.joined[view]


class _Joined:
    """An entry with all its chunks, and tables of their positions for fast lookup by region."""

    def __init__(self, entry: Entry) -> None:
        self.entry = entry
        self._ends = list(accumulate(chunk.size_bytes for chunk in entry.chunks))
        begins = [0, *self._ends[:-1]]
        self._spans: _Rows = np.array([begins[: len(self._ends)], self._ends], np.int64)
        self._boxes: _Rows = np.array([chunk.box for chunk in entry.chunks] if entry.dims else [], np.int64)
        self._placed = entry.chunks
        # Without dims, the chunks follow each other. A chunk that is sent without its neighbours needs its byte range.
        if not entry.dims:
            rows = zip(entry.chunks, begins, strict=False)
            self._placed = tuple(chunk._replace(box=(begin, chunk.size_bytes)) for chunk, begin in rows)

    def cut(self, regions: Sequence[Region]) -> Entry:
        """Return the entry with only the chunks that intersect these regions."""
        found = [self._find_rows(region) for region in regions]
        rows = found[0] if len(found) == 1 else sorted(set().union(*found))
        if len(rows) == len(self._placed):
            return self.entry
        return self.entry._replace(
            chunks=tuple(self._placed[row] for row in rows), dims=self.entry.dims or _BYTE_RANGES
        )

    def _find_rows(self, region: Region) -> Sequence[int]:
        """Return the numbers of the chunks that intersect a region, in order."""
        if self.entry.dims:
            starts, sizes = self._boxes[:, : self.entry.dims], self._boxes[:, self.entry.dims :]
            meets = (starts < np.array(region.box.stops)) & (starts + sizes > np.array(region.box.starts))
            return [int(row) for row in np.flatnonzero(meets.all(axis=1))]
        # A contiguous region: from the first chunk that ends after its start to the first that reaches its stop.
        if is_span(region.box, region.shape):
            start, stop = span_of(region.box, region.shape, region.item_bytes)
            return range(bisect_right(self._ends, start), bisect_left(self._ends, stop) + 1)
        begins, ends = self._spans
        starts, size = _find_runs(region)
        # Of the runs that end after a chunk begins, the first one decides: they intersect if it begins before the
        # chunk ends.
        next_runs = np.searchsorted(starts + size, begins, side="right")
        is_run = next_runs < len(starts)
        meets = is_run & (starts[np.minimum(next_runs, len(starts) - 1)] < ends)
        return [int(row) for row in np.flatnonzero(meets)]


def _find_runs(region: Region) -> tuple[_Rows, int]:
    """Return the byte offsets of the contiguous runs of a region within its tensor, and the length of each run."""
    box, shape = region.box, region.shape
    # A run spans the innermost dims that are whole, and the one before them.
    inner = len(shape)
    while inner > 0 and box.sizes[inner - 1] == shape[inner - 1]:
        inner -= 1
    outer = max(inner - 1, 0)
    starts = np.zeros(1, np.int64)
    for dim, (start, size) in enumerate(zip(box.starts, box.sizes, strict=True)):
        indices = np.arange(start, start + size) if dim < outer else np.array([start])
        starts = (starts[:, None] + indices * prod(shape[dim + 1 :])).ravel()
    return starts * region.item_bytes, prod(box.sizes[outer:]) * region.item_bytes
