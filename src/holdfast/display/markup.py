"""How values look to people: HTML cards for notebooks with every text escaped, and readable reprs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from html import escape
from typing import Any, Final

from holdfast.digest import DIGEST_BYTES, short_hex
from holdfast.texts import format_bytes, shorten

MAX_ROWS: Final = 20
"""Rows of a card's table that are visible at once; the others open with a click."""
_MAX_HIDDEN_ROWS: Final = 500
_MAX_TEXT: Final = 300

_GREY: Final = "rgba(128,128,128,.35)"
_CARD: Final = f"border:1px solid {_GREY};border-radius:6px;padding:.6em .9em;margin:.3em 0;max-width:64em"
_TABLE: Final = "border-collapse:collapse;margin:.5em 0 .1em;font-size:.92em"
_CELL: Final = f"padding:.15em .9em .15em 0;border:0;border-top:1px solid {_GREY};vertical-align:top"
_HEAD: Final = "padding:.15em .9em .15em 0;border:0;font-weight:600;opacity:.65"
_CODE: Final = "font-family:ui-monospace,monospace"


@dataclass(frozen=True, slots=True)
class Bar:
    """A bar whose filled part shows a share of something."""

    share: float
    """Between 0 and 1."""
    label: str


@dataclass(frozen=True, slots=True)
class Card:
    """What a notebook shows of an object."""

    kind: str
    """What the object is, such as "Snapshot"."""
    title: str
    facts: Sequence[tuple[str, str]] = ()
    bar: Bar | None = None
    headers: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    right: str = ""
    """The headers of columns that are aligned to the right, separated by spaces."""
    note: str = ""


def render_card(card: Card) -> str:
    """Return a card as HTML. It contains no script, and no reference to anything outside of it."""
    parts = [_render_title(card), _render_facts(card.facts)]
    parts += [_render_bar(card.bar)] if card.bar else []
    parts += [_render_rows(card)] if card.rows else []
    parts += [f'<div style="opacity:.75">{_escape(card.note)}</div>'] if card.note else []
    return f'<div class="holdfast" style="{_CARD}">{"".join(parts)}</div>'


def _escape(text: str) -> str:
    """Return a text that cannot be markup; control characters and other unprintable ones become escapes."""
    short = text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}…"
    visible = "".join(char if char.isprintable() else ascii(char)[1:-1] for char in short)
    return escape(visible, quote=True)


def _render_title(card: Card) -> str:
    return (
        f'<div><span style="opacity:.65">{_escape(card.kind)}</span> '
        f'<strong style="{_CODE}">{_escape(card.title)}</strong></div>'
    )


def _render_facts(facts: Iterable[tuple[str, str]]) -> str:
    spans = [
        f'<span style="margin-right:1.4em;white-space:nowrap"><span style="opacity:.65">{_escape(name)}</span> '
        f"{_escape(value)}</span>"
        for name, value in facts
    ]
    return f'<div style="line-height:1.7">{" ".join(spans)}</div>' if spans else ""


def _render_bar(bar: Bar) -> str:
    percent = 100 * min(max(bar.share, 0.0), 1.0)
    return (
        f'<div style="display:flex;align-items:center;gap:.8em;margin:.3em 0"><div style="flex:0 0 14em;height:.55em;'
        f'border-radius:3px;background:{_GREY}"><div style="width:{percent:.1f}%;height:100%;border-radius:3px;'
        f'background:currentColor;opacity:.6"></div></div><span>{_escape(bar.label)}</span></div>'
    )


def _render_rows(card: Card) -> str:
    """Return the table: the first rows, and the others folded below them."""
    hidden = card.rows[MAX_ROWS : MAX_ROWS + _MAX_HIDDEN_ROWS]
    shown = _render_table(card, card.rows[:MAX_ROWS])
    if not hidden:
        return shown
    rest = len(card.rows) - MAX_ROWS
    cut = f"<div>… the last {rest - len(hidden)} are not listed</div>" if rest > len(hidden) else ""
    return f"{shown}<details><summary>{rest} more</summary>{_render_table(card, hidden)}{cut}</details>"


def _render_table(card: Card, rows: Sequence[Sequence[str]]) -> str:
    aligned = ["right" if header in card.right.split() else "left" for header in card.headers]
    heads = "".join(
        f'<th style="{_HEAD};text-align:{align}">{_escape(header)}</th>'
        for header, align in zip(card.headers, aligned, strict=True)
    )
    body = "".join(f"<tr>{_render_cells(row, aligned)}</tr>" for row in rows)
    table = f'<table style="{_TABLE}"><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table>'
    return f'<div style="overflow-x:auto">{table}</div>'


def _render_cells(row: Sequence[str], aligned: Sequence[str]) -> str:
    last = len(row) - 1
    cells = []
    for position, (cell, align) in enumerate(zip(row, aligned, strict=True)):
        # Only the last column is wrapped: it has the long texts.
        more = (f";{_CODE}" if not position else "") + (";white-space:nowrap" if position < last else "")
        cells.append(f'<td style="{_CELL};text-align:{align}{more}">{_escape(cell)}</td>')
    return "".join(cells)


_MAX_ITEMS: Final = 3
_MAX_CHARS: Final = 120


def readable_repr(value: Any) -> str:
    """Return the repr of a dataclass: digests in hex, sizes and times with units, without defaults and private fields.

    A class uses it as its `__repr__`.
    """
    shown = [field for field in dataclasses.fields(value) if field.repr and not field.name.startswith("_")]
    texts = [
        f"{field.name}={_format_field(field.name, getattr(value, field.name))}"
        for field in shown
        if not _is_default(field, getattr(value, field.name))
    ]
    return f"{type(value).__name__}({', '.join(texts)})"


def format_when(time_s: float) -> str:
    """Return a time in UTC; a number that is not a date as it is."""
    try:
        return datetime.fromtimestamp(time_s, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (OverflowError, ValueError, OSError):
        return f"@{time_s:g}"


def _is_default(field: dataclasses.Field[Any], value: object) -> bool:
    if field.default_factory is not dataclasses.MISSING:
        return bool(value == field.default_factory())
    return field.default is not dataclasses.MISSING and bool(value == field.default)


def _format_field(name: str, value: object) -> str:
    if isinstance(value, int) and not isinstance(value, bool) and name.endswith("_bytes"):
        return format_bytes(value)
    if isinstance(value, int | float) and name in ("time_s", "started_s"):
        return format_when(value)
    if isinstance(value, float) and (name == "seconds" or name.endswith("_s")):
        return f"{value:.3g} s"
    return _format_value(value)


def _format_value(value: object) -> str:
    if isinstance(value, bytes) and len(value) == DIGEST_BYTES:
        return short_hex(value)
    if isinstance(value, Mapping):
        return _enclose("{}", [f"{key!r}: {_format_value(each)}" for key, each in value.items()])
    if isinstance(value, list):
        return _enclose("[]", [_format_value(each) for each in value[: _MAX_ITEMS + 1]], len(value))
    if type(value) is tuple:
        return _enclose("()", [_format_value(each) for each in value[: _MAX_ITEMS + 1]], len(value))
    return shorten(repr(value), _MAX_CHARS)


def _enclose(brackets: str, texts: list[str], total: int | None = None) -> str:
    """Return the first items in brackets, and how many are left out."""
    left_out = (len(texts) if total is None else total) - _MAX_ITEMS
    shown = texts[:_MAX_ITEMS] + ([f"... {left_out} more"] if left_out > 0 else [])
    comma = "," if brackets == "()" and len(shown) == 1 else ""
    return brackets[0] + ", ".join(shown) + comma + brackets[1]
