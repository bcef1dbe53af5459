"""The walks of ARCHITECTURE.md name functions that exist."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from typing import Final

from tests.architecture.sources import ROOT, parse_source, read_sources

PAGE: Final = "ARCHITECTURE.md"
_STEP: Final = re.compile(r"`([a-z_0-9/]+\.py):([A-Za-z_.]+)`")
_LEAST: Final = 25
"""A page with fewer steps than this has lost its walks."""


def find_missing(page: str, trees: Mapping[str, ast.Module]) -> list[str]:
    """Return the steps of a page whose file has no such class, function or method."""
    return [
        f"{path}:{name}"
        for path, name in _STEP.findall(page)
        if path not in trees or not _has(trees[path], name.split("."))
    ]


def _has(tree: ast.Module | ast.ClassDef, names: list[str]) -> bool:
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == names[0]:
            return len(names) == 1 or (isinstance(node, ast.ClassDef) and _has(node, names[1:]))
    return False


def test_every_step_of_a_walk_exists() -> None:
    page = (ROOT / PAGE).read_text(encoding="utf-8")
    trees = {source.in_package: source.tree for source in read_sources("src/holdfast")}

    assert len(_STEP.findall(page)) >= _LEAST
    assert find_missing(page, trees) == []


def test_a_step_that_is_gone_is_reported() -> None:
    tree = parse_source("src/holdfast/repo/engine.py", "class Engine:\n    def run(self): ...\ndef count(): ...").tree
    page = "`repo/engine.py:Engine.run` `repo/engine.py:count` `repo/engine.py:Engine.stop` `repo/gone.py:run`"

    assert find_missing(page, {"repo/engine.py": tree}) == ["repo/engine.py:Engine.stop", "repo/gone.py:run"]
