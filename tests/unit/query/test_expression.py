"""The parser: what binds tighter, what is refused and where, and how deep it may nest."""

from __future__ import annotations

import pytest

from holdfast.errors import BadExpression
from holdfast.query.expression import (
    MAX_NESTING,
    AllOf,
    AnyOf,
    Compare,
    Exists,
    FieldRef,
    Holds,
    Like,
    LiteralValue,
    Negated,
    OneOf,
    iter_fields,
    parse_expression,
    parse_field,
    parse_fields,
)
from holdfast.query.globs import Glob

A, B, C = (Holds(FieldRef((name,))) for name in "abc")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a and b or c", AnyOf((AllOf((A, B)), C))),
        ("a and (b or c)", AllOf((A, AnyOf((B, C))))),
        ("not a and b", AllOf((Negated(A), B))),
        ("not not a", Negated(Negated(A))),
        ("a exists", Exists(FieldRef(("a",)))),
        ("a in (1, 'x', null)", OneOf(FieldRef(("a",)), (1, "x", None))),
        ("a not in (1)", Negated(OneOf(FieldRef(("a",)), (1,)))),
        ("a ~ 'x*'", Like(FieldRef(("a",)), Glob("x*"))),
        ("a LIKE 'x*'", Like(FieldRef(("a",)), Glob("x*"))),
        ("a !~ 'x*'", Negated(Like(FieldRef(("a",)), Glob("x*")))),
        ("a not like 'x*'", Negated(Like(FieldRef(("a",)), Glob("x*")))),
        ("a = 1", Compare(FieldRef(("a",)), "==", LiteralValue(1))),
        ("1 < a", Compare(LiteralValue(1), "<", FieldRef(("a",)))),
        ("a.x != b", Compare(FieldRef(("a", "x")), "!=", FieldRef(("b",)))),
        ("true", Holds(LiteralValue(True))),
    ],
)
def test_an_expression_has_this_form(text: str, expected: object) -> None:
    assert parse_expression(text) == expected


@pytest.mark.parametrize(
    ("text", "position", "reason"),
    [
        ("loss <", 6, "expected a field or a value, not the end of the expression"),
        ("loss < and b", 7, "expected a field or a value, not 'and'"),
        ("(loss < 1", 9, "expected ')', not the end of the expression"),
        ("loss < 1)", 8, "expected 'and', 'or' or the end, not ')'"),
        ("0 < loss < 1", 9, "two comparisons are joined with 'and'"),
        ("loss 3", 5, "expected a comparison between loss and 3, such as = or <"),
        ("3", 1, "expected a comparison after 3, such as =, <, in or like"),
        ("a in 3", 5, "expected '(', not '3'"),
        ("a in ()", 6, "expected a value: a number, a text in quotation marks, true, false or null"),
        ("a in (1 2)", 8, "expected ')', not '2'"),
        ("a not 3", 6, "expected 'in' or 'like' after 'not'"),
        ("name like run", 10, "expected a pattern in quotation marks, such as 'run/*'"),
        ("tag = 3", 6, "tag is a text; write the value in quotation marks"),
        ("'1' < size", 0, "size is a number; compare it with one, such as 1GiB"),
        ("age < '2d'", 6, "age is a number; compare it with one, such as 2d"),
        ("created > 'now'", 10, "'now' is not a date; write 2026-11-17 or 2026-11-17T14:30"),
        ("host in ('a', 3)", 14, "host is a text; write the value in quotation marks"),
    ],
)
def test_a_mistake_is_one_sentence_with_its_place(text: str, position: int, reason: str) -> None:
    with pytest.raises(BadExpression) as caught:
        parse_expression(text)

    assert (caught.value.sentence, caught.value.position) == (reason, position)
    assert caught.value.expression == text


@pytest.mark.parametrize("text", ["", "   "])
def test_an_empty_expression_is_refused(text: str) -> None:
    with pytest.raises(BadExpression, match="the expression is empty; write a condition such as loss"):
        parse_expression(text)


@pytest.mark.parametrize(("before", "after"), [("(", ")"), ("not ", "")])
def test_nesting_is_bounded(before: str, after: str) -> None:
    deepest = MAX_NESTING - 1

    parse_expression(before * deepest + "a" + after * deepest)
    with pytest.raises(BadExpression, match=f"nested more than {MAX_NESTING} deep"):
        parse_expression(before * MAX_NESTING + "a" + after * MAX_NESTING)


def test_many_conditions_in_a_row_do_not_nest() -> None:
    found = parse_expression(" and ".join(["a"] * 500))

    assert found == AllOf((Holds(FieldRef(("a",))),) * 500)


def test_a_field_of_too_many_keys_is_refused() -> None:
    with pytest.raises(BadExpression, match="has 9 keys; at most 8 are allowed"):
        parse_expression("a.b.c.d.e.f.g.h.i > 1")


def test_a_single_field_may_contain_any_character() -> None:
    assert parse_field("val loss (%)").path == ("val loss (%)",)
    assert parse_field(" metrics.loss ").path == ("metrics", "loss")
    assert parse_field("metrics['a.b']").path == ("metrics", "a.b")
    assert [field.path for field in parse_fields("step, val/loss")] == [("step",), ("val/loss",)]


@pytest.mark.parametrize("text", ["", "a..b", ".", "a['x'] b", "a['x'] < 1"])
def test_what_is_no_single_field_is_refused(text: str) -> None:
    with pytest.raises(BadExpression):
        parse_field(text)


def test_all_fields_of_a_condition_are_listed() -> None:
    condition = parse_expression("a < b and not (c in (1) or d like 'x') and e exists and f")

    assert [str(field) for field in iter_fields(condition)] == ["a", "b", "c", "d", "e", "f"]
