"""Selects a part of an encoded tree, or renames its keys by prefix, so that a load reads only what it needs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from fnmatch import fnmatchcase
from itertools import chain
from typing import Final, TypeVar

from holdfast.errors import Mismatch
from holdfast.json_text import Json
from holdfast.trees.outline import ITEMS_START, KEYED_START, PAIRS_START, has_children, iter_children, key_text

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


_NOTHING: Final = object()


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Return whether a leaf's name matches one of the patterns, or is below one of them."""
    return any(fnmatchcase(name, pattern) or name.startswith(pattern + ".") for pattern in patterns)


def pick(node: Json, is_wanted: Callable[[str], bool]) -> Json:
    """Return the tree with only the leaves whose name is wanted; None if there are none.

    Unwanted leaves are left out of dicts. In sequences and fields they become None, so that no other value moves.
    """
    found = _pick(node, None, is_wanted)
    return None if found is _NOTHING else found


def _pick(node: Json, name: str | None, is_wanted: Callable[[str], bool]) -> Json:
    if not has_children(node):
        return node if is_wanted(name or "") else _NOTHING
    # A key may be the empty string, so the root is None.
    tag, prefix = node[0], "" if name is None else name + "."
    start = ITEMS_START.get(tag) or KEYED_START[tag]
    kept: list[Json] = []
    is_empty = True
    for key, child in iter_children(node):
        found = _pick(child, prefix + key_text(key), is_wanted)
        is_empty = is_empty and found is _NOTHING
        if found is _NOTHING and tag in PAIRS_START:
            continue
        found = None if found is _NOTHING else found
        kept += [found] if tag in ITEMS_START else [key, found]
    return _NOTHING if is_empty else [*node[:start], *kept]


def rename_keys(node: Json, renames: Mapping[str, str]) -> Json:
    """Return the tree with prefixes of text keys replaced in every dict; raises Mismatch if two become equal."""
    if not has_children(node):
        return node
    tag = node[0]
    start = ITEMS_START.get(tag) or KEYED_START[tag]
    children = [(key, rename_keys(child, renames)) for key, child in iter_children(node)]
    if tag in ITEMS_START:
        return [*node[:start], *(child for _, child in children)]
    texts = [key for key, _ in children if isinstance(key, str)] if tag in PAIRS_START else []
    names = plan_names(texts, renames)
    pairs = ((names.get(key, key) if isinstance(key, str) else key, child) for key, child in children)
    return [*node[:start], *chain.from_iterable(pairs)]
