"""A test that kills, fails or pauses somewhere in the code proves that this happens: it uses `tests.kit.hooking`."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from typing import Final

from tests.architecture.sources import Source, parse_source, read_sources

REPLACING: Final = ("setattr", "patch.object", "patch.multiple", "mock.patch")
"""How the names of functions end that put something in the place of an attribute."""
HURTING: Final = ("os.kill", "os._exit", "os.abort", "pytest.fail", "time.sleep", "raise_signal", ".wait")
"""How the names of functions end that kill, fail or pause."""
HOOKING: Final = "tests/kit/hooking.py"


def find_unproved(sources: Iterable[Source]) -> list[str]:
    """Return the lines that replace an attribute by a function of the same file that kills, fails or pauses."""
    return [
        f"{source.path}:{line}: use `hook` or `hooked` of {HOOKING}, which prove that the function is called"
        for source in sources
        if source.path != HOOKING
        for line in _iter_lines(source.tree)
    ]


def _iter_lines(tree: ast.Module) -> Iterator[int]:
    functions = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(REPLACING):
            given = [*node.args, *(keyword.value for keyword in node.keywords)]
            found = [functions.get(each.id) if isinstance(each, ast.Name) else each for each in given]
            if any(isinstance(each, ast.FunctionDef | ast.Lambda) and _hurts(each) for each in found):
                yield node.lineno


def _hurts(function: ast.FunctionDef | ast.Lambda) -> bool:
    return any(
        isinstance(node, ast.Raise) or (isinstance(node, ast.Call) and ast.unparse(node.func).endswith(HURTING))
        for node in ast.walk(function)
    )


def test_whatever_kills_fails_or_pauses_in_a_test_proves_that_it_is_called() -> None:
    assert find_unproved(read_sources("tests")) == []


def test_a_function_that_may_never_be_called_is_found() -> None:
    planted = """
def refuse(*_):
    raise OSError("on cue")

def count(*_):
    seen.append(1)

def test_a(monkeypatch, hook):
    monkeypatch.setattr(module, "one", refuse)
    monkeypatch.setattr(module, "two", lambda: os.kill(os.getpid(), SIGKILL))
    with mock.patch.object(module, "three", lambda: go_on.wait(9)):
        act()
    with mock.patch.multiple(module, four=refuse):
        act()
    monkeypatch.setattr(module, "five", count)
    hook(module, "six", refuse)
"""

    found = find_unproved([parse_source("tests/unit/test_planted.py", planted)])

    assert [line.split(":")[1] for line in found] == ["9", "10", "11", "13"]
