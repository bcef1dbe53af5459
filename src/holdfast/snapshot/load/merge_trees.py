"""Merge the encoded trees of several ranks: keys are added, and where leaves differ the lowest rank's is used."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from holdfast.json_text import Json, canonical_json
from holdfast.snapshot.leaves import GRAD, PARTS, TENSOR
from holdfast.trees.outline import FIELDS_START, ITEMS_START, PAIRS_START, key_text


def merge_trees(trees: Sequence[Json]) -> tuple[Json, list[str]]:
    """Return the union of encoded trees with the same entry numbers, and the names of leaves that differ."""
    divergent: list[str] = []
    united = trees[0]
    for tree in trees[1:]:
        united = _unite(united, tree, (), divergent)
    return united, list(dict.fromkeys(divergent))


def _unite(ours: Json, theirs: Json, path: tuple[str, ...], divergent: list[str]) -> Json:
    if ours == theirs and canonical_json(ours) == canonical_json(theirs):
        return ours
    tag = _find_tag(ours)
    if tag == _find_tag(theirs) and isinstance(ours, list) and isinstance(theirs, list):
        if tag in PAIRS_START and ours[: PAIRS_START[tag]] == theirs[: PAIRS_START[tag]]:
            return _unite_pairs(ours, theirs, PAIRS_START[tag], path, divergent)
        start = {**FIELDS_START, **ITEMS_START}.get(tag, 0)
        if start and len(ours) == len(theirs) and ours[:start] == theirs[:start]:
            return _unite_items(ours, theirs, start, path, divergent)
    divergent.append(".".join(path))
    return ours


def _find_tag(node: Json) -> str:
    return node[0] if isinstance(node, list) and node and isinstance(node[0], str) else ""


def _unite_pairs(ours: list[Json], theirs: list[Json], start: int, path: tuple[str, ...], divergent: list[str]) -> Json:
    united = dict(_iter_pairs(ours, start))
    for encoded, (key, value) in _iter_pairs(theirs, start):
        held = united.get(encoded)
        united[encoded] = (key, value if held is None else _unite(held[1], value, (*path, key_text(key)), divergent))
    return [*ours[:start], *(item for pair in united.values() for item in pair)]


def _iter_pairs(node: list[Json], start: int) -> list[tuple[bytes, tuple[Json, Json]]]:
    pairs = zip(node[start::2], node[start + 1 :: 2], strict=True)
    return [(canonical_json(key), (key, value)) for key, value in pairs]


def _unite_items(ours: list[Json], theirs: list[Json], start: int, path: tuple[str, ...], divergent: list[str]) -> Json:
    items = zip(ours[start:], theirs[start:], strict=True)
    # The name of a field comes before its value, and is the same in both.
    return [*ours[:start], *(_unite(a, b, (*path, str(number)), divergent) for number, (a, b) in enumerate(items))]


def renumber(node: Json, numbers: Mapping[int, int]) -> Json:
    """Return an encoded tree with the entry numbers of its leaves replaced."""
    if not isinstance(node, list) or not node:
        return node
    tag = node[0]
    if not isinstance(tag, str) or not tag.startswith("@"):
        return [renumber(item, numbers) if isinstance(item, list) else item for item in node]
    if tag == PARTS:
        first = node[3] if node[3] is None else numbers[node[3]]
        rest = [renumber(item, numbers) if at % 2 else item for at, item in enumerate(node[4:])]
        return [*node[:3], first, *rest]
    if tag == GRAD:
        return [tag, *(renumber(item, numbers) for item in node[1:])]
    if tag == TENSOR:
        return [tag, *(numbers[number] for number in node[1:])]
    return [tag, numbers[node[1]]]
