"""Entries: their digests, their shape, and many of them as columns."""

from __future__ import annotations

import pytest

from holdfast.digest import hash_bytes
from holdfast.errors import Corrupt
from holdfast.repo.format.chunk import ChunkRef, Location
from holdfast.repo.format.entry import (
    ChunkRows,
    Entry,
    EntryRows,
    count_bytes,
    digest_entry,
    digest_snapshot,
    find_shape,
    repeat_rows,
)
from holdfast.repo.format.manifest import encode_manifest
from holdfast.repo.format.source import BytesSource

PACK = "a" * 24 + "-" + "b" * 16


def make_ref(data: bytes, *, offset: int | None = None, box: tuple[int, ...] = ()) -> ChunkRef:
    """Return a reference to a chunk with these bytes: at an offset of a pack, or inline."""
    if offset is None:
        return ChunkRef(hash_bytes(data), len(data), None, data, box)
    return ChunkRef(hash_bytes(data), len(data), Location(PACK, offset, len(data), 0, b"f" * 16), box=box)


SOURCES = [
    BytesSource("inline", b"tiny", {"kind": 1}),
    BytesSource("empty", b"", cuts=()),
    BytesSource("cut", b"0123456789", note={"from": "here"}, cuts=(4, 10)),
    BytesSource("alias", b"tiny", alias=7),
]
REFS = [make_ref(b"tiny"), make_ref(b"0123", offset=64), make_ref(b"456789", offset=68), make_ref(b"tiny")]
ENTRIES = [
    Entry("inline", 4, (REFS[0],), {"kind": 1}),
    Entry("empty", 0, ()),
    Entry("cut", 10, (REFS[1], REFS[2]), note={"from": "here"}),
    Entry("alias", 4, (REFS[3],), alias=7),
]


def make_rows() -> EntryRows:
    refs = ChunkRows()
    refs.extend(REFS[:1])
    refs.extend(REFS[1:])
    return EntryRows(SOURCES, refs)


def test_rows_are_equal_to_the_entries_that_they_describe() -> None:
    rows = make_rows()
    assert list(rows) == ENTRIES
    assert [rows[number] for number in range(-4, 4)] == ENTRIES + ENTRIES
    assert rows[1:3] == ENTRIES[1:3]
    assert count_bytes(rows) == count_bytes(ENTRIES) == 18


def test_references_are_read_by_index_and_slice() -> None:
    refs = make_rows().refs
    assert list(refs) == REFS
    assert refs[-1] == REFS[3]
    assert refs[1:] == REFS[1:]
    with pytest.raises(IndexError):
        refs[4]


def test_rows_and_entries_have_the_same_manifest() -> None:
    assert encode_manifest({"tree": []}, make_rows()) == encode_manifest({"tree": []}, ENTRIES)


def test_released_columns_leave_only_digests() -> None:
    refs = make_rows().refs
    columns = refs.release_columns()
    assert columns.locations == [ref.location for ref in REFS]
    assert len(refs) == 0
    assert list(refs.iter_digests()) == [ref.digest for ref in REFS]


def test_digests_are_not_kept_if_no_chunk_is_in_a_pack() -> None:
    refs = ChunkRows()
    refs.extend([REFS[0]])
    refs.release_columns()
    assert list(refs.iter_digests()) == []


def test_a_digest_depends_on_content_and_not_on_location_or_note() -> None:
    entry = ENTRIES[2]
    moved = entry._replace(chunks=(make_ref(b"0123", offset=4096), make_ref(b"456789", offset=5000)), note=None)
    assert digest_entry(moved) == digest_entry(entry)
    changes = [
        entry._replace(name="other"),
        entry._replace(spec={"kind": 2}),
        entry._replace(alias=1),
        entry._replace(rank=0),
        entry._replace(chunks=entry.chunks[:1]),
    ]
    assert len({digest_entry(each) for each in [entry, *changes]}) == 6


def test_equal_numbers_of_different_type_are_different_specs() -> None:
    specs = [1, 1.0, True]
    assert len({digest_snapshot(None, [Entry("x", 0, (), spec)]) for spec in specs}) == 3
    mixed = [Entry("x", 0, (), 1), Entry("y", 0, (), True)]
    assert digest_snapshot(None, mixed) != digest_snapshot(None, [mixed[0], Entry("y", 0, (), 1)])


def test_the_shape_is_that_of_the_boxes() -> None:
    boxes = (make_ref(b"ab", box=(0, 0, 2, 1)), make_ref(b"cdef", box=(0, 1, 2, 2)))
    assert find_shape(Entry("x", 6, boxes, dims=2)) == (2, 3)
    with pytest.raises(Corrupt, match="do not add up to 7 bytes"):
        find_shape(Entry("x", 7, boxes, dims=2))


def test_repeated_sources_have_the_references_of_the_first() -> None:
    refs = ChunkRows()
    refs.extend(REFS[:3])
    sources = [*SOURCES[:3], BytesSource("again", b"0123456789", cuts=(4, 10)), SOURCES[3]]

    rows = repeat_rows(sources, refs, {3: 2, 4: 0})

    assert list(rows) == [*REFS[:3], *REFS[1:3], REFS[0]]
    assert repeat_rows(SOURCES[:3], refs, {}) is refs
