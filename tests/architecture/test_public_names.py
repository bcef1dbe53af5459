"""Public names and command-line options change only together with their frozen lists."""

from __future__ import annotations

import argparse
import ast
from collections.abc import Iterable
from importlib import import_module

import pytest

from docs.generate import iter_arguments, iter_verbs
from tests.architecture.frozen import FOLDER, LISTS, list_public_names
from tests.architecture.sources import Source, iter_imports, parse_source, read_sources


def find_violations(frozen: Iterable[str], actual: Iterable[str]) -> list[str]:
    """Return a line for each name that is frozen and gone, or there and not frozen."""
    before, now = set(frozen), set(actual)
    return [
        *(f"gone: {name}" for name in sorted(before - now)),
        *(f"not frozen: {name}" for name in sorted(now - before)),
    ]


def find_face_violations(face: Source) -> list[str]:
    """Return a line for each name on which the lists of the lazy face disagree."""
    values = {
        target.id: node.value
        for node in ast.walk(face.tree)
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name)
    }
    exported = set(ast.literal_eval(values["__all__"])) - {"__version__"}
    homes = ast.literal_eval(values["_HOME"])
    loadable = {f"{homes.get(name, 'holdfast.errors')}.{name}" for name in exported}
    typed = {found.full for found in iter_imports(face) if found.typing_only}
    return [
        *(f"in _HOME, not in __all__: {name}" for name in sorted(homes.keys() - exported)),
        *(f"in __all__ or TYPE_CHECKING, not in both: {name}" for name in sorted(loadable ^ typed)),
    ]


@pytest.mark.parametrize("name", LISTS)
def test_the_surface_is_the_frozen_one(name: str) -> None:
    frozen = (FOLDER / name).read_text(encoding="utf-8").splitlines()

    found = find_violations(frozen, LISTS[name]())

    assert found == [], "if this is meant: python -m tests.architecture.frozen"


def test_every_public_name_can_be_loaded() -> None:
    for path in list_public_names():
        module, _, name = path.rpartition(".")
        assert hasattr(import_module(module), name), path


def test_a_name_that_is_not_public_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        getattr(import_module("holdfast"), "no_such_name")  # noqa: B009  # the point is to ask at run time


def test_the_lists_of_the_face_agree() -> None:
    (face,) = [source for source in read_sources("src/holdfast") if source.module == "holdfast"]

    assert find_face_violations(face) == []


def test_a_changed_surface_is_reported() -> None:
    assert find_violations(["holdfast.open", "holdfast.save"], ["holdfast.open", "holdfast.load"]) == [
        "gone: holdfast.save",
        "not frozen: holdfast.load",
    ]


def test_a_changed_option_is_reported() -> None:
    parser = argparse.ArgumentParser(prog="holdfast")
    verb = parser.add_subparsers().add_parser("ls")
    verb.add_argument("prefix", nargs="?")
    frozen = [spelled for _, each in iter_verbs(parser) for spelled, _ in iter_arguments(each)]

    verb.add_argument("-j", "--json", action="store_true")
    actual = [spelled for _, each in iter_verbs(parser) for spelled, _ in iter_arguments(each)]

    assert find_violations(frozen, actual) == ["not frozen: -j, --json"]


def test_a_face_whose_lists_differ_is_reported() -> None:
    face = (
        "if TYPE_CHECKING:\n    from holdfast.errors import NotFound, Corrupt\n"
        "__all__ = ['NotFound', '__version__', 'load']\n"
        "_HOME: Final = {'load': 'holdfast.snapshot.load', 'open': 'holdfast.snapshot.open'}\n"
    )

    assert find_face_violations(parse_source("src/holdfast/__init__.py", face)) == [
        "in _HOME, not in __all__: open",
        "in __all__ or TYPE_CHECKING, not in both: holdfast.errors.Corrupt",
        "in __all__ or TYPE_CHECKING, not in both: holdfast.snapshot.load.load",
    ]
