"""Plans a collective save: finds replicas, divides chunks among the ranks, checks that boxes cover each tensor once."""

from __future__ import annotations

import secrets
import struct
import warnings
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise, repeat
from typing import Any, Final

from holdfast.digest import Digest, Seeded, hash_bytes
from holdfast.distributed.talk.failures import name_ranks
from holdfast.errors import Mismatch
from holdfast.json_text import Json, canonical_json, parse_json
from holdfast.repo.engine import Engine
from holdfast.repo.format.boxes import Box, Coordinates, contains, overlap, volume, whole
from holdfast.repo.format.entry import NO_RANK, Entry
from holdfast.repo.format.source import Source, SourceChunk, cut_sources, group_chunks
from holdfast.repo.write.transaction import ManifestPart
from holdfast.repo.write.world import Ranks
from holdfast.repo.write.writer import Placement, Request
from holdfast.snapshot.leaves import renumber
from holdfast.snapshot.merge_trees import merge_trees
from holdfast.snapshot.save import Digests, SaveOptions, digest_sources, make_leaves
from holdfast.tensors.shard_source import ShardSource, pick_chunks
from holdfast.tensors.sharding import LocalLeaf
from holdfast.texts import list_lines, list_some
from holdfast.trees.outline import TREE
from holdfast.trees.registered import Types

_PRIME: Final = (1 << 127) - 1
"""Modulus of all sums. It is prime because a polynomial has few zeros only over a field."""
_SEED_BYTES: Final = 8

BoxItem = tuple[str, str, Coordinates, Box]
"""Name, dtype and global shape of a tensor, and one of its stored boxes."""


@dataclass(frozen=True, slots=True)
class Sketch:
    """The sums of some boxes; merged over all ranks they show whether every tensor is stored exactly once."""

    total: int = 0
    """Weight of the boxes minus weight of the tensors whose origin they contain, modulo a prime."""
    origins: tuple[int, ...] = ()
    """Sorted 8-byte hashes of the tensors whose first item is stored. A hash that occurs twice is stored twice."""


def sketch_boxes(items: Iterable[BoxItem], seed: bytes) -> Sketch:
    """Sketch the boxes that one rank stores; `seed` is random for each save, and the same on all ranks.

    A tensor without items counts as stored by a rank that passes a box of it that starts at the origin.
    """
    seeded = Seeded(int.from_bytes(seed[:_SEED_BYTES].ljust(_SEED_BYTES, b"\0"), "big"))
    known: dict[tuple[str, str, Coordinates], bytes] = {}
    total = 0
    origins = []
    for name, dtype, shape, box in items:
        is_first = not any(box.starts)
        if volume(box) == 0 and not (is_first and 0 in shape):
            continue
        if is_first:
            origins.append(int.from_bytes(seeded(seed + name.encode(errors="surrogatepass"))[:8], "big"))
        if box == whole(shape):
            continue
        tensor = (name, dtype, shape)
        if tensor not in known:
            known[tensor] = seeded(_encode_tensor(seed, *tensor))
        difference = _weigh(box, shape, known[tensor], seeded) - (is_first and 0 not in shape)
        total += difference * int.from_bytes(known[tensor], "big")
    return Sketch(total % _PRIME, tuple(sorted(origins)))


def _encode_tensor(seed: bytes, name: str, dtype: str, shape: Coordinates) -> bytes:
    parts = (seed, name.encode(errors="surrogatepass"), dtype.encode(), struct.pack(f"<{len(shape)}q", *shape))
    return b"".join(struct.pack("<q", len(part)) + part for part in parts)


def _weigh(box: Box, shape: Coordinates, tensor: bytes, seeded: Seeded) -> int:
    """Return the weight of a box, without the factor of its tensor."""
    weight = 1
    for dim, (start, size, length) in enumerate(zip(box.starts, box.sizes, shape, strict=True)):
        if size != length or start:
            heights = [_hash_edge(edge, length, dim, tensor, seeded) for edge in (start, start + size)]
            weight = weight * (heights[1] - heights[0]) % _PRIME
    return weight


def _hash_edge(edge: int, length: int, dim: int, tensor: bytes, seeded: Seeded) -> int:
    # G(0) = 0 and G(length) = 1: a box that is whole along a dim has the factor 1 there.
    if edge in (0, length):
        return int(edge > 0)
    return int.from_bytes(seeded(tensor + struct.pack("<qq", dim, edge)), "big")


def merge(sketches: Iterable[Sketch]) -> Sketch:
    """Return the sketch of all boxes together."""
    total = 0
    origins: list[int] = []
    for sketch in sketches:
        total += sketch.total
        origins += sketch.origins
    return Sketch(total % _PRIME, tuple(sorted(origins)))


def is_covered(sketch: Sketch) -> bool:
    """Return whether every tensor of which any box is stored is stored exactly once."""
    return sketch.total % _PRIME == 0 and all(left != right for left, right in pairwise(sketch.origins))


@dataclass(frozen=True, slots=True)
class Problem:
    """A region of a tensor that no rank or several ranks store, or a dtype or shape that ranks disagree about."""

    name: str
    text: str
    """A sentence that names the tensor, the region and the ranks."""
    region: Box | None = None
    """None if the problem concerns the whole tensor."""
    ranks: tuple[int, ...] = ()
    """The ranks that store the region; a rank that stores it twice is listed twice."""


@dataclass(frozen=True, slots=True)
class StoredBox:
    """A box of a tensor, with the dtype and shape of the tensor on the rank that stores it."""

    rank: int
    name: str
    dtype: str
    shape: Coordinates
    box: Box


def find_problems(stored: Iterable[StoredBox]) -> list[Problem]:
    """Return every reason why a tensor is not stored exactly once. Slow, so it is used only if the sketches fail."""
    by_name: dict[str, list[StoredBox]] = defaultdict(list)
    for each in stored:
        by_name[each.name].append(each)
    problems = []
    for name, found in by_name.items():
        differences = _find_differences(name, found)
        problems += differences or find_gaps(name, found[0].shape, [(each.rank, each.box) for each in found])
    return problems


def _find_differences(name: str, stored: Sequence[StoredBox]) -> list[Problem]:
    problems = []
    for what in ("dtype", "shape"):
        ranks: dict[object, set[int]] = defaultdict(set)
        for each in stored:
            ranks[getattr(each, what)].add(each.rank)
        if len(ranks) > 1:
            views = " and ".join(f"{value} on {name_ranks(ranks[value])}" for value in ranks)
            all_ranks = tuple(sorted(set().union(*ranks.values())))
            problems.append(Problem(name, f"{name}: its {what} is {views}", ranks=all_ranks))
    return problems


def find_gaps(name: str, shape: Coordinates, stored: Sequence[tuple[int, Box]]) -> list[Problem]:
    """Return every region of a tensor that no rank stores, that several store, or that is outside of its shape.

    `stored` has the rank and the box of everything that is stored of it.
    """
    problems = [_describe_outside(name, shape, rank, box) for rank, box in stored if not contains(whole(shape), box)]
    if 0 in shape:
        ranks = sorted(rank for rank, box in stored if volume(box) == 0 and not any(box.starts))
        found = [] if len(ranks) == 1 else [(whole(shape), tuple(ranks))]
    else:
        inside = [(rank, overlap(whole(shape), box)) for rank, box in stored]
        found = _sweep([(rank, box) for rank, box in inside if box is not None], shape, 0)
    return problems + [_describe_region(name, shape, region, ranks) for region, ranks in found]


def _describe_outside(name: str, shape: Coordinates, rank: int, box: Box) -> Problem:
    region = name_region(box, tuple(stop + 1 for stop in box.stops))
    return Problem(name, f"{name}: rank {rank} holds {region}, outside of shape {shape}", box, (rank,))


def _describe_region(name: str, shape: Coordinates, region: Box, ranks: tuple[int, ...]) -> Problem:
    verb = "is" if region == whole(shape) or len(shape) > 2 else "are"
    return Problem(name, f"{name}: {name_region(region, shape)} {verb} held by {name_ranks(ranks)}", region, ranks)


_Found = list[tuple[Box, tuple[int, ...]]]


def _sweep(stored: Collection[tuple[int, Box]], shape: Coordinates, dim: int) -> _Found:
    """Return the regions, in the dims from `dim` on, that no box or several boxes cover, with the ranks of these."""
    if dim == len(shape) or not stored:
        ranks = tuple(sorted(rank for rank, _ in stored))
        return [] if len(ranks) == 1 else [(whole(shape[dim:]), ranks)]
    opening, closing = defaultdict(list), defaultdict(list)
    for number, (_, box) in enumerate(stored):
        opening[box.starts[dim]].append(number)
        closing[box.stops[dim]].append(number)
    boxes = list(stored)
    active: dict[int, tuple[int, Box]] = {}
    slabs: list[tuple[int, int, _Found]] = []
    for low, high in pairwise(sorted({0, shape[dim], *opening, *closing})):
        for number in closing[low]:
            del active[number]
        active.update((number, boxes[number]) for number in opening[low])
        found = _sweep(active.values(), shape, dim + 1)
        # Join neighbours with equal findings: the edge between them belongs to a box elsewhere.
        start = slabs.pop()[0] if slabs and slabs[-1][2] == found else low
        slabs.append((start, high, found))
    return [
        (Box((low, *inner.starts), (high - low, *inner.sizes)), ranks)
        for low, high, found in slabs
        for inner, ranks in found
    ]


def name_region(region: Box, shape: Coordinates) -> str:
    """Format a region for a message: items of one dim, rows and columns of two, an index expression of more."""
    if region == whole(shape):
        return "all of it"
    parts = [(f"{start}:{stop}", size == length) for (start, size), stop, length in _edges(region, shape)]
    if len(shape) > 2:
        return f"[{', '.join(':' if is_whole else text for text, is_whole in parts)}]"
    words = ("items",) if len(shape) == 1 else ("rows", "columns")
    named = zip(words, parts, strict=True)
    return ", ".join(f"{word} {text}" for word, (text, is_whole) in named if not is_whole)


def _edges(region: Box, shape: Coordinates) -> Iterable[tuple[tuple[int, int], int, int]]:
    return zip(zip(region.starts, region.sizes, strict=True), region.stops, shape, strict=True)


_ENGINE_BYTES: Final = 64 << 20
_BATCH_BYTES: Final = 8 << 20
_MAX_NAMED: Final = 20
_READ: Final = b"r"
_DIGESTS: Final = b"d"
"""Kinds of fingerprints: of bytes that were read, and of digests that a device has computed."""


@dataclass(frozen=True, slots=True)
class Planned:
    """What one rank saves."""

    request: Request
    divergent: tuple[str, ...] = ()
    """Names whose values differ between ranks without being declared per rank."""


@dataclass(slots=True)
class _Leaves:
    """The leaves of this rank."""

    node: Json = None
    sources: Sequence[Source] = ()
    chunks: Sequence[Sequence[SourceChunk]] = ()
    """The chunks of each source."""
    local: Mapping[int, LocalLeaf] = field(default_factory=dict)
    """The boxes that this rank has of shards and of declared replicas, by number of the entry."""
    per_rank: set[int] = field(default_factory=set)
    """Numbers of the entries that were declared per rank."""
    per_rank_names: set[str] = field(default_factory=set)
    digests: Digests = field(default_factory=dict)
    """By number of an entry that is on a device and may also be on other ranks: the digests of its chunks."""
    fingerprints: dict[int, bytes] = field(default_factory=dict)
    """Fingerprints of the entries that other ranks may also have, by number; the first byte is the kind."""

    def whole_bytes(self, number: int) -> int:
        """Return the size of the whole entry, of which this rank may have a part."""
        source = self.sources[number]
        return source.whole_bytes if isinstance(source, ShardSource) else source.size_bytes

    def describe(self) -> list[Json]:
        """Return the description of each entry, without its bytes."""
        return [
            [
                source.name,
                self.whole_bytes(number),
                source.spec,
                _drop_index(source.note),
                source.alias,
                # In a root manifest, rank 0 means that the entry was declared per rank.
                0 if number in self.per_rank else NO_RANK,
            ]
            for number, source in enumerate(self.sources)
        ]

    def encode(self) -> bytes:
        """Encode the tree, the descriptions of its entries, and the names that were declared per rank."""
        return canonical_json([self.node, self.describe(), sorted(self.per_rank_names)])


def plan_save(
    name: str, tree: object, options: SaveOptions, types: Types, ranks: Ranks, global_ranks: Sequence[int]
) -> Planned:
    """Plan this rank's part of a collective save; raises RankError on all ranks if one of them fails."""
    return _Planner(name, options, ranks, global_ranks).plan(tree, types)


class _Planner:
    """Plans one save, on one rank."""

    def __init__(self, name: str, options: SaveOptions, ranks: Ranks, global_ranks: Sequence[int]) -> None:
        self._name = name
        self._options = options
        self._ranks = ranks
        self._group = {rank: number for number, rank in enumerate(global_ranks)}
        self._leaves = _Leaves()
        self._divergent: list[str] = []
        self._seeded = Seeded(0)

    def plan(self, tree: object, types: Types) -> Planned:
        ranks = self._ranks
        seed = ranks.broadcast(f"save {self._name!r}", lambda: secrets.token_bytes(8))
        described = ranks.all_gather("describe", lambda: self._describe(tree, types, seed))
        verify_passed_by_all("overwrite=True", [each[3] for each in described])
        root = self._agree_on_tree([(each[0], each[1]) for each in described])
        holders, variants = self._find_holders(described)
        chunks = self._choose_chunks(holders)
        self._verify_coverage(chunks, seed)
        is_same = root is not None and canonical_json(root.spec) == canonical_json(self._spec)
        sources, placements, digests = self._make_placements(chunks, variants, keeps_all=not is_same)
        request = Request(
            self._name,
            sources,
            spec=None if is_same else self._spec,
            places=placements,
            root=root,
            options=self._options,
            digests=digests,
        )
        divergent = tuple(dict.fromkeys(self._divergent))
        if divergent:
            # Warn in a step: if warnings are turned into errors, all ranks must raise.
            ranks.broadcast("warn", lambda: _warn_of_divergent(self._name, divergent))
        return Planned(request, divergent)

    @property
    def _spec(self) -> Json:
        return {TREE: self._leaves.node}

    def _describe(self, tree: object, types: Types, seed: bytes) -> tuple[Any, ...]:
        """Encode the tree; return what the ranks compare: name, digests of tree and fingerprints, and `overwrite`."""
        leaves = make_leaves(tree, self._options, types)
        self._leaves.node = parse_json(leaves.spec.data, where="the tree")[TREE]
        self._leaves.sources = leaves.sources
        self._leaves.local, self._leaves.per_rank = leaves.local_leaves, leaves.per_rank_entries
        self._leaves.per_rank_names = leaves.per_rank_names
        chunks: list[list[SourceChunk]] = [[] for _ in leaves.sources]
        for piece in cut_sources(leaves.sources):
            chunks[piece.position].append(piece)
        self._leaves.chunks = chunks
        self._compute_fingerprints(seed)
        shape = canonical_json([self._leaves.node, self._leaves.describe()])
        # One digest per group of ranks that should have the same values: if they do, a few bytes prove it.
        by_group: dict[tuple[int, ...], list[bytes]] = defaultdict(list)
        for number, taken in self._leaves.fingerprints.items():
            by_group[self._find_declared(number)].append(canonical_json(self._key(number)) + taken)
        digests = {group: hash_bytes(b"".join(sorted(found))) for group, found in by_group.items()}
        return self._name, hash_bytes(shape), digests, self._options.overwrite

    def _find_declared(self, number: int) -> tuple[int, ...]:
        """Return the ranks that are declared to have the same entry or box as this one; all ranks if none are."""
        leaf = self._leaves.local.get(number)
        # A mesh smaller than the world says nothing about copies outside of it, such as data-parallel ones.
        if leaf is None or not leaf.ranks or len(leaf.mesh_ranks) < self._ranks.world_size:
            return tuple(range(self._ranks.world_size))
        return tuple(sorted(self._group[rank] for rank in leaf.ranks))

    def _key(self, number: int) -> list[Json]:
        source = self._leaves.sources[number]
        if not isinstance(source, ShardSource):
            return [source.name, None]
        return [source.name, [[*piece.box.starts, *piece.box.sizes] for piece in source.pieces]]

    def _compute_fingerprints(self, seed: bytes) -> None:
        """Compute fingerprints of all entries that other ranks may also have; those on a device are hashed there."""
        if self._ranks.world_size == 1:
            return
        leaves = self._leaves
        self._seeded = Seeded(int.from_bytes(seed, "big"))
        shared = []
        for number, source in enumerate(leaves.sources):
            is_unique = isinstance(source, ShardSource) and len(self._find_declared(number)) == 1
            if number not in leaves.per_rank and not is_unique:
                shared.append(number)
        leaves.digests = digest_sources((number, leaves.sources[number]) for number in shared)
        on_device = [number for number in shared if any(leaves.digests.get(number, ()))]
        on_host = [number for number in shared if number not in set(on_device)]
        found = self._fingerprint(on_host, _READ) | self._fingerprint(on_device, _DIGESTS)
        leaves.fingerprints = {number: found[number] for number in shared}

    def _fingerprint(self, numbers: Sequence[int], kind: bytes) -> dict[int, bytes]:
        """Return the fingerprints of entries: of their bytes, or of the digests of their chunks."""
        leaves, seeded = self._leaves, self._seeded
        sources = {number: leaves.sources[number] for number in numbers}
        found = {number: seeded(canonical_json([each.spec, each.size_bytes])) for number, each in sources.items()}

        def fingerprint(batch: Sequence[SourceChunk]) -> list[tuple[int, bytes]]:
            return [(each.position, each.digest or seeded(each.source.read(each.start, each.stop))) for each in batch]

        pieces: list[SourceChunk] = []
        for number in numbers:
            digests = leaves.digests[number] if kind == _DIGESTS else repeat(None)
            pieces += [chunk._replace(digest=each) for chunk, each in zip(leaves.chunks[number], digests, strict=False)]
        batches = [(batch, _BATCH_BYTES) for batch in group_chunks(pieces, limit_bytes=_BATCH_BYTES)]
        with Engine("holdfast-fingerprint", budget_bytes=_ENGINE_BYTES, waits=False) as engine:
            for batch in engine.iter_results(fingerprint, batches):
                self._ranks.beat()
                for number, digest in batch:
                    found[number] = seeded(found[number] + digest)
        return {number: kind + each for number, each in found.items()}

    def _agree_on_tree(self, described: Sequence[tuple[str, bytes]]) -> ManifestPart | None:
        """Return the root: this rank's tree and entries if all ranks have the same, else the union of all ranks.

        None if a single process saves only whole tensors.
        """
        names = {name for name, _ in described}
        if len(names) > 1:
            shown = list_some(sorted(names), _MAX_NAMED)
            raise Mismatch(f"the ranks save under different names: {shown}; pass the same name on all ranks")
        own = self._leaves
        if len(described) == 1 and not any(map(_is_partial, own.sources)):
            return None
        shapes = [shape for _, shape in described]
        if len(set(shapes)) == 1:
            return _make_root(own.node, own.describe())
        # Of ranks with equal trees, the first one sends it.
        is_first = shapes.index(shapes[self._ranks.rank]) == self._ranks.rank
        sent = self._ranks.all_gather("trees", lambda: own.encode() if is_first else b"")
        trees = [parse_json(memoryview(each), where="a rank") for each in sent if each]
        return self._unite(trees)

    def _unite(self, trees: Sequence[Any]) -> ManifestPart:
        """Return the root of different trees: the union of their entries, numbered by name, and of their nodes."""
        described: dict[str, Json] = {}
        for _, entries, _ in trees:
            for entry in entries:
                described.setdefault(entry[0], entry)
        numbers = {name: number for number, name in enumerate(described)}
        numbered = [
            renumber(node, {number: numbers[entry[0]] for number, entry in enumerate(entries)})
            for node, entries, _ in trees
        ]
        united, divergent = merge_trees(numbered)
        declared = {name for _, _, names in trees for name in names}
        self._divergent += [name for name in divergent if name not in declared]
        return _make_root(united, list(described.values()))

    def _find_holders(self, gathered: Sequence[tuple[Any, ...]]) -> tuple[dict[int, tuple[int, ...]], set[int]]:
        """Return the ranks that have the same value of each entry, and the entries whose values differ."""
        digests = [each[2] for each in gathered]
        fingerprints = self._leaves.fingerprints
        is_same = all(
            digests[rank].get(group) == digest for group, digest in digests[self._ranks.rank].items() for rank in group
        )
        # Either all ranks take part in the next step or none does.
        if not any(self._ranks.all_gather("alike", lambda: not is_same)):
            return {number: self._find_declared(number) for number in fingerprints}, set()
        tables = self._gather_tables()
        holders: dict[int, tuple[int, ...]] = {}
        variants: set[int] = set()
        problems: list[str] = []
        for number, taken in fingerprints.items():
            key = canonical_json(self._key(number))
            found = [rank for rank, theirs in enumerate(tables) if key in theirs]
            if all(tables[rank][key] == taken for rank in found):
                holders[number] = tuple(found)
            elif number in self._leaves.local:
                problems.append(_describe_difference(self._leaves.sources[number].name, found, tables, key))
            else:
                variants.add(number)

        def name_variants() -> list[str]:
            _verify_replicas(problems)
            return [self._leaves.sources[number].name for number in sorted(variants)]

        # Gathered from all ranks: an entry that differs may be missing on this one.
        for names in self._ranks.all_gather("declared", name_variants):
            self._divergent += names
        return holders, variants

    def _gather_tables(self) -> list[dict[bytes, bytes]]:
        """Return the fingerprints of all ranks, by key; those of one key are of the same kind."""
        fingerprints, gather = self._leaves.fingerprints, self._ranks.all_gather
        numbers = {canonical_json(self._key(number)): number for number in fingerprints}
        tables = gather("replicas", lambda: {key: fingerprints[number] for key, number in numbers.items()})
        kinds: dict[bytes, set[bytes]] = defaultdict(set)
        for table in tables:
            for key, taken in table.items():
                kinds[key].add(taken[:1])
        mixed = {key for key, found in kinds.items() if len(found) > 1}
        if mixed:
            # An entry is on a device of some ranks only: its bytes are compared. All ranks have the same tables.
            fingerprints |= self._fingerprint([numbers[key] for key in mixed & numbers.keys()], _READ)
            again = gather("mixed", lambda: {key: fingerprints[numbers[key]] for key in mixed & numbers.keys()})
            tables = [table | found for table, found in zip(tables, again, strict=True)]
        return tables

    def _choose_chunks(self, holders: Mapping[int, tuple[int, ...]]) -> dict[int, list[int]]:
        """Return the chunks of each entry that this rank stores: a share of each replica, all of the others."""
        own_chunks = {number: list(range(len(chunks))) for number, chunks in enumerate(self._leaves.chunks)}
        groups: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for number, group in holders.items():
            if len(group) > 1:
                groups[group].append(number)
        for group, numbers in groups.items():
            # Sorted by key, so that all holders have the same order although their trees may differ.
            numbers.sort(key=lambda number: canonical_json(self._key(number)))
            chunks = [(number, at) for number in numbers for at in range(len(self._leaves.chunks[number]))]
            sizes = [self._size(number, at) for number, at in chunks]
            share = plan_shares(sizes, len(group))[group.index(self._ranks.rank)]
            own_chunks.update({number: [] for number in numbers})
            for number, at in chunks[share.start : share.stop]:
                own_chunks[number].append(at)
        return own_chunks

    def _size(self, number: int, at: int) -> int:
        piece = self._leaves.chunks[number][at]
        return piece.stop - piece.start

    def _verify_coverage(self, own_chunks: Mapping[int, Sequence[int]], seed: bytes) -> None:
        """Raise Mismatch on all ranks unless every tensor is stored exactly once."""
        items = [
            (self._leaves.sources[number].name, str(leaf.dtype), leaf.global_shape, box)
            for number, leaf in self._leaves.local.items()
            for box in self._pick_boxes(number, own_chunks[number])
        ]
        sketches = self._ranks.all_gather("cover", lambda: _flatten(sketch_boxes(items, seed)))
        if is_covered(merge(Sketch(total, tuple(origins)) for total, origins in sketches)):
            return
        # The sketches only show that something is wrong. To describe it, all ranks exchange their boxes.
        plain = [[name, dtype, list(shape), [list(box.starts), list(box.sizes)]] for name, dtype, shape, box in items]
        gathered = self._ranks.all_gather("gaps", lambda: plain)
        stored = [
            StoredBox(rank, name, dtype, tuple(shape), Box(tuple(starts), tuple(sizes)))
            for rank, own in enumerate(gathered)
            for name, dtype, shape, (starts, sizes) in own
        ]
        texts = [problem.text for problem in find_problems(stored)]
        raise Mismatch(
            f"{self._name!r} cannot be saved: its tensors are not stored exactly once; nothing was written:"
            + list_lines(texts, _MAX_NAMED),
            problems=tuple(texts),
        )

    def _pick_boxes(self, number: int, chunks: Sequence[int]) -> list[Box]:
        source = self._leaves.sources[number]
        assert isinstance(source, ShardSource), "the source of a shard has boxes"
        # A tensor without items has no chunks. The coordinator alone reports its box, so that it counts as stored once.
        if not source.boxes and self._ranks.is_coordinator:
            return [Box((0,) * len(shape), shape) for shape in (self._leaves.local[number].global_shape,) if 0 in shape]
        return [source.boxes[at] for at in chunks]

    def _make_placements(
        self, own_chunks: Mapping[int, Sequence[int]], variants: set[int], *, keeps_all: bool
    ) -> tuple[Sequence[Source], dict[int, Placement], Digests]:
        """Return the sources of this rank's part, the position of each in its whole entry, and known digests."""
        if self._ranks.world_size == 1 and not any(map(_is_partial, self._leaves.sources)):
            return self._leaves.sources, {}, {}
        sources: list[Source] = []
        placements: dict[int, Placement] = {}
        digests: dict[int, Sequence[Digest | None]] = {}
        for number, source in enumerate(self._leaves.sources):
            whole_bytes, known = self._leaves.whole_bytes(number), self._leaves.digests.get(number)
            if number in self._leaves.per_rank or number in variants:
                if known:
                    digests[len(sources)] = known
                placements[len(sources)] = Placement(whole_bytes, 0, (), self._ranks.rank)
                sources.append(source)
                continue
            # The tree of a rank that differs from the root refers to its entries by number, so none may be missing.
            if not own_chunks[number] and whole_bytes and not keeps_all:
                continue
            spans = [(each.start, each.stop) for each in (self._leaves.chunks[number][at] for at in own_chunks[number])]
            dims, boxes = _place_chunks(source, own_chunks[number], spans)
            if known:
                digests[len(sources)] = [known[at] for at in own_chunks[number]]
            placements[len(sources)] = Placement(whole_bytes, dims, boxes)
            sources.append(pick_chunks(source, spans))
        return sources, placements, digests


def _drop_index(note: Json) -> Json:
    """Return a note without the device index, which differs between ranks."""
    if not isinstance(note, dict) or "device" not in note:
        return note
    return note | {"device": str(note["device"]).partition(":")[0]}


def _is_partial(source: Source) -> bool:
    """Return whether a source contains less than its entry, or its bytes in another order."""
    return isinstance(source, ShardSource) and not source.is_whole


def _place_chunks(
    source: Source, numbers: Sequence[int], spans: Sequence[tuple[int, int]]
) -> tuple[int, list[tuple[int, ...]]]:
    """Return the dims and positions of chunks: byte ranges if there is one dim, boxes if there are more."""
    if not isinstance(source, ShardSource):
        return 1, [(start, stop - start) for start, stop in spans]
    boxes = [source.boxes[number] for number in numbers]
    dims = len(boxes[0].starts) if boxes else 1
    if dims > 1:
        return dims, [(*box.starts, *box.sizes) for box in boxes]
    items = [(box.starts[0] if box.starts else 0, box.sizes[0] if box.sizes else 1) for box in boxes]
    sizes = [stop - start for start, stop in spans]
    return 1, [(start * (size // count), size) for (start, count), size in zip(items, sizes, strict=True)]


def _make_root(node: Json, described: Sequence[Any]) -> ManifestPart:
    entries = [
        Entry(name, whole_bytes, (), spec, note, 1, alias, rank)
        for name, whole_bytes, spec, note, alias, rank in described
    ]
    return ManifestPart({TREE: node}, entries)


def _flatten(sketch: Sketch) -> tuple[int, list[int]]:
    return sketch.total, list(sketch.origins)


def _describe_difference(name: str, holders: Sequence[int], tables: Sequence[Mapping[bytes, bytes]], key: bytes) -> str:
    """Return a line that groups the ranks `holders` by their value of a declared replica.

    `tables` has, for each rank, the fingerprints of its entries; `key` is that of the replica.
    """
    groups: dict[bytes, list[int]] = defaultdict(list)
    for rank in holders:
        groups[tables[rank][key]].append(rank)
    return (
        f"{name}: declared a replica, but its value differs between {', and '.join(map(name_ranks, groups.values()))}"
    )


def _verify_replicas(problems: Sequence[str]) -> None:
    """Raise Mismatch if declared replicas differ."""
    if problems:
        raise Mismatch(
            f"replicas differ; nothing was written:{list_lines(problems, _MAX_NAMED)}", problems=tuple(problems)
        )


def _warn_of_divergent(name: str, divergent: Sequence[str]) -> None:
    """Warn of entries that differ between ranks without being declared per rank; every rank's value was saved."""
    warnings.warn(
        f"{name!r}: not the same on all ranks: {list_some(divergent, _MAX_NAMED)}. The value of each rank was saved."
        " Loaded on as many ranks, each gets its own; on another number, all get that of the lowest rank. Mark such"
        " values with holdfast.per_rank(...) if they are meant to differ",
        stacklevel=2,
    )


def verify_passed_by_all(option: str, is_passed: Sequence[bool]) -> None:
    """Raise Mismatch if some ranks have passed an option and others have not."""
    given = [rank for rank, each in enumerate(is_passed) if each]
    if 0 < len(given) < len(is_passed):
        raise Mismatch(f"only {name_ranks(given)} passed {option}: pass it on all ranks, or on none")


def plan_shares(sizes: Sequence[int], holders: int) -> list[range]:
    """Return the range of chunks that each holder stores; a range may be empty.

    `sizes` are the sizes in bytes of the chunks, in an order that is the same on all holders. No share is larger than
    an equal share plus one chunk.
    """
    if holders < 1:
        raise ValueError(f"holders={holders}: must be at least 1")
    # The bytes are divided equally. A chunk belongs to the share that contains its middle, so no chunk is cut and
    # each end of a share is off by at most half a chunk.
    ends = list(accumulate(sizes))
    total = ends[-1] if ends else 0
    doubled_middles = [2 * end - size for end, size in zip(ends, sizes, strict=True)]
    edges = [bisect_left(doubled_middles, -(-2 * total * holder // holders)) for holder in range(holders)]
    return [range(start, stop) for start, stop in zip(edges, [*edges[1:], len(sizes)], strict=True)]
