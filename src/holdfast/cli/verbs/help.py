"""The verb `help`: prints the help page of a verb; with --json, the whole command line as data."""

from __future__ import annotations

import argparse
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from difflib import get_close_matches

from holdfast.cli.output import Output
from holdfast.cli.verb import add_json, document
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
    page, summary = _find_page(parser, options.words)
    if options.json:
        output.json(list(_iter_described(page, summary)))
        return 0
    for line in page.format_help().splitlines():
        output.line(line)
    return 0


def _find_page(parser: ArgumentParser, words: list[str]) -> tuple[ArgumentParser, str]:
    """Return the parser and the summary of a verb or action; raises NotFound with the closest word."""
    summary = ""
    for number, word in enumerate(words):
        below = _find_verbs(parser)
        known = below[0].choices if below else {}
        if word not in known:
            raise _explain_unknown(word, list(known), "verb" if not number else f"action of {words[number - 1]!r}")
        parser, summary = known[word], _list_summaries(below[0])[word]
    return parser, summary


def _find_verbs(parser: ArgumentParser) -> list[argparse._SubParsersAction[ArgumentParser]]:
    return [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]


def _list_summaries(verbs: argparse._SubParsersAction[ArgumentParser]) -> dict[str, str]:
    return {choice.dest: choice.help or "" for choice in verbs._choices_actions}


def _explain_unknown(word: str, known: list[str], what: str) -> NotFound:
    close = get_close_matches(word, known, n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(known)}" if known else "it has none"
    return NotFound(f"unknown {what} {word!r}: {hint}", name=word)


def _iter_described(parser: ArgumentParser, summary: str) -> Iterator[dict[str, Json]]:
    """Yield a page as data, then those of all verbs and actions below it."""
    below = _find_verbs(parser)
    yield {
        "command": parser.prog,
        "summary": summary,
        "verbs": [name for action in below for name in action.choices],
        "options": [
            {
                "spellings": list(action.option_strings),
                "help": (action.help or "") % {**vars(action), "prog": parser.prog},
                "takes_value": action.nargs != 0,
            }
            for action in parser._actions
            if action.option_strings and action.help != argparse.SUPPRESS
        ],
    }
    for action in below:
        for name, its_summary in _list_summaries(action).items():
            yield from _iter_described(action.choices[name], its_summary)
