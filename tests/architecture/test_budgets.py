"""How long functions may grow, how many parameters they may take, and names that say nothing."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from pathlib import PurePosixPath
from typing import Final

import pytest

from tests.architecture.sources import Source, parse_source, read_sources

# Raising one of these is a change of its own, with its reason.
MAX_FUNCTION_LINES: Final = 60
MAX_POSITIONAL: Final = 6

EMPTY_NAMES: Final = {"utils", "util", "common", "helpers", "helper", "misc", "base", "types", "core", "manager"}


def find_violations(sources: Iterable[Source]) -> list[str]:
    """Return a line for each function or name that breaks a budget."""
    return [line for source in sources for line in _check_source(source)]


def _check_source(source: Source) -> Iterator[str]:
    for part in PurePosixPath(source.path).with_suffix("").parts:
        if part.removeprefix("test").strip("_") in EMPTY_NAMES:
            yield f"{source.path}: {part!r} does not say what is in it"
    for node in ast.walk(source.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for reason in _check_function(node):
                yield f"{source.path}:{node.lineno}: {node.name} {reason}"


def _check_function(node: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str]:
    num_lines = (node.end_lineno or node.lineno) - node.lineno + 1 - _count_docstring(node)
    if num_lines > MAX_FUNCTION_LINES:
        yield f"has {num_lines} lines, at most {MAX_FUNCTION_LINES}"
    names = [argument.arg for argument in (*node.args.posonlyargs, *node.args.args)]
    num_positional = len(names) - (names[:1] in (["self"], ["cls"]))
    if num_positional > MAX_POSITIONAL:
        yield f"takes {num_positional} positional parameters, at most {MAX_POSITIONAL}"


def _count_docstring(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return the lines of a docstring, which may describe many parameters."""
    first = node.body[0]
    return (first.end_lineno or first.lineno) - first.lineno + 1 if ast.get_docstring(node) else 0


def test_every_function_keeps_its_budget() -> None:
    assert find_violations(read_sources("src", "tests", "bench", "docs", "examples")) == []


def _function(num_lines: int, parameters: str = "") -> str:
    return f"def act({parameters}):\n" + "    pass\n" * (num_lines - 1)


@pytest.mark.parametrize(
    ("path", "code", "reason"),
    [
        ("src/holdfast/repo/format/pack.py", _function(61), "act has 61 lines"),
        ("src/holdfast/repo/format/pack.py", "async " + _function(61), "act has 61 lines"),
        ("bench/suites/save.py", _function(2, "a, b, c, d, e, f, g"), "takes 7 positional parameters"),
        ("src/holdfast/repo/utils.py", "", "'utils' does not say"),
        ("src/holdfast/core/pack.py", "", "'core' does not say"),
        ("tests/unit/test_helpers.py", "", "'test_helpers' does not say"),
    ],
)
def test_a_planted_violation_is_reported(path: str, code: str, reason: str) -> None:
    found = find_violations([parse_source(path, code)])

    assert len(found) == 1
    assert reason in found[0]


@pytest.mark.parametrize(
    "code",
    [
        "x = 1\n" * 600,
        _function(60),
        'def act():\n    """Act.\n\n    So.\n    """\n' + "    pass\n" * 59,
        _function(2, "self, a, b, c, d, e, f"),
        _function(2, "a, *, b, c, d, e, f, g"),
    ],
)
def test_what_is_allowed_is_not_reported(code: str) -> None:
    assert find_violations([parse_source("src/holdfast/repo/format/pack.py", code)]) == []
