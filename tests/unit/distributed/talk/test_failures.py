"""Failures of ranks, in words and as bytes."""

from __future__ import annotations

import pytest

from holdfast.distributed.talk.failures import (
    decode_failures,
    describe_error,
    encode_failures,
    is_caused_by,
    make_error,
    make_lost_error,
    name_ranks,
)
from holdfast.errors import Corrupt, DigestMismatch, NotFound, RankFailure


class Unprintable(Exception):
    """Its text cannot be computed."""

    def __str__(self) -> str:
        raise RuntimeError


def raise_and_describe(error: Exception) -> RankFailure:
    try:
        raise error
    except Exception as raised:  # noqa: BLE001 - any error
        return describe_error(3, raised)


@pytest.mark.parametrize(
    ("error", "type_name"),
    [(ValueError("no"), "ValueError"), (NotFound("no"), "holdfast.errors.NotFound")],
    ids=["builtin", "ours"],
)
def test_an_error_is_described_by_class_text_and_traceback(error: Exception, type_name: str) -> None:
    found = raise_and_describe(error)

    assert (found.rank, found.type_name) == (3, type_name)
    assert "no" in found.message
    assert "raise_and_describe" in found.traceback_text


def test_an_error_without_a_text_can_be_described() -> None:
    assert raise_and_describe(Unprintable()).type_name.endswith("Unprintable")


def test_long_texts_are_cut_and_the_end_of_a_traceback_is_kept() -> None:
    found = raise_and_describe(ValueError("x" * 100_000 + "end"))

    assert len(found.message) == 4096
    assert found.traceback_text.endswith("end\n")


def test_failures_are_decoded_as_they_were_encoded() -> None:
    failures = [raise_and_describe(ValueError("no")), RankFailure(0, "RankGone", "silent")]

    assert decode_failures(b"".join(encode_failures(failures))) == failures


def test_the_error_of_a_step_names_the_ranks_and_shows_the_first_traceback_of_another_rank() -> None:
    failures = [RankFailure(rank, "ValueError", f"no {rank}", f"trace {rank}") for rank in (4, 0, 1, 2, 3)]

    error = make_error("write", failures, rank=0, world_size=8)

    assert str(error).splitlines() == [
        "step 'write' failed on rank 0 of 8, because of ranks 0-4: rank 0: ValueError: no 0; rank 1: ValueError: no 1;"
        " rank 2: ValueError: no 2; and 2 more, see `.failures`",
        "trace 1",
    ]
    assert list(error.failures) == [0, 1, 2, 3, 4]


def test_the_error_of_a_step_that_failed_here_says_so() -> None:
    error = make_error("write", [RankFailure(2, "ValueError", "no", "trace")], rank=2, world_size=4)

    assert str(error) == "step 'write' failed on rank 2 of 4, because of this rank: rank 2: ValueError: no"


def test_a_lost_store_is_no_failure_of_a_rank() -> None:
    error = make_lost_error("write", "no reply", rank=2, world_size=4)

    assert "the process that hosts the group's store" in str(error)
    assert not error.failures


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([], "no rank"),
        ([4], "rank 4"),
        ([4, 4], "rank 4 twice"),
        ([4, 4, 4], "rank 4, 3 times"),
        ([1, 3], "ranks 1 and 3"),
        ([3, 1, 2], "ranks 1-3"),
        ([0, 1, 4, 5, 6, 9], "ranks 0, 1, 4-6 and 9"),
        (range(0, 16, 2), "ranks 0, 2, 4, 6, 8, 10, 12 and 14"),
        (range(0, 40, 2), "20 ranks, 0, 2, 4, 6, 8, 10, 12, 14 among them"),
    ],
)
def test_ranks_are_named_in_words(ranks: list[int], text: str) -> None:
    assert name_ranks(ranks) == text


def test_the_error_of_one_other_rank_names_that_rank() -> None:
    error = make_error("write", [RankFailure(1, "RankGone", "no sign of life", "")], rank=0, world_size=2)

    assert str(error) == "step 'write' failed on rank 0 of 2, because of rank 1: rank 1: RankGone: no sign of life"


@pytest.mark.parametrize(
    ("errors", "expected"),
    [
        ([Corrupt("no")], True),
        ([DigestMismatch("no"), NotFound("no")], True),
        ([DigestMismatch("no"), ValueError("no")], False),
        ([KeyError("no")], False),
        ([], False),
    ],
    ids=["the class", "a subclass and another", "one other", "a class that it inherits from", "nothing known"],
)
def test_the_cause_is_of_a_class_if_every_rank_that_failed_has_an_error_of_it(
    errors: list[Exception], expected: bool
) -> None:
    failures = [describe_error(rank, error) for rank, error in enumerate(errors)]

    assert is_caused_by(make_error("read", failures, rank=0, world_size=2), Corrupt, NotFound) is expected
