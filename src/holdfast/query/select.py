"""Selects snapshots: those for which a condition holds, sorted, and at most so many."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Literal, get_args

from holdfast.errors import BadExpression, NotFound
from holdfast.json_text import Json
from holdfast.objects.protocol import ObjectStore
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
    iter_fields,
    parse_expression,
    parse_field,
)
from holdfast.query.facts import MISSING, Facts, is_nan, make_facts
from holdfast.repo.format.layout import natural_order
from holdfast.repo.names.snapshots import CommittedSnapshot, Tag, iter_tags
from holdfast.texts import list_some

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


BestMode = Literal["min", "max"]
SortFields = str | Sequence[str] | None


@dataclass(frozen=True, slots=True)
class SortKey:
    """A field to sort by."""

    field: FieldRef
    is_descending: bool


@dataclass(frozen=True, slots=True)
class Query:
    """A parsed question: which snapshots, in which order, how many."""

    condition: Condition | None = None
    keys: tuple[SortKey, ...] = ()
    limit: int | None = None

    @property
    def fields(self) -> tuple[FieldRef, ...]:
        """Every field that the condition and the sort keys name."""
        named = () if self.condition is None else iter_fields(self.condition)
        return (*named, *(key.field for key in self.keys))

    @property
    def names_tags(self) -> bool:
        """Whether an answer needs the tags of the store."""
        return any(field.path[0] in ("tag", "tags") for field in self.fields)


def parse_query(*, where: str | None = None, sort: SortFields = None, limit: int | None = None) -> Query:
    """Parse a question; raises BadExpression for what cannot be parsed.

    `sort` is a field, several with commas between them, or a list of fields; a minus before a field sorts descending.
    """
    if limit is not None and (type(limit) is not int or limit < 0):
        raise BadExpression(f"limit is a whole number that is not negative, not {limit!r}")
    keys = (sort.split(",") if isinstance(sort, str) else sort) if sort is not None else ()
    return Query(None if where is None else parse_expression(where), tuple(map(_parse_key, keys)), limit)


def _parse_key(text: str) -> SortKey:
    is_descending = type(text) is str and text.strip().startswith("-")
    return SortKey(parse_field(text.strip()[1:] if is_descending else text), is_descending)


def select(facts: Iterable[Facts], query: Query) -> list[Facts]:
    """Return the facts that match a query, in its order; without sort keys in natural order of the names."""
    found = [each for each in facts if query.condition is None or holds(query.condition, each)]
    found.sort(key=lambda each: natural_order(each.snapshot.name))
    # Sorting is stable, so the least important key comes first.
    for key in reversed(query.keys):
        found = _sort(found, key)
    return found if query.limit is None else found[: query.limit]


def _sort(facts: Sequence[Facts], key: SortKey) -> list[Facts]:
    keyed = [(order_value(each.find(key.field)), each) for each in facts]
    known = [pair for pair in keyed if not is_last(pair[0])]
    known.sort(key=lambda pair: pair[0], reverse=key.is_descending)
    return [each for _, each in known] + [each for order, each in keyed if is_last(order)]


def find_best(facts: Sequence[Facts], metric: str, *, mode: str, prefix: str) -> Facts:
    """Return the facts with the best value of a metric, of equal ones the newest; raises NotFound if none has it."""
    if mode not in get_args(BestMode):
        raise BadExpression(f"mode is 'min' or 'max', not {mode!r}")
    field = parse_field(metric)
    sign = 1 if mode == "min" else -1
    found = [(sign * value, each) for each in facts if (value := each.find_number(field)) is not None]
    if not found:
        known = sorted({name for each in facts for name, _ in each.iter_metrics()})
        which = f"metrics that exist: {list_some(known, 20)}" if known else "none has metrics"
        where = f"no snapshot that begins with {prefix!r}" if prefix else "no snapshot"
        raise NotFound(f"{where} has a finite number {metric!r}; {which}", name=metric)
    return min(found, key=lambda pair: (pair[0], -pair[1].snapshot.time_s, natural_order(pair[1].snapshot.name)))[1]


def read_facts(store: ObjectStore, snapshots: Iterable[CommittedSnapshot], query: Query) -> list[Facts]:
    """Return the facts about snapshots; reads the tags if the query needs them, and skips those that are damaged."""
    tags = (tag for tag in iter_tags(store) if isinstance(tag, Tag)) if query.names_tags else ()
    return make_facts(snapshots, tags, now_s=store.clock())
