"""Values that differ from rank to rank: named when another number of ranks loads the snapshot."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import Final

from holdfast.json_text import Json
from holdfast.repo.format.entry import NO_RANK
from holdfast.repo.format.manifest import Manifest
from holdfast.repo.format.rank_manifests import Manifests
from holdfast.snapshot.load.merge_trees import merge_trees, renumber
from holdfast.trees.outline import TREE

_MAX_NAMED: Final = 20


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
        # A part has a tree of its own only if that rank's tree differs from the root's.
        if part.spec is not None:
            own = renumber(_find_tree(part), {at: numbers[entry.name] for at, entry in enumerate(entries)})
            names += merge_trees([_find_tree(root), own])[1]
    return list(dict.fromkeys(names))


def _find_tree(manifest: Manifest) -> Json:
    return manifest.spec[TREE] if isinstance(manifest.spec, dict) else None


def warn_alone(name: str, manifests: Manifests | None) -> None:
    """Warn a single process that loads values of which each rank had its own."""
    if manifests is not None and len(manifests.parts) > 1:
        variants = find_variants(manifests.root, manifests.parts)
        if variants:
            warn_of_variants(name, variants, saved_by=len(manifests.parts), loaded_by=1)


def warn_of_variants(name: str, variants: Sequence[str], *, saved_by: int, loaded_by: int) -> None:
    """Warn that each rank gets the values of the lowest one."""
    more = f" and {len(variants) - _MAX_NAMED} more" if len(variants) > _MAX_NAMED else ""
    warnings.warn(
        f"{name!r} was saved by {saved_by} ranks and is loaded by {loaded_by}: where each had a value of its own, all"
        f" get that of the lowest, rank 0 if it had one: {', '.join(variants[:_MAX_NAMED])}{more}."
        f" Load it with {saved_by} ranks to get all of them back",
        stacklevel=3,
    )
