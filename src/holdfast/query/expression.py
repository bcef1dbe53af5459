"""Conditions on snapshots, such as `loss < 0.3 and step >= 1000`: tokens, parsed form and parser."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Final, Literal

from holdfast.errors import BadExpression, BadName
from holdfast.json_text import is_number
from holdfast.query.globs import Glob
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


MAX_NESTING: Final = 64
"""Parentheses and `not` may be nested so deep."""
MAX_KEYS: Final = 8
"""A field has at most so many keys: each dot may be part of a key, and every way to read it is tried."""

Comparison = Literal["==", "!=", "<", "<=", ">", ">="]

NUMBERS: Final = frozenset({"age", "created", "entries", "generation", "ranks", "size"})
"""Fields of every snapshot that are numbers."""
TEXTS: Final = frozenset({"digest", "host", "name", "tag"})
"""Fields of every snapshot that are texts."""


@dataclass(frozen=True, slots=True)
class FieldRef:
    """A field of a snapshot, by its keys."""

    path: tuple[str, ...]

    def __str__(self) -> str:
        """Show it as it is typed."""
        return ".".join(self.path)


@dataclass(frozen=True, slots=True)
class LiteralValue:
    """A value that stands in the expression itself."""

    value: Literals


Operand = FieldRef | LiteralValue


@dataclass(frozen=True, slots=True)
class Compare:
    """Two operands and the comparison between them."""

    left: Operand
    comparison: Comparison
    right: Operand


@dataclass(frozen=True, slots=True)
class OneOf:
    """Whether an operand equals one of several values."""

    operand: Operand
    values: tuple[Literals, ...]


@dataclass(frozen=True, slots=True)
class Like:
    """Whether a text matches a glob."""

    operand: Operand
    glob: Glob


@dataclass(frozen=True, slots=True)
class Exists:
    """Whether a snapshot has a field."""

    field: FieldRef


@dataclass(frozen=True, slots=True)
class Holds:
    """Whether the value of an operand is `true`."""

    operand: Operand


@dataclass(frozen=True, slots=True)
class Negated:
    """Whether a condition does not hold."""

    condition: Condition


@dataclass(frozen=True, slots=True)
class AllOf:
    """Whether all conditions hold."""

    conditions: tuple[Condition, ...]


@dataclass(frozen=True, slots=True)
class AnyOf:
    """Whether one condition holds."""

    conditions: tuple[Condition, ...]


Condition = Compare | OneOf | Like | Exists | Holds | Negated | AllOf | AnyOf


def parse_expression(text: str) -> Condition:
    """Parse a condition; nothing is evaluated. Raises BadExpression, which shows the place of the mistake."""
    if type(text) is not str:
        raise BadExpression(f"a condition is a text such as 'loss < 0.3', not {text!r}")
    return _Parser(text).parse()


def parse_field(text: str) -> FieldRef:
    """Parse the name of one field, as `sort` and `columns` take it; raises BadExpression.

    A name without brackets is split at its dots, whatever other characters it contains.
    """
    if type(text) is not str:
        raise BadExpression(f"a field is a text such as 'loss', not {text!r}")
    if "[" not in text:
        path = tuple(text.strip().split("."))
        if not all(path):
            raise BadExpression(f"{text[:80]!r} is not the name of a field; write step, loss or metrics.loss")
        return FieldRef(_verify_length(path, text))
    first, *others = Reader(text).iter_tokens()
    if first.kind != "field" or [token.kind for token in others] != ["end"]:
        raise make_mistake("expected one field", text, others[0].position if others else 0)
    return FieldRef(_verify_length(first.path, text))


def iter_fields(condition: Condition) -> Iterator[FieldRef]:
    """Yield every field that a condition names."""
    match condition:
        case AllOf(parts) | AnyOf(parts):
            for part in parts:
                yield from iter_fields(part)
        case Negated(inner):
            yield from iter_fields(inner)
        case Compare(left, _, right):
            yield from (operand for operand in (left, right) if isinstance(operand, FieldRef))
        case OneOf(operand) | Like(operand) | Holds(operand):
            yield from [operand] if isinstance(operand, FieldRef) else []
        case Exists(field):
            yield field


def _verify_length(path: tuple[str, ...], text: str) -> tuple[str, ...]:
    if len(path) > MAX_KEYS:
        raise BadExpression(f"the field {text[:80]!r} has {len(path)} keys; at most {MAX_KEYS} are allowed")
    return path


class _Parser:
    """A recursive-descent parser with one token of lookahead; docs/reference/expressions.md has the grammar."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens = Reader(text).iter_tokens()
        self._next = next(self._tokens)
        self._nesting = 0

    def parse(self) -> Condition:
        if self._next.kind == "end":
            raise BadExpression("the expression is empty; write a condition such as loss < 0.3")
        condition = self._parse_any()
        self._verify_end()
        return condition

    def _verify_end(self) -> None:
        if self._next.kind != "end":
            raise self._fail(f"expected 'and', 'or' or the end, not {self._next.text!r}")

    def _parse_any(self) -> Condition:
        parts = [self._parse_all()]
        while self._take("or"):
            parts.append(self._parse_all())
        return parts[0] if len(parts) == 1 else AnyOf(tuple(parts))

    def _parse_all(self) -> Condition:
        parts = [self._parse_not()]
        while self._take("and"):
            parts.append(self._parse_not())
        return parts[0] if len(parts) == 1 else AllOf(tuple(parts))

    def _parse_not(self) -> Condition:
        self._nesting += 1
        if self._nesting > MAX_NESTING:
            raise self._fail(f"the expression is nested more than {MAX_NESTING} deep")
        condition = Negated(self._parse_not()) if self._take("not") else self._parse_test()
        self._nesting -= 1
        return condition

    def _parse_test(self) -> Condition:
        if self._take("("):
            condition = self._parse_any()
            self._expect(")")
            return condition
        begun = self._next
        operand = self._parse_operand()
        if isinstance(operand, FieldRef) and self._take("exists"):
            return Exists(operand)
        is_negated = self._take("not")
        if self._take("in"):
            return _negate(OneOf(operand, self._parse_values(operand)), is_negated=is_negated)
        if self._take("like") or (not is_negated and self._take("~")):
            return _negate(Like(operand, Glob(self._parse_pattern())), is_negated=is_negated)
        if is_negated:
            raise self._fail("expected 'in' or 'like' after 'not'")
        if self._take("!~"):
            return Negated(Like(operand, Glob(self._parse_pattern())))
        return self._parse_comparison(operand, begun)

    def _parse_comparison(self, left: Operand, begun: Token) -> Condition:
        sign = self._next
        if sign.kind != "sign" or sign.text in "(),":
            return self._parse_truth(left, begun)
        self._advance()
        token = self._next
        right = self._parse_operand()
        if self._next.kind == "sign" and self._next.text not in "(),":
            raise self._fail("two comparisons are joined with 'and'")
        left, right = self._fit(left, right, begun), self._fit(right, left, token)
        return Compare(left, "==" if sign.text == "=" else sign.text, right)  # type: ignore[arg-type]  # the tokenizer knows no other sign

    def _parse_truth(self, operand: Operand, begun: Token) -> Condition:
        if isinstance(operand, LiteralValue) and not isinstance(operand.value, bool):
            raise self._fail(f"expected a comparison after {begun.text}, such as =, <, in or like")
        if isinstance(operand, FieldRef) and self._next.kind in ("field", "value"):
            raise self._fail(f"expected a comparison between {begun.text} and {self._next.text}, such as = or <")
        return Holds(operand)

    def _parse_values(self, operand: Operand) -> tuple[Literals, ...]:
        self._expect("(")
        values: list[Literals] = []
        while not values or self._take(","):
            token = self._next
            if token.kind != "value":
                raise self._fail("expected a value: a number, a text in quotation marks, true, false or null")
            self._advance()
            fitted = self._fit(LiteralValue(token.value), operand, token)
            values.append(fitted.value if isinstance(fitted, LiteralValue) else None)
        self._expect(")")
        return tuple(values)

    def _parse_pattern(self) -> str:
        token = self._next
        if token.kind != "value" or not isinstance(token.value, str):
            raise self._fail("expected a pattern in quotation marks, such as 'run/*'")
        self._advance()
        return token.value

    def _parse_operand(self) -> Operand:
        token = self._next
        if token.kind not in ("field", "value"):
            what = "the end of the expression" if token.kind == "end" else repr(token.text)
            raise self._fail(f"expected a field or a value, not {what}")
        self._advance()
        if token.kind == "value":
            return LiteralValue(token.value)
        return FieldRef(_verify_length(token.path, token.text))

    def _fit(self, operand: Operand, other: Operand, token: Token) -> Operand:
        """Return a literal as the other operand needs it: a date for `created`; raise if the types cannot match."""
        if not isinstance(operand, LiteralValue) or not isinstance(other, FieldRef) or len(other.path) > 1:
            return operand
        field, value = other.path[0], operand.value
        if field == "created" and isinstance(value, str):
            time_s = parse_date(value)
            if time_s is None:
                raise self._fail(f"{value[:40]!r} is not a date; write 2026-11-17 or 2026-11-17T14:30", token)
            return LiteralValue(time_s)
        if field in NUMBERS and not is_number(value):
            raise self._fail(f"{field} is a number; compare it with one, such as {_EXAMPLES.get(field, '8')}", token)
        if field in TEXTS and not isinstance(value, str):
            raise self._fail(f"{field} is a text; write the value in quotation marks", token)
        return operand

    def _take(self, text: str) -> bool:
        if self._next.kind not in ("word", "sign") or self._next.text.lower() != text:
            return False
        self._advance()
        return True

    def _expect(self, text: str) -> None:
        if not self._take(text):
            what = "the end of the expression" if self._next.kind == "end" else repr(self._next.text)
            raise self._fail(f"expected {text!r}, not {what}")

    def _advance(self) -> None:
        self._next = next(self._tokens)

    def _fail(self, sentence: str, token: Token | None = None) -> BadExpression:
        return make_mistake(sentence, self._text, (token or self._next).position)


_EXAMPLES: Final = {"age": "2d", "created": "2026-11-17", "size": "1GiB"}


def _negate(condition: Condition, *, is_negated: bool) -> Condition:
    return Negated(condition) if is_negated else condition


def parse_fields(texts: str | Sequence[str]) -> tuple[FieldRef, ...]:
    """Parse several fields: a text with commas between them, or one text for each."""
    given = texts.split(",") if isinstance(texts, str) else texts
    return tuple(parse_field(text) for text in given)
