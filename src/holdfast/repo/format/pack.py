"""Pack files: chunks of one writer, then a footer from which the index of the pack can be rebuilt."""

from __future__ import annotations

import struct
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Final, NamedTuple

from holdfast.digest import Buffer, Digest, fingerprint, hash_bytes
from holdfast.errors import Corrupt, HoldfastError, NewerFormat
from holdfast.objects.blocks import LentBlock
from holdfast.objects.protocol import ObjectStore
from holdfast.objects.settle import commit_settled
from holdfast.repo.format.chunk import CHUNK_BYTES, DELTA, RAW, WHOLE, Location, has_possible_size
from holdfast.repo.format.columns import ColumnType, Schema, Table, column, decode_table, encode_table
from holdfast.repo.format.layout import is_file_id, pack_key
from holdfast.repo.format.record import Fields

PACK_LIMIT_BYTES: Final = 1 << 30
"""A pack of this size or more gets no further chunk."""
MAX_FOOTER_BYTES: Final = 256 << 20
RUN_BYTES: Final = 64 << 10
"""A run of chunks of this size or more starts at a page boundary, so that it can be mapped and read directly."""
PAGE_BYTES: Final = 4096
"""Alignment of large runs; part of the format, and equal to the alignment of direct I/O."""
LINE_BYTES: Final = 64
"""Alignment of small runs and of the footer."""

PACK_MAJOR: Final = 1
PACK_MINOR: Final = 0
HEADER: Final = struct.Struct("<8sHHI48s")
TRAILER: Final = struct.Struct("<QQ32s8s8s")
_MAGIC: Final = b"HFPACK\r\n"
_END_MAGIC: Final = b"HFPKEND\n"
_ZEROS: Final = bytes(PAGE_BYTES)
_TAIL_BYTES: Final = 64 << 10
"""Size of the read that should contain the whole footer: it has room for a thousand chunks."""

_FOOTER: Final[Schema] = {
    "digest": ColumnType("B", 32),
    "raw_bytes": ColumnType("I"),
    "offset": ColumnType("Q"),
    "stored_bytes": ColumnType("I"),
    "codec": ColumnType("B"),
    "xxh3": ColumnType("B", 16),
}


class PackedChunk(NamedTuple):
    """One row of a footer."""

    digest: Digest
    size_bytes: int
    location: Location


class NewChunk(NamedTuple):
    """A chunk to be written."""

    digest: Digest
    data: memoryview
    alignment: int
    """The chunk starts at a multiple of this; 1 if it follows the chunk before it without a gap."""
    fingerprint: bytes | None = None
    """Of bytes that no other code can change. If None, it is computed after the bytes are written."""
    codec: int = RAW
    raw_bytes: int | None = None
    """The size of the chunk; None if `data` is the chunk itself, not encoded."""


class PackBuilder:
    """Writes chunks into a new pack, which becomes visible and durable with `seal`."""

    def __init__(self, store: ObjectStore, pack_id: str, *, limit_bytes: int | None = None) -> None:
        """Begin a pack that is full from `limit_bytes` on; by default, from as many as format and store allow."""
        self.pack_id = pack_id
        self.rows: list[PackedChunk] = []
        self._store = store
        self._upload = store.upload(pack_key(pack_id))
        self._size = 0
        self._limit_bytes = limit_bytes or min(PACK_LIMIT_BYTES, store.traits.upload_bytes or PACK_LIMIT_BYTES)
        try:
            self._append(encode_header(pack_id))
        except BaseException:
            self.abort()  # the caller has no reference to it yet
            raise

    @property
    def size_bytes(self) -> int:
        """How many bytes were appended."""
        return self._size

    @property
    def is_full(self) -> bool:
        """Whether the next chunk must be written to another pack."""
        return self._size >= self._limit_bytes

    def append_chunks(self, chunks: Sequence[NewChunk], *, block: LentBlock | None = None) -> list[Location]:
        """Append chunks and return their locations, in order.

        A `block`, if passed, contains exactly these chunks, laid out as in a pack from a page boundary on, and all of
        them have fingerprints. If they end up at a page boundary, they are written without a copy. The block is
        released when it is no longer needed.
        """
        buffers: list[Buffer] = []
        offsets: list[int] = []
        end = self._size
        for _, data, alignment, *_ in chunks:
            if gap := -end % alignment:
                buffers.append(_ZEROS[:gap])
                end += gap
            buffers.append(data)
            offsets.append(end)
            end += len(data)
        if block and offsets[0] % PAGE_BYTES == 0:
            self._upload.append(bytes(offsets[0] - self._size))
            self._upload.append_block(block)
        else:
            self._upload.append(*buffers)
            if block:
                block.release()
        self._size = end
        # After the write: a caller that knows an earlier fingerprint can detect a change between hashing and writing.
        pack_id = self.pack_id
        locations = [
            Location(pack_id, offset, len(data), codec, known or fingerprint(data))
            for (_, data, _, known, codec, _), offset in zip(chunks, offsets, strict=True)
        ]
        self.rows += [
            PackedChunk(chunk.digest, chunk.raw_bytes or at.stored_bytes, at)
            for chunk, at in zip(chunks, locations, strict=True)
        ]
        return locations

    def seal(self) -> int:
        """Write footer and trailer, make the pack visible and durable, and return its size."""
        self._pad(LINE_BYTES)
        footer = _encode_footer(self.pack_id, self.rows)
        self._append(footer, TRAILER.pack(self._size, len(footer), hash_bytes(footer), bytes(8), _END_MAGIC))
        commit_settled(self._store, self._upload, pack_key(self.pack_id), self._size)
        return self._size

    def abort(self) -> None:
        """Drop the pack."""
        self._upload.abort()

    def _append(self, *buffers: Buffer) -> None:
        self._upload.append(*buffers)
        self._size += sum(map(len, buffers))

    def _pad(self, alignment: int) -> None:
        gap = -self._size % alignment
        if gap:
            self._append(_ZEROS[:gap])


def choose_alignment(run_bytes: int) -> int:
    """Return the alignment of the start of a run of chunks with `run_bytes` bytes."""
    return PAGE_BYTES if run_bytes >= RUN_BYTES else LINE_BYTES


def encode_header(pack_id: str) -> bytes:
    """Return the header of a pack: magic bytes, version and pack id."""
    return _pack_header(pack_id, PACK_MAJOR, PACK_MINOR)


def _pack_header(pack_id: str, major: int, minor: int) -> bytes:
    return HEADER.pack(_MAGIC, major, minor, 0, pack_id.encode())


def _verify_header(header: memoryview, pack_id: str) -> None:
    key = pack_key(pack_id)
    magic, major, *_ = HEADER.unpack(header)
    if magic == _MAGIC and major > PACK_MAJOR:
        raise NewerFormat(f"{key} has pack version {major}, this Holdfast reads up to {PACK_MAJOR}: upgrade")
    if magic != _MAGIC:
        raise Corrupt(f"{key} does not start as a pack", key=key)


@dataclass(frozen=True, slots=True)
class Footer:
    """The chunks of a pack, ordered by offset, and the sizes of the file."""

    chunks: tuple[PackedChunk, ...]
    footer_offset: int
    pack_bytes: int


def read_footer(store: ObjectStore, pack_id: str) -> Footer:
    """Read and check header, trailer and footer of a pack; raises NotFound, Corrupt or NewerFormat."""
    ends = _read_ends(store, pack_id, store.stat(pack_key(pack_id)).size_bytes)
    return _decode_footer(ends, _read_rows(store, ends))


def iter_pack_footers(
    store: ObjectStore, packs: Iterable[tuple[str, int]]
) -> Generator[Footer | HoldfastError, None, None]:
    """Yield the footer of each pack, given by its id and size, or the error with which `read_footer` would end.

    They come in order, and later ones are read meanwhile if the store wants that.
    """
    ends = ((partial(_try_ends, store, *pack), _TAIL_BYTES) for pack in packs)
    with closing(store.iter_together(ends)) as found:
        rows = ((partial(_try_rows, store, each), _count_unread(each)) for each in found)
        with closing(store.iter_together(rows)) as read:
            for each in read:
                yield each if isinstance(each, HoldfastError) else _try_decode(*each)


@dataclass(frozen=True, slots=True)
class _Ends:
    """The header of a pack, its last bytes, and what its trailer says about the footer."""

    pack_id: str
    pack_bytes: int
    header: memoryview
    tail: memoryview
    offset: int
    length: int
    digest: bytes

    @property
    def rows(self) -> memoryview | None:
        """The footer, if it is within the last bytes."""
        start = len(self.tail) - TRAILER.size - self.length
        return self.tail[start : start + self.length] if start >= 0 else None


def _read_ends(store: ObjectStore, pack_id: str, size: int) -> _Ends:
    key = pack_key(pack_id)
    if size < HEADER.size + TRAILER.size:
        raise Corrupt(f"{key} has {size} bytes, too few for a pack", key=key)
    header = _read(store, key, 0, HEADER.size)
    _verify_header(header, pack_id)
    # If a request costs more than the bytes, the footer of most packs comes with the trailer.
    tail_bytes = max(TRAILER.size, min(size, _TAIL_BYTES, store.traits.wait_bytes))
    tail = _read(store, key, size - tail_bytes, tail_bytes)
    offset, length, digest, reserved, magic = TRAILER.unpack(tail[-TRAILER.size :])
    if magic != _END_MAGIC or any(reserved) or offset + length + TRAILER.size != size or length > MAX_FOOTER_BYTES:
        raise Corrupt(f"{key} is cut short or its trailer is damaged", key=key)
    return _Ends(pack_id, size, header, tail, offset, length, digest)


def _read_rows(store: ObjectStore, ends: _Ends) -> memoryview:
    return _read(store, pack_key(ends.pack_id), ends.offset, ends.length) if ends.rows is None else ends.rows


def _decode_footer(ends: _Ends, rows: memoryview) -> Footer:
    key = pack_key(ends.pack_id)
    if hash_bytes(rows) != ends.digest:
        raise Corrupt(f"{key} has a damaged footer", key=key)
    table = decode_table(rows, _FOOTER, where=key)
    # The digest of the footer covers the minor version too: if the header states another one, it is damaged.
    minor: int = HEADER.unpack(ends.header)[2]
    is_same = minor == Fields(key, table.head).integer("minor")
    if not is_same or ends.header != _pack_header(ends.pack_id, PACK_MAJOR, minor):
        raise Corrupt(f"{key} has a damaged header", key=key)
    return _parse_footer(table, ends.pack_id, footer_offset=ends.offset, pack_bytes=ends.pack_bytes)


def _try_ends(store: ObjectStore, pack_id: str, size: int) -> _Ends | HoldfastError:
    try:
        return _read_ends(store, pack_id, size)
    except HoldfastError as error:
        return error


def _count_unread(ends: _Ends | HoldfastError) -> int:
    return 0 if isinstance(ends, HoldfastError) or ends.rows is not None else ends.length


def _try_rows(store: ObjectStore, ends: _Ends | HoldfastError) -> tuple[_Ends, memoryview] | HoldfastError:
    try:
        return ends if isinstance(ends, HoldfastError) else (ends, _read_rows(store, ends))
    except HoldfastError as error:
        return error


def _try_decode(ends: _Ends, rows: memoryview) -> Footer | HoldfastError:
    try:
        return _decode_footer(ends, rows)
    except HoldfastError as error:
        return error


def _read(store: ObjectStore, key: str, start: int, length: int) -> memoryview:
    data = memoryview(bytearray(length))
    store.read_into(key, start, data)
    return data


def _encode_footer(pack_id: str, rows: Sequence[PackedChunk]) -> bytes:
    columns = {
        "digest": memoryview(b"".join(row.digest for row in rows)),
        "raw_bytes": column("I", [row.size_bytes for row in rows]),
        "offset": column("Q", [row.location.offset for row in rows]),
        "stored_bytes": column("I", [row.location.stored_bytes for row in rows]),
        "codec": column("B", [row.location.codec for row in rows]),
        "xxh3": memoryview(b"".join(row.location.fingerprint for row in rows)),
    }
    return encode_table({"pack": pack_id, "minor": PACK_MINOR}, columns, _FOOTER)


def _parse_footer(table: Table, pack_id: str, *, footer_offset: int, pack_bytes: int) -> Footer:
    key = pack_key(pack_id)
    if table.head.get("pack") != pack_id:
        raise Corrupt(f"{key} has the footer of another pack", key=key)
    chunks = tuple(_iter_rows(table, pack_id))
    end = HEADER.size
    for chunk in chunks:
        gap = chunk.location.offset - end
        end = chunk.location.offset + chunk.location.stored_bytes
        if not 0 <= gap < PAGE_BYTES or end > footer_offset or not _has_possible_size(chunk):
            raise Corrupt(f"{key}: the footer has impossible locations of chunks", key=key)
    if footer_offset - end >= PAGE_BYTES:
        raise Corrupt(f"{key}: {footer_offset - end} bytes before the footer belong to no chunk", key=key)
    return Footer(chunks, footer_offset, pack_bytes)


def _has_possible_size(chunk: PackedChunk) -> bool:
    stored, codec = chunk.location.stored_bytes, chunk.location.codec
    # An unknown codec may not store much more than the chunk's size: a sparse file could otherwise claim any size.
    is_known = codec in (*WHOLE, DELTA)
    is_possible = has_possible_size(codec, stored, chunk.size_bytes) if is_known else 0 < stored <= 2 * CHUNK_BYTES
    return is_possible and 0 < chunk.size_bytes <= CHUNK_BYTES


def _iter_rows(table: Table, pack_id: str) -> Iterator[PackedChunk]:
    names = table.columns
    rows = {len(names[name]) // kind.width for name, kind in _FOOTER.items()}
    if len(rows) != 1:
        raise Corrupt(f"{pack_key(pack_id)}: the columns of the footer differ in length", key=pack_key(pack_id))
    digests, prints = bytes(names["digest"]), bytes(names["xxh3"])
    for i in range(rows.pop()):
        own_print = prints[16 * i : 16 * i + 16]
        location = Location(pack_id, names["offset"][i], names["stored_bytes"][i], names["codec"][i], own_print)
        yield PackedChunk(Digest(digests[32 * i : 32 * i + 32]), names["raw_bytes"][i], location)


def parse_pack_key(key: str) -> str | None:
    """Return the pack id in a key, or None if it is not the key of a pack."""
    pack_id = key.rpartition("/")[2]
    return pack_id if key == pack_key(pack_id) and is_file_id(pack_id) else None
