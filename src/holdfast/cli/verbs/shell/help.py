"""The verb `help`: prints the help page of a verb; with --json, the whole command line as data."""

from __future__ import annotations

import argparse
from argparse import ArgumentParser, Namespace
from difflib import get_close_matches

from holdfast.cli.output import Output
from holdfast.cli.verb import add_json, document
from holdfast.cli.verbs.shell.words import Command, iter_commands
from holdfast.errors import NotFound
from holdfast.json_text import Json


def declare_help(parser: ArgumentParser) -> None:
    """Declare the verb `help`."""
    more = "Prints the same page as VERB --help. Without VERB, lists the verbs."
    document(parser, more, examples=["holdfast help ls", "holdfast help cache prune"])
    parser.add_argument("words", metavar="VERB", nargs="*", help="a verb, and an action of it")
    add_json(parser)
    parser.set_defaults(run_verb=run_help)


def run_help(options: Namespace, url: str, output: Output) -> int:
    """Print a help page."""
    del url
    parser: ArgumentParser = options.build_parser()
    words = " ".join(options.words)
    commands = [each for each in iter_commands(parser) if f"{each.words} ".startswith(f"{words} " if words else "")]
    page = _find_parser(parser, options.words)
    if options.json:
        output.json([_describe(command) for command in commands])
        return 0
    for line in page.format_help().splitlines():
        output.line(line)
    return 0


def _find_parser(parser: ArgumentParser, words: list[str]) -> ArgumentParser:
    """Return the parser of a verb or action; raises NotFound with the closest word."""
    for number, word in enumerate(words):
        below = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
        known = below[0].choices if below else {}
        if word not in known:
            raise _explain_unknown(word, list(known), "verb" if not number else f"action of {words[number - 1]!r}")
        parser = known[word]
    return parser


def _explain_unknown(word: str, known: list[str], what: str) -> NotFound:
    close = get_close_matches(word, known, n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(known)}" if known else "it has none"
    return NotFound(f"unknown {what} {word!r}: {hint}", name=word)


def _describe(command: Command) -> dict[str, Json]:
    return {
        "command": f"holdfast {command.words}".strip(),
        "summary": command.summary,
        "verbs": [name for name, _ in command.verbs],
        "options": [
            {"spellings": list(option.spellings), "help": option.help, "takes_value": option.value is not None}
            for option in command.options
        ],
    }
