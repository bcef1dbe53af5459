"""Scrubbing reads every byte between header and footer, whatever the sizes, and distinguishes chunks from padding."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from holdfast.digest import fingerprint, hash_bytes
from holdfast.objects.memory import MemoryStore
from holdfast.objects.protocol import ObjectStore
from holdfast.repo.engine import Engine, Stages
from holdfast.repo.format.chunk import UNIT_BYTES, Location
from holdfast.repo.format.layout import pack_key
from holdfast.repo.format.pack import HEADER, Footer, PackBuilder, PackedChunk, read_footer
from holdfast.repo.upkeep.check import PackSection, Scrubbed, Scrubber, cut_pack
from tests.kit.saving import MIB, PACK_ID, Watched, append_run, iter_gaps, noise, rot

KEY = pack_key(PACK_ID)


@pytest.fixture
def footer(store: MemoryStore) -> Footer:
    """A pack of two small chunks, 20 MiB in one run, and one small chunk more."""
    pack = PackBuilder(store, PACK_ID)
    runs = [(64, [noise(600), noise(700, 1)]), (4096, [noise(MIB, 2 + i) for i in range(20)]), (64, [noise(513, 99)])]
    for alignment, chunks in runs:
        append_run(pack, [(hash_bytes(data), memoryview(data)) for data in chunks], alignment=alignment)
    pack.seal()
    return read_footer(store, PACK_ID)


@pytest.fixture
def engine() -> Iterator[Engine]:
    with Engine("test", budget_bytes=16 << 20, waits=True) as found:
        yield found


def scrub(store: ObjectStore, footer: Footer, engine: Engine) -> list[Scrubbed]:
    return list(Scrubber(store, engine, Stages()).scrub(cut_pack(PACK_ID, footer, data_start=HEADER.size)))


def test_stretches_cover_every_byte_and_every_chunk_once(footer: Footer) -> None:
    sections = list(cut_pack(PACK_ID, footer, data_start=HEADER.size))
    assert sections[0].start == HEADER.size
    assert sections[-1].stop == footer.footer_offset
    assert all(left.stop == right.start for left, right in itertools.pairwise(sections))
    assert [chunk for section in sections for chunk in section.chunks] == list(footer.chunks)
    assert max(section.stop - section.start for section in sections) <= UNIT_BYTES + 4096


def test_an_intact_pack_is_clean(store: MemoryStore, footer: Footer, engine: Engine) -> None:
    outcomes = scrub(store, footer, engine)
    assert not any(outcome.bad_chunks or outcome.has_bad_padding or outcome.error for outcome in outcomes)


def test_every_chunk_that_is_hit_is_named_and_no_other(store: MemoryStore, footer: Footer, engine: Engine) -> None:
    hit = [footer.chunks[i] for i in (0, 1, 5, 20, 22)]
    for chunk in hit:
        rot(store, KEY, chunk.location.offset + chunk.size_bytes - 1)
    outcomes = scrub(store, footer, engine)
    assert [chunk for outcome in outcomes for chunk in outcome.bad_chunks] == hit
    assert not any(outcome.has_bad_padding for outcome in outcomes)


def test_every_stretch_of_padding_is_checked(store: MemoryStore, footer: Footer, engine: Engine) -> None:
    for start, stop in iter_gaps(footer):
        for position in (start, stop - 1):
            rot(store, KEY, position)
            outcomes = scrub(store, footer, engine)
            assert [outcome.has_bad_padding for outcome in outcomes].count(True) == 1
            assert not any(outcome.bad_chunks for outcome in outcomes)
            rot(store, KEY, position)


def test_an_unreadable_section_is_reported_and_the_others_are_read(
    store: MemoryStore, footer: Footer, engine: Engine
) -> None:
    watched = Watched(store)
    watched.failing.add(KEY)
    outcomes = scrub(watched, footer, engine)
    assert all("input/output error" in outcome.error for outcome in outcomes)
    assert [chunk for outcome in outcomes for chunk in outcome.bad_chunks] == list(footer.chunks)


def test_a_buffer_used_before_leaves_no_trace(store: MemoryStore, engine: Engine) -> None:
    """One thread scrubs many packs with one buffer: padding must be judged by what was read now."""
    pack = PackBuilder(store, PACK_ID)
    append_run(pack, [(hash_bytes(noise(600)), memoryview(noise(600)))], alignment=4096)
    pack.seal()
    footer = read_footer(store, PACK_ID)
    sections = list(cut_pack(PACK_ID, footer, data_start=HEADER.size)) * 50
    outcomes = list(Scrubber(store, engine, Stages()).scrub(sections))
    assert len(outcomes) == 50
    assert not any(outcome.has_bad_padding or outcome.bad_chunks for outcome in outcomes)


def test_a_pack_without_chunks_is_clean(store: MemoryStore, engine: Engine) -> None:
    PackBuilder(store, PACK_ID).seal()
    (outcome,) = scrub(store, read_footer(store, PACK_ID), engine)
    assert outcome == Scrubbed(PackSection(PACK_ID, HEADER.size, outcome.section.stop, ()))


def test_a_chunk_of_an_unknown_codec_is_judged_by_its_stored_bytes(store: MemoryStore, engine: Engine) -> None:
    stored = noise(100)
    store.create(KEY, bytes(64) + stored)
    at = Location(PACK_ID, 64, 100, 9, fingerprint(stored))
    footer = Footer((PackedChunk(hash_bytes(b"unfolded"), 5000, at),), 164, 164)
    assert not scrub(store, footer, engine)[0].bad_chunks
    rot(store, KEY, 100)
    assert scrub(store, footer, engine)[0].bad_chunks == footer.chunks
