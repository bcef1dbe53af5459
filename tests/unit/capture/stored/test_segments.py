"""Segments: events are stored as a table of columns; the root of a step covers all its events."""

from __future__ import annotations

import gc

import numpy as np
import pytest

from holdfast.capture.stored.events import Event, ObservedEvent, ObservedEvents
from holdfast.capture.stored.runs import RunFacts
from holdfast.capture.stored.segments import (
    advance_roots,
    compute_root,
    decode_events,
    encode_events,
    verify_run_name,
)
from holdfast.errors import BadName, Corrupt
from tests.kit.runs_in_memory import FULL_EVENT, as_observed, make_output, make_run


def test_events_are_decoded_as_they_were_encoded() -> None:
    events = [make_output(0), FULL_EVENT, make_output(9, fqn="")]

    assert decode_events(encode_events(as_observed(events)), rank=0, what="it") == events


def test_events_with_digests_of_both_kinds_are_decoded_as_they_were_encoded() -> None:
    remote = make_output(1)._replace(digest=b"", blake3=bytes(range(32)))
    events = [make_output(0), remote, FULL_EVENT._replace(blake3=bytes(32)), make_output(3)]

    table = encode_events(as_observed(events))

    assert decode_events(table, rank=0, what="it") == events
    assert {"hashes", "blake3"} & encode_events(as_observed([make_output(0), FULL_EVENT])).keys() == set()


@pytest.mark.parametrize("column", ["hashes", "blake3"])
def test_a_table_that_lacks_a_digest_is_refused(column: str) -> None:
    remote = [make_output(number)._replace(digest=b"", blake3=bytes(32)) for number in range(3)]
    table = encode_events(as_observed(remote))

    with pytest.raises(Corrupt, match="its table of events is invalid"):
        decode_events({**table, column: table[column][:-1]}, rank=0, what="it")


def test_the_root_of_a_step_covers_the_stronger_digest() -> None:
    both = make_output(0)._replace(blake3=bytes(32))
    remote = both._replace(digest=b"")

    assert compute_root([both]) == compute_root([remote]) != compute_root([make_output(0)])
    roots: dict[int, bytes] = {}
    advance_roots(roots, as_observed([remote]))
    assert roots == {0: compute_root([remote])}


def test_digests_of_devices_take_the_place_of_their_numbers() -> None:
    events = as_observed([make_output(number) for number in range(4)])
    numbers: list[bytes | int] = [b"", 1, 0, 1]
    events.flat[8::9] = numbers
    events.flat[3::9] = [b"host", b"", b"", b"both"]

    known = ObservedEvents(events)
    known.set_blake3([b"first", b"second"])
    assert [fields[-1] for fields in known] == [b"", b"second", b"first", b"second"]

    events.drop_blake3()
    assert [(fields[0], fields[3], fields[-1]) for fields in events] == [(0, b"host", b""), (3, b"both", b"")]


def test_an_empty_table_is_decoded() -> None:
    assert decode_events(encode_events(ObservedEvents()), rank=0, what="it") == []


def test_events_that_share_their_facts_are_decoded_one_by_one() -> None:
    first = ObservedEvent(*next(iter(as_observed([FULL_EVENT]))))
    again = first._replace(seq=8, step=4, digest=bytes(16), alias=5, measured=None, leaf="", form="other")

    found = decode_events(encode_events(ObservedEvents([first, again, first])), rank=0, what="it")

    later = FULL_EVENT._replace(seq=8, site=FULL_EVENT.site._replace(step=4), digest=bytes(16), alias=5)
    assert found == [FULL_EVENT, later._replace(stats=None, leaf="", form="other"), FULL_EVENT]


@pytest.mark.parametrize("column", ["numbers", "ragged", "digests", "values", "counts", "texts"])
def test_a_table_that_was_cut_off_is_refused(column: str) -> None:
    columns = encode_events(as_observed([FULL_EVENT]))
    columns[column] = columns[column][:-1] if columns[column].ndim == 1 else columns[column][:0]

    with pytest.raises(Corrupt, match="segment 3: its table of events is invalid"):
        decode_events(columns, rank=0, what="segment 3")


@pytest.mark.parametrize("texts", [b"[1, 2, 3, 4, 5, 6, 7, 8]", b"[[], {}, 1, 2, 3, 4, 5, 6]", b"7", b'{"0": "a"}'])
def test_a_table_whose_texts_are_something_else_is_refused(texts: bytes) -> None:
    columns = encode_events(as_observed([FULL_EVENT]))
    columns["texts"] = np.frombuffer(texts, dtype=np.uint8)

    with pytest.raises(Corrupt, match="its table of events is invalid"):
        decode_events(columns, rank=0, what="it")


def test_a_table_whose_column_is_no_array_is_refused() -> None:
    columns = {**encode_events(as_observed([FULL_EVENT])), "values": 7}

    with pytest.raises(Corrupt, match="its table of events is invalid"):
        decode_events(columns, rank=0, what="it")  # type: ignore[arg-type] # what a damaged store may contain


@pytest.mark.parametrize(
    "changed",
    [
        make_output(1)._replace(digest=bytes(16)),
        make_output(1)._replace(shape=(3, 2)),
        make_output(1)._replace(dtype="int32"),
        make_output(1)._replace(site=make_output(1).site._replace(call=1)),
    ],
)
def test_the_root_of_a_step_changes_with_an_event(changed: Event) -> None:
    run = make_run(RunFacts("a"), [make_output(0), make_output(1)])

    assert run.root(0) != make_run(RunFacts("b"), [make_output(0), changed]).root(0)


@pytest.mark.parametrize("name", ["@a", "a/@r0", "", "a//b", ".."])
def test_names_that_could_be_taken_for_segments_are_refused(name: str) -> None:
    with pytest.raises(BadName):
        verify_run_name(name)


def test_a_recorder_that_adds_events_creates_no_object_for_the_garbage_collector() -> None:
    events = ObservedEvents()
    ((_, _, facts, *_),) = as_observed([FULL_EVENT])
    gc.collect()
    before = len(gc.get_objects())

    for seq in range(1000):
        events.flat += (seq, 0, facts, bytes(16), -1, None, "", "", b"")

    assert len(gc.get_objects()) - before < 100
    assert [seq for seq, *_ in events] == [*range(1000)]


def test_the_last_events_are_kept() -> None:
    events = as_observed([make_output(number) for number in range(5)])

    events.keep_last(2)
    assert [seq for seq, *_ in events] == [3, 4]
    events.keep_last(9)
    assert len(events) == 2
    events.keep_last(0)
    assert len(events) == 0


def test_roots_advance_by_the_events_of_each_step() -> None:
    events = [make_output(0), make_output(1, step=1), make_output(2), make_output(3, step=2)]
    roots = {2: b"earlier"}

    steps = advance_roots(roots, as_observed(events))

    assert steps == {0, 1, 2}
    assert roots[0] == compute_root([events[0], events[2]])
    assert roots[1] == compute_root([events[1]])
    assert roots[2] != compute_root([events[3]]), "it continues the root of earlier segments"
