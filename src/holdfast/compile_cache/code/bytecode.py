"""Finds the names that a code object reads: globals, attributes of them, imports."""

from __future__ import annotations

import dis
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Final

_GLOBAL_READS: Final = frozenset({"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"})
_ATTRIBUTE_READS: Final = frozenset({"LOAD_ATTR", "LOAD_METHOD"})
# Instructions that push nothing, or only the NULL marker of a call.
_IGNORED: Final = frozenset({"CACHE", "EXTENDED_ARG", "NOP", "PRECALL", "PUSH_NULL", "RESUME"})
ATTRIBUTE_FUNCTIONS: Final = {"delattr": delattr, "getattr": getattr, "hasattr": hasattr, "setattr": setattr}
"""Called with a constant name, these functions are plain attribute reads."""


@dataclass(frozen=True, slots=True)
class Import:
    """An import statement in a function."""

    module: str
    level: int
    """Number of leading dots of a relative import; 0 for an absolute one."""
    names: tuple[str, ...]
    """The names in `from module import ...`; empty for `import module`."""


@dataclass(frozen=True, slots=True)
class Reads:
    """What a code object and the code objects nested in it read."""

    chains: tuple[tuple[str, ...], ...]
    """Names of globals, each with the attributes read directly from it: `a.b.c` is ("a", "b", "c")."""
    imports: tuple[Import, ...]
    attributes: frozenset[str]
    """Attributes read from values that are only known when the code runs, such as arguments."""
    computed: frozenset[str]
    """Those of `getattr`, `setattr`, `hasattr`, `delattr` that are used without a constant name."""


@functools.lru_cache(maxsize=4096)
def read_code(code: CodeType) -> Reads:
    """Return what a code object and the code objects nested in it read."""
    steps = [step for step in dis.get_instructions(code) if step.opname not in _IGNORED]
    chains, attributes, computed = _read_names(steps)
    imports = list(_iter_imports(steps))
    for nested in code.co_consts:
        if isinstance(nested, CodeType):
            inner = read_code(nested)
            chains += inner.chains
            imports += inner.imports
            attributes |= inner.attributes
            computed |= inner.computed
    return Reads(
        tuple(dict.fromkeys(chains)), tuple(dict.fromkeys(imports)), frozenset(attributes), frozenset(computed)
    )


def _read_names(steps: Sequence[dis.Instruction]) -> tuple[list[tuple[str, ...]], set[str], set[str]]:
    chains: list[tuple[str, ...]] = []
    attributes: set[str] = set()
    computed: set[str] = set()
    position = 0
    while position < len(steps):
        step = steps[position]
        position += 1
        if step.opname in _GLOBAL_READS:
            below = _list_attributes(steps, position)
            position += len(below)
            chains.append((step.argval, *below))
            if step.argval in ATTRIBUTE_FUNCTIONS:
                name = _find_constant_name(steps, position)
                (computed if name is None else attributes).add(name or step.argval)
        elif step.opname in _ATTRIBUTE_READS or step.opname in ("LOAD_SUPER_ATTR", "IMPORT_FROM"):
            attributes.add(step.argval)
    return chains, attributes, computed


def _list_attributes(steps: Sequence[dis.Instruction], position: int) -> list[str]:
    """Return the chain of attributes that is read from the value on top of the stack."""
    found = []
    # At a jump target, the value may come from another branch, as in `(a if c else b).name`.
    while position < len(steps) and steps[position].opname in _ATTRIBUTE_READS and not steps[position].is_jump_target:
        found.append(steps[position].argval)
        position += 1
    return found


def _find_constant_name(steps: Sequence[dis.Instruction], position: int) -> str | None:
    """Return the name in `getattr(x, "name")`, with or without a default; None if the name is not a plain constant."""
    if position < len(steps) and steps[position].opname.startswith("LOAD_"):
        position += 1 + len(_list_attributes(steps, position + 1))
        if position < len(steps) and steps[position].opname == "LOAD_CONST" and not steps[position].is_jump_target:
            name = steps[position].argval
            return name if isinstance(name, str) and _is_end_of_call(steps[position + 1 : position + 3]) else None
    return None


def _is_end_of_call(steps: Sequence[dis.Instruction]) -> bool:
    """Return whether the next instructions are a call, or one more argument and then a call."""
    if steps and steps[0].opname.startswith("LOAD_"):
        steps = steps[1:]
    return bool(steps) and steps[0].opname.startswith("CALL")


def _iter_imports(steps: Sequence[dis.Instruction]) -> Iterator[Import]:
    for position, step in enumerate(steps):
        if step.opname == "IMPORT_NAME":
            level, names = steps[position - 2].argval, steps[position - 1].argval
            yield Import(step.argval, level, tuple(names or ()))
