"""Random expressions mean what a plain model of them says; random text is parsed or refused, and nothing else."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Final

from hypothesis import example, given, settings
from hypothesis import strategies as st

from holdfast.errors import BadExpression
from holdfast.query.expression import parse_expression
from holdfast.query.select import holds, parse_query, select
from tests.kit.committed import make_one_fact

ABSENT: Final = object()
KEYS: Final = ("a", "b", "c", "d/e", "odd key")
TEXTS: Final = ("", "x", "xy", "y-2", "y-10", "it's")
WORDS: Final = (*"a1()[],=<~!", "'x'", "and", "or", "not", "in", "like", "exists", "2d", "1e9")
SIGNS: Final = ("=", "==", "!=", "<", "<=", ">", ">=")

numbers = st.one_of(st.integers(-3, 3), st.sampled_from([-0.5, 0.25, 1.0, 2.5]))
literals = st.one_of(numbers, st.sampled_from(TEXTS), st.booleans(), st.none())
values = st.one_of(literals, st.just("nan"), st.just("inf"), st.lists(literals, max_size=2))
metadata = st.dictionaries(st.sampled_from(KEYS), values)


@dataclass(frozen=True)
class Both:
    """An expression as text, and the same as a function of the metrics."""

    text: str
    judge: Any


def spell_literal(value: Any) -> str:
    if isinstance(value, str):
        escaped = value.replace("'", "\\'")
        return f"'{escaped}'"
    return (
        {True: "true", False: "false", None: "null"}[value] if value is None or isinstance(value, bool) else repr(value)
    )


def spell_key(key: str) -> str:
    return f"['{key}']" if " " in key else key


def is_same_type(a: Any, b: Any) -> bool:
    if isinstance(a, bool) or isinstance(b, bool):
        return isinstance(a, bool) and isinstance(b, bool)
    if isinstance(a, int | float) and isinstance(b, int | float):
        return True
    return type(a) is type(b)


def split_digits(text: str) -> list[Any]:
    return [int(part) if part.isdigit() else part for part in text.replace("-", "- ").split(" ")]


def judge_pair(a: Any, sign: str, b: Any) -> bool:
    """The plain rules, for two values that are no lists."""
    if a is ABSENT or b is ABSENT or "nan" in (repr(a), repr(b)):
        return False
    if sign in ("=", "=="):
        return is_same_type(a, b) and a == b
    if not is_same_type(a, b) or a is None:
        return False
    if isinstance(a, str):
        a, b = split_digits(a), split_digits(b)
    return bool({"<": a < b, "<=": a <= b, ">": a > b, ">=": a >= b}[sign])


def judge(a: Any, sign: str, b: Any) -> bool:
    left, right = (each if isinstance(each, list) else [each] for each in (a, b))
    if sign == "!=":
        known = not any(each is ABSENT or repr(each) == "nan" for each in (*left, *right))
        return known and not judge(a, "=", b)
    return any(judge_pair(x, sign, y) for x in left for y in right)


def look_up(metrics: dict[str, Any], key: str) -> Any:
    value = metrics.get(key, ABSENT)
    return {"nan": math.nan, "inf": math.inf}.get(value, value) if isinstance(value, str) else value


def compare(key: str, sign: str, value: Any) -> Both:
    return Both(f"{spell_key(key)} {sign} {spell_literal(value)}", lambda m: judge(look_up(m, key), sign, value))


def compare_keys(key: str, sign: str, other: str) -> Both:
    text = f"{spell_key(key)} {sign} {spell_key(other)}"
    return Both(text, lambda m: judge(look_up(m, key), sign, look_up(m, other)))


def list_values(key: str, choices: list[Any]) -> Both:
    text = f"{spell_key(key)} in ({', '.join(map(spell_literal, choices))})"
    return Both(text, lambda m: any(judge(look_up(m, key), "=", choice) for choice in choices))


def match_text(key: str, pattern: str) -> Both:
    def is_like(m: dict[str, Any]) -> bool:
        found = look_up(m, key)
        items = found if isinstance(found, list) else [found]
        return any(isinstance(each, str) and fnmatchcase(each, pattern) for each in items)

    return Both(f"{spell_key(key)} like '{pattern}'", is_like)


def join(word: str, parts: list[Both]) -> Both:
    every = all if word == "and" else any
    return Both("(" + f" {word} ".join(part.text for part in parts) + ")", lambda m: every(p.judge(m) for p in parts))


def negate(part: Both) -> Both:
    return Both(f"not ({part.text})", lambda m: not part.judge(m))


keys, signs = st.sampled_from(KEYS), st.sampled_from(SIGNS)
tests = st.one_of(
    st.builds(compare, keys, signs, literals),
    st.builds(compare_keys, keys, signs, keys),
    st.builds(list_values, keys, st.lists(literals, min_size=1, max_size=3)),
    st.builds(match_text, keys, st.sampled_from(["*", "x*", "y-?", "[xy]*", ""])),
    keys.map(lambda key: Both(f"{spell_key(key)} exists", lambda m: key in m)),
    keys.map(lambda key: Both(spell_key(key), lambda m: look_up(m, key) is True)),
)
expressions = st.recursive(
    tests,
    lambda inner: st.one_of(
        inner.map(negate), st.builds(join, st.sampled_from(["and", "or"]), st.lists(inner, min_size=1, max_size=3))
    ),
    max_leaves=8,
)


@settings(max_examples=400)
@given(expressions, metadata)
def test_an_expression_means_what_the_model_says(both: Both, metrics: dict[str, Any]) -> None:
    condition = parse_expression(both.text)

    assert holds(condition, make_one_fact({"metrics": metrics})) is both.judge(metrics), both.text


@given(st.text(max_size=40) | st.lists(st.sampled_from(WORDS)).map(" ".join))
@example("a = 1 = 2")
@example("((((")
@example("not")
def test_any_text_is_parsed_or_refused_with_a_place_in_it(text: str) -> None:
    error = find_mistake(text)

    if error is not None:
        assert 0 <= error.position <= len(text)
        assert "\n" not in error.sentence
        assert len(error.sentence) > 10


def find_mistake(text: str) -> BadExpression | None:
    try:
        parse_expression(text)
    except BadExpression as error:
        return error
    return None


@given(st.lists(metadata, max_size=8), st.sampled_from(["a", "-a", "a,-b", "['odd key'],-a"]))
def test_sorting_never_fails_and_does_not_depend_on_the_order_before(found: list[dict[str, Any]], sort: str) -> None:
    facts = [make_one_fact({"metrics": metrics}, name=f"n/{number}") for number, metrics in enumerate(found)]
    query = parse_query(sort=sort)

    ordered = select(facts, query)

    assert [each.snapshot.name for each in select(facts[::-1], query)] == [each.snapshot.name for each in ordered]
    assert len(ordered) == len(facts)
