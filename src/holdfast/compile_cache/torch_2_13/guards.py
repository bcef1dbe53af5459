"""Decides whether the text of shape guards is plain arithmetic, which is safe to evaluate before it is trusted."""

from __future__ import annotations

import ast
from typing import Final

MAX_GUARDS_CHARS: Final = 1 << 18
"""Enough for a graph with thousands of symbols; a record cannot hold more."""
_MAX_POWER: Final = 16
"""Shapes need squares and cubes; larger or nested powers could take forever to evaluate."""

_FUNCTIONS: Final = frozenset(
    {"max", "min", "abs", "IsNonOverlappingAndDenseIndicator", "cast_symbool_to_symint_guardless"}
)
_METHODS: Final = frozenset(
    {
        "math.floor", "math.ceil", "math.trunc", "math.sqrt", "math.log2", "math.inf",
        "torch.sym_float", "torch.sym_not", "torch._sym_sqrt",
    }
)  # fmt: skip
_OPERATORS: Final = (
    ast.Add, ast.Sub, ast.Mult, ast.FloorDiv, ast.Div, ast.Mod, ast.BitAnd, ast.BitOr, ast.BitXor,
)  # fmt: skip
_COMPARISONS: Final = (ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE)
_SIGNS: Final = (ast.Not, ast.USub, ast.UAdd)


def is_plain(text: str) -> bool:
    """Return whether guards only compare and calculate with sizes.

    Torch evaluates guards as Python code, before the rest of an entry is verified. So a text that could do anything
    else must not reach it.
    """
    if len(text) > MAX_GUARDS_CHARS:
        return False
    try:
        return _is_plain(ast.parse(text, mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False


def _is_plain(node: ast.expr) -> bool:
    match node:
        case ast.Constant(value=bool() | int() | float()):
            return True
        case ast.Subscript(value=ast.Name(id="L"), slice=ast.Constant(value=str())):
            return True
        case ast.BoolOp(values=values):
            return all(map(_is_plain, values))
        case ast.Compare(left=left, ops=operators, comparators=others):
            known = all(isinstance(operator, _COMPARISONS) for operator in operators)
            return known and all(map(_is_plain, (left, *others)))
        case ast.UnaryOp(op=operator, operand=operand):
            return isinstance(operator, _SIGNS) and _is_plain(operand)
        case ast.BinOp(left=left, op=ast.Pow(), right=ast.Constant(value=int(power))):
            is_nested = any(isinstance(below, ast.Pow) for below in ast.walk(left))
            return 0 <= power <= _MAX_POWER and not is_nested and _is_plain(left)
        case ast.BinOp(left=left, op=operator, right=right):
            return isinstance(operator, _OPERATORS) and _is_plain(left) and _is_plain(right)
        case ast.IfExp(test=test, body=body, orelse=other):
            return all(map(_is_plain, (test, body, other)))
        case _:
            return _is_known_call(node)


def _is_known_call(node: ast.expr) -> bool:
    match node:
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]):
            return name in _FUNCTIONS and all(map(_is_plain, arguments))
        case ast.Call(func=ast.Attribute() as method, args=arguments, keywords=[]):
            return _is_known_call(method) and all(map(_is_plain, arguments))
        case ast.Attribute(value=ast.Name(id=owner), attr=name):
            return f"{owner}.{name}" in _METHODS
        case _:
            return False
