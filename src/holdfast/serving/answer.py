"""Requests to the API, with limits, and answers: JSON, streams of JSON lines, files; errors as sentences."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import parse_qs, urlsplit

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


MAX_TARGET_BYTES: Final = 16 << 10
"""A longer path and query is refused before it is parsed."""
_MAX_PARAMETERS: Final = 128
_MAX_OFFSET: Final = 1 << 50


@dataclass(frozen=True, slots=True)
class ApiRequest:
    """The path of a request, and the values of each parameter."""

    path: str
    parameters: Mapping[str, Sequence[str]]

    def read_text(self, name: str, default: str = "") -> str:
        """Return a parameter; of several with one name, the last."""
        return self.parameters.get(name, (default,))[-1]

    def read_required(self, name: str) -> str:
        """Return a parameter; raises BadName if it is missing or empty."""
        value = self.read_text(name)
        if not value:
            raise BadName(f"the parameter {name!r} is missing")
        return value

    def read_texts(self, name: str, *, most: int) -> list[str]:
        """Return all values of a parameter; raises BadName if there are more than `most`."""
        values = list(self.parameters.get(name, ()))
        if len(values) > most:
            raise BadName(f"{len(values)} values of {name!r} are too many: ask for at most {most} at a time")
        return values

    def read_number(self, name: str, default: int, *, most: int) -> int:
        """Return a parameter that is a whole number from 0 to `most`; raises BadName for anything else."""
        text = self.read_text(name, str(default))
        if not (text.isascii() and text.isdigit() and len(text) < 19) or int(text) > most:
            raise BadName(f"the parameter {name}={text[:40]!r} is not a whole number from 0 to {most}")
        return int(text)

    def read_page(self, default: int, *, most: int) -> tuple[int, int]:
        """Return the first row that is asked for, and how many rows: `default`, unless `limit` is given."""
        return self.read_number("offset", 0, most=_MAX_OFFSET), self.read_number("limit", default, most=most)

    def read_flag(self, name: str) -> bool:
        """Return whether a parameter is "true"; raises BadName for anything but "true", "false" and nothing."""
        text = self.read_text(name, "false")
        if text not in ("true", "false"):
            raise BadName(f"the parameter {name}={text[:40]!r} is neither true nor false")
        return text == "true"


def choose_sort(sort: str, fields: Sequence[str]) -> str:
    """Return the field of an order such as `-bytes`, or the first one; raises BadName if it is not one of `fields`."""
    field = sort.removeprefix("-") or fields[0]
    if field not in fields:
        raise BadName(f"rows cannot be sorted by {field[:40]!r}; choose one of {', '.join(fields)}")
    return field


def parse_request(target: str) -> ApiRequest:
    """Parse the target of a request line; raises BadName if it is too long or malformed."""
    if len(target) > MAX_TARGET_BYTES:
        raise BadName(f"the address of the request is longer than {MAX_TARGET_BYTES} characters")
    try:
        parts = urlsplit(target)
        found = parse_qs(
            parts.query,
            keep_blank_values=True,
            strict_parsing=bool(parts.query),
            max_num_fields=_MAX_PARAMETERS,
            errors="strict",
        )
    except ValueError as error:
        raise BadName(f"the address of the request is malformed: {error}") from error
    return ApiRequest(parts.path, found)
