"""Texts for messages: a few names of many, a list of lines, a long text cut to a length."""

from __future__ import annotations

from collections.abc import Sequence


def list_some(names: Sequence[str], limit: int) -> str:
    """Return at most `limit` names, separated by commas, and how many are left out: `a, b, c and 7 more`."""
    left_out = len(names) - limit
    return ", ".join(names[:limit]) + (f" and {left_out} more" if left_out > 0 else "")


def list_lines(lines: Sequence[str], limit: int) -> str:
    """Return at most `limit` lines, each indented below the text before it, and how many are left out."""
    left_out = len(lines) - limit
    shown = [*lines[:limit], *([f"and {left_out} more"] if left_out > 0 else [])]
    return "".join(f"\n  {line}" for line in shown)


def shorten(text: str, limit: int) -> str:
    """Return a text of at most `limit` characters; a longer one ends in `...`."""
    return text if len(text) <= limit else f"{text[: limit - 3]}..."
