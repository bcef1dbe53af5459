"""Answers to requests: JSON, streams of JSON lines, files; and errors as sentences."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from holdfast.errors import BadExpression, BadName, Corrupt, HoldfastError, NotAStore, NotFound, StoreError
from holdfast.json_text import Json

_log = logging.getLogger(__name__)

JSON_TYPE: Final = "application/json"
LINES_TYPE: Final = "application/x-ndjson"
_BUG: Final = "This is a bug in Holdfast; the log of the process that runs `holdfast serve` has more about it."


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    """A status, a content type, and a body: bytes, or pieces that are sent as they are computed."""

    status: int
    content_type: str
    body: bytes | Iterator[bytes]
    headers: Mapping[str, str] = field(default_factory=dict)


def answer_json(value: Json, *, status: int = 200) -> HttpAnswer:
    """Return a value as JSON."""
    return HttpAnswer(status, JSON_TYPE, encode_json(value))


def answer_lines(values: Iterable[Json]) -> HttpAnswer:
    """Return values as lines of JSON, each sent when it is computed; an error becomes the last line."""
    return HttpAnswer(200, LINES_TYPE, _iter_lines(values))


def encode_json(value: Json) -> bytes:
    """Return a value as JSON in ASCII."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode("ascii")


def _iter_lines(values: Iterable[Json]) -> Iterator[bytes]:
    try:
        for value in values:
            yield encode_json(value) + b"\n"
    except Exception as error:  # noqa: BLE001 - the status has been sent, so any error has to be told in the stream
        yield encode_json(describe_error(error)[1]) + b"\n"


def answer_error(error: Exception) -> HttpAnswer:
    """Return an error as JSON, with its sentence."""
    status, described = describe_error(error)
    return answer_json(described, status=status)


def answer_refusal(status: int, sentence: str) -> HttpAnswer:
    """Return why a request is not answered."""
    return answer_json({"error": {"kind": "Refused", "message": sentence}}, status=status)


def describe_error(error: Exception) -> tuple[int, dict[str, Json]]:
    """Return the HTTP status of an error, and the error as JSON: its kind, and a sentence for people."""
    if isinstance(error, HoldfastError):
        found: dict[str, Json] = {"kind": type(error).__name__, "message": _format_error(error)}
        if isinstance(error, BadExpression) and error.expression:
            found |= {"expression": error.expression, "position": error.position}
        return _find_status(error), {"error": found}
    if isinstance(error, OSError) and error.strerror:
        where = f"{error.filename}: " if error.filename is not None else ""
        return 503, {"error": {"kind": type(error).__name__, "message": end_sentence(f"{where}{error.strerror}")}}
    _log.error("a request failed", exc_info=error)
    return 500, {"error": {"kind": type(error).__name__, "message": f"{end_sentence(str(error) or 'Failed')} {_BUG}"}}


def _format_error(error: HoldfastError) -> str:
    text = _find_sentence(error)
    # A name at the beginning stays as it is: `weights` and `Weights` are two leaves.
    named = str(getattr(error, "key", "") or getattr(error, "name", ""))
    return end_sentence(text, begins_with_name=bool(named) and text.startswith(named))


def _find_sentence(error: HoldfastError) -> str:
    text = error.sentence if isinstance(error, BadExpression) else str(error)
    return f"{text}; run `holdfast check`" if isinstance(error, Corrupt) and "check" not in text else text


def _find_status(error: HoldfastError) -> int:
    if isinstance(error, NotFound):
        return 404
    if isinstance(error, NotAStore | StoreError):
        return 503
    return 400 if isinstance(error, BadName | ValueError | LookupError) else 500


def end_sentence(text: str, *, begins_with_name: bool = False) -> str:
    """Return a text as a sentence: with a capital letter, unless a name is first, and a full stop at its end."""
    text = text.strip() or "Failed"
    first = text[0] if begins_with_name else text[0].upper()
    return first + text[1:] + ("" if text[-1] in ".!?" else ".")
