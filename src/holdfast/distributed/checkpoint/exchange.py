"""Finds the chunks that each rank needs while each manifest is read once, and shares what all ranks load."""

from __future__ import annotations

import json
import logging
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from math import isqrt, prod
from types import TracebackType
from typing import Any, Final, Literal, NamedTuple, Protocol
from zlib import crc32

import numpy as np
import torch
from numpy.typing import NDArray
from typing_extensions import Self

from holdfast.digest import hash_bytes
from holdfast.distributed.checkpoint.module_sync import TensorFacts, gather_tables
from holdfast.distributed.checkpoint.plan import plan_shares
from holdfast.distributed.talk.collectives import Collectives
from holdfast.distributed.talk.sending import Sender, open_carrier
from holdfast.errors import Corrupt, NotFound, SnapshotGone
from holdfast.objects.protocol import ObjectStore
from holdfast.repo.format.boxes import Box, is_span, span_of, volume, whole
from holdfast.repo.format.entry import NO_RANK, Entry
from holdfast.repo.format.layout import ManifestRef, manifest_key
from holdfast.repo.format.manifest import (
    Manifest,
    build_table,
    decode_manifest,
    encode_manifest,
    read_manifest,
    read_verified,
)
from holdfast.repo.format.rank_manifests import Manifests, join_entry, merge
from holdfast.repo.read.read_plan import Region
from holdfast.repo.read.reader import SnapshotReader
from holdfast.repo.write.world import Ranks
from holdfast.snapshot.batches import view_tensor_memory
from holdfast.snapshot.entries import ReadTarget
from holdfast.snapshot.merge_trees import find_variants

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


_log = logging.getLogger(__name__)

MIN_BYTES: Final = 64 << 20
"""Below this size every rank reads everything itself, without a measurement."""
SAMPLE_BYTES: Final = 8 << 20
"""How much is read and sent to measure which is faster."""
MIN_READ_S: Final = 1.0
"""If reading everything takes less than this, the ranks are not connected."""
_MARGIN: Final = 0.8
"""Sending must take less than this share of the time of reading, because the measurement is not exact."""


class ReplicaExchange:
    """Lets each rank read a share of the entries that all ranks load in place, and send it to the others.

    Use it in a `with`.
    """

    def __init__(
        self,
        ranks: Collectives,
        reader: SnapshotReader,
        *,
        mode: Literal["auto", "broadcast"] = "broadcast",
        timeout_s: float,
    ) -> None:
        """Exchange between `ranks`; with mode="auto", only if a measurement shows that to be faster."""
        self._ranks = ranks
        self._reader = reader
        self._mode = mode
        self._timeout_s = timeout_s
        self._stack = ExitStack()
        self._sender: Sender | None = None
        self._shares: list[list[torch.Tensor]] = []

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the connections to the other ranks."""
        self._stack.__exit__(kind, error, trace)

    def choose(self, places: Mapping[int, ReadTarget]) -> Collection[int]:
        """Return the numbers of the entries that this rank need not read, because another rank sends them."""
        numbers, table = _describe(places)
        tables = gather_tables(self._ranks, table)
        if tables is not None:
            table = {name: facts for name, facts in table.items() if all(each.get(name) == facts for each in tables)}
        # An entry that is tied to another one uses the same memory, so it is not read separately.
        read = [name for name in sorted(table) if table[name][-1] not in table]
        sizes = [table[name][0] for name in read]
        if not read or not self._is_faster(sizes, [places[numbers[name]] for name in read]):
            return ()
        shares = plan_shares(sizes, self._ranks.world_size)
        named = [[read[at] for at in share] for share in shares]
        self._shares = [[_find_memory(places[numbers[name]]) for name in names] for names in named]
        mine = set(named[self._ranks.rank])
        return {numbers[name] for name in table if name not in mine}

    def send(self) -> None:
        """Send what this rank has read, and receive what the others have read; call it after all ranks have read."""
        if not self._shares:
            return
        sender = self._connect()
        with sender.sending("broadcast"):
            for rank, memory in enumerate(self._shares):
                sender.send_bytes(memory, rank)

    def _connect(self) -> Sender:
        """Return the sender; the first call connects the ranks, so all must make it."""
        if self._sender is None:
            carrier = self._stack.enter_context(open_carrier(self._ranks, timeout_s=self._timeout_s))
            self._sender = Sender(self._ranks, carrier, timeout_s=self._timeout_s)
        return self._sender

    def _is_faster(self, sizes: Sequence[int], places: Sequence[ReadTarget]) -> bool:
        """Return whether to send. All ranks return the same: they have the same sizes, and the coordinator decides."""
        if self._mode == "broadcast":
            return True
        if sum(sizes) < MIN_BYTES:
            return False
        sample = _plan_sample(sizes)
        scale = sum(sizes) / sum(sample.values())
        # Not into the target: the load may still be refused, and then the target must be unchanged.
        memory = [torch.empty(size_bytes, dtype=torch.uint8) for size_bytes in sample.values()]

        def read() -> None:
            for at, each in zip(sample, memory, strict=True):
                self._reader.read_into(places[at].entry, 0, each.numpy().data)

        # All ranks read at the same time, as in the real load, because they may share a disk or a network.
        read_s = scale * self._ranks.all_reduce("measure reading", lambda: _time(read), max)
        if read_s < MIN_READ_S:
            return False
        send_s = scale * self._measure_sending(memory)
        return bool(self._ranks.broadcast("choose", lambda: self._decide(read_s, send_s)))

    def _measure_sending(self, memory: Sequence[torch.Tensor]) -> float:
        """Return how long the slowest rank takes to send or receive the sample, in seconds."""
        sender = self._connect()
        with sender.sending("try sending"):
            sender.send_bytes([memory[0][:1]], 0)  # warm up: the first bytes on a connection take longer
        with sender.sending("measure sending"):
            seconds = _time(partial(sender.send_bytes, memory, 0))
        return float(self._ranks.all_reduce("compare times", lambda: seconds, max))

    def _decide(self, read_s: float, send_s: float) -> bool:
        """Return whether to send: each rank then reads only its share, and everything is sent once."""
        shared_s = read_s / self._ranks.world_size + send_s
        is_faster = shared_s < _MARGIN * read_s
        text = "estimated %.1f s if every rank reads everything, %.1f s if each reads a share and sends it: %s"
        _log.info(text, read_s, shared_s, "sending" if is_faster else "every rank reads")
        return is_faster


def _time(act: Callable[[], None]) -> float:
    began = time.monotonic()
    act()
    return time.monotonic() - began


def _plan_sample(sizes: Sequence[int]) -> dict[int, int]:
    """Return how many bytes to read of which entries, the largest entries first."""
    sample: dict[int, int] = {}
    room = SAMPLE_BYTES
    for at in sorted(range(len(sizes)), key=lambda at: (-sizes[at], at)):
        if room <= 0:
            break
        sample[at] = min(room, sizes[at])
        room -= sample[at]
    return sample


def _describe(places: Mapping[int, ReadTarget]) -> tuple[dict[str, int], dict[str, TensorFacts]]:
    """Return the entries that are loaded whole into contiguous memory: their numbers, and facts to compare, by name."""
    numbers: dict[str, int] = {}
    table: dict[str, TensorFacts] = {}
    first: dict[tuple[torch.device, int, int], str] = {}
    for number, place in sorted(places.items(), key=lambda item: item[1].entry.name):
        entry = place.entry
        if not entry.size_bytes or not _is_whole(place):
            continue
        memory = _find_memory(place)
        content = hash_bytes(b"".join(chunk.digest for chunk in entry.chunks)).hex()
        key = (memory.device, memory.data_ptr(), entry.size_bytes)
        tied = first.setdefault(key, entry.name)
        numbers[entry.name] = number
        table[entry.name] = [entry.size_bytes, content, memory.device.type, "" if tied == entry.name else tied]
    return numbers, table


def _is_whole(place: ReadTarget) -> bool:
    if place.pieces is None:
        return place.size_bytes == place.entry.size_bytes
    if len(place.pieces) != 1:
        return False
    box, tensor = place.pieces[0]
    return box == whole(tuple(place.tensor.shape)) and tensor.is_contiguous()


def _find_memory(place: ReadTarget) -> torch.Tensor:
    """Return the memory into which a whole entry is loaded, as a tensor of bytes."""
    return view_tensor_memory(place.tensor if place.pieces is None else place.pieces[0].tensor, place.entry.size_bytes)
