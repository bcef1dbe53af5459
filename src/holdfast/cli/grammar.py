"""The list of verbs; the module of a verb declares its arguments, and is imported only if the verb was typed."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Collection
from typing import Final

from holdfast.cli.verb import add_verb

_SUMMARIES: Final = {
    "init": "create an empty store",
    "ls": "list snapshots",
    "show": "show the contents of a snapshot, and its packs",
    "log": "show which snapshots were saved from which",
    "follow": "print snapshots as they are committed",
    "bisect": "find the first snapshot of a series that fails a test",
    "diff": "show the differences between two snapshots",
    "put": "save files as a snapshot",
    "get": "write the entries of a snapshot as files",
    "cat": "write one entry to standard output",
    "import": "save a checkpoint of another library as a snapshot",
    "verify-import": "compare files with what was imported from them",
    "export": "write a snapshot to files of other libraries",
    "verify-export": "compare exported files with their receipt",
    "tag": "list, set, move or delete tags",
    "rm": "delete snapshots",
    "du": "show the disk usage of snapshots",
    "prune": "delete old snapshots by rule",
    "gc": "free space that no snapshot needs",
    "check": "check the store for damage",
    "repair": "repair a damaged store",
    "copy": "copy snapshots to another store",
    "mirror": "upload what a mirror of the store lacks",
    "cache": "manage compiled graphs",
    "run": "list recorded runs, and find where two diverge",
    "serve": "show the store in a browser",
    "doctor": "check the store and its filesystem",
    "completion": "print the completion script of a shell",
    "help": "show the help page of a verb",
}
"""Every verb with its summary, in the order in which help lists them."""


def add_verbs(parser: ArgumentParser, words: Collection[str] | None) -> None:
    """Add every verb by name and summary, and declare the arguments of those in `words`; None declares all."""
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", title="verbs")
    for name, summary in _SUMMARIES.items():
        verb = add_verb(verbs, name, summary)
        if words is None or name in words:
            _declare(name, verb)


def _declare(name: str, parser: ArgumentParser) -> None:  # noqa: C901 - a table, written as imports that mypy follows
    """Import the module of a verb and let it declare the verb."""
    match name:
        case "init":
            from holdfast.cli.verbs.names import declare_init as declare
        case "ls":
            from holdfast.cli.verbs.ls import declare_ls as declare
        case "show":
            from holdfast.cli.verbs.show import declare_show as declare
        case "log":
            from holdfast.cli.verbs.log import declare_log as declare
        case "follow":
            from holdfast.cli.verbs.follow import declare_follow as declare
        case "bisect":
            from holdfast.cli.verbs.bisect import declare_bisect as declare
        case "diff":
            from holdfast.cli.verbs.diff import declare_diff as declare
        case "put":
            from holdfast.cli.verbs.files import declare_put as declare
        case "get":
            from holdfast.cli.verbs.files import declare_get as declare
        case "cat":
            from holdfast.cli.verbs.files import declare_cat as declare
        case "import":
            from holdfast.cli.verbs.formats import declare_import as declare
        case "verify-import":
            from holdfast.cli.verbs.formats import declare_verify_import as declare
        case "export":
            from holdfast.cli.verbs.formats import declare_export as declare
        case "verify-export":
            from holdfast.cli.verbs.formats import declare_verify_export as declare
        case _:
            _declare_upkeep(name, parser)
            return
    declare(parser)


def _declare_upkeep(name: str, parser: ArgumentParser) -> None:  # noqa: C901 - a table, too
    """Do the same for the verbs that look after a store."""
    match name:
        case "tag":
            from holdfast.cli.verbs.names import declare_tag as declare
        case "rm":
            from holdfast.cli.verbs.rm import declare_rm as declare
        case "du":
            from holdfast.cli.verbs.space import declare_du as declare
        case "prune":
            from holdfast.cli.verbs.space import declare_prune as declare
        case "gc":
            from holdfast.cli.verbs.space import declare_gc as declare
        case "check":
            from holdfast.cli.verbs.check import declare_check as declare
        case "repair":
            from holdfast.cli.verbs.repair import declare_repair as declare
        case "copy":
            from holdfast.cli.verbs.repair import declare_copy as declare
        case "mirror":
            from holdfast.cli.verbs.mirror import declare_mirror as declare
        case "cache":
            from holdfast.cli.verbs.cache import declare_cache as declare
        case "run":
            from holdfast.cli.verbs.run import declare_run as declare
        case "serve":
            from holdfast.cli.verbs.serve import declare_serve as declare
        case "doctor":
            from holdfast.cli.verbs.doctor import declare_doctor as declare
        case "completion":
            from holdfast.cli.verbs.completion import declare_completion as declare
        case "help":
            from holdfast.cli.verbs.help import declare_help as declare
        case _:
            raise AssertionError(f"no module declares the verb {name!r}")
    declare(parser)
