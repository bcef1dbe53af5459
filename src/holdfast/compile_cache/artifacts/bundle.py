"""Artifacts that travel: copied from store to store, under another number where theirs is taken; needs no torch."""

from __future__ import annotations

import time

from holdfast.compile_cache.artifacts.catalog import StoredVariant, iter_states, parse_found
from holdfast.errors import Corrupt
from holdfast.progress import Progress
from holdfast.repo.handle.repository import Repository
from holdfast.repo.names.snapshots import Snapshot
from holdfast.repo.upkeep.copying import copy_snapshot
from holdfast.repo.write.writer import SaveResult


def copy_artifact(
    source: Repository, snapshot: Snapshot, target: Repository, *, progress: Progress | None = None
) -> SaveResult:
    """Copy one artifact, unless the target has a variant of its key with the same guards and signature.

    Two compilations of one graph differ in bytes, and number their variants as they come: the same name means little.
    """
    started = time.monotonic()
    found = parse_found(snapshot)
    if found.trouble:
        raise found.trouble
    free = ""
    for state in iter_states(target.store, found.key_digest):
        if isinstance(state, StoredVariant):
            continue
        if state.snapshot is None:
            free = free or state.name
            continue
        held = parse_found(state.snapshot)
        if not held.trouble and held.guards == found.guards and _is_as_good(held, found):
            seconds = time.monotonic() - started
            there, size = state.snapshot, state.snapshot.logical_bytes
            return SaveResult(there.name, there.digest, there.generation, size, 0, size, seconds, existed=True)
    if not free:
        raise Corrupt(f"{target.store.url} has no name left for a variant of {found.key_digest}", key=found.name)
    return copy_snapshot(source, snapshot, target, name=free, progress=progress)


def _is_as_good(held: StoredVariant, found: StoredVariant) -> bool:
    """Tell whether whoever could use the one can use the other: the same one, or no signature is lost."""
    return held.mac == found.mac or not found.mac
