"""Segments: events are stored as a table of columns; the root of a step covers all its events."""

from __future__ import annotations

import pytest

from holdfast.capture.stored.events import Event
from holdfast.capture.stored.runs import RunFacts
from holdfast.capture.stored.segments import (
    decode_events,
    encode_events,
    verify_run_name,
)
from holdfast.errors import BadName, Corrupt
from tests.kit.runs_in_memory import FULL_EVENT, as_observed, make_output, make_run


def test_events_are_decoded_as_they_were_encoded() -> None:
    events = [make_output(0), FULL_EVENT, make_output(9, fqn="")]

    assert decode_events(encode_events(as_observed(events)), rank=0, what="it") == events


def test_an_empty_table_is_decoded() -> None:
    assert decode_events(encode_events([]), rank=0, what="it") == []


def test_events_that_share_their_facts_are_decoded_one_by_one() -> None:
    (first,) = as_observed([FULL_EVENT])
    again = first._replace(seq=8, step=4, digest=bytes(16), alias=5, measured=None, leaf="", form="other")

    found = decode_events(encode_events([first, again, first]), rank=0, what="it")

    later = FULL_EVENT._replace(seq=8, site=FULL_EVENT.site._replace(step=4), digest=bytes(16), alias=5)
    assert found == [FULL_EVENT, later._replace(stats=None, leaf="", form="other"), FULL_EVENT]


@pytest.mark.parametrize("column", ["numbers", "ragged", "digests", "values", "counts", "texts"])
def test_a_table_that_was_cut_off_is_refused(column: str) -> None:
    columns = encode_events(as_observed([FULL_EVENT]))
    columns[column] = columns[column][:-1] if columns[column].ndim == 1 else columns[column][:0]

    with pytest.raises(Corrupt, match="segment 3: its table of events is invalid"):
        decode_events(columns, rank=0, what="segment 3")


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
