"""What the declarations of all verbs share: the layout of a help page, common options, and errors with a suggestion."""

from __future__ import annotations

import re
from argparse import ArgumentParser, ArgumentTypeError, RawDescriptionHelpFormatter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING, Final, NoReturn, cast

from holdfast.errors import BadName
from holdfast.json_text import Json
from holdfast.texts import mask_urls

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from holdfast.repo.handle.compression import Compression, DeltaChoice

    Verbs = _SubParsersAction[ArgumentParser]


_CHOICE: Final = re.compile(r"argument (.*): invalid choice: '(.*)' \(choose from (.*)\)\Z", re.DOTALL)
_WHAT: Final = {"VERB": "unknown verb", "ACTION": "unknown action"}
_UNKNOWN: Final = re.compile(r"unrecognized arguments:.* (-s|--store|--debug|--profile|--color)\b")
_MISTYPED: Final = re.compile(r"unrecognized arguments: (--[\w-]+)")
_BEFORE: Final = {"-s": "-s STORE", "--store": "--store STORE", "--color": "--color WHEN"}


class Parser(ArgumentParser):
    """A parser whose errors suggest what the user may have meant."""

    def error(self, message: str) -> NoReturn:
        """Print the usage and the error, with a hint if there is one, and exit with 2."""
        choice, unknown = _CHOICE.match(message), _UNKNOWN.match(message)
        if choice:
            close = get_close_matches(choice[2], re.findall(r"[\w-]+", choice[3]), n=1)
            what = _WHAT.get(choice[1])
            known = f"{what} {choice[2]!r}:" if what else f"argument {choice[1]}: invalid choice {choice[2]!r}:"
            message = f"{known} did you mean {close[0]!r}?" if close else f"{known} choose from {choice[3]}"
        elif unknown:
            option = unknown[1]
            message += f" (write it before the verb: holdfast {_BEFORE.get(option, option)} VERB)"
        elif mistyped := _MISTYPED.match(message):
            close = get_close_matches(mistyped[1], list(_iter_options(self)), n=1)
            message += f" (did you mean {close[0]!r}?)" if close else ""
        super().error(mask_urls(message))


def _iter_options(parser: ArgumentParser) -> Iterator[str]:
    """Yield the options of a parser, and of the verbs below it that are declared."""
    for action in parser._actions:
        yield from action.option_strings
        for below in action.choices.values() if isinstance(action.choices, Mapping) else ():
            yield from _iter_options(below)


def add_verb(verbs: Verbs, name: str, summary: str) -> ArgumentParser:
    """Add a verb, or an action of a verb, with its one-line summary, and return its parser."""
    return verbs.add_parser(
        name,
        help=summary,
        description=summary[0].upper() + summary[1:] + ".",
        formatter_class=RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def document(parser: ArgumentParser, more: str = "", *, examples: Sequence[str]) -> None:
    """Add to the help page of a verb: `more` after the summary, and examples at the end."""
    if more:
        parser.description = f"{parser.description}\n\n{more}"
    parser.epilog = format_examples(*examples)


def format_examples(*commands: str) -> str:
    """Return the section of a help page that shows example commands."""
    # argparse dedents by the lines after the first, so the first line is empty.
    return "\nExample:\n\n" + "\n".join(f"    {command}" for command in commands)


def add_query(parser: ArgumentParser) -> None:
    """Add the option --where, which selects snapshots by their metadata."""
    parser.add_argument("--where", metavar="EXPR", help="only those for which this holds: 'loss < 0.3 and age < 2d'")


def split_command(words: Sequence[str], verb: str) -> tuple[list[str], list[str]]:
    """Split the words at the two dashes after which a verb takes a command; the command is empty for other verbs.

    argparse would remove dashes from the command, and does so in another way in each version of Python.
    """
    at = words.index("--") if "--" in words else len(words)
    return (list(words[:at]), list(words[at + 1 :])) if verb in words[:at] else (list(words), [])


def join_descending(words: Sequence[str]) -> list[str]:
    """Join `--sort -loss`, which argparse would refuse, to `--sort=-loss`; what follows `--` is left alone."""
    joined: list[str] = []
    for number, word in enumerate(words):
        if word == "--":
            return [*joined, *words[number:]]
        if joined and joined[-1] == "--sort" and word.startswith("-") and not word.startswith("--"):
            joined[-1] = f"--sort={word}"
        else:
            joined.append(word)
    return joined


def add_json(parser: ArgumentParser, text: str = "print JSON") -> None:
    """Add the option --json."""
    parser.add_argument("--json", action="store_true", help=text)


def add_prefix(parser: ArgumentParser) -> None:
    """Add the argument PREFIX, which selects snapshots."""
    parser.add_argument("prefix", metavar="PREFIX", nargs="?", default="", help="only names that start with this")


def add_yes(parser: ArgumentParser) -> None:
    """Add the option --yes of a verb that prints a plan first."""
    parser.add_argument("--yes", action="store_true", help="carry out the plan; without it, only print the plan")


def add_compression(parser: ArgumentParser) -> None:
    """Add the options `--compression` and `--delta`."""
    parser.add_argument(
        "--compression",
        metavar="HOW",
        choices=("none", "fast", "small", "auto"),
        help="store new bytes with none, fast, small or auto (default: auto in buckets, none in directories)",
    )
    parser.add_argument(
        "--delta",
        metavar="auto|off|N",
        type=parse_delta,
        default="auto",
        help="store new bytes as the difference from the latest snapshot with the same prefix; with N, one in N is"
        " stored whole (default: auto, which is 10 with --compression fast or small, otherwise off)",
    )


def parse_compression(text: str | None) -> Compression:
    """Return what `--compression` gave; "default" without it."""
    if text is None:
        return "default"
    return None if text == "none" else cast("Compression", text)


def parse_delta(text: str) -> DeltaChoice:
    """Return what `--delta` gave; raises ArgumentTypeError."""
    if text in ("auto", "off"):
        return cast("DeltaChoice", text)
    if not text.isdecimal() or not int(text):
        raise ArgumentTypeError(f"it is auto, off or a number from 1 on, not {text!r}")
    return int(text)


def add_follow_links(parser: ArgumentParser) -> None:
    """Add the option `--follow-links`."""
    parser.add_argument(
        "--follow-links",
        action="store_true",
        help="follow symbolic links in a folder also if they lead outside of it, or to directories",
    )


def add_metadata(parser: ArgumentParser) -> None:
    """Add the option `--meta`."""
    parser.add_argument(
        "--meta",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="store this text with the snapshot; may be repeated",
    )


def parse_metadata(pairs: Iterable[str]) -> dict[str, Json]:
    """Return what `--meta` gave; raises BadName."""
    metadata: dict[str, Json] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise BadName(f"--meta {pair!r} is not of the form KEY=VALUE")
        if key in metadata:
            raise BadName(f"--meta gives the key {key!r} twice")
        metadata[key] = value
    return metadata
