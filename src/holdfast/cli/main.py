"""The entry point: chooses the store, runs the verb, reports errors and returns the exit code."""

from __future__ import annotations

import os
import sys
import time
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Collection, Sequence
from typing import Final

from holdfast import __version__
from holdfast.cli.grammar import add_verbs
from holdfast.cli.output import Output
from holdfast.cli.verb import Parser, format_examples, join_descending, split_command
from holdfast.errors import BadExpression, BadName, Corrupt, HoldfastError, NotAStore, NotFound
from holdfast.objects.disk_cache import DiskCache
from holdfast.objects.url import holds_config, locate_store_root, verify_path
from holdfast.repo.format.layout import MANIFESTS
from holdfast.texts import mask_url

ERROR: Final = 2
INTERRUPTED: Final = 130
_STORELESS: Final = ("completion", "help")
"""Verbs that work without a store."""
BROKEN_PIPE: Final = 141
"""The exit code that a shell reports for a program killed by SIGPIPE."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0 success, 1 findings or differences, 2 error."""
    output = Output()
    words = sys.argv[1:] if argv is None else argv
    started = time.monotonic()
    try:
        if "_ARGCOMPLETE" in os.environ:
            _answer_shell()
        parser = build_parser(words)
        own, command = split_command(words, "bisect")
        options = parser.parse_args(join_descending(own))
        if options.verb is None:
            parser.print_help()
            return ERROR
        options.command = command
        output.choose_color(options.color, is_refused=_refuses_color())
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
        _report(error, output, debug="--debug" in words)
        return ERROR
    return code


def _answer_shell() -> None:
    """Tell the shell what may follow the command line that it has put into a variable, and end the process."""
    from holdfast.cli.verbs.completion import answer_shell

    answer_shell(build_parser(os.environ["COMP_LINE"].split()), _choose_store)


def _run(options: Namespace, output: Output) -> int:
    url = _choose_url(options)
    options.build_parser = build_parser
    if options.verb == "copy":
        options.to = _verify_not_memory(options.to)
    output.cache = _choose_cache()
    options.variables, options.cache_folder = dict(os.environ), _choose_cache_folder()
    run_verb: Callable[[Namespace, str, Output], int] = options.run_verb
    return run_verb(options, url, output)


def _choose_url(options: Namespace) -> str:
    """Return the URL of the store, or an empty text if the verb needs none with these options (`needs_store`)."""
    if options.verb == "init":
        return _choose_init_path(options)
    if options.verb == "doctor" and options.place is not None:
        if options.store is not None:
            given = f"{mask_url(options.store)!r} (-s) and {mask_url(options.place)!r}"
            raise BadName(f"doctor: both {given} are given; give only one")
        return _verify_not_memory(options.place)
    needs_store: Callable[[Namespace], bool] | None = vars(options).get("needs_store")
    return "" if needs_store and not needs_store(options) else _choose_store(options)


def _choose_store(options: Namespace) -> str:
    """Return the URL of the store: of -s, else of the environment, else of the nearest store above."""
    given: str | None = options.store
    url = given if given is not None else os.environ.get("HOLDFAST_STORE", "")
    if url or given is not None:
        return _verify_not_memory(url)
    here = os.getcwd()
    root = locate_store_root(here)
    if root is None and options.verb in _STORELESS:
        return ""
    if root is None:
        raise NotAStore(
            f"no store was given, and there is none at or above {here};"
            " use -s STORE, set HOLDFAST_STORE, or create one with `holdfast init PATH`"
            + _hint_misplaced_store(options)
        )
    return root


def _choose_cache() -> DiskCache | None:
    """Return the cache for what is read from buckets; None unless HOLDFAST_CACHE_DIR names a directory."""
    given = os.environ.get("HOLDFAST_CACHE_DIR", "")
    return DiskCache(verify_path(os.path.expanduser(given))) if given else None


def _choose_cache_folder() -> str:
    """Return the folder for what may be deleted at any time; empty if the user has none."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    parent = given if os.path.isabs(given) else os.path.expanduser("~/.cache")
    return os.path.join(parent, "holdfast") if os.path.isabs(parent) else ""


def _refuses_color() -> bool:
    """Return whether the user wants no colours: by NO_COLOR, or with a terminal that has none."""
    return bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb"


def _hint_misplaced_store(options: Namespace) -> str:
    """Return a hint if a path of a store was given as another argument; an empty text otherwise."""
    values = [value for value in vars(options).values() if isinstance(value, str)]
    store = next((value for value in values if holds_config(value)), None)
    return "" if store is None else f"; {store} is a store, so type `holdfast -s {store} {options.verb}`"


def _choose_init_path(options: Namespace) -> str:
    """Return where to create a store; unlike other verbs, `init` never searches above the current directory."""
    if options.path is not None and options.store is not None:
        raise BadName(
            f"init: both {mask_url(options.store)!r} (-s) and {mask_url(options.path)!r} are given; give only one"
        )
    given = options.path if options.path is not None else options.store
    url = given if given is not None else os.environ.get("HOLDFAST_STORE", "") or os.getcwd()
    return _verify_not_memory(url)


def _verify_not_memory(url: str) -> str:
    if url.startswith("memory:"):
        raise BadName(f"{mask_url(url)} exists only in the process that opened it; the command line needs a path")
    return os.path.expanduser(url)


def _report(error: Exception, output: Output, *, debug: bool) -> None:
    """Print one line about an error; a traceback only for bugs, or with --debug."""
    package = _find_broken_package(error)
    if debug or not (package or isinstance(error, HoldfastError | OSError)):
        output.trace(error)
    if package:
        output.note(_explain_broken_package(package, error))
    elif isinstance(error, BadExpression) and error.expression:
        output.note(error.sentence)
        output.point(error.expression, error.position)
    elif isinstance(error, HoldfastError):
        output.note(_advise(error))
    elif isinstance(error, OSError) and error.strerror:
        output.note(f"{error.filename}: {error.strerror}" if error.filename is not None else error.strerror)
    else:
        output.note(f"{type(error).__name__}: {error} (this is a bug in Holdfast; please report it)")
    try:
        output.flush()
    except OSError:
        output.abandon()


def _find_broken_package(error: Exception) -> str:
    """Return the package of others whose import failed, or an empty text if the error is another one."""
    # An OSError is a shared library that is missing or broken, if it was raised while a module was imported.
    if not isinstance(error, ImportError) and not (isinstance(error, OSError) and _is_from_import(error)):
        return ""
    package = (getattr(error, "name", "") or "a package").partition(".")[0]
    return "" if package == __package__.partition(".")[0] else package


def _is_from_import(error: Exception) -> bool:
    step = error.__traceback__
    while step and step.tb_frame.f_code.co_name != "<module>":
        step = step.tb_next
    return step is not None


def _explain_broken_package(package: str, error: Exception) -> str:
    if isinstance(error, ModuleNotFoundError):
        return f"this needs {package}, which is not installed; install it with `pip install {package}`"
    return f"this needs {package}, which is installed but cannot be imported: {str(error).splitlines()[0]}"


def _advise(error: HoldfastError) -> str:
    """Return the text of an error; add the next step if the text has none."""
    text = str(error)
    if isinstance(error, Corrupt) and "check" not in text:
        return f"{text}; run `holdfast check`"
    if isinstance(error, NotFound) and error.name.startswith(MANIFESTS):
        return f"{text}; the snapshot was deleted just now, or its manifest is lost: `holdfast check` reports which"
    return text


def build_parser(words: Collection[str] | None = None) -> ArgumentParser:
    """Return the parser of the command line; with `words`, the verbs that are not in it have no arguments yet."""
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
        help="path or URL of the store; else $HOLDFAST_STORE, else the nearest store at or above the current directory."
        " For s3://, gs:// and az://, credentials and endpoints come from the environment, and $HOLDFAST_CACHE_DIR is a"
        " directory that keeps what is read",
    )
    parser.add_argument(
        "--color",
        metavar="WHEN",
        choices=("auto", "always", "never"),
        default="auto",
        help="use colours: auto (on a terminal, unless NO_COLOR is set), always or never",
    )
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    parser.add_argument("--profile", action="store_true", help="print the time of each stage to standard error")
    parser.add_argument("--version", action="version", version=f"holdfast {__version__}", help="print the version")
    add_verbs(parser, words)
    return parser
