"""Copies artifacts between stores, under another variant number if theirs is in use. Does not need torch."""

from __future__ import annotations

import time

from holdfast.compile_cache.artifacts.catalog import StoredVariant, iter_states, parse_found
from holdfast.errors import Corrupt
from holdfast.progress import Progress
from holdfast.repo.handle.repository import Repository
from holdfast.repo.names.snapshots import CommittedSnapshot
from holdfast.repo.upkeep.copying import copy_snapshot
from holdfast.repo.write.writer import SaveResult


def copy_artifact(
    source: Repository, snapshot: CommittedSnapshot, target: Repository, *, progress: Progress | None = None
) -> SaveResult:
    """Copy one artifact, unless the target has a variant of its key with the same guards and at least its signature.

    Equal names do not mean equal artifacts: variants are numbered in the order in which a store receives them. Nor do
    equal artifacts have equal bytes: two compilations of one graph differ.
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
        existing = parse_found(state.snapshot)
        if not existing.trouble and existing.guards == found.guards and _can_replace(existing, found):
            seconds = time.monotonic() - started
            there, size = state.snapshot, state.snapshot.logical_bytes
            return SaveResult(there.name, there.digest, there.generation, size, 0, size, seconds, existed=True)
    if not free:
        raise Corrupt(
            f"{target.store.url} has no unused name for another variant of {found.key_digest}", key=found.name
        )
    return copy_snapshot(source, snapshot, target, name=free, progress=progress)


def _can_replace(existing: StoredVariant, found: StoredVariant) -> bool:
    """Return whether every process that trusts `found` by its signature also trusts `existing`."""
    return existing.mac == found.mac or not found.mac
