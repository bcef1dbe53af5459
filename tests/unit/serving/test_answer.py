"""Errors become sentences, also in the middle of a stream."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from holdfast.errors import BadExpression, BadName, Corrupt, NotFound, StoreGone
from holdfast.json_text import Json
from holdfast.serving.answer import answer_error, answer_lines, describe_error, end_sentence


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (NotFound("no snapshot 'x'"), 404, "No snapshot 'x'."),
        (BadName("it is bad."), 400, "It is bad."),
        (Corrupt("chunk 3 differs"), 500, "Chunk 3 differs; run `holdfast check`."),
        (StoreGone("the store is gone"), 503, "The store is gone."),
        (OSError(5, "Input/output error", "/x"), 503, "/x: Input/output error."),
    ],
)
def test_an_error_is_a_sentence(error: Exception, status: int, message: str) -> None:
    found = describe_error(error)

    assert found == (status, {"error": {"kind": type(error).__name__, "message": message}})


def test_a_mistake_in_an_expression_has_its_place() -> None:
    answer = answer_error(BadExpression("expected a value\n  loss <", expression="loss <", position=6))

    assert answer.status == 400
    assert isinstance(answer.body, bytes)
    found = json.loads(answer.body)["error"]
    assert (found["message"], found["expression"], found["position"]) == ("Expected a value.", "loss <", 6)


def test_a_bug_is_called_a_bug(caplog: pytest.LogCaptureFixture) -> None:
    status, found = describe_error(TypeError("unexpected"))

    assert status == 500
    assert "bug in Holdfast" in found["error"]["message"]
    assert "a request failed" in caplog.text


def test_an_error_in_a_stream_is_its_last_line() -> None:
    def compute() -> Iterator[Json]:
        yield {"done": 1}
        raise Corrupt("chunk 3 differs")

    answer = answer_lines(compute())

    assert isinstance(answer.body, Iterator)
    lines = [json.loads(line) for line in answer.body]
    assert lines == [{"done": 1}, {"error": {"kind": "Corrupt", "message": "Chunk 3 differs; run `holdfast check`."}}]


def test_a_sentence_ends() -> None:
    assert end_sentence("what is it?") == "What is it?"
    assert end_sentence("") == "Failed."


def test_a_name_at_the_beginning_keeps_its_letters() -> None:
    _, found = describe_error(Corrupt("weights needs 8 bytes", key="weights"))

    assert found["error"] == {"kind": "Corrupt", "message": "weights needs 8 bytes; run `holdfast check`."}
