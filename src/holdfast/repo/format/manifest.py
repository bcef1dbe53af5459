"""Manifests: the list of a snapshot's entries and their chunks, with a location for each; encoded and decoded."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from ctypes import CDLL
from functools import cached_property
from itertools import accumulate, chain, compress, repeat
from operator import eq, mul, ne, not_, sub
from typing import Final, NamedTuple

import zstandard

from holdfast.digest import DIGEST_BYTES, Buffer, Digest, hash_bytes, hash_parts
from holdfast.errors import Corrupt, DigestMismatch, NewerFormat, NotFound, TooLarge
from holdfast.json_text import Json, canonical_json, encode_texts
from holdfast.objects.disk_cache import DiskCache
from holdfast.objects.protocol import ObjectStore
from holdfast.repo.format.chunk import (
    CHUNK_BYTES,
    DELTA,
    RAW,
    WHOLE,
    Base,
    ChunkRef,
    Location,
    has_possible_size,
)
from holdfast.repo.format.columns import (
    MAX_TABLE_BYTES,
    ColumnType,
    LazyColumn,
    Letter,
    PackedNames,
    RepeatedColumn,
    Schema,
    Table,
    consume_table,
    decode_table,
)
from holdfast.repo.format.entry import NO_RANK, ChunkColumns, ChunkTable, Entry, EntryRows
from holdfast.repo.format.layout import ManifestRef, PartRef, are_file_ids, manifest_key, parse_part

MANIFEST_MAJOR: Final = 1
MANIFEST_MINOR: Final = 0
INLINE: Final = 0xFFFFFFFF
"""Value in the pack column if the bytes of the chunk are in the inline column."""

HEADER: Final = struct.Struct("<8sHHIQ")
MAGIC: Final = b"HFMANIF\n"
# Limits how much memory a small file can ask for. A table that compresses better than this, because its chunks are
# all the same, is stored uncompressed.
MAX_RATIO: Final = 64
RAW_TABLE: Final = 0
ZSTD_TABLE: Final = 1

SCHEMA: Final[Schema] = {
    "entry_bytes": ColumnType("Q"),
    "entry_chunks": ColumnType("I"),
    "entry_spec": ColumnType("I"),
    "entry_note": ColumnType("I", mandatory=False),
    "entry_dims": ColumnType("B"),
    "entry_alias": ColumnType("I"),
    "entry_rank": ColumnType("I"),
    "chunk_digest": ColumnType("B", 32),
    "chunk_bytes": ColumnType("I"),
    "chunk_pack": ColumnType("I"),
    "chunk_offset": ColumnType("Q"),
    "chunk_stored": ColumnType("I"),
    "chunk_codec": ColumnType("B"),
    "chunk_xxh3": ColumnType("B", 16),
    "box": ColumnType("q"),
    "inline": ColumnType("B"),
    # The bases of deltas: a row for each chunk that is stored as a delta, in the order of the chunks.
    "base_digest": ColumnType("B", 32, always=False),
    "base_pack": ColumnType("I", always=False),
    "base_offset": ColumnType("Q", always=False),
    "base_stored": ColumnType("I", always=False),
    "base_codec": ColumnType("B", always=False),
    "base_xxh3": ColumnType("B", 16, always=False),
}
_BASE_COLUMNS: Final = tuple(name for name in SCHEMA if name.startswith("base_"))


def read_manifest(store: ObjectStore, ref: ManifestRef, *, cache: DiskCache | None = None) -> Manifest:
    """Read and check a manifest; raises NotFound, Corrupt or NewerFormat."""
    key = manifest_key(ref.manifest_id)
    # No variable refers to the file or its table: each is freed before its content is decoded.
    convert = _join_names(key)
    table = decode_table(_open_table(read_verified(store, ref, cache=cache), key), SCHEMA, where=key, convert=convert)
    return Manifest(table, key)


Head = tuple[list[str], tuple[PartRef, ...]]
"""The packs and parts that a manifest names."""


def read_head(store: ObjectStore, ref: ManifestRef) -> Head:
    """Read only the packs and parts that a manifest names; raises as `read_manifest` does."""
    key = manifest_key(ref.manifest_id)
    unread = {"names": lambda names: None}
    table = decode_table(_open_table(read_verified(store, ref), key), SCHEMA, where=key, convert=unread)
    return _parse_packs(table, key), _parse_parts(table, key)


def read_verified(store: ObjectStore, ref: ManifestRef, *, cache: DiskCache | None = None) -> bytes:
    """Read the file of a manifest; raises DigestMismatch unless it has the digest in `ref`."""
    key = manifest_key(ref.manifest_id)
    cached = None if cache is None else _read_cached(cache, key, ref)
    if cached is not None:
        return cached
    data = store.read(key, limit_bytes=ref.size_bytes)
    if hash_bytes(data) != ref.digest:
        raise DigestMismatch(f"{key} is damaged: its digest is not the one that its snapshot states", key=key)
    if cache is not None:
        cache.count_use(missed_bytes=len(data))
        cache.write(key, 0, data)
    return data


def _read_cached(cache: DiskCache, key: str, ref: ManifestRef) -> bytes | None:
    with cache.open(key) as cached:
        data = None if cached is None else cached.read(0, ref.size_bytes)
    if data is None or hash_bytes(data) != ref.digest:
        return None
    cache.count_use(hit_bytes=data.nbytes)
    return bytes(data)


def decode_manifest(data: bytes, *, where: str) -> Manifest:
    """Decode a manifest file; checks every length before it is used. Raises Corrupt or NewerFormat."""
    return Manifest(decode_table(_open_table(data, where), SCHEMA, where=where, convert=_join_names(where)), where)


def _join_names(where: str) -> Mapping[str, Callable[[Json], Json]]:
    """Return a conversion that packs the names before the spec is parsed: most of them are also keys in the spec.

    Otherwise both sets of strings would be in memory at the same time.
    """
    return {"names": lambda names: PackedNames(_verify_names(names, where))}


def _open_table(file: bytes, where: str) -> memoryview:
    """Check the header and the digest of a manifest file, and return its table."""
    data, own_digest = memoryview(file)[:-DIGEST_BYTES], file[-DIGEST_BYTES:]
    if len(data) < HEADER.size:
        raise Corrupt(f"{where} is too short for a manifest", key=where)
    magic, major, _minor, codec, table_bytes = HEADER.unpack_from(data)
    if magic != MAGIC:
        raise Corrupt(f"{where} does not start as a manifest", key=where)
    if major > MANIFEST_MAJOR:
        raise NewerFormat(f"{where} has manifest version {major}, this Holdfast reads up to {MANIFEST_MAJOR}: upgrade")
    if hash_bytes(data) != own_digest:
        raise DigestMismatch(f"{where} is damaged: it does not have the digest that it states", key=where)
    return _decompress(data[HEADER.size :], codec, table_bytes, where)


def _parse_packs(table: Table, where: str) -> list[str]:
    """Return the ids of all packs that a manifest needs."""
    packs = _verify_strings(table.head.get("packs"), "packs", where)
    if not are_file_ids(packs):
        raise Corrupt(f"{where}: a pack id is malformed", key=where)
    return packs


def _parse_parts(table: Table, where: str) -> tuple[PartRef, ...]:
    parts = table.head.get("parts")
    if not isinstance(parts, list):
        raise Corrupt(f"{where}: 'parts' is not a list", key=where)
    return tuple(parse_part(part, where=where) for part in parts)


def _parse_since_whole(table: Table, where: str) -> int:
    found = table.head.get("since_whole", 0)
    if type(found) is not int or not 0 <= found < 1 << 32:
        raise Corrupt(f"{where}: 'since_whole' is not a count", key=where)
    return found


def _verify_names(values: Json, where: str) -> list[str]:
    names = _verify_strings(values, "names", where)
    if len(set(names)) != len(names):
        raise Corrupt(f"{where}: two entries have one name", key=where)
    return names


def _verify_strings(values: Json, field: str, where: str) -> list[str]:
    if not isinstance(values, list) or not set(map(type, values)) <= {str}:
        raise Corrupt(f"{where}: {field!r} is not a list of strings", key=where)
    return values


def _decompress(body: memoryview, codec: int, table_bytes: int, where: str) -> memoryview:
    """Return the table in the body of a manifest; checks its size before memory is allocated for it."""
    if codec not in (RAW_TABLE, ZSTD_TABLE):
        raise NewerFormat(f"{where} is compressed with codec {codec}, which this Holdfast does not know: upgrade")
    if table_bytes > min(MAX_TABLE_BYTES, MAX_RATIO * len(body)):
        raise Corrupt(f"{where} claims to decompress to {table_bytes} bytes, more than is possible", key=where)
    if codec == RAW_TABLE:
        table = body
    else:
        try:
            # The zstd frame states a size too, and the decompressor allocates that much: it must be the checked one.
            if zstandard.frame_content_size(body) != table_bytes:
                raise Corrupt(f"{where}: the sizes in its two headers differ", key=where)
            table = memoryview(zstandard.ZstdDecompressor().decompress(body, allow_extra_data=False))
        except zstandard.ZstdError as error:
            raise Corrupt(f"{where} does not decompress: {error}", key=where) from error
    if len(table) != table_bytes:
        raise Corrupt(f"{where} has a table of {len(table)} bytes, not {table_bytes}", key=where)
    return table


def _sum_up(counts: Sequence[int]) -> Sequence[int]:
    """Return the running sums of `counts`."""
    if isinstance(counts, RepeatedColumn) and counts[0] > 0:
        return range(counts[0], counts[0] * len(counts) + 1, counts[0])
    return array("Q", accumulate(counts))


class ChunkPlace(NamedTuple):
    """Where a chunk is stored, and its sizes."""

    pack_id: str
    """Empty if the bytes are in the manifest."""
    offset: int
    stored_bytes: int
    size_bytes: int
    """Before compression."""
    base: Location | None
    """Where the base of a delta is stored."""


class Manifest:
    """A decoded manifest; entries are created when they are read."""

    def __init__(self, table: Table, where: str) -> None:
        """Check that the columns are consistent; raises Corrupt, which names the file `where`."""
        self._where = where
        self._columns = table.columns
        # Not the head itself, which contains a string for each name.
        self._head: dict[str, Json] = {field: table.head.get(field) for field in ("specs", "notes")}
        self.spec: Json = table.head.get("spec")
        names = table.head.get("names")
        self.names: Sequence[str] = (
            names if isinstance(names, PackedNames) else PackedNames(_verify_names(names, where))
        )
        self.packs = _parse_packs(table, where)
        self.parts = _parse_parts(table, where)
        """The manifests with the chunks, if this is the root of a snapshot of several parts."""
        self.since_whole = _parse_since_whole(table, where)
        """How many saves in a row have stored deltas, up to this one, since one stored none; 0 if this one has none."""
        self._verify()
        # Arrays, not lists: there may be millions of entries, and a Python int takes four times the memory.
        self._chunk_ends = _sum_up(self._columns["entry_chunks"])
        self._is_plain = not bytes(self._columns["entry_dims"]).strip(b"\0")
        # Two numbers per chunk and dimension.
        boxes = accumulate(map(mul, self._columns["entry_chunks"], self._columns["entry_dims"]))
        self._box_ends = array("Q", () if self._is_plain else [2 * end for end in boxes])
        self._verify_spans()

    def __len__(self) -> int:
        """Return the number of entries."""
        return len(self.names)

    @property
    def num_chunks(self) -> int:
        """Return the number of chunks of all entries."""
        return len(self._columns["chunk_bytes"])

    @cached_property
    def _positions(self) -> dict[str, int]:
        return {name: position for position, name in enumerate(self.names)}

    def find_entry(self, name: str) -> Entry:
        """Return the entry of that name, or raise NotFound."""
        position = self._positions.get(name)
        if position is None:
            raise NotFound(f"no entry {name!r} in {self._where}", name=name)
        return self.entry(position)

    def find_aliases(self, alias: int) -> list[int]:
        """Return the positions of the entries with this alias, which share memory."""
        return [position for position, found in enumerate(self._columns["entry_alias"]) if found == alias]

    def iter_entries(self) -> Iterator[Entry]:
        """Yield the entries in order."""
        return (self.entry(position) for position in range(len(self)))

    def entry(self, position: int) -> Entry:
        """Return the entry at `position`."""
        columns = self._columns
        rows = range(*self._find_rows(position))
        dims = columns["entry_dims"][position]
        boxes = self._iter_boxes(position, 2 * dims) if dims else repeat(())
        return Entry(
            self.names[position],
            columns["entry_bytes"][position],
            tuple(map(self._chunk, rows, boxes)),
            self._head["specs"][columns["entry_spec"][position]],
            self._head["notes"][columns["entry_note"][position]],
            dims,
            columns["entry_alias"][position],
            columns["entry_rank"][position],
        )

    def find_facts(self, position: int) -> tuple[Json, int, int]:
        """Return the spec, the size in bytes and the alias of an entry, without creating its chunks."""
        columns = self._columns
        spec = self._head["specs"][columns["entry_spec"][position]]
        return spec, columns["entry_bytes"][position], columns["entry_alias"][position]

    def find_chunks(self, position: int) -> ChunkTable:
        """Return the cuts and digests of an entry's chunks, without creating them."""
        columns = self._columns
        first, end = self._find_rows(position)
        boxes = () if self._is_plain else columns["box"][slice(*self._find_box_rows(position))]
        return ChunkTable(
            columns["entry_dims"][position],
            tuple(columns["chunk_bytes"][first:end]),
            bytes(columns["chunk_digest"][DIGEST_BYTES * first : DIGEST_BYTES * end]),
            tuple(boxes),
        )

    @property
    def chunk_bytes(self) -> int:
        """Size of all chunks before compression; a chunk that several entries use counts for each."""
        return sum(self._columns["chunk_bytes"])

    def iter_places(self) -> Iterator[ChunkPlace]:
        """Yield where each chunk is stored, and its size, without creating the chunk."""
        columns, packs = self._columns, {**dict(enumerate(self.packs)), INLINE: ""}
        bases = map(self._find_base, range(self.num_chunks)) if self._base_rows else repeat(None)
        return map(
            ChunkPlace,
            map(packs.__getitem__, columns["chunk_pack"]),
            columns["chunk_offset"],
            columns["chunk_stored"],
            columns["chunk_bytes"],
            bases,
        )

    def cut_entry(self, position: int, places: Mapping[int, tuple[int, ...]]) -> Entry:
        """Return an entry with some of its chunks: `places` has, by position among all, the box or range of each."""
        first, _ = self._find_rows(position)
        spec, size_bytes, alias = self.find_facts(position)
        chunks = tuple(self._chunk(first + row, place) for row, place in places.items())
        dims = max(1, self._columns["entry_dims"][position])
        return Entry(self.names[position], size_bytes, chunks, spec, None, dims, alias)

    def _find_rows(self, position: int) -> tuple[int, int]:
        return self._chunk_ends[position - 1] if position else 0, self._chunk_ends[position]

    def _find_box_rows(self, position: int) -> tuple[int, int]:
        return self._box_ends[position - 1] if position else 0, self._box_ends[position]

    def _iter_boxes(self, position: int, width: int) -> Iterator[tuple[int, ...]]:
        rows = range(*self._find_box_rows(position), width)
        return (tuple(self._columns["box"][at : at + width]) for at in rows)

    def locate_all(self) -> dict[Digest, int]:
        """Return a row, to be passed to `location`, for every chunk that is stored in a pack."""
        packs = self._columns["chunk_pack"]
        return {self._digest(row): row for row in range(self.num_chunks) if packs[row] != INLINE}

    def location(self, row: int) -> Location:
        """Return the location of the chunk in `row`, which must not be inline."""
        columns = self._columns
        return Location(
            self.packs[columns["chunk_pack"][row]],
            columns["chunk_offset"][row],
            columns["chunk_stored"][row],
            columns["chunk_codec"][row],
            bytes(columns["chunk_xxh3"][16 * row : 16 * row + 16]),
            self._base(self._base_rows[row]) if row in self._base_rows else None,
        )

    @cached_property
    def _base_rows(self) -> dict[int, int]:
        """Return the row of the base for each row of a delta."""
        if "base_pack" not in self._columns:
            return {}
        return {row: number for number, row in enumerate(self._iter_deltas())}

    def _iter_deltas(self) -> Iterator[int]:
        codecs = bytes(self._columns["chunk_codec"])
        row = codecs.find(DELTA)
        while row >= 0:
            yield row
            row = codecs.find(DELTA, row + 1)

    def _base(self, row: int) -> Base:
        columns = self._columns
        location = Location(
            self.packs[columns["base_pack"][row]],
            columns["base_offset"][row],
            columns["base_stored"][row],
            columns["base_codec"][row],
            bytes(columns["base_xxh3"][16 * row : 16 * row + 16]),
        )
        return Base(Digest(bytes(columns["base_digest"][32 * row : 32 * row + 32])), location)

    def _find_base(self, row: int) -> Location | None:
        number = self._base_rows.get(row)
        return None if number is None else self._base(number).location

    def _digest(self, row: int) -> Digest:
        return Digest(bytes(self._columns["chunk_digest"][32 * row : 32 * row + 32]))

    def _chunk(self, row: int, box: tuple[int, ...]) -> ChunkRef:
        columns = self._columns
        size = columns["chunk_bytes"][row]
        if columns["chunk_pack"][row] != INLINE:
            return ChunkRef(self._digest(row), size, self.location(row), box=box)
        start = columns["chunk_offset"][row]
        return ChunkRef(self._digest(row), size, None, bytes(columns["inline"][start : start + size]), box)

    def _verify(self) -> None:
        """Check that columns have the right lengths, and that numbers in them refer to something that exists."""
        columns, where = self._columns, self._where
        entries, chunks = len(self.names), len(columns["chunk_bytes"])
        for name, kind in SCHEMA.items():
            rows = entries if name.startswith("entry_") else chunks
            if name.startswith(("entry_", "chunk_")) and len(columns[name]) != rows * kind.width:
                raise Corrupt(f"{where}: column {name!r} has the wrong length", key=where)
        for field, name in (("specs", "entry_spec"), ("notes", "entry_note")):
            values = self._head.get(field)
            if not isinstance(values, list) or max(columns[name], default=-1) >= len(values):
                raise Corrupt(f"{where}: {name!r} points outside the head", key=where)
        self._verify_locations()
        self._verify_bases()

    def _verify_bases(self) -> None:
        """Check that every delta has a base of its own length that is no delta, in a pack that is listed."""
        columns, where = self._columns, self._where
        deltas = list(self._iter_deltas())
        present = [name for name in _BASE_COLUMNS if name in columns]
        if not deltas and not present:
            return
        if any(len(columns.get(name, ())) != len(deltas) * SCHEMA[name].width for name in _BASE_COLUMNS):
            raise Corrupt(f"{where}: the deltas and their bases do not add up", key=where)
        for number, row in enumerate(deltas):
            codec, stored = columns["base_codec"][number], columns["base_stored"][number]
            is_listed = columns["base_pack"][number] < len(self.packs) and columns["base_offset"][number] < 1 << 62
            if columns["chunk_pack"][row] == INLINE or not is_listed:
                raise Corrupt(f"{where}: a delta or its base has an impossible location", key=where)
            if codec not in WHOLE or not has_possible_size(codec, stored, columns["chunk_bytes"][row]):
                raise Corrupt(f"{where}: the base of a delta is a delta itself, or of another length", key=where)

    def _verify_locations(self) -> None:
        """Check that every chunk has a possible location; uses built-ins, because there may be millions of chunks."""
        columns, where = self._columns, self._where
        packs, sizes, offsets = columns["chunk_pack"], columns["chunk_bytes"], columns["chunk_offset"]
        used = set(packs)
        fits = all(pack < len(self.packs) for pack in used - {INLINE})
        fits = fits and min(sizes, default=1) > 0 and max(sizes, default=1) <= CHUNK_BYTES
        if not fits or max(offsets, default=0) >= 1 << 62:
            raise Corrupt(f"{where}: a chunk has an impossible location", key=where)
        inline_end = 0
        if INLINE in used:
            rows = zip(offsets, sizes, columns["chunk_stored"], strict=True)
            for offset, size, stored in compress(rows, map(INLINE.__eq__, packs)):
                # Inline chunks must be adjacent: if many shared the same bytes, a small file could become a huge one.
                if offset != inline_end or stored != size:
                    raise Corrupt(f"{where}: a chunk has an impossible location", key=where)
                inline_end += size
        if inline_end != len(columns["inline"]):
            raise Corrupt(f"{where}: inline bytes belong to no chunk", key=where)

    def _verify_spans(self) -> None:
        """Check that chunks, boxes and sizes of the entries add up."""
        columns, where = self._columns, self._where
        num_chunks = self._chunk_ends[-1] if self._chunk_ends else 0
        if num_chunks != self.num_chunks or (self._box_ends[-1] if self._box_ends else 0) != len(columns["box"]):
            raise Corrupt(f"{where}: entries and chunks do not add up", key=where)
        ends = array("Q", accumulate(columns["chunk_bytes"], initial=0))
        stops = array("Q", map(ends.__getitem__, self._chunk_ends))
        if self._is_plain:
            # Sums that agree at every entry do so for every entry, and are compared at once.
            adds_up = all(map(eq, stops, accumulate(columns["entry_bytes"])))
        else:
            spans = map(sub, stops, chain((0,), stops))
            is_plain = map(not_, columns["entry_dims"])
            adds_up = not any(compress(map(ne, spans, columns["entry_bytes"]), is_plain))
        if not adds_up:
            raise Corrupt(f"{where}: the chunks of an entry do not add up to its size", key=where)


_ZSTD_LEVEL: Final = 3
_LARGE_BYTES: Final = 1 << 20
"""Before a table of this size or more is compressed, freed memory is returned to the system."""
_NO_FINGERPRINT: Final = bytes(16)


def encode_manifest(
    spec: Json, entries: Iterable[Entry], parts: Sequence[PartRef] = (), *, since_whole: int = 0
) -> bytes:
    """Encode a manifest file; with `parts`, that of a root, whose entries have their chunks in the parts.

    `since_whole` is stored if some chunks are deltas; see `Manifest.since_whole`.
    If `entries` are EntryRows, their chunk columns are released afterwards, so that they can be freed early.
    """
    # No variable refers to the columns, so each is freed as soon as it is copied.
    table = (
        _encode_rows(spec, entries, since_whole)
        if isinstance(entries, EntryRows)
        else _encode_table(spec, entries, parts, since_whole)
    )
    size = len(table)
    if size > MAX_TABLE_BYTES:
        raise TooLarge("a snapshot of so many entries, or with such a tree, is too large for one manifest")
    if size >= _LARGE_BYTES:
        _return_freed_memory()
    body: Buffer
    codec, body = ZSTD_TABLE, zstandard.ZstdCompressor(level=_ZSTD_LEVEL).compress(table)
    if size > MAX_RATIO * len(body):
        codec, body = RAW_TABLE, table
    del table  # before the file is joined, which takes as much memory as the body
    header = HEADER.pack(MAGIC, MANIFEST_MAJOR, MANIFEST_MINOR, codec, size)
    # Records refer to a manifest by the digest of its whole file. This digest also proves one without a record.
    return b"".join([header, body, hash_parts([header, body])])


def _return_freed_memory() -> None:
    """Return memory to the system that was freed while columns grew; otherwise the C library keeps it.

    Only glibc has a function for it; with another C library nothing is done.
    """
    trim = getattr(CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _encode_table(spec: Json, entries: Iterable[Entry], parts: Sequence[PartRef], since_whole: int) -> memoryview:
    head, columns = _list_columns(spec, entries, parts)
    head["names"] = encode_texts(head["names"])
    if "base_pack" in columns:
        head["since_whole"] = since_whole
    return consume_table(head, columns, SCHEMA)


def _encode_rows(spec: Json, rows: EntryRows, since_whole: int) -> memoryview:
    """Encode the same table as `_encode_table`, directly from columns, without creating entries."""
    specs, notes = _Numbers(), _Numbers()
    names: list[str] = []
    sizes, spec_numbers, note_numbers, aliases = array("Q"), array("I"), array("I"), array("I")
    for source in rows.sources:
        names.append(source.name)
        sizes.append(source.size_bytes)
        spec_numbers.append(specs.find(source.spec))
        note_numbers.append(notes.find(source.note))
        aliases.append(source.alias)
    columns: dict[str, memoryview | LazyColumn] = {
        "entry_bytes": memoryview(sizes),
        "entry_chunks": _later("I", len(rows), lambda: map(sub, rows.ends, chain([0], rows.ends))),
        "entry_spec": memoryview(spec_numbers),
        "entry_note": memoryview(note_numbers),
        "entry_dims": memoryview(bytes(len(rows))),
        "entry_alias": memoryview(aliases),
        "entry_rank": _later("I", len(rows), lambda: repeat(NO_RANK, len(rows))),
        "box": memoryview(array("q")),
    }
    del sizes, spec_numbers, note_numbers, aliases
    chunks = rows.refs.release_columns()
    bases = [at.base for at in chunks.locations if at and at.base]
    pack_ids = dict.fromkeys(at.pack_id for at in chunks.locations if at)
    pack_ids |= dict.fromkeys(base.location.pack_id for base in bases)
    packs = {pack_id: number for number, pack_id in enumerate(pack_ids)}
    head: dict[str, Json] = {
        "spec": spec,
        "names": encode_texts(names),
        "specs": specs.values,
        "notes": notes.values,
        "packs": list(packs),
        "parts": [],
    }
    if bases:
        head["since_whole"] = since_whole
    columns |= _describe_chunks(chunks, packs) | _describe_bases(bases, packs)
    del chunks, names, bases
    return consume_table(head, columns, SCHEMA)


def _describe_chunks(chunks: ChunkColumns, packs: Mapping[str, int]) -> dict[str, memoryview | LazyColumn]:
    digests, sizes, locations, inline, inline_ends = chunks
    count = len(sizes)
    # Inline chunks are adjacent; the offsets of others come from their locations. Mostly all are inline, or none is.
    located = locations if packs else []
    return {
        "chunk_digest": memoryview(digests),
        "chunk_bytes": memoryview(sizes),
        "chunk_pack": _later("I", count, lambda: [packs[at.pack_id] if at else INLINE for at in locations]),
        "chunk_offset": LazyColumn(8 * count, lambda: _overlay(_find_starts(inline_ends), located, "offset")),
        "chunk_stored": LazyColumn(4 * count, lambda: _overlay(sizes[:], located, "stored_bytes")),
        "chunk_codec": LazyColumn(count, lambda: _overlay(array("B", [RAW]) * count, located, "codec")),
        "chunk_xxh3": LazyColumn(16 * count, lambda: memoryview(_join_fingerprints(located, count))),
        "inline": memoryview(inline),
    }


def _describe_bases(bases: Sequence[Base], packs: Mapping[str, int]) -> dict[str, memoryview]:
    """Return the columns of the bases; none if no chunk is a delta."""
    if not bases:
        return {}
    places = [base.location for base in bases]
    return {
        "base_digest": memoryview(b"".join([base.digest for base in bases])),
        "base_pack": memoryview(array("I", [packs[at.pack_id] for at in places])),
        "base_offset": memoryview(array("Q", [at.offset for at in places])),
        "base_stored": memoryview(array("I", [at.stored_bytes for at in places])),
        "base_codec": memoryview(array("B", [at.codec for at in places])),
        "base_xxh3": memoryview(b"".join([at.fingerprint for at in places])),
    }


def _later(letter: Letter, count: int, iter_values: Callable[[], Iterable[int]]) -> LazyColumn:
    return LazyColumn(count * array(letter).itemsize, lambda: memoryview(array(letter, iter_values())))


def _find_starts(ends: array[int]) -> array[int]:
    starts = array("Q", [0])
    starts.extend(ends)
    starts.pop()
    return starts


def _overlay(values: array[int], locations: Sequence[Location | None], field: str) -> memoryview:
    """Return `values`, replaced by `field` of the location for each chunk that has one."""
    for row, at in enumerate(locations):
        if at is not None:
            values[row] = getattr(at, field)
    return memoryview(values)


def _join_fingerprints(locations: Sequence[Location | None], count: int) -> bytes:
    if not locations:
        return bytes(len(_NO_FINGERPRINT) * count)
    return b"".join([at.fingerprint if at else _NO_FINGERPRINT for at in locations])


def build_table(spec: Json, entries: Iterable[Entry], parts: Sequence[PartRef] = ()) -> Table:
    """Return entries as the table of a manifest."""
    return Table(*_list_columns(spec, entries, parts))


def _list_columns(
    spec: Json, entries: Iterable[Entry], parts: Sequence[PartRef]
) -> tuple[dict[str, Json], dict[str, memoryview]]:
    columns = {name: array(kind.letter) for name, kind in SCHEMA.items() if kind.width == 1 and kind.always}
    digests, prints, inline = bytearray(), bytearray(), bytearray()
    names: list[str] = []
    specs, notes = _Numbers(), _Numbers()
    packs: dict[str, int] = {}
    bases: list[Base] = []
    for entry in entries:
        name, size_bytes, chunks, own_spec, note, dims, alias, rank = entry
        names.append(name)
        columns["entry_bytes"].append(size_bytes)
        columns["entry_chunks"].append(len(chunks))
        columns["entry_spec"].append(specs.find(own_spec))
        columns["entry_note"].append(notes.find(note))
        columns["entry_dims"].append(dims)
        columns["entry_alias"].append(alias)
        columns["entry_rank"].append(rank)
        for digest, chunk_bytes, at, data, box in chunks:
            digests += digest
            columns["chunk_bytes"].append(chunk_bytes)
            if at is None:
                # The bytes of inline chunks are adjacent in their own column.
                row = (INLINE, len(inline), len(data), RAW, _NO_FINGERPRINT)
            else:
                number = packs.setdefault(at.pack_id, len(packs))
                row = (number, at.offset, at.stored_bytes, at.codec, at.fingerprint)
                if at.base:
                    bases.append(at.base)
            columns["chunk_pack"].append(row[0])
            columns["chunk_offset"].append(row[1])
            columns["chunk_stored"].append(row[2])
            columns["chunk_codec"].append(row[3])
            prints += row[4]
            inline += data
            columns["box"].extend(box)
    for base in bases:
        packs.setdefault(base.location.pack_id, len(packs))
    head: dict[str, Json] = {
        "spec": spec,
        "names": names,
        "specs": specs.values,
        "notes": notes.values,
        "packs": list(packs),
        "parts": [part.to_json() for part in parts],
    }
    views = {name: memoryview(values) for name, values in columns.items()}
    wide = {"chunk_digest": memoryview(digests), "chunk_xxh3": memoryview(prints), "inline": memoryview(inline)}
    return head, views | wide | _describe_bases(bases, packs)


class _Numbers:
    """Numbers distinct values in the order in which they are first seen."""

    def __init__(self) -> None:
        self.values: list[Json] = []
        # By id first, because many entries share one object. The object is kept alive, so that no other gets its id.
        self._known: dict[int, tuple[Json, int]] = {}
        self._encoded: dict[bytes, int] = {}

    def find(self, value: Json) -> int:
        known = self._known.get(id(value))
        if known is None:
            number = self._encoded.setdefault(canonical_json(value), len(self.values))
            if number < len(self.values):
                return number
            self.values.append(value)
            known = self._known[id(value)] = (value, number)
        return known[1]
