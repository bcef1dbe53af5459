"""The command line's frame: its grammar, which store is meant, and how a run ends."""

from __future__ import annotations

import os
import time
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Final

from holdfast import __version__
from holdfast.cli.output import Output
from holdfast.errors import BadName, HoldfastError, NotAStore
from holdfast.store.url import find_store_root

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    Verbs = _SubParsersAction[ArgumentParser]

ERROR: Final = 2
INTERRUPTED: Final = 130
BROKEN_PIPE: Final = 141
"""What a shell reports for a program that a signal ended, as SIGPIPE ends most."""

# A verb's module is loaded when the verb runs: `ls` must not pay for what `put` needs.
_HOME: Final = {
    "init": "holdfast.cli.names",
    "ls": "holdfast.cli.names",
    "tag": "holdfast.cli.names",
    "rm": "holdfast.cli.rm",
    "show": "holdfast.cli.show",
    "diff": "holdfast.cli.diff",
    "put": "holdfast.cli.put",
    "get": "holdfast.cli.get",
    "cat": "holdfast.cli.get",
    "check": "holdfast.cli.check",
    "doctor": "holdfast.cli.doctor",
    "du": "holdfast.cli.space",
    "prune": "holdfast.cli.space",
    "gc": "holdfast.cli.space",
    "repair": "holdfast.cli.mend",
    "copy": "holdfast.cli.mend",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0 fine, 1 findings or differences, 2 error."""
    parser = build_parser()
    options = parser.parse_args(argv)
    if options.verb is None:
        parser.print_help()
        return ERROR
    output = Output()
    started = time.monotonic()
    try:
        code = _run(options, output)
        output.flush()
        if options.profile:
            output.profile(time.monotonic() - started)
    except BrokenPipeError:
        output.abandon()
        return BROKEN_PIPE
    except KeyboardInterrupt:
        output.note("interrupted")
        return INTERRUPTED
    except Exception as error:  # noqa: BLE001 - whatever it is, exit code 1 would be read as "findings"
        _report(error, output, debug=options.debug)
        return ERROR
    return code


def _run(options: Namespace, output: Output) -> int:
    url = _choose_init_place(options) if options.verb == "init" else _choose_store(options.store)
    if options.verb == "copy":
        options.to = _verify_lasting(options.to)
    # For what only some runs of a verb need: torch, to name the largest.
    options.load = import_module
    run: Callable[[Namespace, str, Output], int] = getattr(import_module(_HOME[options.verb]), f"run_{options.verb}")
    return run(options, url, output)


def _choose_store(given: str | None) -> str:
    """Return the store that is meant: the given one, else the environment's, else the nearest one."""
    url = given if given is not None else os.environ.get("HOLDFAST_STORE", "")
    if url or given is not None:
        return _verify_lasting(url)
    here = os.getcwd()
    root = find_store_root(here)
    if root is None:
        raise NotAStore(
            f"no store is given, and none is at or above {here};"
            " use -s STORE, set HOLDFAST_STORE, or make one with `holdfast init PATH`"
        )
    return root


def _choose_init_place(options: Namespace) -> str:
    """Return where a store is to be made; unlike other verbs, `init` never looks above the current directory."""
    if options.path is not None and options.store is not None:
        raise BadName(f"init: both {options.store!r} (-s) and {options.path!r} are given; give one place")
    given = options.path if options.path is not None else options.store
    url = given if given is not None else os.environ.get("HOLDFAST_STORE", "") or os.getcwd()
    return _verify_lasting(url)


def _verify_lasting(url: str) -> str:
    if url.startswith("memory:"):
        raise BadName(f"{url} ends with the process that opened it; give the command line a path")
    return os.path.expanduser(url)


def _report(error: Exception, output: Output, *, debug: bool) -> None:
    """Say in one line what went wrong; a traceback is for bugs, and for who asks."""
    if debug or not isinstance(error, HoldfastError | OSError):
        output.trace(error)
    if isinstance(error, HoldfastError):
        output.note(str(error))
    elif isinstance(error, OSError) and error.strerror:
        output.note(f"{error.filename}: {error.strerror}" if error.filename is not None else error.strerror)
    else:
        output.note(f"{type(error).__name__}: {error} (this is a bug in Holdfast; please report it)")
    try:
        output.flush()
    except OSError:
        output.abandon()


def build_parser() -> ArgumentParser:
    """Return the grammar of the whole command line."""
    parser = ArgumentParser(
        prog="holdfast",
        description="Keep files and PyTorch state in a content-addressed store.",
        epilog=_example("holdfast init ckpts", "holdfast -s ckpts put run1/step-100 model.pt", "holdfast -s ckpts ls"),
        formatter_class=RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "-s",
        "--store",
        metavar="STORE",
        help="path of the store; else $HOLDFAST_STORE, else the nearest store at or above the current directory",
    )
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    parser.add_argument("--profile", action="store_true", help="say where the time went, on standard error")
    parser.add_argument("--version", action="version", version=f"holdfast {__version__}", help="print the version")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", title="verbs")
    for add in (
        _add_init,
        _add_ls,
        _add_show,
        _add_diff,
        _add_put,
        _add_get,
        _add_cat,
        _add_tag,
        _add_rm,
        _add_du,
        _add_prune,
        _add_gc,
        _add_check,
        _add_repair,
        _add_copy,
        _add_doctor,
    ):
        add(verbs)
    return parser


def _example(*commands: str) -> str:
    # The lines after the first decide how far a page dedents, so the first one stays empty.
    return "\nExample:\n\n" + "\n".join(f"    {command}" for command in commands)


def _add(verbs: Verbs, name: str, summary: str, *, more: str = "", examples: Sequence[str]) -> ArgumentParser:
    return verbs.add_parser(
        name,
        help=summary,
        description=summary[0].upper() + summary[1:] + "." + (f"\n\n{more}" if more else ""),
        epilog=_example(*examples),
        formatter_class=RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def _add_json(parser: ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")


def _add_init(verbs: Verbs) -> None:
    more = (
        "The place must be empty, or not exist yet. Without PATH it is what -s or\n"
        "$HOLDFAST_STORE names, else the current directory."
    )
    parser = _add(verbs, "init", "make a directory a store", more=more, examples=["holdfast init ckpts"])
    parser.add_argument("path", metavar="PATH", nargs="?", help="the directory; made if need be")


def _add_ls(verbs: Verbs) -> None:
    more = "In natural order: step-99 comes before step-100. Exits with 1 if a name is\ndamaged."
    parser = _add(verbs, "ls", "list snapshots", more=more, examples=["holdfast ls", "holdfast ls run1/ --json"])
    parser.add_argument("prefix", metavar="PREFIX", nargs="?", default="", help="only names that start with this")
    parser.add_argument("-l", "--long", action="store_true", help="whole digests, generations and metadata too")
    _add_json(parser)


def _add_show(verbs: Verbs) -> None:
    more = (
        "NEW is what this save added to the store, INLINE what lies in the manifest.\n"
        "Exits with 1 if a pack is missing."
    )
    examples = [
        "holdfast show run1/step-100",
        "holdfast show run1/step-100 model.weight",
        "holdfast show best --chunks",
    ]
    parser = _add(verbs, "show", "show what a snapshot holds and where it lies", more=more, examples=examples)
    parser.add_argument("name", metavar="NAME", help="a snapshot or a tag")
    parser.add_argument("leaf", metavar="LEAF", nargs="?", help="only this leaf, or what lies below this name")
    parser.add_argument("--chunks", action="store_true", help="list every chunk")
    _add_json(parser)


def _add_diff(verbs: Verbs) -> None:
    more = (
        "Lines begin with + for what only B has, - for what only A has, ~ for what both\n"
        "have and differs. Only manifests are read, unless a tensor was cut or laid out\n"
        "in another way. --values reads what differs and says by how much; NaN in the\n"
        "same place on both sides counts as equal. Exits with 1 if there is a difference."
    )
    examples = ["holdfast diff run1/step-100 run1/step-200", "holdfast diff best last --values --only 'model.*'"]
    parser = _add(verbs, "diff", "say what differs between two snapshots", more=more, examples=examples)
    parser.add_argument("a", metavar="A", help="a snapshot or a tag")
    parser.add_argument("b", metavar="B", help="another one")
    parser.add_argument("--values", action="store_true", help="measure how far values are apart; loads torch")
    parser.add_argument(
        "--only", metavar="PATTERN", action="append", default=[], help="only leaves that fit; may be repeated"
    )
    parser.add_argument("--all", action="store_true", help="print every line, not only the first 50")
    _add_json(parser)


def _add_put(verbs: Verbs) -> None:
    more = (
        "A file becomes the entry of its name. A directory DIR becomes entries DIR/...;\n"
        "DIR/ and . mean what is in them, without the name. Hidden files are included,\n"
        "empty directories are not kept. A link to a file counts as the file; a link to\n"
        "a directory is refused, unless given as LINK/. Putting the same again under the\n"
        "same name writes nothing."
    )
    examples = ["holdfast put run1/step-100 model.pt config.json", "holdfast put data/v1 corpus/ --meta source=web"]
    parser = _add(verbs, "put", "save files as a snapshot", more=more, examples=examples)
    parser.add_argument("name", metavar="NAME", help="the snapshot's name")
    parser.add_argument("paths", metavar="PATH", nargs="+", help="a file or directory")
    parser.add_argument("--overwrite", action="store_true", help="replace what the name holds, all at once")
    parser.add_argument(
        "--meta", metavar="KEY=VALUE", action="append", default=[], help="keep this text with it; may be repeated"
    )


def _add_get(verbs: Verbs) -> None:
    more = (
        "Every byte is verified before it is written, and a file appears whole or not at\n"
        "all. Files in the way are named, all of them, before anything is written. Links\n"
        "below DIR are never followed."
    )
    examples = ["holdfast get run1/step-100 out", "holdfast get best out --only '*.json'"]
    parser = _add(verbs, "get", "write the entries of a snapshot as files", more=more, examples=examples)
    parser.add_argument("name", metavar="NAME", help="a snapshot or a tag")
    parser.add_argument("directory", metavar="DIR", help="where to; made if need be")
    parser.add_argument("--only", metavar="GLOB", help="only entries that match; * matches / too")
    parser.add_argument("--overwrite", action="store_true", help="replace files that are in the way")


def _add_cat(verbs: Verbs) -> None:
    more = "Verified piece by piece: no damaged byte is written."
    examples = ["holdfast cat run1/step-100 config.json"]
    parser = _add(verbs, "cat", "write one entry to standard output", more=more, examples=examples)
    parser.add_argument("name", metavar="NAME", help="a snapshot or a tag")
    parser.add_argument("entry", metavar="ENTRY", help="the entry's name, as `holdfast show` lists it")


def _add_tag(verbs: Verbs) -> None:
    more = "Without arguments: list them. With TAG alone: print the snapshot it points to."
    examples = [
        "holdfast tag best run1/step-100",
        "holdfast tag best run1/step-200 --move",
        "holdfast tag --delete best",
    ]
    parser = _add(verbs, "tag", "list, set, move or delete tags", more=more, examples=examples)
    parser.add_argument("tag", metavar="TAG", nargs="?", help="the tag")
    parser.add_argument("snapshot", metavar="NAME", nargs="?", help="the snapshot it shall point to")
    parser.add_argument("--move", action="store_true", help="even if it points elsewhere now")
    parser.add_argument("--delete", metavar="TAG", help="delete this tag; the snapshot stays")
    _add_json(parser)


def _add_rm(verbs: Verbs) -> None:
    more = "Prints what would be deleted, and acts only with --yes. A snapshot that a tag\npoints to is refused."
    parser = _add(verbs, "rm", "delete snapshots", more=more, examples=["holdfast rm run1/step-100 --yes"])
    parser.add_argument("names", metavar="NAME", nargs="+", help="a snapshot")
    parser.add_argument("--yes", action="store_true", help="delete; without, only say what would be deleted")


def _add_check(verbs: Verbs) -> None:
    more = "Never writes. Exits with 1 if there is an error or a warning; notes are fine."
    examples = ["holdfast check", "holdfast check --read --json"]
    parser = _add(verbs, "check", "look for damage", more=more, examples=examples)
    parser.add_argument("--read", action="store_true", help="read and verify every byte, not only the structure")
    _add_json(parser)


def _add_doctor(verbs: Verbs) -> None:
    more = (
        "Tries out the filesystem with scratch files in the store's directory, which are\n"
        "removed again.\n"
        "Exits with 1 if there is something to worry about."
    )
    parser = _add(verbs, "doctor", "say what the store's place can do", more=more, examples=["holdfast doctor"])
    _add_json(parser)


def _add_yes(parser: ArgumentParser) -> None:
    parser.add_argument("--yes", action="store_true", help="act; without, only say what would be done")


def _add_du(verbs: Verbs) -> None:
    more = (
        "STORED is what a snapshot takes in packs and manifests, SHARED what others use\n"
        "as well, OWN what deleting it can free."
    )
    parser = _add(verbs, "du", "say what takes the space", more=more, examples=["holdfast du", "holdfast du run1/"])
    parser.add_argument("prefix", metavar="PREFIX", nargs="?", default="", help="only names that start with this")
    _add_json(parser)


def _add_prune(verbs: Verbs) -> None:
    more = (
        "A snapshot stays if any rule keeps it; tagged ones always stay. Prints its plan,\n"
        "and acts only with --yes. Space is freed by `holdfast gc`."
    )
    examples = ["holdfast prune --keep-last 3 run1/", "holdfast prune --keep-every 1000 --keep-within 7d run1/ --yes"]
    parser = _add(verbs, "prune", "delete old snapshots by rule", more=more, examples=examples)
    parser.add_argument("prefix", metavar="PREFIX", nargs="?", default="", help="only names that start with this")
    parser.add_argument("--keep-last", metavar="N", type=int, default=0, help="the newest N")
    parser.add_argument("--keep-every", metavar="N", type=int, default=0, help="steps that are multiples of N")
    parser.add_argument("--keep-within", metavar="TIME", help="those younger than TIME: 30m, 12h, 7d, 2w")
    _add_yes(parser)
    _add_json(parser)


def _add_gc(verbs: Verbs) -> None:
    more = (
        "Safe beside saves under way. Where nobody is saving, a local store is freed at\n"
        "once; otherwise files are marked and deleted when nobody can be using them, by\n"
        "this run or the next. Prints its plan, and acts only with --yes."
    )
    parser = _add(verbs, "gc", "free the space of what nothing needs", more=more, examples=["holdfast gc --yes"])
    parser.add_argument("--repack", action="store_true", help="also empty packs that are mostly dead")
    parser.add_argument("--min-age", metavar="TIME", default="1h", help="leave younger files alone (default: 1h)")
    parser.add_argument("--wait", metavar="TIME", default="0s", help="wait so long for saves under way")
    _add_yes(parser)
    _add_json(parser)


def _add_repair(verbs: Verbs) -> None:
    more = (
        "Reads every byte. Rebuilds the index, lists damaged packs as bad, and lets\n"
        "snapshots use other copies in the store. What is lost is named, and never\n"
        "dropped. Prints its plan, and acts only with --yes. Exits with 1 if something is\n"
        "lost."
    )
    parser = _add(verbs, "repair", "mend what can be mended", more=more, examples=["holdfast repair --yes"])
    _add_yes(parser)
    _add_json(parser)


def _add_copy(verbs: Verbs) -> None:
    more = (
        "Only what is missing there moves, verified on both sides; content, digest,\n"
        "metadata and commit time are kept. A copy that was cut off is simply repeated."
    )
    examples = ["holdfast copy run1/step-100 best --to /mnt/backup"]
    parser = _add(verbs, "copy", "copy snapshots to another store", more=more, examples=examples)
    parser.add_argument("names", metavar="NAME", nargs="+", help="a snapshot or a tag")
    parser.add_argument("--to", metavar="STORE", required=True, help="the other store; made if need be")
    parser.add_argument("--overwrite", action="store_true", help="replace what the names hold there")
