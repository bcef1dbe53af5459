"""How a verb is added to the grammar: what every page of help has, and the options that many verbs share."""

from __future__ import annotations

from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    Verbs = _SubParsersAction[ArgumentParser]


def format_examples(*commands: str) -> str:
    """Return how a page of help shows commands."""
    # The lines after the first decide how far a page dedents, so the first one stays empty.
    return "\nExample:\n\n" + "\n".join(f"    {command}" for command in commands)


def add_verb(verbs: Verbs, name: str, summary: str, *, more: str = "", examples: Sequence[str]) -> ArgumentParser:
    """Add a verb with its page of help and no arguments yet."""
    return verbs.add_parser(
        name,
        help=summary,
        description=summary[0].upper() + summary[1:] + "." + (f"\n\n{more}" if more else ""),
        epilog=format_examples(*examples),
        formatter_class=RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def add_json(parser: ArgumentParser) -> None:
    """Add what makes a verb print JSON."""
    parser.add_argument("--json", action="store_true", help="print JSON")
