"""The index: fragments, which are sorted tables of the chunks in packs; a cache that can be rebuilt from the packs."""

from __future__ import annotations

import struct
import threading
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from functools import partial
from typing import Final

from typing_extensions import Self

from holdfast.digest import Digest, fingerprint, hash_bytes
from holdfast.errors import Corrupt, NewerFormat, NotFound, ObjectExists, StoreError
from holdfast.json_text import Json
from holdfast.lru import LruCache
from holdfast.objects.protocol import ObjectInfo, ObjectStore
from holdfast.objects.settle import create_settled
from holdfast.repo.format.chunk import Location
from holdfast.repo.format.columns import ColumnType, Schema, column, decode_table, encode_table
from holdfast.repo.format.layout import INDEX, are_file_ids, index_key
from holdfast.repo.format.pack import PackedChunk

TIER: Final = 8
"""How many fragments of one size class are merged into one."""
MAX_ROWS: Final = 1 << 18
"""Most rows that a merge puts into one fragment, so that the cost of a commit is bounded."""
ROW: Final = struct.Struct("<32sIIQIB3x16s")
_HEADER: Final = struct.Struct("<8sHHIQQ32s")
_MAGIC: Final = b"HFINDEX\n"
INDEX_MAJOR: Final = 1
INDEX_MINOR: Final = 0
_PREFIXES_PER_BLOCK: Final = 16384
_ROWS_PER_BLOCK: Final = 512
_MAX_DIRECTORY_BYTES: Final = 64 << 20
_FIRST_READ_BYTES: Final = 16 << 10
"""Size of the first read of a fragment: mostly its header and directory, and all of a small fragment."""
_FIRST_REQUEST_BYTES: Final = 256 << 10
"""The same for a store whose requests wait: as much as most fragments have."""
_SEARCHES_PER_ROW: Final = 1 / 16
"""After this many searches of fragments per row, building a guide costs less than going on without one."""
_SLOTS_PER_ROW: Final = 16
_FEWEST_SLOTS_PER_ROW: Final = 4
_DIRECTORY: Final[Schema] = {
    "fanout": ColumnType("I"),
    "prefix_check": ColumnType("B", 16),
    "row_check": ColumnType("B", 16),
}
_ROW_GROWTH: Final = 8
"""How many times more memory a row takes once it is decoded."""
_SEVERAL: Final = 255
"""Value of a slot in which more than one fragment has digests."""


def encode_fragment(chunks: Iterable[PackedChunk]) -> bytes:
    """Encode a fragment: header, directory, 4-byte digest prefixes, rows; both sorted by digest."""
    numbers: dict[str, int] = {}
    rows = sorted(
        {
            ROW.pack(
                chunk.digest,
                chunk.size_bytes,
                numbers.setdefault(chunk.location.pack_id, len(numbers)),
                chunk.location.offset,
                chunk.location.stored_bytes,
                chunk.location.codec,
                chunk.location.fingerprint,
            )
            for chunk in chunks
        }
    )
    body = b"".join(rows)
    prefixes = array("I", (int.from_bytes(row[:4], "big") for row in rows))
    prefix_body = bytes(column("I", prefixes.tolist()))
    directory = encode_table(
        {"packs": list(numbers)},
        {
            "fanout": column("I", prefixes[::_PREFIXES_PER_BLOCK].tolist()),
            "prefix_check": memoryview(b"".join(map(fingerprint, _blocks(prefix_body, 4 * _PREFIXES_PER_BLOCK)))),
            "row_check": memoryview(b"".join(map(fingerprint, _blocks(body, ROW.size * _ROWS_PER_BLOCK)))),
        },
        _DIRECTORY,
    )
    header = _HEADER.pack(_MAGIC, INDEX_MAJOR, INDEX_MINOR, ROW.size, len(rows), len(directory), hash_bytes(directory))
    return b"".join([header, directory, prefix_body, body])


def _blocks(data: bytes, size: int) -> Iterator[memoryview]:
    view = memoryview(data)
    return (view[start : start + size] for start in range(0, len(data), size))


class Fragment:
    """One fragment; its blocks are read when they are searched."""

    def __init__(self, store: ObjectStore, key: str, size_bytes: int, *, start: bytes = b"") -> None:
        """Read header and directory, or find them in `start`; raises NotFound, Corrupt or NewerFormat."""
        self.key = key
        self._store = store
        self._start = memoryview(start)
        self._start = self._read(0, min(size_bytes, _find_first_read_bytes(store)))
        if size_bytes < _HEADER.size:
            raise Corrupt(f"{key} is not an intact index fragment", key=key)
        magic, major, _minor, row_bytes, rows, directory_bytes, digest = _HEADER.unpack_from(self._start)
        if magic == _MAGIC and major > INDEX_MAJOR:
            raise NewerFormat(f"{key} has index version {major}, this Holdfast reads up to {INDEX_MAJOR}: upgrade")
        self._prefixes_at = _HEADER.size + directory_bytes
        self._rows_at = self._prefixes_at + 4 * rows
        whole = self._rows_at + ROW.size * rows
        if magic != _MAGIC or row_bytes != ROW.size or whole != size_bytes or directory_bytes > _MAX_DIRECTORY_BYTES:
            raise Corrupt(f"{key} is not an intact index fragment", key=key)
        directory = self._read(_HEADER.size, directory_bytes)
        if hash_bytes(directory) != digest:
            raise Corrupt(f"{key} has a damaged directory", key=key)
        table = decode_table(directory, _DIRECTORY, where=key)
        self.num_rows = rows
        self.packs = _parse_packs(table.head.get("packs"), key)
        self._fanout = list(table.columns["fanout"])
        self._prefix_checks = bytes(table.columns["prefix_check"])
        self._row_checks = bytes(table.columns["row_check"])
        if size_bytes > len(self._start):
            self._start = memoryview(b"")  # blocks of a large fragment are kept by the cache
        blocks = -(-rows // _PREFIXES_PER_BLOCK), -(-rows // _ROWS_PER_BLOCK)
        if (len(self._fanout), len(self._row_checks) // 16) != blocks or len(self._prefix_checks) != 16 * blocks[0]:
            raise Corrupt(f"{key} has an impossible directory", key=key)

    def find(self, digest: Digest, cache: BlockCache) -> Iterator[tuple[int, Location]]:
        """Yield (size, location) of each copy of the chunk that this fragment lists."""
        prefix = int.from_bytes(digest[:4], "big")
        # Equal prefixes may begin at the end of the block before the first block that starts with the prefix.
        first = max(bisect_left(self._fanout, prefix) - 1, 0)
        for block in range(first, bisect_right(self._fanout, prefix)):
            prefixes = cache.prefixes(self, block)
            position = bisect_left(prefixes, prefix)
            while position < len(prefixes) and prefixes[position] == prefix:
                row = self._row(block * _PREFIXES_PER_BLOCK + position, cache)
                if row[0] == digest and row[2] < len(self.packs):
                    yield row[1], Location(self.packs[row[2]], row[3], row[4], row[5], row[6])
                position += 1

    def iter_chunks(self) -> Iterator[PackedChunk]:
        """Yield every row, for merging."""
        for block in range(len(self._row_checks) // 16):
            for row in ROW.iter_unpack(self.read_rows(block)):
                if row[2] < len(self.packs):
                    yield PackedChunk(
                        Digest(row[0]), row[1], Location(self.packs[row[2]], row[3], row[4], row[5], row[6])
                    )

    def iter_prefixes(self, cache: BlockCache) -> Iterator[int]:
        """Yield the first four bytes of every digest, as a number."""
        for block in range(len(self._fanout)):
            yield from cache.prefixes(self, block)

    def read_prefixes(self, block: int) -> array[int]:
        """Read one block of prefixes."""
        data = self._read_block(self._prefixes_at, block, 4, _PREFIXES_PER_BLOCK, self._prefix_checks)
        return array("I", struct.unpack(f"<{len(data) // 4}I", data))

    def read_rows(self, block: int) -> memoryview:
        """Read one block of rows."""
        return self._read_block(self._rows_at, block, ROW.size, _ROWS_PER_BLOCK, self._row_checks)

    def _row(self, number: int, cache: BlockCache) -> tuple[bytes, int, int, int, int, int, bytes]:
        block, position = divmod(number, _ROWS_PER_BLOCK)
        digest, size, pack, offset, stored, codec, mark = ROW.unpack_from(cache.rows(self, block), position * ROW.size)
        return digest, size, pack, offset, stored, codec, mark

    def _read_block(self, at: int, block: int, item_bytes: int, per_block: int, checks: bytes) -> memoryview:
        first = block * per_block
        data = self._read(at + first * item_bytes, (min(first + per_block, self.num_rows) - first) * item_bytes)
        if fingerprint(data) != checks[16 * block : 16 * block + 16]:
            raise Corrupt(f"{self.key} has a damaged block", key=self.key)
        return data

    def _read(self, start: int, size: int) -> memoryview:
        if start + size <= len(self._start):
            return self._start[start : start + size]
        data = memoryview(bytearray(size))
        self._store.read_into(self.key, start, data)
        return data


def _find_first_read_bytes(store: ObjectStore) -> int:
    return max(_FIRST_READ_BYTES, min(_FIRST_REQUEST_BYTES, store.traits.wait_bytes))


def _parse_packs(value: Json, key: str) -> list[str]:
    if not isinstance(value, list) or not set(map(type, value)) <= {str} or not are_file_ids(value):
        raise Corrupt(f"{key} has malformed pack ids", key=key)
    return value


class BlockCache:
    """The most recently used blocks, within a byte budget."""

    def __init__(self, limit_bytes: int) -> None:
        """Keep at most `limit_bytes`, and always the last block."""
        self._blocks: LruCache[tuple[str, str, int], memoryview | array[int]] = LruCache(
            limit_bytes, size_of=lambda block: memoryview(block).nbytes
        )

    def prefixes(self, fragment: Fragment, block: int) -> array[int]:
        """Return a block of prefixes; reads it if it is not cached."""
        key = (fragment.key, "prefix", block)
        found = self._blocks.get(key)
        if isinstance(found, array):
            return found
        read = fragment.read_prefixes(block)
        self._blocks.put(key, read)
        return read

    def rows(self, fragment: Fragment, block: int) -> memoryview:
        """Return a block of rows; reads it if it is not cached."""
        key = (fragment.key, "row", block)
        found = self._blocks.get(key)
        if isinstance(found, memoryview):
            return found
        read = fragment.read_rows(block)
        self._blocks.put(key, read)
        return read


class Guide:
    """Finds the fragments that may contain a digest, so that a lookup searches one fragment or none.

    One byte per range of 4-byte digest prefixes: the fragment with digests there, none, or several.
    """

    def __init__(self, num_slots: int) -> None:
        """Divide the prefixes into `num_slots` ranges, a power of two up to 2^32; no fragment is added yet."""
        self._slots = bytearray(num_slots)
        self._shift = 33 - num_slots.bit_length()
        self._numbers: dict[str, int] = {}
        self._last = 0
        # For each value of a slot, the fragments to search.
        self._choices: list[tuple[str, ...]] = [()] * (_SEVERAL + 1)

    @property
    def num_slots(self) -> int:
        """The number of ranges; with as many digests as ranges, most lookups search every fragment."""
        return len(self._slots)

    def add(self, key: str, prefixes: Iterable[int]) -> None:
        """Add the fragment `key`: lookups of these prefixes search it."""
        number = self._numbers[key] = self._choose_number()
        if number != _SEVERAL:
            self._choices[number] = (key,)
        self._choices[_SEVERAL] = tuple(self._numbers)
        slots, shift, choices = self._slots, self._shift, self._choices
        for prefix in prefixes:
            slot = prefix >> shift
            if slots[slot] != number:
                # A slot with the number of a forgotten fragment counts as empty.
                slots[slot] = _SEVERAL if choices[slots[slot]] else number

    def forget(self, key: str) -> None:
        """Remove the fragment `key`: no lookup searches it any more."""
        number = self._numbers.pop(key, 0)
        if number != _SEVERAL:
            self._choices[number] = ()
        self._choices[_SEVERAL] = tuple(self._numbers)

    def find(self, prefix: int) -> tuple[str, ...]:
        """Return the keys of all fragments that may contain a digest with this prefix."""
        return self._choices[self._slots[prefix >> self._shift]]

    def _choose_number(self) -> int:
        """Return an unused number, the one unused for longest; `_SEVERAL` if all are in use."""
        taken = set(self._numbers.values())
        for step in range(1, _SEVERAL):
            number = (self._last + step - 1) % (_SEVERAL - 1) + 1
            if number not in taken:
                self._last = number
                return number
        return _SEVERAL


class ChunkIndex:
    """All fragments of a store: finds copies of chunks. Best effort: fragments that cannot be read are ignored.

    Safe in any thread. A fragment never changes, so an index that is kept open reads only new ones.
    """

    def __init__(self, store: ObjectStore, *, limit_bytes: int) -> None:
        """Start without fragments, until `refresh`; keep at most `limit_bytes` in memory."""
        self.damaged: set[str] = set()
        self.store: Final = store
        self._max_slots = 1 << (limit_bytes // 4).bit_length() - 1
        self._cache = BlockCache(limit_bytes - self._max_slots)
        self._fragments: dict[str, Fragment] = {}
        self._listed: dict[str, ObjectInfo] = {}
        self._is_outdated = False
        self._num_finds = 0
        self._num_rows = 0
        self._guide: Guide | None = None
        self._num_searches = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """Return the number of fragments that can be searched."""
        self._relist_outdated()
        with self._lock:
            self._open_listed()
            return len(self._fragments)

    @property
    def is_wanted(self) -> bool:
        """Whether this handle has searched the index before: then the next save probably searches it as well."""
        return self._num_finds > 0

    @property
    def listed(self) -> Sequence[ObjectInfo]:
        """All fragments of the last `refresh`, and those that were written since through this index."""
        return list(self._listed.values())

    def refresh(self) -> Self:
        """Open new fragments and forget deleted ones; blocks are read when they are needed."""
        self.relist()
        with self._lock:
            self._open_listed()
        return self

    def expire(self) -> None:
        """Forget the last listing: the next search lists the fragments first."""
        self._is_outdated = True

    def relist(self) -> None:
        """List the fragments and forget deleted ones; new ones are opened by the first search."""
        listed = {info.key: info for info in self.store.iter_objects(INDEX)}
        with self._lock:
            self._listed, self._is_outdated = listed, False
            for key in self._fragments.keys() - listed.keys():
                self._forget(key)
            self.damaged &= listed.keys()

    def write(self, chunks: Iterable[PackedChunk]) -> None:
        """Write a fragment, which is then searched without being read; raises as `write_fragment` does."""
        data = encode_fragment(chunks)
        key = create_fragment(self.store, data)
        with self._lock:
            self._listed[key] = ObjectInfo(key, len(data), self.store.clock())
            if len(data) <= _find_first_read_bytes(self.store) and key not in self._fragments:
                self._add(Fragment(self.store, key, len(data), start=data))

    def find(self, digest: Digest, size_bytes: int) -> list[Location]:
        """Return the locations where copies of a chunk may be stored."""
        found = []
        self._relist_outdated()
        with self._lock:
            self._num_finds += 1
            self._open_listed()
            for key in self._choose(int.from_bytes(digest[:4], "big")):
                try:
                    found += [at for size, at in self._fragments[key].find(digest, self._cache) if size == size_bytes]
                except (NotFound, Corrupt, StoreError) as error:
                    self._drop(key, error)
        return found

    def _choose(self, prefix: int) -> Iterable[str]:
        """Return the keys of the fragments to search: all of them, until a guide is worth its cost."""
        if self._guide is None:
            if self._num_searches < self._num_rows * _SEARCHES_PER_ROW:
                self._num_searches += len(self._fragments)
                return list(self._fragments)
            self._guide = Guide(self._count_slots())
            for key in list(self._fragments):
                self._add_to_guide(self._guide, key)
        return self._guide.find(prefix)

    def _count_slots(self) -> int:
        return min(self._max_slots, 1 << (_SLOTS_PER_ROW * self._num_rows).bit_length())

    def _relist_outdated(self) -> None:
        if self._is_outdated:
            self.relist()

    def _open_listed(self) -> None:
        """Open the fragments that were listed and are not open; at once, if the store answers many requests."""
        if len(self._listed) == len(self._fragments):
            return
        new = self._listed.keys() - self._fragments.keys() - self.damaged
        infos = [self._listed[key] for key in sorted(new)]
        opened = self.store.run_together([partial(self._open, info) for info in infos])
        for info, found in zip(infos, opened, strict=True):
            if isinstance(found, Fragment):
                self._add(found)
            elif isinstance(found, NotFound):
                del self._listed[info.key]  # merged away since it was listed
            else:
                self.damaged.add(info.key)

    def _open(self, info: ObjectInfo) -> Fragment | NotFound | Corrupt | NewerFormat | StoreError:
        try:
            return Fragment(self.store, info.key, info.size_bytes)
        except (NotFound, Corrupt, NewerFormat, StoreError) as error:
            return error

    def _add(self, fragment: Fragment) -> None:
        self._fragments[fragment.key] = fragment
        self._num_rows += fragment.num_rows
        if self._guide and self._guide.num_slots < min(self._max_slots, _FEWEST_SLOTS_PER_ROW * self._num_rows):
            self._guide, self._num_searches = None, 0
        if self._guide:
            self._add_to_guide(self._guide, fragment.key)

    def _add_to_guide(self, guide: Guide, key: str) -> None:
        try:
            guide.add(key, self._fragments[key].iter_prefixes(self._cache))
        except (NotFound, Corrupt, StoreError) as error:
            self._drop(key, error)

    def _drop(self, key: str, error: NotFound | Corrupt | StoreError) -> None:
        self._forget(key)
        if isinstance(error, NotFound):
            self._listed.pop(key, None)
        else:
            self.damaged.add(key)

    def _forget(self, key: str) -> None:
        self._num_rows -= self._fragments.pop(key).num_rows
        if self._guide:
            self._guide.forget(key)


def write_fragment(store: ObjectStore, chunks: Iterable[PackedChunk]) -> str:
    """Write a fragment under its own digest and return its key; not fsynced, as it can be rebuilt from the packs."""
    return create_fragment(store, encode_fragment(chunks))


def create_fragment(store: ObjectStore, data: bytes) -> str:
    """Create an encoded fragment under its own digest and return its key."""
    key = index_key(hash_bytes(data).hex())
    try:
        create_settled(store, key, data, durable=False)
    except ObjectExists:
        # The key is a digest, so only a damaged file can have it with other bytes. Lookups ignore such a file.
        return key
    return key


def drop_missing(store: ObjectStore, fragments: Iterable[ObjectInfo], present: AbstractSet[str]) -> None:
    """Rewrite fragments without the packs that are gone: their rows only slow lookups down."""
    works = ((partial(_drop_rows, store, info, present), info.size_bytes * _ROW_GROWTH) for info in fragments)
    for _ in store.iter_together(works):
        pass


def _drop_rows(store: ObjectStore, info: ObjectInfo, present: AbstractSet[str]) -> None:
    try:
        fragment = Fragment(store, info.key, info.size_bytes)
        if all(pack_id in present for pack_id in fragment.packs):
            return
        kept = [chunk for chunk in fragment.iter_chunks() if chunk.location.pack_id in present]
    except (NotFound, Corrupt, NewerFormat):
        return
    if kept:
        write_fragment(store, kept)
    store.delete(info.key)


def plan_merge(fragments: Iterable[ObjectInfo]) -> list[ObjectInfo]:
    """Choose fragments to merge: those of the smallest size class that is full, or none."""
    tiers: dict[int, list[ObjectInfo]] = {}
    for info in fragments:
        tiers.setdefault((info.size_bytes // ROW.size).bit_length() // 3, []).append(info)
    for _, members in sorted(tiers.items()):
        smallest = sorted(members, key=lambda info: info.size_bytes)[:TIER]
        if len(smallest) == TIER and sum(info.size_bytes for info in smallest) <= MAX_ROWS * ROW.size:
            return smallest
    return []


def apply_merge(store: ObjectStore, fragments: list[ObjectInfo]) -> None:
    """Replace many fragments by one; a concurrent search finds the old ones, the new one or both."""
    found = store.run_together([partial(_read_chunks, store, info) for info in fragments])
    merged = write_fragment(store, (chunk for chunks in found for chunk in chunks))
    store.run_together([partial(store.delete, info.key) for info in fragments if info.key != merged])


def _read_chunks(store: ObjectStore, info: ObjectInfo) -> list[PackedChunk]:
    try:
        return list(Fragment(store, info.key, info.size_bytes).iter_chunks())
    except (NotFound, Corrupt, NewerFormat):
        return []  # merged by another process, or unreadable; it can be rebuilt from the packs


def merge_tiers(store: ObjectStore) -> None:
    """Merge fragments, smallest first, until no size class is full."""
    while plan := plan_merge(store.iter_objects(INDEX)):
        apply_merge(store, plan)
