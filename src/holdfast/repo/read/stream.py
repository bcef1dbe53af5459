"""Reads entries one part after the other, verified: as seekable streams, or ahead of the caller."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, Protocol, runtime_checkable

from holdfast.errors import NotFound
from holdfast.repo.format.chunk import CHUNK_BYTES
from holdfast.repo.format.entry import Entry
from holdfast.repo.read.reader import SnapshotReader

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

_BUFFER_BYTES: Final = 64 << 10
_MAX_COMPARED: Final = 1000
"""How many names are compared with a missing one, to suggest a similar one."""


@runtime_checkable
class RangeSource(Protocol):
    """A source of bytes that can be read at any offset."""

    def read_into(self, start: int, buffer: memoryview, /) -> int | None:
        """Fill `buffer` with the bytes from `start` on, and return how many there were; None means all."""


class SeekableFile(Protocol):
    """A binary file that can be read at any position, such as that of `open(path, "rb")`."""

    def seek(self, offset: int, whence: int = ..., /) -> int:
        """Set the position."""

    def read(self, size: int = ..., /) -> Any:
        """Return at most `size` bytes; none at the end of the file."""


class RangeView(io.RawIOBase):
    """A stream over `size_bytes` bytes of a source, from `offset` on; it never reads outside that range.

    As in any binary stream, the position may be past the end; reading there returns nothing.
    """

    def __init__(
        self,
        source: RangeSource | SeekableFile,
        offset: int,
        size_bytes: int,
        *,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        """Open the stream without reading; `on_close` is called once, when it is closed.

        The source may be any seekable binary file. The view sets the position of the file before each read, so the
        file may have several views, used by one thread at a time. Closing a view does not close the file.
        """
        super().__init__()
        self._source = source if isinstance(source, RangeSource) else _FileBytes(source)
        self._offset = offset
        self._size_bytes = size_bytes
        self._position = 0
        self._on_close = on_close

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        """Set the position, relative to the start, the current position or the end; return it."""
        self._verify_open()
        bases = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size_bytes}
        if whence not in bases:
            raise ValueError(f"whence={whence} is none of os.SEEK_SET, os.SEEK_CUR and os.SEEK_END")
        if bases[whence] + offset < 0:
            raise ValueError(f"position {bases[whence] + offset} is before the start of the stream")
        self._position = bases[whence] + offset
        return self._position

    def tell(self) -> int:
        """Return the position in the stream."""
        self._verify_open()
        return self._position

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        """Fill `buffer` up to the end of the stream; return the number of bytes."""
        self._verify_open()
        target = memoryview(buffer).cast("B")
        target = target[: max(0, self._size_bytes - self._position)]
        if not target:
            return 0
        filled = self._source.read_into(self._offset + self._position, target)
        count = target.nbytes if filled is None else filled
        self._position += count
        return count

    def readall(self) -> bytes:
        """Return all remaining bytes, in one read."""
        data = bytearray(max(0, self._size_bytes - self.tell()))
        return bytes(memoryview(data)[: self.readinto(data)])

    def close(self) -> None:
        """Close the stream; may be called again."""
        if not self.closed:
            super().close()
            self._on_close()

    def _verify_open(self) -> None:
        if self.closed:
            raise ValueError("this stream is closed")


class _FileBytes:
    """The bytes of a seekable file, which need not have `readinto`; there may be fewer than are asked for."""

    def __init__(self, file: SeekableFile) -> None:
        self._file = file

    def read_into(self, start: int, buffer: memoryview, /) -> int:
        self._file.seek(start)
        filled = 0
        while filled < buffer.nbytes and (piece := self._file.read(buffer.nbytes - filled)):
            if not isinstance(piece, bytes):
                kind = f"a {type(self._file).__name__} returned {type(piece).__name__}"
                raise TypeError(f"{kind} and not bytes; open the file in binary mode, 'rb'")
            buffer[filled : filled + len(piece)] = piece
            filled += len(piece)
        return filled


class _EntryBytes:
    """The bytes of an entry. Caches the last chunk, so that reading line by line reads each chunk once.

    From a server, each read that continues where the last one ended is twice as large, up to the reader's window.
    """

    def __init__(self, reader: SnapshotReader, entry: Entry) -> None:
        self._reader = reader
        self._entry = entry
        self._ahead_bytes = CHUNK_BYTES
        self._kept_start = 0
        self._kept = memoryview(b"")

    def read_into(self, start: int, buffer: memoryview, /) -> None:
        if buffer.nbytes >= CHUNK_BYTES:
            self._reader.read_into(self._entry, start, buffer)
            return
        while buffer:
            at = start - self._kept_start
            if not 0 <= at < self._kept.nbytes:
                self._keep(start - start % CHUNK_BYTES)
                at = start - self._kept_start
            part = self._kept[at : at + buffer.nbytes]
            buffer[: part.nbytes] = part
            buffer, start = buffer[part.nbytes :], start + part.nbytes

    def _keep(self, start: int) -> None:
        is_next = 0 < start == self._kept_start + self._kept.nbytes
        more_bytes = min(2 * self._ahead_bytes, self._reader.ahead_bytes) if is_next else 0
        self._ahead_bytes = max(CHUNK_BYTES, more_bytes)
        data = memoryview(bytearray(min(self._ahead_bytes, self._entry.size_bytes - start)))
        self._reader.read_into(self._entry, start, data)
        self._kept_start, self._kept = start, data


def _find_near(reader: SnapshotReader, name: str) -> Entry:
    """Return the entry called `name`; raises NotFound, which also suggests similar names."""
    try:
        return reader.find_entry(name)
    except NotFound as error:
        names = list(islice(reader.manifest.names, _MAX_COMPARED))
        near = [each for each in names if each.endswith(f"/{name}")] or get_close_matches(name, names)
        if not near:
            raise
        hint = f"did you mean {' or '.join(map(repr, near[:3]))}?"
        raise NotFound(f"{error}; {hint}", name=name) from None


def open_entry(
    reader: SnapshotReader,
    name: str,
    *,
    start: int = 0,
    size_bytes: int | None = None,
    on_close: Callable[[], None] = lambda: None,
) -> io.BufferedReader:
    """Return an entry, or `size_bytes` of it from `start` on, as a stream; raises NotFound, ValueError.

    The stream reads only the chunks it needs and verifies each as a whole; a damaged chunk raises Corrupt.
    """
    entry = _find_near(reader, name)
    source = _EntryBytes(reader, entry)
    return open_range(source, entry.size_bytes, name, start=start, size_bytes=size_bytes, on_close=on_close)


def open_range(
    source: RangeSource | SeekableFile,
    total_bytes: int,
    name: str,
    *,
    start: int = 0,
    size_bytes: int | None = None,
    on_close: Callable[[], None] = lambda: None,
) -> io.BufferedReader:
    """Return the bytes of a source, or `size_bytes` of them from `start` on, as a stream; raises ValueError."""
    size = total_bytes - start if size_bytes is None else size_bytes
    if start < 0 or size < 0 or start + size > total_bytes:
        raise ValueError(f"bytes {start} to {start + size} are out of range: {name!r} has {total_bytes} bytes")
    return io.BufferedReader(RangeView(source, start, size, on_close=on_close), buffer_size=_BUFFER_BYTES)


class ReadAhead:
    """Keeps entries that were announced, and a window of the last entry. From a disk, it reads exactly what is asked.

    For one thread.
    """

    def __init__(self, reader: SnapshotReader) -> None:
        self._reader = reader
        self.limit_bytes = reader.ahead_bytes // 4
        """How much it keeps at a time; 0 if it reads exactly what is asked."""
        self._held: dict[str, memoryview] = {}
        self._entry_name = ""
        self._start = 0
        self._window = memoryview(b"")

    def announce(self, entries: Iterable[Entry]) -> None:
        """Read entries that will be needed next, with few requests; those that were announced before are dropped.

        Only as many as fit into `limit_bytes` are read, so that memory stays bounded.
        """
        self._held = {}
        if not self.limit_bytes:
            return
        left, chosen = self.limit_bytes, []
        for entry in entries:
            if entry.size_bytes <= left:
                left -= entry.size_bytes
                chosen.append((entry, memoryview(bytearray(entry.size_bytes))))
        self._reader.read_all(chosen)
        self._held = {entry.name: data for entry, data in chosen}

    def read(self, entry: Entry, start: int, stop: int) -> bytearray:
        """Return the verified bytes of an entry from `start` to `stop`."""
        data = bytearray(stop - start)
        if not self.limit_bytes:
            self._reader.read_into(entry, start, memoryview(data))
            return data
        held = self._held.get(entry.name)
        if held is not None:
            data[:] = held[start:stop]
            return data
        if entry.name != self._entry_name or not self._start <= start <= stop <= self._start + self._window.nbytes:
            self._read_window(entry, start, stop)
        data[:] = self._window[start - self._start : stop - self._start]
        return data

    def _read_window(self, entry: Entry, start: int, stop: int) -> None:
        size_bytes = max(stop - start, min(self.limit_bytes, entry.size_bytes - start))
        self._window = memoryview(b"")  # freed before the next one is allocated
        window = memoryview(bytearray(size_bytes))
        self._reader.read_into(entry, start, window)
        self._entry_name, self._start, self._window = entry.name, start, window
