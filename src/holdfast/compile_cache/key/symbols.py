"""Renames symbolic sizes by order of appearance, because torch derives their names from variable names."""

from __future__ import annotations

import re
from typing import Final

import sympy  # type: ignore[import-untyped]  # it has no types, and torch's expressions are sympy's
import torch

from holdfast.compile_cache.key_parts import Uncacheable
from holdfast.json_text import Json

_KIND: Final = re.compile(r"[a-z]+")


class Symbols:
    """The symbols of one graph. Each gets a number when it first appears."""

    def __init__(self) -> None:
        self._names: dict[sympy.Symbol, sympy.Symbol] = {}
        self._ranges: dict[str, Json] = {}

    def describe(self, value: object) -> Json:
        """Return an integer as it is, and any other value, such as a symbolic size, as text."""
        if type(value) is int:
            return value
        if not isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
            return repr(value)
        return self._describe_symbolic(value)

    def list_ranges(self) -> dict[str, Json]:
        """Return the range of each symbol. The compiler relies on ranges without adding guards for them."""
        return dict(self._ranges)

    def _describe_symbolic(self, value: torch.SymInt | torch.SymFloat | torch.SymBool) -> str:
        try:
            expression, shape_env = value.node.expr, value.node.shape_env
            # Symbols that first appear in the same expression are numbered by name, which can cause a miss. It is rare:
            # dynamo passes each size as a separate input, before any expression that uses it.
            for symbol in sorted(expression.free_symbols - self._names.keys(), key=str):
                self._add(symbol, shape_env)
        except AttributeError as error:
            raise Uncacheable(f"the symbolic number {value} is of an unsupported kind ({error})") from error
        # Rename before printing: terms are printed in the order of their names.
        return str(expression.xreplace(self._names))

    def _add(self, symbol: sympy.Symbol, shape_env: torch.fx.experimental.symbolic_shapes.ShapeEnv) -> None:
        kind = _KIND.match(symbol.name)
        name = f"{kind[0] if kind else 's'}{len(self._names)}"
        self._names[symbol] = sympy.Symbol(name, **symbol.assumptions0)
        bounds = shape_env.var_to_range.get(symbol)
        text = f"{bounds.lower} to {bounds.upper}" if bounds is not None else "unknown"
        self._ranges[name] = f"{text}, a size" if symbol in shape_env.size_like else text
