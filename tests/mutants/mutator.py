"""Finds the places in a module at which one small change makes a mutant, and makes the change in its text."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

GUARD: Final = "dropped guard call"
KINDS: Final = (
    GUARD, "dropped call", "comparison", "condition", "integer", "slice", "and/or", "not", "arithmetic", "raise",
    "return", "default",
)  # fmt: skip
_GUARDS: Final = re.compile("(?<!a)sync|renew|verify|check|close|(?<!b)lock|validate|flush")
_TEXTS: Final = frozenset({"warn", "debug", "info", "warning", "error", "exception", "log"})
"""Functions whose calls only write texts for people."""
_COMPARISONS: Final[dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]]] = {
    ast.Lt: (ast.LtE,), ast.LtE: (ast.Lt,), ast.Gt: (ast.GtE,), ast.GtE: (ast.Gt,), ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,), ast.Is: (ast.IsNot,), ast.IsNot: (ast.Is,), ast.In: (ast.NotIn,), ast.NotIn: (ast.In,),
}  # fmt: skip
_SIGNS: Final[dict[type[ast.operator], ast.operator]] = {ast.Add: ast.Sub(), ast.Sub: ast.Add()}
IMPORTED: Final = (0, sys.maxsize)
"""The lines of what an import executes: any test that executes a line of the module may notice the change."""
_TEXT_VALUES: Final = (ast.JoinedStr, ast.List, ast.Tuple, ast.ListComp)


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change: `start` to `end` (bytes of the module) become `text`; tests that execute `lines` may notice it."""

    module: str
    function: str
    kind: str
    was: str
    becomes: str
    start: int
    end: int
    text: str
    lines: tuple[int, int]
    number: int = 1
    """1, unless the same change is possible several times in the function."""

    @property
    def package(self) -> str:
        """The package of the core."""
        return self.module.partition("/")[0]

    @property
    def key(self) -> str:
        """What identifies the change as long as the code around it stays the same."""
        number = f" ({self.number})" if self.number > 1 else ""
        return f"`{self.module}` `{self.function}` {self.kind}{number}: `{self.was}` -> `{self.becomes}`"


def find_mutants(module: str, source: str) -> list[Mutant]:
    """Return all mutants of a module, in the order of the text."""
    found, counts = [], dict[str, int]()
    for mutant in sorted(_Finder(module, source).find(), key=lambda one: (one.start, one.end, one.text)):
        counts[mutant.key] = counts.get(mutant.key, 0) + 1
        found.append(replace(mutant, number=counts[mutant.key]))
    return found


def apply_mutant(source: str, mutant: Mutant) -> str:
    """Return the text of the module with the change."""
    data = source.encode()
    return (data[: mutant.start] + mutant.text.encode() + data[mutant.end :]).decode()


class _Finder:
    """Walks over a module; each `_in_` method yields (kind, replaced node, new node or text)."""

    def __init__(self, module: str, source: str) -> None:
        self.module = module
        self.tree = ast.parse(source)
        # The offset of each line; columns of `ast` count bytes as well.
        self.offsets = [0]
        for line in source.encode().splitlines(keepends=True):
            self.offsets.append(self.offsets[-1] + len(line))

    def find(self) -> Iterator[Mutant]:
        yield from self._walk(self.tree, [], IMPORTED)

    def _walk(self, node: ast.AST, names: Sequence[str], lines: tuple[int, int] | None) -> Iterator[Mutant]:
        """Yield the mutants below a node; `lines` are those that use its value, if they are not its own."""
        for child in _iter_code(node):
            inner, used = names, lines
            if isinstance(child, (ast.FunctionDef, ast.ClassDef)):
                inner = [*names, child.name]
            if isinstance(child, ast.ClassDef):
                used = IMPORTED
            elif isinstance(child, ast.FunctionDef):
                used = None
            elif isinstance(node, ast.FunctionDef) and isinstance(child, ast.arguments):
                used = _find_body(node)
            for kind, target, new in _iter_changes(child):
                in_header = isinstance(child, ast.FunctionDef) and kind == "default"
                yield self._make(kind, target, new, inner, _find_body(child) if in_header else used)
            yield from self._walk(child, inner, used)

    def _make(
        self,
        kind: str,
        target: ast.expr | ast.stmt,
        new: ast.AST | str,
        names: Sequence[str],
        lines: tuple[int, int] | None,
    ) -> Mutant:
        assert target.end_lineno is not None
        assert target.end_col_offset is not None
        start = self.offsets[target.lineno - 1] + target.col_offset
        end = self.offsets[target.end_lineno - 1] + target.end_col_offset
        text = new if isinstance(new, str) else ast.unparse(new)
        is_part = isinstance(target, ast.expr) and not isinstance(new, (str, ast.Constant))
        return Mutant(
            module=self.module,
            function=".".join(names) or "(module)",
            kind=kind,
            was=_shorten(ast.unparse(target)),
            becomes=_shorten(text),
            start=start,
            end=end,
            text=f"({text})" if is_part else text,
            lines=lines or (target.lineno, target.end_lineno),
        )


def _find_body(function: ast.AST) -> tuple[int, int]:
    assert isinstance(function, ast.FunctionDef)
    return function.body[0].lineno, function.body[-1].end_lineno or 0


def _shorten(text: str, limit: int = 110) -> str:
    line = " ".join(text.replace("`", "'").split())
    return line if len(line) <= limit else f"{line[: limit // 2]} ... {line[-limit // 2 :]}"


def _iter_code(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the parts of a node that mutants may change: no annotations, no texts, no assertions."""
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "decorator_list", "type_params"):
            continue
        if isinstance(node, ast.Raise) or (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not _is_left_out(child):
                yield child


def _is_left_out(node: ast.AST) -> bool:
    match node:
        case ast.Assert() | ast.JoinedStr() | ast.Import() | ast.ImportFrom():
            return True
        case ast.FunctionDef(name="__repr__" | "__str__"):
            return True
        case ast.Assign(targets=[ast.Name(id=name)]):
            # `__all__`, and aliases of types such as `Boxes = Sequence[...]`.
            return name == "__all__" or (isinstance(node.value, ast.Subscript) and name[:1].isupper())
        case ast.Call(func=function):
            return _get_name(function) in {*_TEXTS, "cast", "TypeVar"}
    return False


def _get_name(function: ast.expr) -> str:
    return ast.unparse(function).rpartition(".")[2]


_Change = tuple[str, "ast.expr | ast.stmt", "ast.AST | str"]


def _iter_changes(node: ast.AST) -> Iterator[_Change]:  # noqa: C901 - one case for each kind of node
    match node:
        case ast.Compare(ops=[op]):
            for other in _COMPARISONS[type(op)]:
                yield "comparison", node, ast.Compare(node.left, [other()], node.comparators)
        case ast.BoolOp():
            yield "and/or", node, ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values)
        case ast.UnaryOp(op=ast.Not()):
            yield "not", node, node.operand
        case ast.Constant(value=int(value)) if not isinstance(value, bool):
            yield "integer", node, ast.Constant(value + 1)
        case ast.Slice():
            yield from _in_slice(node)
        case ast.BinOp(op=ast.Add() | ast.Sub()) if not any(map(_is_text, (node.left, node.right))):
            yield "arithmetic", node, ast.BinOp(node.left, _SIGNS[type(node.op)], node.right)
        case ast.AugAssign(op=ast.Add() | ast.Sub()) if not _is_text(node.value):
            yield "arithmetic", node, ast.AugAssign(node.target, _SIGNS[type(node.op)], node.value)
        case ast.If() if not _is_left_out_test(node.test):
            yield "condition", node.test, ast.Constant(True)
            yield "condition", node.test, ast.Constant(False)
        case ast.Expr(value=ast.Call(func=function) as call) if not _is_left_out(call):
            yield GUARD if _GUARDS.search(_get_name(function)) else "dropped call", node, "pass"
        case ast.Raise():
            yield "raise", node, "pass"
        case ast.FunctionDef():
            yield from _in_function(node)


def _is_left_out_test(test: ast.expr) -> bool:
    return isinstance(test, ast.Constant) or ast.unparse(test) in ("TYPE_CHECKING", "__debug__")


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, _TEXT_VALUES) or (isinstance(node, ast.Constant) and isinstance(node.value, (str, bytes)))


def _in_slice(node: ast.Slice) -> Iterator[_Change]:
    # Constants are changed as integers.
    for bound in (node.lower, node.upper):
        if bound is not None and not isinstance(bound, (ast.Constant, ast.UnaryOp)):
            yield "slice", bound, ast.BinOp(bound, ast.Add(), ast.Constant(1))


def _in_function(node: ast.FunctionDef) -> Iterator[_Change]:
    """Results of functions that return a bool or perhaps None, and defaults of functions without decorators."""
    returns = "" if node.returns is None else ast.unparse(node.returns)
    if returns == "bool" or "None" in returns.split(" | "):
        for statement in _iter_statements(node):
            if isinstance(statement, ast.Return) and not isinstance(statement.value, (ast.Constant, type(None))):
                yield "return", statement, "return None"
    if not node.decorator_list:
        for default in node.args.kw_defaults:
            if isinstance(default, ast.Constant) and isinstance(default.value, bool):
                yield "default", default, ast.Constant(not default.value)
            elif not isinstance(default, (ast.Constant, type(None))):
                yield "default", default, ast.Constant(None)


def _iter_statements(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the statements of a function, without those of functions inside it."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, (ast.FunctionDef, ast.ClassDef, ast.Lambda)):
            yield child
            yield from _iter_statements(child)
