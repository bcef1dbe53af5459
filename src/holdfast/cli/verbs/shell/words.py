"""What can be typed after each verb: its actions, options and arguments, read from the parser of the command line."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal

ValueKind = Literal["names", "files", "choices", "nothing"]
"""How a value is completed: a snapshot or tag of the store, a path, one of a few words, or not at all."""

_NAMES: Final = {"NAME", "PREFIX", "TAG", "A", "B", "SNAPSHOT"}
_FILES: Final = {"PATH", "DIR", "FILE", "STORE", "FOLDER", "DIRECTORY"}
_OTHER_NAMES: Final = ("run", "cache")
"""Verbs whose arguments are names of something else than snapshots."""


@dataclass(frozen=True, slots=True)
class Value:
    """What an option or argument takes."""

    kind: ValueKind
    choices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Option:
    """An option of a verb."""

    spellings: tuple[str, ...]
    help: str
    value: Value | None
    """None for a switch."""


@dataclass(frozen=True, slots=True)
class Command:
    """A verb, or an action of a verb; the words are empty for what may come before the verb."""

    words: str
    summary: str
    verbs: tuple[tuple[str, str], ...]
    """The words that may follow, each with its summary: verbs, or the actions of a verb."""
    options: tuple[Option, ...]
    value: Value
    """What its arguments are."""


def iter_commands(parser: argparse.ArgumentParser, words: str = "", summary: str = "") -> Iterator[Command]:
    """Yield the command line itself, then every verb and every action of a verb."""
    below = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    verbs = tuple((choice.dest, choice.help or "") for action in below for choice in action._choices_actions)
    yield Command(words, summary, verbs, tuple(_iter_options(parser)), _find_value(parser, words))
    for action in below:
        for name, summary_of_verb in verbs:
            yield from iter_commands(action.choices[name], f"{words} {name}".strip(), summary_of_verb)


def _iter_options(parser: argparse.ArgumentParser) -> Iterator[Option]:
    for action in parser._actions:
        if action.option_strings and action.help != argparse.SUPPRESS:
            value = None if action.nargs == 0 else _describe_value(action)
            text = (action.help or "") % {**vars(action), "prog": parser.prog}
            yield Option(tuple(action.option_strings), text, value)


def _find_value(parser: argparse.ArgumentParser, words: str) -> Value:
    """Return what the arguments of a verb are: the first kind that can be completed."""
    arguments = [action for action in parser._actions if not action.option_strings and action.help != argparse.SUPPRESS]
    values = [_describe_value(action) for action in arguments if not isinstance(action, argparse._SubParsersAction)]
    if words.partition(" ")[0] in _OTHER_NAMES:
        values = [value for value in values if value.kind != "names"]
    return next((value for value in values if value.kind != "nothing"), Value("nothing"))


def _describe_value(action: argparse.Action) -> Value:
    if action.choices is not None:
        return Value("choices", tuple(map(str, action.choices)))
    metavar = action.metavar if isinstance(action.metavar, str) else action.dest.upper()
    return Value("names" if metavar in _NAMES else "files" if metavar in _FILES else "nothing")
