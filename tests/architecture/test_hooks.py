"""A test that kills, fails or pauses somewhere in the code proves that this happens: it uses `tests.kit.hooking`."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Final

from tests.architecture.sources import Source, parse_source, read_sources

REPLACING: Final = ("setattr", "patch.object", "patch.multiple", "mock.patch")
"""How the names of functions end that put something in the place of an attribute."""
HURTING: Final = ("os.kill", "os._exit", "os.abort", "pytest.fail", "time.sleep", "raise_signal", ".wait")
"""How the names of functions end that kill, fail or pause."""
HOOKING: Final = "tests/kit/hooking.py"


def find_unproved(sources: Iterable[Source]) -> list[str]:
    """Return the lines that replace an attribute by a function of the same file that kills, fails or pauses.

    The function may be the result of another one of the file. An assignment counts if it replaces an attribute of
    something that was imported.
    """
    return [
        f"{source.path}:{line}: use `hook` or `hooked` of {HOOKING}, which prove that the function is called"
        for source in sources
        if source.path != HOOKING
        for line in sorted(set(_iter_lines(source.tree)))
    ]


def _iter_lines(tree: ast.Module) -> Iterator[int]:
    functions = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    imported = {alias.asname or alias.name for node in imports for alias in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(REPLACING):
            given = [*node.args, *(keyword.value for keyword in node.keywords)]
            # A mock with a side effect fails, whatever that is.
            if any(keyword.arg == "side_effect" for keyword in node.keywords) or _any_hurts(given, functions):
                yield node.lineno
        if isinstance(node, ast.Assign) and _any_hurts([node.value], functions):
            yield from (each.lineno for each in node.targets if _is_attribute_of(each, imported))


def _any_hurts(values: Iterable[ast.expr], functions: Mapping[str, ast.FunctionDef]) -> bool:
    return any(_hurts(function) for each in values if (function := _find_function(each, functions)) is not None)


def _is_attribute_of(target: ast.expr, names: Collection[str]) -> bool:
    return isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id in names


def _find_function(value: ast.expr, functions: Mapping[str, ast.FunctionDef]) -> ast.FunctionDef | ast.Lambda | None:
    """Return the function that an expression means: itself, by name, or as the result of a function that makes it."""
    named = value.func if isinstance(value, ast.Call) else value
    if isinstance(named, ast.Name):
        return functions.get(named.id)
    return value if isinstance(value, ast.Lambda) else None


def _hurts(function: ast.FunctionDef | ast.Lambda) -> bool:
    return any(
        isinstance(node, ast.Raise) or (isinstance(node, ast.Call) and ast.unparse(node.func).endswith(HURTING))
        for node in ast.walk(function)
    )


def test_whatever_kills_fails_or_pauses_in_a_test_proves_that_it_is_called() -> None:
    assert find_unproved(read_sources("tests")) == []


def test_a_function_that_may_never_be_called_is_found() -> None:
    planted = """
from holdfast import module

def refuse(*_):
    raise OSError("on cue")

def count(*_):
    seen.append(1)

def fail_by(error):
    def fail(*_):
        raise error
    return fail

def test_a(monkeypatch, hook):
    monkeypatch.setattr(module, "one", refuse)
    monkeypatch.setattr(module, "two", lambda: os.kill(os.getpid(), SIGKILL))
    with mock.patch.object(module, "three", lambda: go_on.wait(9)):
        act()
    with mock.patch.multiple(module, four=refuse):
        act()
    monkeypatch.setattr(module, "five", count)
    hook(module, "six", refuse)
    monkeypatch.setattr(module, "seven", fail_by(OSError()))
    with mock.patch.object(module, "eight", side_effect=OSError()):
        act()
    module.nine = refuse
    server.fault_of = refuse
"""

    found = find_unproved([parse_source("tests/unit/test_planted.py", planted)])

    assert [line.split(":")[1] for line in found] == ["16", "17", "18", "20", "24", "25", "27"]
