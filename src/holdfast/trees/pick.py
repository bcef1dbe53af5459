"""Selects a part of an encoded tree, or renames its keys, so that a load reads only the entries it needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import chain
from typing import Final

from holdfast.json_text import Json
from holdfast.trees.outline import ITEMS_START, KEYED_START, PAIRS_START, has_children, iter_children, key_text
from holdfast.trees.rename import plan_names

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
