"""Selects snapshots: those for which a condition holds, sorted, and at most so many."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from holdfast.errors import BadExpression, NotFound
from holdfast.objects.protocol import ObjectStore
from holdfast.query.evaluate import holds, is_last, order_value
from holdfast.query.expression import Condition, FieldRef, iter_fields, parse_expression, parse_field
from holdfast.query.facts import Facts, make_facts
from holdfast.repo.format.layout import natural_order
from holdfast.repo.names.snapshots import CommittedSnapshot
from holdfast.repo.names.tags import Tag, iter_tags
from holdfast.texts import list_some

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
