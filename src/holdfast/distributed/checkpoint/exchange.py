"""Where the chunks lie that each of many ranks wants of a snapshot of many parts: each part is read once, rows travel.

Of N parts each of W ranks reads N/W. A name belongs to one rank, its owner: whoever has read rows of it sends them
there, whoever wants some of it says so there, and the owner answers with the rows that hold what is wanted. There are
about as many owners as the root of W: with more of them messages would be many, with fewer they would be long.
"""

from __future__ import annotations

import json
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import isqrt, prod
from typing import Any, Final, NamedTuple, Protocol
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from holdfast.errors import Corrupt
from holdfast.objects.protocol import ObjectStore
from holdfast.repo.format.boxes import Box, is_span, span_of, volume
from holdfast.repo.format.entry import NO_RANK, Entry
from holdfast.repo.format.layout import ManifestRef, manifest_key
from holdfast.repo.format.manifest import Manifest, decode_manifest, read_manifest, read_proven
from holdfast.repo.format.manifest_encoding import build_table, encode_manifest
from holdfast.repo.format.rank_manifests import Manifests, join_entry, merge
from holdfast.repo.read.regions import Region
from holdfast.repo.write.world import Ranks
from holdfast.snapshot.load.variants import find_variants

OWNED_BYTES: Final = 8 << 20
"""How much of all part manifests one owner takes on, before there are more of them."""
_WHERE: Final = "the parts of a snapshot"
_UNPLACED: Final = 1
"""The dims of an entry that has no chunks, or not all of them: each has its place."""

Wanted = tuple[Region, ...] | None
"""The boxes that are wanted of a tensor; None is all bytes of an entry."""
_Rows = NDArray[np.int64]


class Exchanging(Ranks, Protocol):
    """Ranks that can send something else to each other, too."""

    def all_to_all(self, step: str, map: Callable[[], Sequence[Any]]) -> list[Any]:
        """Call `map` for one value for each rank, and return what came from each; b"" costs nothing."""


def open_together(store: ObjectStore, ref: ManifestRef, ranks: Exchanging) -> ChunkExchange:
    """Read the manifests of a snapshot, each by one rank; raises RankError on all if one is missing or damaged."""
    data = ranks.broadcast("root", lambda: read_proven(store, ref))
    root = decode_manifest(data, where=manifest_key(ref.manifest_id))
    mine = range(ranks.rank, len(root.parts), ranks.world_size)
    parts: dict[int, Manifest] = {}

    def read() -> None:
        for number in mine:
            parts[number] = read_manifest(store, root.parts[number].manifest)
            ranks.beat()

    if root.parts:
        ranks.all_gather("parts", read)
    return ChunkExchange(ranks, root, parts)


class ChunkExchange:
    """One rank's part in finding where chunks lie."""

    def __init__(self, ranks: Exchanging, root: Manifest, parts: Mapping[int, Manifest]) -> None:
        """Take the root, and the parts that this rank has read."""
        self._ranks = ranks
        self._root = root
        self._parts = parts
        # As many as have saved it: each is who it was.
        self._rank = ranks.rank if len(root.parts) == ranks.world_size else None
        self.heads = self._make_heads() if root.parts else root
        """The tree and its entries as this rank has to see them, without chunks."""

    def locate(self, wants: Mapping[int, Wanted]) -> Manifest:
        """Return the same with the chunks of what is wanted, by number; all ranks must call this.

        Of boxes, only the chunks that hold some of them are there. Raises RankError on all ranks if the parts do not
        make up an entry that one of them wants.
        """
        if not self._root.parts:
            return self._root
        if self._ranks.world_size == 1:
            parts = tuple(self._parts[number] for number in sorted(self._parts))
            return merge(Manifests(self._root, parts, 0), self._rank)
        stated = list(self.heads.iter_entries())
        asked = {number: wanted for number, wanted in wants.items() if wanted is None or any(map(_is_some, wanted))}
        router = Router.plan(self._root, self._ranks.world_size)
        sent = self._ranks.all_to_all(
            "rows", lambda: pack_questions(router, self._parts, [(stated[n], asked[n]) for n in asked], self._rank)
        )
        answers = self._ranks.all_to_all("places", lambda: answer_all(sent))
        found = {entry.name: entry for each in answers if each for entry in decode_rows(each)}
        for number in asked:
            stated[number] = _fill(stated[number], found[stated[number].name])
        return Manifest(build_table(self.heads.spec, stated), _WHERE)

    def list_variants(self) -> list[str]:
        """Return what the ranks that saved it had each a value of its own of, if these are others; all must call this.

        As many as have saved it get each its own back, so there is nothing to tell.
        """
        if self._rank is not None or not self._root.parts:
            return []
        told = self._ranks.all_gather("variants", lambda: find_variants(self._root, self._parts.values()))
        return sorted({name for names in told for name in names})

    @property
    def num_parts(self) -> int:
        """How many ranks have saved it."""
        return len(self._root.parts)

    def _make_heads(self) -> Manifest:
        own = self._parts.get(self._rank) if self._rank is not None else None
        # A part has a spec of its own only if that rank saw the tree otherwise than the root tells it.
        base = own if own is not None and own.spec is not None else self._root
        held = {} if own is None else {entry.name: entry for entry in own.iter_entries() if entry.rank == self._rank}
        entries = []
        for entry in base.iter_entries():
            seen = held.get(entry.name, entry)
            entries.append(
                entry._replace(size_bytes=seen.size_bytes, spec=seen.spec, chunks=(), dims=_UNPLACED, rank=NO_RANK)
            )
        return Manifest(build_table(base.spec, entries), _WHERE)


def _is_some(region: Region) -> bool:
    return volume(region.box) > 0


def _fill(stated: Entry, found: Entry) -> Entry:
    """Return an entry with the chunks that were found for it."""
    if found.rank != NO_RANK and (found.size_bytes, found.spec) != (stated.size_bytes, stated.spec):
        raise Corrupt(
            f"{stated.name!r}: what rank {found.rank} has saved of it is not what the snapshot says that it is;"
            " run `holdfast check`",
            key=stated.name,
        )
    return stated._replace(chunks=found.chunks, dims=found.dims)


@dataclass(frozen=True, slots=True)
class Router:
    """Which rank owns a name."""

    world_size: int
    owners: int
    positions: Mapping[str, int]
    """The names of the root by number: one after the other, so that no owner has many more than another."""

    @classmethod
    def plan(cls, root: Manifest, world_size: int) -> Router:
        """Return what all ranks find alike."""
        part_bytes = sum(part.manifest.size_bytes for part in root.parts)
        owners = min(world_size, max(isqrt(world_size - 1) + 1, part_bytes // OWNED_BYTES))
        return cls(world_size, owners, {name: number for number, name in enumerate(root.names)})

    def find_owner(self, name: str) -> int:
        """Return the rank that owns a name; the coordinator has enough to do already, and comes last."""
        number = self.positions.get(name)
        index = (crc32(name.encode(errors="surrogatepass")) if number is None else number) % self.owners
        return (index + 1) * self.world_size // self.owners - 1


def pack_questions(
    router: Router, parts: Mapping[int, Manifest], asked: Iterable[tuple[Entry, Wanted]], rank: int | None
) -> list[Any]:
    """Return what to send to each rank: the rows of these parts that are of its names, and what is wanted of those."""
    rows: dict[int, list[tuple[int, bytes]]] = {}
    for number, part in parts.items():
        by_owner: dict[int, list[Entry]] = {}
        for entry in part.iter_entries():
            if entry.chunks or not entry.size_bytes:
                by_owner.setdefault(router.find_owner(entry.name), []).append(_strip(entry))
        for owner, entries in by_owner.items():
            rows.setdefault(owner, []).append((number, encode_manifest(None, entries)))
    wants: dict[int, list[Any]] = {}
    for entry, wanted in asked:
        regions = wanted and [(each.shape, each.item_bytes, *each.box) for each in wanted if _is_some(each)]
        wants.setdefault(router.find_owner(entry.name), []).append((entry.name, entry.size_bytes, regions))
    return [
        (rank, rows.get(owner, []), json.dumps(wants.get(owner, [])).encode())
        if owner in rows or owner in wants
        else b""
        for owner in range(router.world_size)
    ]


def _strip(entry: Entry) -> Entry:
    """Return an entry without what the owner of its name need not know."""
    return entry._replace(note=None, alias=0, spec=entry.spec if entry.rank != NO_RANK else None)


def decode_rows(data: bytes) -> Iterator[Entry]:
    """Yield entries that another rank has sent."""
    return decode_manifest(data, where="what another rank has sent").iter_entries()


def answer_all(questions: Sequence[Any]) -> list[bytes]:
    """Return what each rank gets to know of the names that this one owns; Corrupt if their rows do not add up."""
    parts = sorted((part for each in questions if each for part in each[1]), key=lambda part: part[0])
    held: dict[str, list[Entry]] = {}
    for _, data in parts:
        for entry in decode_rows(data):
            held.setdefault(entry.name, []).append(entry)
    owned = {name: _Owned(found) for name, found in held.items()}
    answers = []
    for each in questions:
        entries = []
        for name, size_bytes, regions in json.loads(each[2]) if each else ():
            joined = owned.setdefault(name, _Owned([])).find(name, size_bytes, each[0])
            wanted = regions and [
                Region(Box(tuple(starts), tuple(sizes)), tuple(shape), item_bytes)
                for shape, item_bytes, starts, sizes in regions
            ]
            entries.append(joined.entry if wanted is None else joined.cut(wanted))
        answers.append(encode_manifest(None, entries) if entries else b"")
    return answers


class _View(NamedTuple):
    """An entry as some ranks have to see it."""

    size_bytes: int
    rank: int
    """Whose own it is, if it is somebody's."""


@dataclass(slots=True)
class _Owned:
    """A name, and what all parts have of it, in their order."""

    found: list[Entry]
    variants: tuple[int, ...] = ()
    joined: dict[_View, _Joined] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.variants = tuple(entry.rank for entry in self.found if entry.rank != NO_RANK)

    def find(self, name: str, size_bytes: int, rank: int | None) -> _Joined:
        """Return the whole as a rank has to see it."""
        chosen = NO_RANK
        if self.variants:
            chosen = rank if rank in self.variants else min(self.variants)
        view = _View(size_bytes, chosen)
        if view not in self.joined:
            entry = join_entry(Entry(name, size_bytes, ()), self.found, rank)
            self.joined[view] = _Joined(entry._replace(rank=chosen))
        return self.joined[view]


class _Joined:
    """An entry with all its chunks, and a table of where they are, so that each of many ranks finds its own soon."""

    def __init__(self, entry: Entry) -> None:
        self.entry = entry
        self._ends = list(accumulate(chunk.size_bytes for chunk in entry.chunks))
        begins = [0, *self._ends[:-1]]
        self._spans: _Rows = np.array([begins[: len(self._ends)], self._ends], np.int64)
        self._boxes: _Rows = np.array([chunk.box for chunk in entry.chunks] if entry.dims else [], np.int64)
        self._placed = entry.chunks
        if not entry.dims:
            rows = zip(entry.chunks, begins, strict=False)
            self._placed = tuple(chunk._replace(box=(begin, chunk.size_bytes)) for chunk, begin in rows)

    def cut(self, regions: Sequence[Region]) -> Entry:
        """Return the entry with the chunks that hold some of these regions, and no others."""
        found = [self._find_rows(region) for region in regions]
        rows = found[0] if len(found) == 1 else sorted(set().union(*found))
        if len(rows) == len(self._placed):
            return self.entry
        return self.entry._replace(chunks=tuple(self._placed[row] for row in rows), dims=self.entry.dims or _UNPLACED)

    def _find_rows(self, region: Region) -> Sequence[int]:
        """Return the numbers of the chunks that hold some of a region, in order."""
        if self.entry.dims:
            starts, sizes = self._boxes[:, : self.entry.dims], self._boxes[:, self.entry.dims :]
            meets = (starts < np.array(region.box.stops)) & (starts + sizes > np.array(region.box.starts))
            return [int(row) for row in np.flatnonzero(meets.all(axis=1))]
        if is_span(region.box, region.shape):
            start, stop = span_of(region.box, region.shape, region.item_bytes)
            return range(bisect_right(self._ends, start), bisect_left(self._ends, stop) + 1)
        begins, ends = self._spans
        starts, size = _find_runs(region)
        # The first run that ends after a chunk begins either begins in it or is not in it.
        next_runs = np.searchsorted(starts + size, begins, side="right")
        is_run = next_runs < len(starts)
        meets = is_run & (starts[np.minimum(next_runs, len(starts) - 1)] < ends)
        return [int(row) for row in np.flatnonzero(meets)]


def _find_runs(region: Region) -> tuple[_Rows, int]:
    """Return where the runs of a region begin in the row of bytes that the tensor is, and how long each is."""
    box, shape = region.box, region.shape
    # The innermost dims that are whole make up one run, together with the first that is not.
    inner = len(shape)
    while inner > 0 and box.sizes[inner - 1] == shape[inner - 1]:
        inner -= 1
    outer = max(inner - 1, 0)
    starts = np.zeros(1, np.int64)
    for dim, (start, size) in enumerate(zip(box.starts, box.sizes, strict=True)):
        indices = np.arange(start, start + size) if dim < outer else np.array([start])
        starts = (starts[:, None] + indices * prod(shape[dim + 1 :])).ravel()
    return starts * region.item_bytes, prod(box.sizes[outer:]) * region.item_bytes
