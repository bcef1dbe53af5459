"""Parameters of a request, with limits."""

from __future__ import annotations

import pytest

from holdfast.errors import BadName
from holdfast.serving.answer import MAX_TARGET_BYTES, choose_sort, parse_request


def test_parameters_are_decoded() -> None:
    found = parse_request("/api/v1/leaves?name=run%2F1&limit=20&folded=true&name=b")

    assert found.path == "/api/v1/leaves"
    assert found.read_texts("name", most=2) == ["run/1", "b"]
    assert found.read_text("name") == "b"
    assert found.read_number("limit", 100, most=50) == 20
    assert found.read_number("offset", 7, most=50) == 7
    assert found.read_flag("folded")
    assert not found.read_flag("values")


@pytest.mark.parametrize("number", ["-1", "1e3", "51", "x", "9" * 400, "\u0663"])
def test_a_bad_number_is_named(number: str) -> None:
    with pytest.raises(BadName, match="limit"):
        parse_request(f"/x?limit={number}").read_number("limit", 1, most=50)


def test_what_is_too_much_is_refused() -> None:
    with pytest.raises(BadName, match="longer"):
        parse_request("/x?" + "a" * MAX_TARGET_BYTES)
    with pytest.raises(BadName, match="malformed"):
        parse_request("/x?" + "&".join("a=1" for _ in range(500)))
    with pytest.raises(BadName, match="at most 2"):
        parse_request("/x?a=1&a=2&a=3").read_texts("a", most=2)


@pytest.mark.parametrize("target", ["/x?a=%ff%fe", "/x?a", "//[x/?a=1"])
def test_what_is_malformed_is_refused(target: str) -> None:
    with pytest.raises(BadName):
        parse_request(target)


def test_a_page_has_a_start_and_a_limit() -> None:
    assert parse_request("/x?offset=7").read_page(20, most=50) == (7, 20)
    assert parse_request("/x?limit=50").read_page(20, most=50) == (0, 50)
    with pytest.raises(BadName, match="limit='51'"):
        parse_request("/x?limit=51").read_page(20, most=50)


def test_an_order_is_one_of_the_fields() -> None:
    assert [choose_sort(sort, ("a", "b")) for sort in ("", "-", "b", "-b")] == ["a", "a", "b", "b"]
    with pytest.raises(BadName, match="'c'; choose one of a, b"):
        choose_sort("-c", ("a", "b"))


def test_a_missing_parameter_and_a_bad_flag_are_named() -> None:
    with pytest.raises(BadName, match="'name' is missing"):
        parse_request("/x").read_required("name")
    with pytest.raises(BadName, match="values='1'"):
        parse_request("/x?values=1").read_flag("values")
