"""The verb `completion`: prints the script with which a shell asks for completions, and answers the shell."""

from __future__ import annotations

import argparse
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import Final

import argcomplete
from argcomplete.completers import FilesCompleter
from argcomplete.shell_integration import shellcode

from holdfast.cli.output import Output
from holdfast.cli.verb import add_json, document
from holdfast.errors import HoldfastError
from holdfast.objects.url import open_store
from holdfast.repo.format.layout import natural_order
from holdfast.repo.names.snapshots import CommittedSnapshot, Tag, iter_tags, iter_user_names

SHELLS: Final = ("bash", "zsh", "fish")
_MAX_NAMES: Final = 500
_list_files: Final = FilesCompleter()
_NAMES: Final = {"NAME", "PREFIX", "TAG", "A", "B", "SNAPSHOT"}
_FILES: Final = {"PATH", "DIR", "FILE", "STORE", "FOLDER", "DIRECTORY"}
_OTHER_NAMES: Final = ("run", "cache")
"""Verbs whose arguments are names of something else than snapshots."""


def declare_completion(parser: ArgumentParser) -> None:
    """Declare the verb `completion`."""
    more = (
        "Completes verbs, options, files, and the names of snapshots and tags in the\n"
        "store of -s, of $HOLDFAST_STORE or of the current directory.\n\n"
        "  bash   add to ~/.bashrc:  source <(holdfast completion bash)\n"
        "  zsh    add to ~/.zshrc, after compinit:  source <(holdfast completion zsh)\n"
        "  fish   holdfast completion fish > ~/.config/fish/completions/holdfast.fish"
    )
    document(parser, more, examples=["holdfast completion bash"])
    parser.add_argument("shell", metavar="SHELL", choices=SHELLS, help="bash, zsh or fish")
    add_json(parser)
    parser.set_defaults(run_verb=run_completion)


def run_completion(options: Namespace, url: str, output: Output) -> int:
    """Print a script."""
    del url
    script = shellcode(["holdfast"], use_defaults=False, shell=options.shell)
    if options.json:
        output.json({"shell": options.shell, "script": script})
        return 0
    for line in script.splitlines():
        output.line(line)
    return 0


def answer_shell(parser: ArgumentParser, choose_store: Callable[[Namespace], str]) -> None:
    """Write to the shell what may be typed next, and end the process; the shell's script has set the variables."""
    _set_completers(parser, partial(_list_names, choose_store))
    argcomplete.autocomplete(parser, always_complete_options=False)


def _set_completers(parser: ArgumentParser, list_names: Callable[..., list[str]]) -> None:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for verb, below in action.choices.items():
                _set_completers(below, _list_nothing if verb in _OTHER_NAMES else list_names)
        elif action.choices is None:
            kind = action.metavar if isinstance(action.metavar, str) else action.dest.upper()
            completer = list_names if kind in _NAMES else _list_files if kind in _FILES else _list_nothing
            action.completer = completer  # type: ignore[attr-defined]  # where argcomplete looks for it


def _list_nothing(**_: object) -> list[str]:
    return []


def _list_names(
    choose_store: Callable[[Namespace], str], prefix: str, parsed_args: Namespace, **_: object
) -> list[str]:
    """Return the names that begin with what was typed; none if there is no store, or none that can be read."""
    try:
        return list(islice(_iter_matches(choose_store(parsed_args), prefix), _MAX_NAMES))
    except HoldfastError:
        return []


def _iter_matches(url: str, begin: str) -> Iterator[str]:
    """Yield the snapshots and tags whose names begin with a text, in natural order."""
    store = open_store(url, read_only=True)
    found = [*iter_user_names(store, begin), *iter_tags(store)]
    names = {each.name for each in found if isinstance(each, CommittedSnapshot | Tag)}
    yield from sorted((name for name in names if name.startswith(begin)), key=natural_order)
