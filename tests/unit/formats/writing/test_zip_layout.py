"""Zip archives with 64-bit numbers, aligned data and known sizes."""

from __future__ import annotations

import io
import random
import sys
import zipfile
from zlib import crc32

import pytest

from holdfast.formats.writing import zip_layout
from holdfast.formats.writing.zip_layout import ALIGNMENT, _find_crc32, add_crc, plan_zip

RECORDS = [("a", b"one"), ("folder/b", b""), ("é", b"x" * 5000)]


def _write(records: list[tuple[str, bytes]]) -> bytes:
    layout = plan_zip([(name, len(data)) for name, data in records])
    crcs = [crc32(data) for _, data in records]
    archive = bytearray(layout.size_bytes)
    for record, crc, (_, data) in zip(layout.records, crcs, records, strict=True):
        header = record.encode_header(crc)
        assert record.header_at + len(header) == record.data_at
        archive[record.header_at : record.data_at + len(data)] = header + data
    archive[layout.directory_at :] = layout.encode_directory(crcs)
    assert len(archive) == layout.size_bytes
    return bytes(archive)


def _read(archive: bytes) -> list[tuple[str, bytes]]:
    with zipfile.ZipFile(io.BytesIO(archive)) as found:
        assert found.testzip() is None
        return [(info.filename, found.read(info)) for info in found.infolist()]


def test_python_reads_the_records() -> None:
    assert _read(_write(RECORDS)) == RECORDS


def test_data_are_aligned() -> None:
    layout = plan_zip([(name, len(data)) for name, data in RECORDS] + [("large", 1 << 20)])

    assert [record.data_at % ALIGNMENT for record in layout.records] == [0, 0, 0, 0]
    assert layout.records[-1].data_at % 4096 == 0


@pytest.mark.parametrize("limit", [0, 3, 200])
def test_records_beyond_the_limit_of_32_bits_are_read(monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    monkeypatch.setattr(zip_layout, "ZIP64_FROM", limit)

    assert _read(_write(RECORDS)) == RECORDS


@pytest.mark.slow
def test_more_records_than_16_bits_count_are_read() -> None:
    records = [(str(number), b"") for number in range(0x10001)]

    assert len(_read(_write(records))) == 0x10001


_DATA = random.Random(0).randbytes(100_000)


@pytest.mark.parametrize("size", [0, 1, 63, 64, 4097, 100_000])
def test_checksums_are_those_of_zlib(size: int) -> None:
    assert add_crc(memoryview(_DATA)[:size]) == crc32(_DATA[:size])


def test_a_checksum_continues_from_the_bytes_before() -> None:
    assert add_crc(_DATA[777:], add_crc(_DATA[:777])) == crc32(_DATA)


def test_without_zlib_ng_checksums_are_computed_by_zlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zlib_ng", None)

    assert _find_crc32() is crc32


def test_zlib_ng_is_used_if_it_is_installed() -> None:
    fast = pytest.importorskip("zlib_ng.zlib_ng")

    assert _find_crc32() is fast.crc32
