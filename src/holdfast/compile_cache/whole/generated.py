"""Reduces the Python code that torch's compiler generates to what a call runs, so that it needs no import of it.

The generated module imports torch's compiler, builds its kernels from C++ source, and contains a benchmark. The reduced
one has only the function `call` and the names that it uses; kernels are passed to it when it is loaded.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from holdfast.compile_cache.key_parts import Uncacheable

KERNELS: Final = "extern_kernels"
_COMPILE: Final = "async_compile"
_BINDING: Final = "cpp_pybinding"
# Imports that are needed, by module; the others must not be used.
_IMPORTS: Final = frozenset({"ctypes", "torch", "math", "random", "os", "tempfile", "cmath"})
_UNUSED: Final = frozenset({"get_args", "benchmark_compiled_module", "recursively_apply_fns"})


@dataclass(frozen=True, slots=True)
class Binding:
    """A C++ kernel of a generated module."""

    name: str
    """The variable that the code calls."""
    types: tuple[str, ...]
    """The types of its arguments, in C++."""
    source: str


@dataclass(frozen=True, slots=True)
class Reduced:
    """The code of a generated module, reduced."""

    source: str
    bindings: tuple[Binding, ...]
    externs: tuple[str, ...]
    """Names of torch's kernels that the code calls as attributes of `KERNELS`."""
    operators: tuple[str, ...]
    """Operators that the code calls, as `torch.ops.aten.name.overload`."""


def reduce_code(text: str) -> Reduced:
    """Reduce a generated module. Raises Uncacheable if it contains anything unknown."""
    tree = ast.parse(text)
    kept: list[ast.stmt] = []
    bindings: list[Binding] = []
    for statement in tree.body:
        binding = _find_binding(statement)
        if binding is not None:
            bindings.append(binding)
        elif not _is_dropped(statement):
            kept.append(_verify_kept(statement))
    kept = _remove_unused(kept)
    module = ast.Module(body=kept, type_ignores=[])
    _verify_names(module, {binding.name for binding in bindings} | {KERNELS})
    used = {node.id for node in ast.walk(module) if isinstance(node, ast.Name)}
    return Reduced(
        ast.unparse(module),
        tuple(binding for binding in bindings if binding.name in used),
        tuple(sorted(_list_externs(module))),
        tuple(sorted(_list_operators(module))),
    )


def _find_binding(statement: ast.stmt) -> Binding | None:
    match statement:
        case ast.Assign(
            targets=[ast.Name(id=name)],
            value=ast.Call(
                func=ast.Attribute(value=ast.Name(id="async_compile"), attr=kind),
                args=[ast.List(elts=types), ast.Constant(value=str(source))],
                keywords=[],
            ),
        ) if kind == _BINDING:
            texts = [each.value for each in types if isinstance(each, ast.Constant) and isinstance(each.value, str)]
            return Binding(name, tuple(texts), source) if len(texts) == len(types) else None
    return None


def _is_dropped(statement: ast.stmt) -> bool:
    """Return whether a statement only matters to the compiler."""
    match statement:
        case ast.ImportFrom(module=str(module)):
            return module.partition(".")[0] == "torch" and module != "torch"
        case ast.Assign(targets=[ast.Name(id=name)]) if name == _COMPILE:
            return True
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="wait"))) if name == _COMPILE:
            return True
        case ast.Delete(targets=[ast.Name(id=name)]) if name == _COMPILE:
            return True
        case ast.FunctionDef(name=name):
            return name in _UNUSED
        case ast.Assign(targets=[ast.Name(id=name)]) if name in _UNUSED:
            return True
        case ast.If(test=ast.Compare(left=ast.Name(id="__name__"))):
            return True
        case ast.Expr(value=ast.Constant()):
            return True
    return False


def _verify_kept(statement: ast.stmt) -> ast.stmt:
    match statement:
        case ast.Import(names=names) if all(each.name in _IMPORTS for each in names):
            return statement
        case ast.ImportFrom(module=str(module)) if module in _IMPORTS:
            return statement
        case ast.Assign(targets=[ast.Name()]) if _is_plain(statement.value):
            return statement
        case ast.ClassDef(name="Runner"):
            return statement
    raise Uncacheable(f"the generated code has a statement of an unknown kind: {ast.unparse(statement)[:80]}")


def _is_plain(value: ast.expr) -> bool:
    """Return whether an expression is a chain of attributes, a constant, or the construction of the runner."""
    while isinstance(value, ast.Attribute):
        value = value.value
    match value:
        case ast.Name() | ast.Constant():
            return True
        case ast.Call(func=ast.Name(id="Runner"), args=[], keywords=[ast.keyword(value=ast.List(elts=[]))]):
            return True
    return False


def _remove_unused(statements: list[ast.stmt]) -> list[ast.stmt]:
    """Remove variables that nothing reads: most of those that torch writes at the start of each module."""
    while True:
        read = {
            node.id
            for statement in statements
            for node in ast.walk(statement)
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
        } | {"call"}
        kept = [each for each in statements if not _names_only(each) or _names_only(each) & read]
        if len(kept) == len(statements):
            return kept
        statements = kept


def _names_only(statement: ast.stmt) -> set[str]:
    """Return the names that a simple statement assigns; empty for others."""
    if isinstance(statement, ast.Assign):
        return {each.id for each in statement.targets if isinstance(each, ast.Name)}
    if isinstance(statement, ast.Import | ast.ImportFrom):
        return {(each.asname or each.name).partition(".")[0] for each in statement.names}
    return set()


def _verify_names(module: ast.Module, given: set[str]) -> None:
    defined = set(given) | set(vars(builtins))
    for node in ast.walk(module):
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            defined.add(node.id)
        elif isinstance(node, ast.arg):
            defined.add(node.arg)
        elif isinstance(node, ast.ClassDef | ast.FunctionDef):
            defined.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            defined |= {(each.asname or each.name).partition(".")[0] for each in node.names}
            if not isinstance(node, ast.Import) and node not in module.body:
                raise Uncacheable("the generated code imports a module when it runs")
    missing = sorted({node.id for node in ast.walk(module) if isinstance(node, ast.Name)} - defined)
    if missing:
        raise Uncacheable(f"the generated code uses {missing[0]}, which is part of torch's compiler")


def _list_externs(module: ast.Module) -> set[str]:
    return {
        node.attr
        for node in ast.walk(module)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == KERNELS
    }


def _list_operators(module: ast.Module) -> set[str]:
    aliases: Mapping[str, str] = {
        statement.targets[0].id: ast.unparse(statement.value)
        for statement in module.body
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name)
    }
    found = set()
    for node in ast.walk(module):
        if isinstance(node, ast.Attribute):
            name, _, rest = ast.unparse(node).partition(".")
            full = f"{aliases.get(name, name)}.{rest}"
            if full.startswith("torch.ops."):
                found.add(full)
    return found
