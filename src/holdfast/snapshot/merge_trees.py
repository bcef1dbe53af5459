"""Merges the encoded trees of several ranks, and names the values that differ from rank to rank."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from holdfast.json_text import Json, canonical_json
from holdfast.progress import Progress
from holdfast.repo.format.entry import NO_RANK
from holdfast.repo.format.manifest import Manifest
from holdfast.repo.format.rank_manifests import Manifests
from holdfast.repo.handle.repository import Repository
from holdfast.repo.names.snapshots import CommittedSnapshot
from holdfast.repo.read.reader import Verify, open_snapshot
from holdfast.snapshot.leaves import renumber
from holdfast.snapshot.opened import Opened
from holdfast.texts import list_some
from holdfast.trees.outline import FIELDS_START, ITEMS_START, PAIRS_START, TREE, key_text

_MAX_NAMED: Final = 20


def merge_trees(trees: Sequence[Json]) -> tuple[Json, list[str]]:
    """Return the union of encoded trees with the same entry numbers, and the names of leaves that differ."""
    divergent: list[str] = []
    merged = trees[0]
    for tree in trees[1:]:
        merged = _merge_nodes(merged, tree, (), divergent)
    return merged, list(dict.fromkeys(divergent))


def _merge_nodes(ours: Json, theirs: Json, path: tuple[str, ...], divergent: list[str]) -> Json:
    if ours == theirs and canonical_json(ours) == canonical_json(theirs):
        return ours
    tag = _find_tag(ours)
    if tag == _find_tag(theirs) and isinstance(ours, list) and isinstance(theirs, list):
        if tag in PAIRS_START and ours[: PAIRS_START[tag]] == theirs[: PAIRS_START[tag]]:
            return _merge_pairs(ours, theirs, PAIRS_START[tag], path, divergent)
        start = {**FIELDS_START, **ITEMS_START}.get(tag, 0)
        if start and len(ours) == len(theirs) and ours[:start] == theirs[:start]:
            return _merge_items(ours, theirs, start, path, divergent)
    divergent.append(".".join(path))
    return ours


def _find_tag(node: Json) -> str:
    return node[0] if isinstance(node, list) and node and isinstance(node[0], str) else ""


def _merge_pairs(ours: list[Json], theirs: list[Json], start: int, path: tuple[str, ...], divergent: list[str]) -> Json:
    merged = dict(_iter_pairs(ours, start))
    for encoded, (key, value) in _iter_pairs(theirs, start):
        known = merged.get(encoded)
        merged[encoded] = (
            key,
            value if known is None else _merge_nodes(known[1], value, (*path, key_text(key)), divergent),
        )
    return [*ours[:start], *(item for pair in merged.values() for item in pair)]


def _iter_pairs(node: list[Json], start: int) -> list[tuple[bytes, tuple[Json, Json]]]:
    pairs = zip(node[start::2], node[start + 1 :: 2], strict=True)
    return [(canonical_json(key), (key, value)) for key, value in pairs]


def _merge_items(ours: list[Json], theirs: list[Json], start: int, path: tuple[str, ...], divergent: list[str]) -> Json:
    items = zip(ours[start:], theirs[start:], strict=True)
    # The name of a field comes before its value, and is the same in both.
    return [
        *ours[:start],
        *(_merge_nodes(a, b, (*path, str(number)), divergent) for number, (a, b) in enumerate(items)),
    ]


def find_variants(root: Manifest, parts: Iterable[Manifest]) -> list[str]:
    """Return the names of entries and plain values that differ between the parts of ranks.

    Those that were declared per rank are left out: the user knows about them.
    """
    stated = list(root.iter_entries())
    numbers = {entry.name: number for number, entry in enumerate(stated)}
    declared = {entry.name for entry in stated if entry.rank != NO_RANK}
    names = []
    for part in parts:
        entries = list(part.iter_entries())
        names += [entry.name for entry in entries if entry.rank != NO_RANK and entry.name not in declared]
        # A part has a tree of its tree only if that rank's tree differs from the root's.
        if part.spec is not None:
            tree = renumber(_find_tree(part), {at: numbers[entry.name] for at, entry in enumerate(entries)})
            names += merge_trees([_find_tree(root), tree])[1]
    return list(dict.fromkeys(names))


def _find_tree(manifest: Manifest) -> Json:
    return manifest.spec[TREE] if isinstance(manifest.spec, dict) else None


def warn_alone(name: str, manifests: Manifests | None) -> None:
    """Warn a single process that loads values that differed between the ranks."""
    if manifests is not None and len(manifests.parts) > 1:
        variants = find_variants(manifests.root, manifests.parts)
        if variants:
            warn_of_variants(name, variants, saved_by=len(manifests.parts), loaded_by=1)


def warn_of_variants(name: str, variants: Sequence[str], *, saved_by: int, loaded_by: int) -> None:
    """Warn that each rank gets the values of the lowest one."""
    warnings.warn(
        f"{name!r} was saved by {saved_by} ranks and is loaded by {loaded_by}. The ranks had different values here,"
        f" and all get that of the lowest rank that had one: {list_some(variants, _MAX_NAMED)}."
        f" Load it with {saved_by} ranks to get all of them back",
        stacklevel=3,
    )


@contextmanager
def opening_whole(
    repo: Repository, record: CommittedSnapshot, verify: Verify, progress: Progress | None
) -> Iterator[Opened]:
    """Open a snapshot to load all of it in one process; warns of values that differed between the saving ranks."""
    with Opened(open_snapshot(repo, record, verify=verify, progress=progress)) as opened:
        warn_alone(record.name, opened.reader.manifests)
        yield opened
