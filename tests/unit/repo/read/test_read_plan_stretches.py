"""Planning reads: every wanted byte is fetched once, nothing far away with it, and put where it belongs."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.digest import hash_bytes
from holdfast.errors import Corrupt
from holdfast.repo.format.chunk import RAW, UNIT_BYTES, ChunkRef, Location
from holdfast.repo.format.entry import Entry
from holdfast.repo.read.read_plan import (
    STRETCH_BYTES,
    Want,
    group_stretches,
    is_in_one_piece,
    list_wants,
    plan_requests,
    plan_stretches,
)

PACK = bytes(random.Random(7).randbytes(12 << 20))


def entry(name: str, *spans: tuple[int, int], pack: str = "p", codec: int = RAW) -> Entry:
    """Return an entry made of these (offset, size) of the pack."""
    chunks = tuple(
        ChunkRef(hash_bytes(PACK[at : at + size]), size, Location(pack, at, size, codec, b"")) for at, size in spans
    )
    return Entry(name, sum(size for _, size in spans), chunks, None, None)


def content(made: Entry) -> bytes:
    return b"".join(PACK[ref.location.offset :][: ref.size_bytes] for ref in made.chunks if ref.location)


def fetch(wants: list[Want]) -> int:
    """Fetch all wants from the pack, as a reader does; return how many bytes were read."""
    read = 0
    for stretch in plan_stretches(wants):
        data = memoryview(PACK)[stretch.start : stretch.stop]
        read += len(data)
        target = stretch.find_target()
        if target is not None:
            target[:] = data
        else:
            for want, part in stretch.iter_parts(data):
                want.put(part)
    return read


SPANS = st.lists(st.tuples(st.integers(0, 5 << 20), st.integers(1, 200_000)), min_size=1, max_size=6)


@given(st.lists(SPANS, min_size=1, max_size=5), st.randoms(use_true_random=False))
def test_whatever_is_wanted_comes_where_it_is_wanted(layout: list[list[tuple[int, int]]], rng: random.Random) -> None:
    wants, expected, buffers = [], [], []
    for number, spans in enumerate(layout):
        made = entry(str(number), *spans)
        start = rng.randrange(made.size_bytes)
        stop = rng.randrange(start, made.size_bytes) + 1
        buffers.append(bytearray(stop - start))
        wants += list_wants(made, start, memoryview(buffers[-1]))
        expected.append(content(made)[start:stop])
    fetch(wants)
    assert buffers == expected


def test_adjacent_chunks_are_one_read_in_any_order() -> None:
    made = [entry(str(number), (number * 5000, 4000)) for number in (3, 1, 2, 0)]
    wants = [want for one in made for want in list_wants(one, 0, memoryview(bytearray(4000)))]
    (stretch,) = plan_stretches(wants)
    assert (stretch.start, stretch.stop, len(stretch.wants)) == (0, 19_000, 4)
    assert stretch.find_target() is None


def test_a_large_chunk_between_small_ones_is_read_separately() -> None:
    small, large, last = (
        entry("a", (0, 4000)),
        entry("b", (4096, 1 << 20), (4096 + (1 << 20), 500)),
        entry("c", (3 << 19, 9)),
    )
    wants = [want for one in (small, large, last) for want in list_wants(one, 0, memoryview(bytearray(one.size_bytes)))]
    stretches = list(plan_stretches(wants))
    assert [len(stretch.wants) for stretch in stretches] == [1, 2, 1]
    assert all(stretch.find_target() is not None for stretch in stretches)


def test_distant_chunks_and_other_packs_are_separate_reads() -> None:
    made = [entry("a", (0, 4000)), entry("b", (1 << 20, 4000)), entry("c", (5000, 4000), pack="q")]
    wants = [want for one in made for want in list_wants(one, 0, memoryview(bytearray(4000)))]
    assert [(stretch.pack_id, stretch.start) for stretch in plan_stretches(wants)] == [
        ("p", 0), ("p", 1 << 20), ("q", 5000),
    ]  # fmt: skip


def test_a_large_entry_is_read_straight_into_its_memory() -> None:
    made = entry("a", *[(4096 + (n << 20), 1 << 20) for n in range(10)])
    target = bytearray(made.size_bytes)
    wants = list_wants(made, 0, memoryview(target))
    stretches = list(plan_stretches(wants))
    assert all(stretch.find_target() is not None for stretch in stretches)
    assert max(stretch.size_bytes for stretch in stretches) == STRETCH_BYTES
    assert fetch(wants) == made.size_bytes
    assert target == content(made)


def test_a_chunk_that_is_wanted_twice_is_read_once() -> None:
    made = entry("a", (8192, 1000), (8192, 1000))
    target = bytearray(2000)
    assert fetch(list_wants(made, 0, memoryview(target))) == 1000
    assert target == 2 * PACK[8192:9192]


def test_batches_hold_what_a_thread_can_do_at_once() -> None:
    made = entry("a", *[(n << 20, 1 << 20) for n in range(6)] * 4)
    wants = list_wants(made, 0, memoryview(bytearray(made.size_bytes)))
    batches = list(group_stretches(plan_stretches(wants)))
    assert sum(len(batch) for batch, _ in batches) == len(list(plan_stretches(wants)))
    assert all(size <= UNIT_BYTES for _, size in batches)
    assert list(group_stretches([])) == []


@pytest.mark.parametrize(
    ("spans", "codec", "expected"),
    [
        ([(0, 10), (10, 5)], RAW, True),
        ([(0, 10)], RAW, True),
        ([(0, 10), (11, 5)], RAW, False),
        ([(10, 5), (0, 10)], RAW, False),
        ([(0, 10)], 9, False),
        ([], RAW, False),
    ],
)
def test_an_entry_is_contiguous_in_one_pack_or_not(spans: list[tuple[int, int]], codec: int, expected: bool) -> None:
    assert is_in_one_piece(entry("a", *spans, codec=codec)) is expected


def test_a_part_of_an_entry_is_not_read_for_the_whole() -> None:
    made = Entry("a", 0, (), None, None, dims=1)
    with pytest.raises(Corrupt, match="'a' is only one part"):
        list_wants(made, 0, memoryview(b""))


MIB = 1 << 20


@pytest.mark.parametrize(
    ("size_bytes", "budget_bytes", "largest_bytes"),
    [
        (MIB, 256 * MIB, 2 * MIB),
        (128 * MIB, 256 * MIB, 4 * MIB),
        (100 << 30, 256 * MIB, 4 * MIB),
        (100 << 30, 4 << 30, STRETCH_BYTES),
        (100 << 30, 16 * MIB, 2 * MIB),
    ],
)
def test_requests_are_neither_few_nor_small(size_bytes: int, budget_bytes: int, largest_bytes: int) -> None:
    rules = plan_requests(size_bytes, budget_bytes=budget_bytes, at_once=64)
    assert rules.largest_bytes == largest_bytes


def test_a_request_fetches_chunks_for_several_buffers_and_small_gaps_between_them() -> None:
    spans = [(0, MIB), (MIB + 100_000, MIB), (3 * MIB, MIB), (4 * MIB, MIB)]
    wants = [
        want
        for number, span in enumerate(spans)
        for want in list_wants(entry(str(number), span), 0, memoryview(bytearray(MIB)))
    ]
    rules = plan_requests(128 * MIB, budget_bytes=256 * MIB, at_once=64)

    stretches = list(plan_stretches(wants, rules))

    assert [(stretch.start, stretch.stop) for stretch in stretches] == [(0, 2 * MIB + 100_000), (3 * MIB, 5 * MIB)]
    # Each waits for the server, so each has a thread of its own.
    assert [len(batch) for batch, _ in group_stretches(stretches, rules)] == [1, 1]
