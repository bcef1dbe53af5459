"""Selecting and sorting: several keys, what has no value last, limits, and the best by a metric."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.errors import BadExpression, NotFound
from holdfast.json_text import Json
from holdfast.objects.memory import MemoryStore
from holdfast.query.facts import Facts
from holdfast.query.select import find_best, parse_query, read_facts, select
from holdfast.repo.names.snapshots import set_tag
from tests.kit.committed import commit, make_committed


def make(**losses: Json) -> list[Facts]:
    return [
        Facts(make_committed(name.replace("_", "/"), {"metrics": {"loss": loss}} if loss != "-" else {}), (), 0.0)
        for name, loss in losses.items()
    ]


def names(facts: list[Facts]) -> list[str]:
    return [each.snapshot.name for each in facts]


def test_without_a_question_names_are_in_natural_order() -> None:
    assert names(select(make(a10=1, a9=2, b=0), parse_query())) == ["a9", "a10", "b"]


@pytest.mark.parametrize(
    ("sort", "expected"),
    [
        ("loss", ["c", "a", "d", "b", "e", "f", "g"]),
        ("-loss", ["d", "a", "c", "b", "e", "f", "g"]),
        (["-name"], ["g", "f", "e", "d", "c", "b", "a"]),
        ("size,-loss", ["d", "a", "c", "b", "e", "f", "g"]),
        ("size, loss", ["c", "a", "d", "b", "e", "f", "g"]),
    ],
)
def test_what_has_no_order_comes_last_in_either_direction(sort: str | list[str], expected: list[str]) -> None:
    facts = make(b="nan", a=2, d=3, c=1, g=None, f="-", e="-")

    assert names(select(facts, parse_query(sort=sort))) == expected


def test_mixed_types_are_sorted_by_type() -> None:
    assert names(select(make(a="x", b=True, c=1, d="inf"), parse_query(sort="loss"))) == ["c", "d", "a", "b"]


def test_a_condition_and_a_limit_select() -> None:
    facts = make(a=1, b=2, c=3, d=4)

    assert names(select(facts, parse_query(where="loss > 1", sort="-loss", limit=2))) == ["d", "c"]
    assert names(select(facts, parse_query(limit=0))) == []


@pytest.mark.parametrize(
    ("question", "reason"),
    [
        ({"limit": -1}, "limit is a whole number that is not negative, not -1"),
        ({"limit": True}, "limit is a whole number that is not negative, not True"),
        ({"limit": 1.5}, "limit is a whole number that is not negative, not 1.5"),
        ({"sort": "loss,"}, "'' is not the name of a field"),
        ({"sort": "-"}, "'' is not the name of a field"),
        ({"sort": ["loss", 3]}, "a field is a text such as 'loss', not 3"),
        ({"where": "loss <"}, "expected a field or a value"),
        ({"where": 3}, "a condition is a text such as 'loss < 0.3', not 3"),
    ],
)
def test_a_bad_question_is_one_sentence(question: dict[str, Any], reason: str) -> None:
    with pytest.raises(BadExpression, match=reason):
        parse_query(**question)


def test_tags_are_read_if_they_are_asked_for() -> None:
    store = MemoryStore()
    snapshots = [commit(store, make_committed(name)) for name in "ab"]
    set_tag(store, "best", snapshots[1])
    wanted, plain = parse_query(where="tag = 'best'"), parse_query(where="size > 0")

    assert names(select(read_facts(store, snapshots, wanted), wanted)) == ["b"]
    assert [each.tags for each in read_facts(store, snapshots, plain)] == [(), ()]


def test_the_best_is_the_smallest_or_the_largest() -> None:
    facts = make(a=2, b="nan", c=1, d="-", e="-inf", f=True)

    assert find_best(facts, "loss", mode="min", prefix="").snapshot.name == "c"
    assert find_best(facts, "metrics.loss", mode="max", prefix="").snapshot.name == "a"


def test_of_equal_ones_the_newest_is_the_best() -> None:
    times = {"a": 1.0, "b": 3.0, "c": 2.0}
    facts = [Facts(make_committed(name, {"loss": 1}, time_s=time_s), (), 0.0) for name, time_s in times.items()]

    assert find_best(facts, "loss", mode="min", prefix="").snapshot.name == "b"
    assert find_best(facts, "loss", mode="max", prefix="").snapshot.name == "b"


def test_without_the_metric_there_is_no_best() -> None:
    with pytest.raises(
        NotFound, match="no snapshot that begins with 'run/' has a finite number 'acc'; metrics that exist: loss"
    ):
        find_best(make(a=1), "acc", mode="min", prefix="run/")
    with pytest.raises(NotFound, match="no snapshot has a finite number 'acc'; none has metrics"):
        find_best([], "acc", mode="min", prefix="")
    with pytest.raises(BadExpression, match="mode is 'min' or 'max', not 'least'"):
        find_best(make(a=1), "loss", mode="least", prefix="")
