"""Which names a code object reads, taken from its bytecode: globals, attributes below them, imports."""

from __future__ import annotations

import dis
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Final

_GLOBAL_READS: Final = frozenset({"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"})
_ATTRIBUTE_READS: Final = frozenset({"LOAD_ATTR", "LOAD_METHOD"})
# They leave no value on the stack, or one below that of the instruction before them.
_SILENT: Final = frozenset({"CACHE", "EXTENDED_ARG", "NOP", "PRECALL", "PUSH_NULL", "RESUME"})
_ATTRIBUTE_FUNCTIONS: Final = frozenset({"delattr", "getattr", "hasattr", "setattr"})


@dataclass(frozen=True, slots=True)
class Import:
    """An import statement in a function."""

    module: str
    level: int
    """How many packages up a relative import starts; 0 for an absolute one."""
    names: tuple[str, ...]
    """What `from module import ...` lists; empty for `import module`."""


@dataclass(frozen=True, slots=True)
class Reads:
    """What a code object reads, and the code objects that are nested in it."""

    chains: tuple[tuple[str, ...], ...]
    """Names of globals, each with the attributes that are read from it at once: `a.b.c` is ("a", "b", "c")."""
    imports: tuple[Import, ...]
    attributes: frozenset[str]
    """Attributes that are read from values which only a run of the code has, such as arguments."""
    computed: frozenset[str]
    """Which of `getattr`, `setattr`, `hasattr`, `delattr` are used in another way than with a name in the source."""


@functools.lru_cache(maxsize=4096)
def read_code(code: CodeType) -> Reads:
    """Return what a code object reads."""
    steps = [step for step in dis.get_instructions(code) if step.opname not in _SILENT]
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
            if step.argval in _ATTRIBUTE_FUNCTIONS:
                name = _find_constant_name(steps, position)
                (computed if name is None else attributes).add(name or step.argval)
        elif step.opname in _ATTRIBUTE_READS or step.opname in ("LOAD_SUPER_ATTR", "IMPORT_FROM"):
            attributes.add(step.argval)
    return chains, attributes, computed


def _list_attributes(steps: Sequence[dis.Instruction], position: int) -> list[str]:
    """Return the attributes that are read one after the other from the value on the stack."""
    found = []
    # At a jump target the value may come from elsewhere, as in `(a if c else b).name`.
    while position < len(steps) and steps[position].opname in _ATTRIBUTE_READS and not steps[position].is_jump_target:
        found.append(steps[position].argval)
        position += 1
    return found


def _find_constant_name(steps: Sequence[dis.Instruction], position: int) -> str | None:
    """Return the name in `getattr(x, "name")`, with a default or without; None if what is written is not that plain."""
    if position < len(steps) and steps[position].opname.startswith("LOAD_"):
        position += 1 + len(_list_attributes(steps, position + 1))
        if position < len(steps) and steps[position].opname == "LOAD_CONST" and not steps[position].is_jump_target:
            name = steps[position].argval
            return name if isinstance(name, str) and _is_end_of_call(steps[position + 1 : position + 3]) else None
    return None


def _is_end_of_call(steps: Sequence[dis.Instruction]) -> bool:
    """Tell whether a call comes next, or one more argument and then a call."""
    if steps and steps[0].opname.startswith("LOAD_"):
        steps = steps[1:]
    return bool(steps) and steps[0].opname.startswith("CALL")


def _iter_imports(steps: Sequence[dis.Instruction]) -> Iterator[Import]:
    for position, step in enumerate(steps):
        if step.opname == "IMPORT_NAME":
            level, names = steps[position - 2].argval, steps[position - 1].argval
            yield Import(step.argval, level, tuple(names or ()))
