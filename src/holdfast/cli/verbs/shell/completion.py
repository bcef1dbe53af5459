"""The verb `completion`: prints the completion script of a shell, and the names that such a script offers."""

from __future__ import annotations

from argparse import SUPPRESS, ArgumentParser, Namespace
from collections.abc import Iterator
from itertools import islice
from typing import Final

from holdfast.cli.output import Output
from holdfast.cli.verb import add_json, document
from holdfast.cli.verbs.shell.scripts import SHELLS, render_script
from holdfast.cli.verbs.shell.words import iter_commands
from holdfast.errors import BadName
from holdfast.objects.url import open_store
from holdfast.repo.format.layout import natural_order
from holdfast.repo.names.snapshots import CommittedSnapshot, iter_user_names
from holdfast.repo.names.tags import Tag, iter_tags

_MAX_NAMES: Final = 500


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
    parser.add_argument("shell", metavar="SHELL", nargs="?", choices=SHELLS, help="bash, zsh or fish")
    # The scripts ask for the names that begin with what was typed.
    parser.add_argument("--names", metavar="BEGIN", help=SUPPRESS)
    add_json(parser)
    parser.set_defaults(run_verb=run_completion)


def run_completion(options: Namespace, url: str, output: Output) -> int:
    """Print a script, or the names that begin with what was typed."""
    if options.names is not None:
        names = list(islice(_iter_matches(url, options.names), _MAX_NAMES)) if url else []
        if options.json:
            output.json({"names": names})
        for name in [] if options.json else names:
            output.line(name)
        return 0
    if options.shell is None:
        raise BadName(f"completion needs the name of a shell: {', '.join(SHELLS)}")
    script = render_script(options.shell, list(iter_commands(options.build_parser())))
    if options.json:
        output.json({"shell": options.shell, "script": script})
        return 0
    for line in script.splitlines():
        output.line(line)
    return 0


def _iter_matches(url: str, begin: str) -> Iterator[str]:
    """Yield the snapshots and tags whose names begin with a text, in natural order."""
    store = open_store(url, read_only=True)
    found = [*iter_user_names(store, begin), *iter_tags(store)]
    names = {each.name for each in found if isinstance(each, CommittedSnapshot | Tag)}
    yield from sorted((name for name in names if name.startswith(begin)), key=natural_order)
