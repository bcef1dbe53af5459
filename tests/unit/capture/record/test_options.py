"""Options of a recording: bad values and unknown names are refused."""

from __future__ import annotations

import pytest

from holdfast.capture.record.options import Steps, make_options, parse_size, parse_steps
from holdfast.capture.stored.events import Level


@pytest.mark.parametrize(
    ("choices", "text"),
    [
        ({"level": "everything"}, "the level of '\\*' must be one of 'off', 'digest'"),
        ({"kinds": "inputs"}, "each of kinds must be one of"),
        ({"steps": "1..2"}, "steps must look like '0-9,20,100:1000:100'"),
        ({"max_bytes": "much"}, "max_bytes must be a number of bytes or a text such as '20GB'"),
        ({"queue_bytes": 0}, "queue_bytes must be more than 0"),
        ({"when_full": "panic"}, "when_full must be one of 'block', 'degrade', 'raise'"),
        ({"compiled": "no"}, "compiled must be one of"),
        ({"hashes": "sha1"}, "hashes must be one of 'auto', 'both', not 'sha1'"),
    ],
)
def test_invalid_values_are_refused(choices: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        make_options(**choices)  # type: ignore[arg-type]  # that is the point


def test_levels_are_taken_from_the_first_pattern_that_matches() -> None:
    options = make_options(level={"a.*": "full", "*": "stats"}, exclude="a.b", kinds="output input")

    assert options.find_level("output", "a.c") is Level.FULL
    assert options.find_level("output", "d") is Level.STATS
    assert options.find_level("output", "a.b") is options.find_level("output", "a.b.c") is Level.OFF
    assert options.find_level("grad", "d") is Level.OFF


@pytest.mark.parametrize(("size", "found"), [(7, 7), ("20GB", 20 * 10**9), ("1.5 KiB", 1536), ("12", 12)])
def test_sizes_are_numbers_or_texts_with_a_unit(size: int | str, found: int) -> None:
    assert parse_size(size, what="it") == found


@pytest.mark.parametrize("size", [0, -1, "many", "1 XB", "0B"])
def test_what_is_no_size_is_refused(size: int | str) -> None:
    with pytest.raises(ValueError, match="it must be"):
        parse_size(size, what="it")


def test_steps_are_ranges_numbers_or_a_function() -> None:
    def list_chosen(steps: Steps) -> list[int]:
        return [step for step in range(12) if parse_steps(steps)(step)]

    assert list_chosen("0-2,5,6:12:3") == [0, 1, 2, 5, 6, 9]
    assert list_chosen("9-") == [9, 10, 11]
    assert list_chosen(4) == [4]
    assert list_chosen({1, 3}) == [1, 3]
    assert list_chosen(lambda step: step > 9) == [10, 11]
    with pytest.raises(ValueError, match="'x'"):
        parse_steps("x")
