"""Cards for notebooks: text from users never becomes markup, and nothing is loaded from anywhere."""

from __future__ import annotations

from dataclasses import fields, replace
from html.parser import HTMLParser

import pytest

from holdfast.display.markup import MAX_ROWS, Bar, Card, render_card

EVIL = '<script>alert("x")</script><img src=x onerror=alert(1)>&amp;\x1b[31m'
HARMLESS = {"div", "span", "strong", "table", "thead", "tbody", "tr", "th", "td", "details", "summary"}


class Reader(HTMLParser):
    """Reads a page: its tags, its attributes and its text; fails if the tags do not match."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.text = ""
        self.open: list[str] = []
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes.update(name for name, _ in attrs)
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def make_card() -> Card:
    return Card("Kind", "title", [("size", "3 MiB")], Bar(0.5, "half"), ("leaf", "size"), [("w", "3")], "size", "note")


def test_a_card_shows_all_that_it_is_given() -> None:
    read = Reader(render_card(make_card()))

    for text in ("Kind", "title", "size", "3 MiB", "half", "leaf", "w", "note"):
        assert text in read.text


def make_evil(name: str) -> Card:
    """Return a card with markup in one of its fields."""
    card = make_card()
    evil = {
        "facts": [(EVIL, EVIL)],
        "bar": Bar(2.0, EVIL),
        "rows": [(EVIL, EVIL)],
        "headers": (EVIL, "size"),
        "right": EVIL,
    }
    changes: dict[str, object] = {name: evil.get(name, EVIL)}
    return replace(card, **changes)  # type: ignore[arg-type]  # the value fits the field of that name


@pytest.mark.parametrize("name", [each.name for each in fields(Card)])
def test_no_text_becomes_markup(name: str) -> None:
    read = Reader(render_card(make_evil(name)))

    assert read.tags <= HARMLESS
    assert read.attributes <= {"style", "class"}
    assert "\x1b" not in read.text
    assert name == "right" or '<script>alert("x")</script>' in read.text


def test_a_card_refers_to_nothing_outside_of_it() -> None:
    page = render_card(make_card())

    assert not any(word in page for word in ("http", "url(", "src=", "href", "@import"))


def test_rows_beyond_the_first_are_folded_and_a_very_long_list_is_cut() -> None:
    card = replace(make_card(), rows=[(f"leaf{number}", "1") for number in range(MAX_ROWS + 700)])

    read = Reader(render_card(card))

    assert "details" in read.tags
    assert "700 more" in read.text
    assert f"leaf{MAX_ROWS + 499}" in read.text
    assert f"leaf{MAX_ROWS + 500}" not in read.text
    assert "the last 200 are not listed" in read.text


def test_a_card_without_rows_has_no_table() -> None:
    assert "table" not in Reader(render_card(Card("Kind", "title"))).tags
