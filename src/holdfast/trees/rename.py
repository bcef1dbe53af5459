"""Renames by prefix: one name, the keys of a mapping, or the keys of a state dict in place."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping
from typing import TypeVar

from holdfast.errors import Mismatch

Value = TypeVar("Value")


def rename_name(name: str, renames: Mapping[str, str]) -> str:
    """Return `name` with its longest prefix in `renames` replaced, once."""
    old = max((prefix for prefix in renames if name.startswith(prefix)), key=len, default=None)
    return name if old is None else renames[old] + name.removeprefix(old)


def rename_prefixes(mapping: Mapping[str, Value], renames: Mapping[str, str]) -> dict[str, Value]:
    """Return a dict with every key renamed, in the same order; raises Mismatch if two keys would become equal."""
    renamed = plan_names(mapping, renames)
    return {renamed[key]: value for key, value in mapping.items()}


def replace_by_prefix(state_dict: MutableMapping[str, Value], old: str, new: str) -> None:
    """Rename the keys that start with `old` in place, in the same order; raises Mismatch before anything changes."""
    if old == new:
        raise Mismatch(f"the prefix {old!r} would be replaced by itself; pass two different prefixes")
    renamed = rename_prefixes(state_dict, {old: new})
    if renamed.keys() != state_dict.keys():
        state_dict.clear()
        state_dict.update(renamed)


def plan_names(keys: Iterable[str], renames: Mapping[str, str]) -> dict[str, str]:
    """Return the new name of every key; raises Mismatch if two keys would become equal."""
    renamed: dict[str, str] = {}
    taken: dict[str, str] = {}
    problems: list[str] = []
    for key in keys:
        renamed[key] = rename_name(key, renames)
        first = taken.setdefault(renamed[key], key)
        if first != key:
            problems.append(f"{first!r} and {key!r} would both become {renamed[key]!r}")
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise Mismatch(f"{problems[0]}{more}; nothing was renamed. Choose other prefixes", problems=tuple(problems))
    return renamed
