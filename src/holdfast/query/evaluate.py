"""Decides whether a condition holds for a snapshot, and compares values of any type."""

from __future__ import annotations

from typing import Final

from holdfast.json_text import Json
from holdfast.query.expression import (
    AllOf,
    AnyOf,
    Compare,
    Comparison,
    Condition,
    Exists,
    FieldRef,
    Holds,
    Like,
    Negated,
    OneOf,
    Operand,
)
from holdfast.query.facts import MISSING, Facts, is_nan
from holdfast.repo.format.layout import natural_order

_NATURAL: Final = 1000
"""So many characters of a text are compared by the numbers in it, the rest character by character."""
_LAST: Final = 9
"""The rank of values that have no order: they are sorted last, also in descending order."""


def holds(condition: Condition, facts: Facts) -> bool:
    """Return whether a condition holds for a snapshot."""
    match condition:
        case AllOf(parts):
            return all(holds(part, facts) for part in parts)
        case AnyOf(parts):
            return any(holds(part, facts) for part in parts)
        case Negated(inner):
            return not holds(inner, facts)
        case Compare(left, comparison, right):
            return _compare(_evaluate(left, facts), comparison, _evaluate(right, facts))
        case OneOf(operand, values):
            found = _evaluate(operand, facts)
            return any(_compare(found, "==", value) for value in values)
        case Like(operand, glob):
            return any(isinstance(each, str) and glob.matches(each) for each in _spread(_evaluate(operand, facts)))
        case Exists(field):
            return facts.find(field) is not MISSING
        case Holds(operand):
            return _evaluate(operand, facts) is True
    raise AssertionError(f"no rule for {condition!r}")


def order_value(value: Json) -> tuple[int, Json]:
    """Return a sort key under which values of any type have one order: numbers, texts, truth values, the rest."""
    if isinstance(value, bool):
        return 2, value
    if isinstance(value, int | float):
        return (_LAST, 0) if is_nan(value) else (0, value)
    if isinstance(value, str):
        # Python refuses to convert very many digits, and metadata may have 1 MiB of them.
        return 1, (*natural_order(value[:_NATURAL]), value[_NATURAL:])
    return (_LAST, 0)


def is_last(key: tuple[int, Json]) -> bool:
    """Return whether a sort key is that of a value without an order: missing, null, NaN, a list or an object."""
    return key[0] == _LAST


def _evaluate(operand: Operand, facts: Facts) -> Json:
    return facts.find(operand) if isinstance(operand, FieldRef) else operand.value


def _spread(value: Json) -> list[Json]:
    """Return the items of a list, or the value as the only one."""
    return value if isinstance(value, list) else [value]


def _compare(left: Json, comparison: Comparison, right: Json) -> bool:
    """Compare two values. A missing value or NaN matches nothing; a list matches if one of its items does."""
    if comparison == "!=":
        lefts, rights = _spread(left), _spread(right)
        is_known = not any(_is_unknown(value) for value in (left, right, *lefts, *rights))
        return is_known and not _compare(left, "==", right)
    return any(_compare_one(a, comparison, b) for a in _spread(left) for b in _spread(right))


def _compare_one(left: Json, comparison: Comparison, right: Json) -> bool:
    if _is_unknown(left) or _is_unknown(right):
        return False
    if comparison == "==":
        return type(left) is type(right) and left == right if _is_plain(left, right) else left == right
    a, b = order_value(left), order_value(right)
    if is_last(a) or a[0] != b[0]:
        return False
    match comparison:
        case "<":
            return bool(a < b)
        case "<=":
            return bool(a <= b)
        case ">":
            return bool(a > b)
        case _:
            return bool(a >= b)


def _is_unknown(value: Json) -> bool:
    return value is MISSING or is_nan(value)


def _is_plain(left: Json, right: Json) -> bool:
    """Return whether the types must be equal: 1 equals 1.0, but not true."""
    return isinstance(left, bool) or isinstance(right, bool) or isinstance(left, str) or isinstance(right, str)
