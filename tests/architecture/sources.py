"""Python files as the guards see them: path, text, syntax tree and imports."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
PACKAGE: Final = "src/holdfast/"


@dataclass(frozen=True, slots=True)
class Source:
    """One parsed file; `path` is relative to the root of the project, with slashes."""

    path: str
    text: str
    tree: ast.Module

    @property
    def in_package(self) -> str:
        """The path below src/holdfast, as the rules spell it."""
        return self.path.removeprefix(PACKAGE)

    @property
    def unit(self) -> str:
        """The top-level module or folder of the package it belongs to; empty for the public face."""
        first = self.in_package.split("/")[0].removesuffix(".py")
        return "" if first == "__init__" else first

    @property
    def room(self) -> str:
        """The sub-package or module below that; empty for the package's own face."""
        below = self.in_package.split("/")[1:]
        first = below[0].removesuffix(".py") if below else ""
        return "" if first == "__init__" else first

    @property
    def module(self) -> str:
        """The dotted name by which it is imported."""
        parts = ["holdfast", *self.in_package.removesuffix(".py").split("/")]
        return ".".join(parts).removesuffix(".__init__")


@dataclass(frozen=True, slots=True)
class Import:
    """One imported name: `import module` (name empty) or `from module import name`."""

    line: int
    module: str
    name: str
    late: bool
    """Stands inside a function."""
    typing_only: bool
    """Stands under `if TYPE_CHECKING`."""

    @property
    def full(self) -> str:
        """Module and name joined."""
        return f"{self.module}.{self.name}" if self.name else self.module


def parse_source(path: str, text: str) -> Source:
    """Parse `text` as if it stood at `path`."""
    return Source(path, text, ast.parse(text, filename=path))


def read_sources(*folders: str, root: Path = ROOT) -> list[Source]:
    """Read every Python file below `folders`; a folder that does not exist holds none."""
    files = sorted(file for folder in folders for file in (root / folder).rglob("*.py"))
    return [parse_source(file.relative_to(root).as_posix(), file.read_text(encoding="utf-8")) for file in files]


def iter_imports(source: Source) -> Iterator[Import]:
    """Yield every import of a file, at the top or not."""
    yield from _iter_imports(source.tree.body, late=False, typing_only=False)


def _iter_imports(nodes: Iterable[ast.AST], *, late: bool, typing_only: bool) -> Iterator[Import]:
    for node in nodes:
        match node:
            case ast.Import(names=names):
                for alias in names:
                    yield Import(node.lineno, alias.name, "", late, typing_only)
            case ast.ImportFrom(module=module, names=names, level=level):
                for alias in names:
                    yield Import(node.lineno, "." * level + (module or ""), alias.name, late, typing_only)
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Lambda():
                yield from _iter_imports(ast.iter_child_nodes(node), late=True, typing_only=typing_only)
            case ast.If(test=ast.Name(id="TYPE_CHECKING"), body=body, orelse=orelse):
                yield from _iter_imports(body, late=late, typing_only=True)
                yield from _iter_imports(orelse, late=late, typing_only=typing_only)
            case _:
                yield from _iter_imports(ast.iter_child_nodes(node), late=late, typing_only=typing_only)
