"""Splits the text of an expression into tokens: fields, numbers, texts, words and signs, each with its position."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Final, Literal

from holdfast.errors import BadExpression, BadName
from holdfast.texts import parse_duration

MAX_TEXT: Final = 4096
"""Longer expressions are refused before they are read."""

Literals = str | int | float | bool | None
TokenKind = Literal["field", "value", "word", "sign", "end"]

WORDS: Final = frozenset({"and", "or", "not", "in", "like", "exists"})
_CONSTANTS: Final = {"true": True, "false": False, "null": None}
_SIZES: Final = {unit: 1 << 10 * power for power, unit in enumerate("BKMGTPE")}

_SPACE: Final = re.compile(r"\s*")
_DATE: Final = re.compile(
    r"\d{4}-\d\d-\d\d(?:[T ]\d\d:\d\d(?::\d\d(?:\.\d+)?)?)?(?:Z|[+-]\d\d:\d\d)?(?![\w.])", re.ASCII
)
_NUMBER: Final = re.compile(r"[+-]?(?:\d[\d_]*(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?", re.ASCII)
_INFINITY: Final = re.compile(r"[+-]?inf(?!\w)", re.ASCII)
_UNIT: Final = re.compile(r"\w+", re.ASCII)
_SIZE_UNIT: Final = re.compile(r"([KMGTPE])(?:i?B)?|(B)")
_TEXT: Final = re.compile(r"'((?:[^'\\]|\\.)*)'|\"((?:[^\"\\]|\\.)*)\"", re.DOTALL)
# There is no arithmetic, so a name may contain the signs that names of metrics have: val/loss, train-loss, top@5.
_FIELD: Final = re.compile(r"[^\W\d]\w*(?:[./:@-]\w+)*")
_REST: Final = re.compile(r"(?:\.[^\W\d]\w*)+")
_KEY: Final = re.compile(r"\[\s*")
_SIGN: Final = re.compile(r"==|!=|<=|>=|!~|[=<>~(),]")
_ESCAPE: Final = re.compile(r"\\(.)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Token:
    """One token of an expression."""

    kind: TokenKind
    text: str
    """As it was typed; empty at the end of the expression."""
    position: int
    value: Literals = None
    """The value, if this is one: a duration is in seconds, a size in bytes, a date in seconds since 1970."""
    path: tuple[str, ...] = ()
    """The keys of a field: `metrics.loss` has two."""


class Reader:
    """Reads tokens one by one; raises BadExpression at the first character that begins none."""

    def __init__(self, text: str) -> None:
        """Begin at the start of an expression; raises BadExpression if it is too long."""
        if len(text) > MAX_TEXT:
            raise BadExpression(f"the expression has {len(text)} characters; at most {MAX_TEXT} are allowed")
        self._text = text
        self._position = 0

    def iter_tokens(self) -> Iterator[Token]:
        """Yield every token, and at last one of kind "end"."""
        while True:
            self._position = _end_of(_SPACE, self._text, self._position)
            token = self._read_token()
            yield token
            if token.kind == "end":
                return

    def _read_token(self) -> Token:
        start = self._position
        if start == len(self._text):
            return Token("end", "", start)
        for read in (self._read_date, self._read_number, self._read_text, self._read_field, self._read_sign):
            token = read(start)
            if token is not None:
                self._position = start + len(token.text)
                return token
        raise self._fail(f"{self._text[start]!r} does not belong here", start)

    def _read_date(self, start: int) -> Token | None:
        found = _DATE.match(self._text, start)
        if found is None:
            return None
        time_s = parse_date(found[0])
        if time_s is None:
            raise self._fail(f"{found[0]!r} is not a date; write 2026-11-17 or 2026-11-17T14:30", start)
        return Token("value", found[0], start, time_s)

    def _read_number(self, start: int) -> Token | None:
        infinity = _INFINITY.match(self._text, start)
        if infinity:
            return Token("value", infinity[0], start, float(infinity[0]))
        found = _NUMBER.match(self._text, start)
        if found is None:
            return None
        unit = _UNIT.match(self._text, found.end())
        if unit is None:
            return Token("value", found[0], start, self._parse_number(found[0], start))
        text = found[0] + unit[0]
        return Token("value", text, start, self._parse_amount(found[0], unit[0], start))

    def _parse_number(self, text: str, start: int) -> int | float:
        digits = text.replace("_", "")
        try:
            return float(digits) if set(digits) & set(".eE") else int(digits)
        except ValueError as error:
            raise self._fail(f"the number {text[:40]!r} has too many digits", start) from error

    def _parse_amount(self, number: str, unit: str, start: int) -> int | float:
        size = _SIZE_UNIT.fullmatch(unit)
        if size:
            return self._parse_number(number, start) * _SIZES[size[1] or size[2]]
        try:
            return parse_duration(number + unit)
        except BadName as error:
            text = f"{number + unit!r} is no number, duration or size; write 0.3, 2d, 3h50m or 1.5GiB"
            raise self._fail(text, start) from error

    def _read_text(self, start: int) -> Token | None:
        found = _TEXT.match(self._text, start)
        if found is None:
            if self._text[start] in "'\"":
                raise self._fail("this quotation mark has no second one", start)
            return None
        return Token("value", found[0], start, _unquote(found))

    def _read_field(self, start: int) -> Token | None:
        found = _FIELD.match(self._text, start)
        if found is not None and found[0] in _CONSTANTS:
            return Token("value", found[0], start, _CONSTANTS[found[0]])
        if found is not None and found[0].lower() in WORDS:
            return Token("word", found[0].lower(), start)
        path = tuple(found[0].split(".")) if found else ()
        end = found.end() if found else start
        while key := _KEY.match(self._text, end):
            quoted = _TEXT.match(self._text, key.end())
            close = _end_of(_SPACE, self._text, quoted.end()) if quoted else 0
            if quoted is None or self._text[close : close + 1] != "]":
                raise self._fail("expected a key in quotation marks and brackets, such as ['val loss']", end)
            path, end = (*path, _unquote(quoted)), close + 1
            more = _REST.match(self._text, end)
            if more:
                path, end = (*path, *more[0][1:].split(".")), more.end()
        return Token("field", self._text[start:end], start, path=path) if path else None

    def _read_sign(self, start: int) -> Token | None:
        found = _SIGN.match(self._text, start)
        return Token("sign", found[0], start) if found else None

    def _fail(self, sentence: str, position: int) -> BadExpression:
        return make_mistake(sentence, self._text, position)


def make_mistake(sentence: str, expression: str, position: int) -> BadExpression:
    """Return the error for a mistake, whose text shows the expression and a caret below the place."""
    sentence = " ".join(sentence.splitlines())
    text = f"{sentence}\n  {expression}\n  {' ' * position}^"
    return BadExpression(text, expression=expression, position=position)


def parse_date(text: str) -> float | None:
    """Return a date or time of ISO 8601 in seconds since 1970; local time if it names no zone; None if it is none."""
    # Before Python 3.11, fromisoformat does not accept the letter.
    try:
        when = datetime.fromisoformat(text.strip().replace("Z", "+00:00").replace("z", "+00:00"))
        return (when if when.tzinfo else when.astimezone()).astimezone(timezone.utc).timestamp()
    except (ValueError, OverflowError, OSError):
        return None


def _unquote(found: re.Match[str]) -> str:
    return _ESCAPE.sub(r"\1", found[1] if found[1] is not None else found[2])


def _end_of(pattern: re.Pattern[str], text: str, start: int) -> int:
    found = pattern.match(text, start)
    return found.end() if found else start
