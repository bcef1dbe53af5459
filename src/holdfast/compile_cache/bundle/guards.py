"""Evaluates guards, the conditions on sizes under which a compiled graph is valid.

Torch evaluates guards as Python code, so only guards that are plain arithmetic are saved or evaluated.
"""

from __future__ import annotations

import ast
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch._guards import TracingContext
from torch.fx.experimental.symbolic_shapes import ShapeEnv, guarding_hint_or_throw, has_guarding_hint

_log = logging.getLogger(__name__)

MAX_GUARDS_CHARS: Final = 1 << 18
"""Enough for a graph with thousands of symbols; more does not fit into a record."""
_MAX_POWER: Final = 16
"""Shapes need squares and cubes; larger or nested powers could take forever to evaluate."""
_OPERATORS: Final = (
    ast.Add, ast.Sub, ast.Mult, ast.FloorDiv, ast.Div, ast.Mod, ast.BitAnd, ast.BitOr, ast.BitXor,
)  # fmt: skip
# Functions and constants that every supported version writes.
SHARED_NAMES: Final = frozenset(
    {
        "IsNonOverlappingAndDenseIndicator", "abs", "cast_symbool_to_symint_guardless", "math.ceil", "math.floor",
        "math.inf", "math.log2", "math.sqrt", "math.trunc", "torch._sym_sqrt", "torch.sym_float", "torch.sym_not",
    }
)  # fmt: skip
_COMPARISONS: Final = (ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE)
_SIGNS: Final = (ast.Not, ast.USub, ast.UAdd)


@dataclass(frozen=True, slots=True)
class GuardLanguage:
    """The language in which a version of torch writes guards."""

    names: frozenset[str]
    """Functions and constants that guards may contain besides sizes, numbers and operators, such as "math.floor"."""

    def evaluate(self, guards: str, inputs: Sequence[Any], *, install: bool) -> bool:
        """Return whether guards hold for the sizes among `inputs`. If `install`, add them to dynamo's guards."""
        if not guards:
            return True
        environment = _find_shape_env()
        if environment is None or not self.is_plain(guards):
            return False
        sizes = [size for size in inputs if isinstance(size, torch.SymInt) and has_guarding_hint(size)]
        values = sizes if install else [guarding_hint_or_throw(size) for size in sizes]
        try:
            return bool(environment.evaluate_guards_expression(guards, values))
        except (ArithmeticError, KeyError, TypeError, ValueError) as error:
            _log.debug("guards %.200s cannot be evaluated: %s", guards, error)
            return False

    def is_plain(self, text: str) -> bool:
        """Return whether guards only compare and calculate with sizes.

        Torch evaluates guards as Python code, before the rest of an entry is verified. So a text that could do
        anything else must not reach it.
        """
        if len(text) > MAX_GUARDS_CHARS:
            return False
        try:
            return self._is_plain(ast.parse(text, mode="eval").body)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return False

    def _is_plain(self, node: ast.expr) -> bool:
        match node:
            case ast.Constant(value=bool() | int() | float()):
                return True
            case ast.Subscript(value=ast.Name(id="L"), slice=ast.Constant(value=str())):
                return True
            case ast.BoolOp(values=values):
                return all(map(self._is_plain, values))
            case ast.Compare(left=left, ops=operators, comparators=others):
                known = all(isinstance(operator, _COMPARISONS) for operator in operators)
                return known and all(map(self._is_plain, (left, *others)))
            case ast.UnaryOp(op=operator, operand=operand):
                return isinstance(operator, _SIGNS) and self._is_plain(operand)
            case ast.BinOp(left=left, op=ast.Pow(), right=ast.Constant(value=int(power))):
                is_nested = any(isinstance(below, ast.Pow) for below in ast.walk(left))
                return 0 <= power <= _MAX_POWER and not is_nested and self._is_plain(left)
            case ast.BinOp(left=left, op=operator, right=right):
                return isinstance(operator, _OPERATORS) and self._is_plain(left) and self._is_plain(right)
            case ast.IfExp(test=test, body=body, orelse=other):
                return all(map(self._is_plain, (test, body, other)))
            case ast.Call(func=ast.Name() | ast.Attribute() as function, args=arguments, keywords=[]):
                return self._is_known(function) and all(map(self._is_plain, arguments))
            case _:
                return isinstance(node, ast.Attribute) and self._is_known(node)

    def _is_known(self, node: ast.expr) -> bool:
        match node:
            case ast.Name(id=name):
                return name in self.names
            case ast.Attribute(value=ast.Name(id=owner), attr=name):
                return f"{owner}.{name}" in self.names
            case _:
                return False


def _find_shape_env() -> ShapeEnv | None:
    context = TracingContext.try_get()
    return context.fake_mode.shape_env if context and context.fake_mode else None
