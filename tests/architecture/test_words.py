"""One thing, one word: a type name means one type, and a verb says what a call costs."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Final

import pytest

from tests.architecture.sources import Source, parse_source, read_sources

# `find_` looks in memory; what reads a store, a filesystem or other ranks is called `read_`, `list_`, `locate_` ...
_OUTSIDE: Final = {"ObjectStore", "Repository", "Store", "Files", "Collectives", "PathLike"}
# Part of the contract that people who write object stores rely on, or of PyTorch's own vocabulary.
_ALLOWED: Final = {"find_free_bytes", "find_spec"}


def find_shared_names(sources: Iterable[Source]) -> list[str]:
    """Return a line for each public type name that several modules define."""
    homes: dict[str, list[str]] = defaultdict(list)
    for source in sources:
        for name in _iter_types(source.tree):
            homes[name].append(source.in_package)
    return [f"{name}: {', '.join(found)}" for name, found in sorted(homes.items()) if len(found) > 1]


def _iter_types(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        match node:
            case ast.ClassDef(name=name):
                found = name
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if not _is_type_variable(value):
                found = name
            case ast.AnnAssign(target=ast.Name(id=name), annotation=ast.Name(id="TypeAlias")):
                found = name
            case _:
                continue
        if found[0].isupper() and not found.isupper():
            yield found


def _is_type_variable(value: ast.expr) -> bool:
    return (
        isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id in ("TypeVar", "ParamSpec")
    )


def find_costly_finders(sources: Iterable[Source]) -> list[str]:
    """Return a line for each public function called `find_...` that is given a store, files or other ranks."""
    return [
        f"{source.path}:{node.lineno}: {node.name} is given {outside}"
        for source in sources
        for node in ast.walk(source.tree)
        if isinstance(node, ast.FunctionDef) and node.name.startswith("find_") and node.name not in _ALLOWED
        for outside in sorted(_iter_outside(node))
    ]


def _iter_outside(node: ast.FunctionDef) -> set[str]:
    arguments = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
    names = {
        child.id if isinstance(child, ast.Name) else child.attr
        for argument in arguments
        if argument.annotation is not None
        for child in ast.walk(argument.annotation)
        if isinstance(child, ast.Name | ast.Attribute)
    }
    return names & _OUTSIDE


def test_a_public_type_name_means_one_type() -> None:
    assert find_shared_names(read_sources("src/holdfast")) == []


def test_what_is_called_find_looks_in_memory() -> None:
    assert find_costly_finders(read_sources("src/holdfast")) == []


def test_a_type_name_of_two_modules_is_reported() -> None:
    first = parse_source("src/holdfast/a.py", "class Part: ...\nT = TypeVar('T')\nLIMIT = 1\n_Own = int")
    second = parse_source("src/holdfast/b.py", "Part = tuple[int, int]\nT = TypeVar('T')\nLIMIT = 1\n_Own = int")

    assert find_shared_names([first, second]) == ["Part: a.py, b.py"]


@pytest.mark.parametrize("annotation", ["ObjectStore", "Repository | None", "os.PathLike[str]"])
def test_a_finder_that_is_given_a_store_is_reported(annotation: str) -> None:
    source = parse_source("src/holdfast/a.py", f"def find_it(name: str, where: {annotation}) -> None: ...")

    assert len(find_costly_finders([source])) == 1


def test_a_finder_in_memory_is_not_reported() -> None:
    source = parse_source(
        "src/holdfast/a.py", "def find_it(names: list[str]) -> None: ...\ndef read_it(store: ObjectStore): ..."
    )

    assert find_costly_finders([source]) == []
