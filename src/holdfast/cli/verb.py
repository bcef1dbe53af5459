"""How a verb is added to the grammar: what every page of help has, and the options that many verbs share."""

from __future__ import annotations

import re
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING, Final, NoReturn

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    Verbs = _SubParsersAction[ArgumentParser]


_CHOICE: Final = re.compile(r"(.*invalid choice: '(.*)') \(choose from (.*)\)\Z", re.DOTALL)
_UNKNOWN: Final = re.compile(r"unrecognized arguments:.* (-s|--store|--debug|--profile)\b")
_BEFORE: Final = {"-s": "-s STORE", "--store": "--store STORE"}


class Parser(ArgumentParser):
    """A parser whose errors say what was meant."""

    def error(self, message: str) -> NoReturn:
        """Print the usage and the error, with a hint if there is one, and exit with 2."""
        choice, unknown = _CHOICE.match(message), _UNKNOWN.match(message)
        if choice:
            close = get_close_matches(choice[2], re.findall(r"[\w-]+", choice[3]), n=1)
            message = f"{choice[1]} (did you mean {close[0]!r}?)" if close else message
        elif unknown:
            option = unknown[1]
            message += f" (it goes before the verb: holdfast {_BEFORE.get(option, option)} VERB)"
        super().error(message)


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
