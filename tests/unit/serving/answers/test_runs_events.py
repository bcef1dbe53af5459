"""The events of one run: the numbers and the JSON are those of the verbs, in pages."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast.capture.stored import runs
from holdfast.capture.stored.segments import decode_events
from holdfast.cli.main import main
from holdfast.errors import NotFound
from holdfast.serving.answers.runs import (
    RunOutline,
    choose_events,
    describe_events,
    describe_nonfinite,
    describe_outline,
    read_outline,
)
from tests.kit.recordings import FAULT, Recording, write_recorded

ALL = 10**9
RUNS = (
    Recording("good", level="stats", environment={"torch": "2.0"}, notes=("a note",)),
    Recording("nan", is_bad=True, level="stats", hole=math.nan, first_step=0),
    Recording("full", is_bad=True, hole=math.inf),
    Recording("digests", is_bad=True, level="digest", hole=math.nan),
    Recording("late", level="stats", first_step=7, steps=5),
    Recording("ranks", is_bad=True, level="stats", hole=math.nan, world=3),
)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[holdfast.Store]:
    with holdfast.open(tmp_path_factory.mktemp("runs") / "store") as opened:
        for recording in RUNS:
            write_recorded(opened.repository, recording)
        yield opened


def read(store: holdfast.Store, name: str) -> RunOutline:
    return read_outline(store.repository, name)


def print_json(store: holdfast.Store, capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    """Return what a verb prints as JSON."""
    main(["-s", store.url, "run", *words, "--json"])
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("name", [recording.name for recording in RUNS])
def test_a_run_its_events_and_its_first_nan_are_those_of_the_verbs(
    store: holdfast.Store, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    outline = read(store, name)
    listed = next(each for each in print_json(store, capsys, "ls") if each["name"] == name)
    events = print_json(store, capsys, "events", name)

    facts = describe_outline(outline)
    page = describe_events(outline, choose_events(outline, "", None), None, 0, ALL)
    found = describe_nonfinite(outline)

    assert {key: facts[key] for key in listed} == listed
    assert page["events"] == events
    assert facts["events"] == page["total"] == len(events) == sum(facts["levels"].values())
    row = found.pop("row")
    assert found == print_json(store, capsys, "nan", name)
    assert (row is None) == (found["origin"] is None)


def test_a_run_has_its_steps_levels_and_ranks(store: holdfast.Store) -> None:
    found = describe_outline(read(store, "late"))

    assert found["steps"] == {"first": 7, "last": 11, "count": 5}
    assert (found["levels"], found["ranks"]) == ({"stats": 45}, [0])
    assert describe_outline(read(store, "ranks"))["ranks"] == [0, 1, 2]
    assert describe_outline(read(store, "digests"))["levels"] == {"digest": 27}


def test_pages_together_are_all_events(store: holdfast.Store) -> None:
    outline = read(store, "ranks")
    chosen = choose_events(outline, "", None)

    pages = [describe_events(outline, chosen, None, offset, 7) for offset in range(0, 91, 7)]

    whole = describe_events(outline, chosen, None, 0, ALL)["events"]
    assert [event for page in pages for event in page["events"]] == whole
    assert [len(page["events"]) for page in pages] == [7] * 11 + [4, 0]
    assert [(event["step"], event["seq"]) for event in whole] == sorted((each["step"], each["seq"]) for each in whole)


@pytest.mark.parametrize(
    ("text", "step", "count"),
    [
        ("", None, 27),
        ("", 1, 9),
        ("", 99, 0),
        ("layers.1", None, 9),
        ("output", None, 9),
        ("output layers.1", 1, 1),
        ("layers.*", 0, 9),
        ("layers.?", 0, 6),
        ("parameter *.weight", 2, 3),
        ("forward", None, 27),
        ("nothing", None, 0),
        ("nothing", 99, 0),
        ("[", None, 0),
    ],
)
def test_a_filter_takes_kinds_phases_parts_of_names_and_globs(
    store: holdfast.Store, text: str, step: int | None, count: int
) -> None:
    outline = read(store, "good")

    page = describe_events(outline, choose_events(outline, text, step), step, 0, ALL)

    assert page["total"] == len(page["events"]) == count
    assert {event["step"] for event in page["events"]} <= ({0, 1, 2} if step is None else {step})


@pytest.mark.parametrize(
    ("step", "previous", "following"),
    [(None, None, None), (7, None, 8), (9, 8, 10), (11, 10, None), (3, None, 7), (50, 11, None)],
)
def test_the_steps_around_one_are_named(
    store: holdfast.Store, step: int | None, previous: int | None, following: int | None
) -> None:
    outline = read(store, "late")

    steps = describe_events(outline, choose_events(outline, "", step), step, 0, 1)["steps"]

    assert (steps["previous"], steps["next"]) == (previous, following)


@pytest.mark.parametrize("name", ["nan", "full", "ranks"])
def test_the_first_nan_is_a_row_of_its_step(store: holdfast.Store, name: str) -> None:
    outline = read(store, name)

    found = describe_nonfinite(outline)

    step = found["origin"]["step"]
    event = describe_events(outline, choose_events(outline, "", step), step, found["row"], 1)["events"][0]
    assert (event["step"], event["fqn"], event["kind"]) == FAULT
    assert event["rank"] == found["origin"]["rank"]


def test_of_digests_alone_nothing_is_claimed(store: holdfast.Store) -> None:
    found = describe_nonfinite(read(store, "digests"))

    assert (found["origin"], found["row"], found["unknown"]) == (None, None, 27)
    assert "record again with level='stats'" in found["headline"]


def test_a_run_that_is_not_there_is_an_error_with_a_hint(store: holdfast.Store) -> None:
    with pytest.raises(NotFound, match="did you mean 'good'"):
        read(store, "goood")


def test_a_run_of_more_ranks_than_segments_are_kept_is_decoded_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded: list[int] = []

    def count(columns: Any, *, rank: int, what: str) -> Any:
        decoded.append(rank)
        return decode_events(columns, rank=rank, what=what)

    monkeypatch.setattr(runs, "decode_events", count)
    with holdfast.open(tmp_path / "store") as opened:
        write_recorded(opened.repository, Recording("wide", level="digest", world=20))
        outline = read(opened, "wide")

    assert outline.size == 20 * 27
    assert decoded == list(range(20))
