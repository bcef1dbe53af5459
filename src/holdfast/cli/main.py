"""The command line's frame: which store is meant, which verb runs, and how a run ends."""

from __future__ import annotations

import os
import time
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Sequence
from importlib import import_module
from types import ModuleType
from typing import Final

from holdfast import __version__
from holdfast.cli.grammar import add_verbs
from holdfast.cli.output import Output
from holdfast.cli.verb import Parser, format_examples
from holdfast.errors import BadName, Corrupt, HoldfastError, NotAStore, NotFound
from holdfast.objects.url import holds_config, locate_store_root
from holdfast.repo.format.layout import MANIFESTS

ERROR: Final = 2
INTERRUPTED: Final = 130
BROKEN_PIPE: Final = 141
"""What a shell reports for a program that a signal ended, as SIGPIPE ends most."""

# A verb's module is loaded when the verb runs: `ls` must not pay for what `put` needs.
_HOME: Final = {
    "init": "holdfast.cli.verbs.names",
    "ls": "holdfast.cli.verbs.names",
    "tag": "holdfast.cli.verbs.names",
    "rm": "holdfast.cli.verbs.rm",
    "show": "holdfast.cli.verbs.show",
    "diff": "holdfast.cli.verbs.diff",
    "put": "holdfast.cli.verbs.put",
    "get": "holdfast.cli.verbs.get",
    "cat": "holdfast.cli.verbs.get",
    "check": "holdfast.cli.verbs.check",
    "doctor": "holdfast.cli.verbs.doctor",
    "du": "holdfast.cli.verbs.space",
    "prune": "holdfast.cli.verbs.space",
    "gc": "holdfast.cli.verbs.space",
    "repair": "holdfast.cli.verbs.repair",
    "copy": "holdfast.cli.verbs.repair",
    "cache": "holdfast.cli.verbs.cache",
    "run": "holdfast.cli.runs.run",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0 fine, 1 findings or differences, 2 error."""
    output = Output()
    parser = build_parser()
    options = parser.parse_args(argv)
    if options.verb is None:
        parser.print_help()
        return ERROR
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
    url = _choose_init_place(options) if options.verb == "init" else _choose_store(options)
    if options.verb == "copy":
        options.to = _verify_lasting(options.to)
    # For what only some runs of a verb need: torch, to name the largest.
    options.load = _load
    run: Callable[[Namespace, str, Output], int] = getattr(_load(_HOME[options.verb]), f"run_{options.verb}")
    return run(options, url, output)


def _load(module: str) -> ModuleType:
    """Import a module of Holdfast; raises HoldfastError if a package that it needs cannot be imported."""
    try:
        return import_module(module)
    except (ImportError, OSError) as error:  # an OSError is a shared library that is missing or broken
        package = (getattr(error, "name", "") or "a package").partition(".")[0]
        if package == __package__.partition(".")[0]:
            raise  # our own mistake
        if isinstance(error, ModuleNotFoundError):
            why = f"which is not installed; install it with `pip install {package}`"
        else:
            why = f"which is installed but cannot be imported: {str(error).splitlines()[0]}"
        raise HoldfastError(f"this needs {package}, {why}") from error


def _choose_store(options: Namespace) -> str:
    """Return the store that is meant: the given one, else the environment's, else the nearest one."""
    given: str | None = options.store
    url = given if given is not None else os.environ.get("HOLDFAST_STORE", "")
    if url or given is not None:
        return _verify_lasting(url)
    here = os.getcwd()
    root = locate_store_root(here)
    if root is None:
        raise NotAStore(
            f"no store is given, and none is at or above {here};"
            " use -s STORE, set HOLDFAST_STORE, or make one with `holdfast init PATH`" + _find_misplaced(options)
        )
    return root


def _find_misplaced(options: Namespace) -> str:
    """Say so if a store was given where a verb takes something else."""
    values = [value for value in vars(options).values() if isinstance(value, str)]
    store = next((value for value in values if holds_config(value)), None)
    return "" if store is None else f"; {store} is one, so type `holdfast -s {store} {options.verb}`"


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
        output.note(_advise(error))
    elif isinstance(error, OSError) and error.strerror:
        output.note(f"{error.filename}: {error.strerror}" if error.filename is not None else error.strerror)
    else:
        output.note(f"{type(error).__name__}: {error} (this is a bug in Holdfast; please report it)")
    try:
        output.flush()
    except OSError:
        output.abandon()


def _advise(error: HoldfastError) -> str:
    """Return the text of an error, with the next step if it does not say one."""
    text = str(error)
    if isinstance(error, Corrupt) and "check" not in text:
        return f"{text}; run `holdfast check`"
    if isinstance(error, NotFound) and error.name.startswith(MANIFESTS):
        return f"{text}; the snapshot was deleted just now, or its manifest is lost: `holdfast check` tells which"
    return text


def build_parser() -> ArgumentParser:
    """Return the grammar of the whole command line."""
    parser = Parser(
        prog="holdfast",
        description="Keep files and PyTorch state in a content-addressed store.",
        epilog=format_examples(
            "holdfast init ckpts", "holdfast -s ckpts put run1/step-100 model.pt", "holdfast -s ckpts ls"
        ),
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
    add_verbs(parser)
    return parser
