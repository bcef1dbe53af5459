"""The frozen lists: public names and command-line options, one per line in the files beside this one.

Changing a list is the review of a changed surface: `python -m tests.architecture.frozen` rewrites them.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from inspect import isclass, isfunction
from pathlib import Path
from types import ModuleType
from typing import Final

from docs.generate import iter_arguments, iter_verbs
from tests.architecture.sources import PACKAGE, ROOT, parse_source

FOLDER: Final = Path(__file__).parent
# The faces for users and for torch.distributed.checkpoint; the contract and its suite for people who write stores.
PUBLIC_FILES: Final = ("__init__.py", "dcp.py", "objects/protocol.py", "testing/*.py")


def list_public_names() -> list[str]:
    """Return `module.name` for each name that a public file offers."""
    files = [file for pattern in PUBLIC_FILES for file in (ROOT / PACKAGE).glob(pattern)]
    modules = [parse_source(file.relative_to(ROOT).as_posix(), "").module for file in files]
    return sorted(f"{module}.{name}" for module in modules for name in _list_names(import_module(module)))


def _list_names(module: ModuleType) -> list[str]:
    """Return `__all__`, or the classes and functions that a module defines."""
    defined = [
        name
        for name, value in vars(module).items()
        if (isclass(value) or isfunction(value)) and value.__module__ == module.__name__ and not name.startswith("_")
    ]
    return getattr(module, "__all__", defined)


def list_cli_options() -> list[str]:
    """Return `verb: argument` for each argument of each verb, and each verb alone; none while there is no CLI."""
    if not (ROOT / PACKAGE / "cli/main.py").is_file():
        return []
    parser = import_module("holdfast.cli.main").build_parser()
    lines = []
    for words, verb in iter_verbs(parser):
        lines += [words, *(f"{words}: {spelled}" for spelled, _ in iter_arguments(verb))]
    return sorted(lines)


LISTS: Final[dict[str, Callable[[], list[str]]]] = {
    "public_names.txt": list_public_names,
    "cli_options.txt": list_cli_options,
}


def main() -> None:
    """Rewrite every list from the code."""
    for name, list_lines in LISTS.items():
        (FOLDER / name).write_text("".join(f"{line}\n" for line in list_lines()), encoding="utf-8")


if __name__ == "__main__":
    main()
