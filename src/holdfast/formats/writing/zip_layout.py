"""Lays out zip archives of uncompressed records as torch.save does: aligned, and with a known size before any byte."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from holdfast.digest import Buffer
from holdfast.objects.blocks import PAGE_BYTES

ALIGNMENT: Final = 64
"""The data of each record begins at a multiple of this, so that a reader can memory-map it."""
_LARGE_BYTES: Final = 1 << 20
"""Larger records begin with a page of the file, so that they can be written without a copy."""
ZIP64_FROM: Final = 0xFFFFFFFF
"""From this size or offset on, numbers are in an extra field of 64 bits."""
_ELSEWHERE: Final = 0xFFFFFFFF
"""Stands for a number that is in the extra field."""
_MAX_SHORT: Final = 0xFFFF
_VERSION: Final = 45
"""The version of the zip format that has numbers of 64 bits."""
_DATE: Final = (1 << 5) | 1
"""1 January 1980, the first date that the format has: equal exports have equal bytes."""
_LOCAL: Final = struct.Struct("<4s5H3I2H")
_CENTRAL: Final = struct.Struct("<4s6H3I5H2I")
_END: Final = struct.Struct("<4s4H2IH")
_END64: Final = struct.Struct("<4sQ2H2I4Q")
_LOCATOR: Final = struct.Struct("<4sIQI")
_EXTRA: Final = struct.Struct("<2H")
_PADDING_ID: Final = 0x4246
"""The id of the extra field that torch pads headers with."""
_UTF8: Final = 1 << 11


@dataclass(frozen=True, slots=True)
class ZipRecord:
    """One record: where its header and its data begin."""

    name: str
    size_bytes: int
    header_at: int
    data_at: int

    def encode_header(self, crc: int) -> bytes:
        """Return the bytes before the data; `crc` is the CRC-32 of the data."""
        name = self.name.encode()
        is_long = self.size_bytes >= ZIP64_FROM
        extra = _EXTRA.pack(1, 16) + struct.pack("<2Q", self.size_bytes, self.size_bytes) if is_long else b""
        size = _ELSEWHERE if is_long else self.size_bytes
        padding = self.data_at - self.header_at - _LOCAL.size - len(name) - len(extra) - _EXTRA.size
        extra += _EXTRA.pack(_PADDING_ID, padding) + bytes(padding)
        fields = (b"PK\x03\x04", _VERSION, _UTF8, 0, 0, _DATE, crc, size, size, len(name), len(extra))
        return _LOCAL.pack(*fields) + name + extra

    def encode_entry(self, crc: int) -> bytes:
        """Return the record's line in the directory of the archive."""
        name = self.name.encode()
        longs = [self.size_bytes] * 2 if self.size_bytes >= ZIP64_FROM else []
        longs += [self.header_at] if self.header_at >= ZIP64_FROM else []
        extra = _EXTRA.pack(1, 8 * len(longs)) + struct.pack(f"<{len(longs)}Q", *longs) if longs else b""
        size, at = _shorten(self.size_bytes), _shorten(self.header_at)
        head = (b"PK\x01\x02", _VERSION, _VERSION, _UTF8, 0, 0, _DATE, crc, size, size, len(name), len(extra))
        return _CENTRAL.pack(*head, 0, 0, 0, 0, at) + name + extra


@dataclass(frozen=True, slots=True)
class ZipLayout:
    """The records of an archive and the place of its directory; offsets count from the start of the archive."""

    records: tuple[ZipRecord, ...]
    directory_at: int

    @property
    def size_bytes(self) -> int:
        """The size of the whole archive."""
        return self.directory_at + len(self.encode_directory([0] * len(self.records)))

    def encode_directory(self, crcs: Sequence[int]) -> bytes:
        """Return the end of the archive; `crcs` has the CRC-32 of each record's data."""
        entries = b"".join(record.encode_entry(crc) for record, crc in zip(self.records, crcs, strict=True))
        count, at = len(self.records), self.directory_at
        end64 = b""
        if count >= _MAX_SHORT or max(at, len(entries)) >= ZIP64_FROM:
            numbers = (_END64.size - 12, _VERSION, _VERSION, 0, 0, count, count, len(entries), at)
            end64 = _END64.pack(b"PK\x06\x06", *numbers) + _LOCATOR.pack(b"PK\x06\x07", 0, at + len(entries), 1)
        short, size, start = min(count, _MAX_SHORT), _shorten(len(entries)), _shorten(at)
        return entries + end64 + _END.pack(b"PK\x05\x06", 0, 0, short, short, size, start, 0)


def _shorten(number: int) -> int:
    return _ELSEWHERE if number >= ZIP64_FROM else number


def plan_zip(records: Sequence[tuple[str, int]]) -> ZipLayout:
    """Lay out records, given as name and size."""
    planned = list(_iter_records(records))
    end = planned[-1].data_at + planned[-1].size_bytes if planned else 0
    return ZipLayout(tuple(planned), end)


def _iter_records(records: Sequence[tuple[str, int]]) -> Iterator[ZipRecord]:
    at = 0
    for name, size in records:
        header = _LOCAL.size + len(name.encode()) + _EXTRA.size + (20 if size >= ZIP64_FROM else 0)
        data_at = at + header
        data_at += -data_at % (PAGE_BYTES if size >= _LARGE_BYTES else ALIGNMENT)
        yield ZipRecord(name, size, at, data_at)
        at = data_at + size


def _find_crc32() -> Callable[[Buffer, int], int]:
    """Return the function of zlib-ng if it is installed: it takes a sixth of the time of zlib's."""
    try:
        from zlib_ng import zlib_ng
    except ImportError:
        return zlib.crc32
    fast: Callable[[Buffer, int], int] = zlib_ng.crc32
    return fast


_CRC32: Final = _find_crc32()


def add_crc(data: Buffer, before: int = 0) -> int:
    """Return the CRC-32 of `data`, after bytes whose CRC-32 is `before`."""
    return _CRC32(data, before)
