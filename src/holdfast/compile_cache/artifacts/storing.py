"""Writes and copies artifacts, and records when they were used. A hit only reads. Does not need torch."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Final, Literal, NamedTuple

from holdfast.compile_cache.artifacts.artifact import (
    GRAPH,
    KERNELS,
    KEY,
    Artifact,
    describe_content,
    is_equivalent,
    read_verified,
)
from holdfast.compile_cache.artifacts.catalog import (
    ARTIFACT_FORMAT,
    DAY_S,
    StoredVariant,
    iter_states,
    list_signed,
    parse_variant,
)
from holdfast.compile_cache.artifacts.trust import Trust, is_signed, sign
from holdfast.compile_cache.key_parts import GraphKey
from holdfast.errors import Corrupt, HoldfastError, NameInUse, NewerFormat, NotFound
from holdfast.json_text import Json, canonical_json
from holdfast.objects.protocol import ObjectStore
from holdfast.progress import Progress
from holdfast.repo.format.layout import RESERVED
from holdfast.repo.format.record import Fields
from holdfast.repo.format.source import BytesSource
from holdfast.repo.handle.repository import Repository
from holdfast.repo.names.snapshots import CommittedSnapshot, NameState, delete_snapshot, iter_names, read_name
from holdfast.repo.upkeep.transfer import copy_snapshot
from holdfast.repo.write.writer import Request, SaveResult, WriteOptions, save

_ATTEMPTS: Final = 16
"""How often a writer tries again after another process has written to the same name first."""


def write_artifact(repo: Repository, artifact: Artifact, *, secret: bytes | None) -> SaveResult:
    """Save an artifact as the next variant of its key, signed if there is a secret.

    Nothing is written if a readable variant with the same guards exists. A variant with the same guards is replaced if
    it is damaged, or unsigned although there is a secret. Raises what `save` raises; NameInUse only if other processes
    wrote first in every attempt.
    """
    started = time.monotonic()
    metadata, sources = _describe(artifact, secret)
    for _ in range(_ATTEMPTS):
        slot = _find_slot(repo, artifact, secret)
        if isinstance(slot, StoredVariant):
            assert slot.snapshot is not None, "only artifacts with a record can be read"
            return _report_existing(slot.snapshot, seconds=time.monotonic() - started)
        request = Request(
            slot.name, sources, options=WriteOptions(metadata=metadata, overwrite=slot.snapshot is not None)
        )
        try:
            return save(repo, request)
        except NameInUse:
            continue  # another process has written to this name, perhaps the same variant
    raise NameInUse(
        f"other processes keep saving variants of {artifact.key.digest}; nothing was written, try again",
        name=artifact.key.digest,
    )


def copy_artifact(
    source: Repository, snapshot: CommittedSnapshot, target: Repository, *, progress: Progress | None = None
) -> SaveResult:
    """Copy one artifact, unless the target has a variant of its key with the same guards and at least its signature.

    Equal names do not mean equal artifacts: variants are numbered in the order in which a store receives them. Nor do
    equal artifacts have equal bytes: two compilations of one graph differ.
    """
    started = time.monotonic()
    variant = parse_variant(snapshot)
    if variant.trouble:
        raise variant.trouble
    free = ""
    for state in iter_states(target.store, variant.key_digest):
        if isinstance(state, StoredVariant):
            continue
        if state.snapshot is None:
            free = free or state.name
            continue
        if is_equivalent(parse_variant(state.snapshot), variant):
            return _report_existing(state.snapshot, seconds=time.monotonic() - started)
    assert free, "iter_states ends with unused names"
    return copy_snapshot(source, snapshot, target, name=free, progress=progress)


def _describe(artifact: Artifact, secret: bytes | None) -> tuple[dict[str, Json], list[BytesSource]]:
    """Return the metadata of the record, and the entries that it describes."""
    entries = {KEY: canonical_json(dict(artifact.key.parts)), GRAPH: artifact.graph}
    entries |= {KERNELS + name: artifact.kernels[name] for name in sorted(artifact.kernels)}
    metadata: dict[str, Json] = {
        "artifact": ARTIFACT_FORMAT,
        "digests": dict(artifact.key.digests),
        "guards": artifact.guards,
        "seconds": artifact.seconds,
        "torch": _find_torch(artifact.key),
        "producer": socket.gethostname(),
    }
    statement, content = describe_content(artifact.key.digest, list_signed(metadata), entries)
    metadata |= {"content": content, "mac": sign(statement, secret) if secret else ""}
    sources = [BytesSource(name, data, {"type": "artifact"}) for name, data in entries.items()]
    return metadata, sources


def _find_torch(key: GraphKey) -> str:
    """Return the torch version of a key. It is read from the key because importing torch is slow."""
    system = key.parts.get("system")
    version = system.get("torch") if isinstance(system, dict) else None
    return version if isinstance(version, str) else ""


def _find_slot(repo: Repository, artifact: Artifact, secret: bytes | None) -> StoredVariant | NameState:
    """Return the stored variant that makes this one unnecessary, or else the name to write to and its state."""
    free: NameState | None = None
    for state in iter_states(repo.store, artifact.key.digest):
        if isinstance(state, StoredVariant):
            continue  # a name with a damaged record cannot be written to
        if state.snapshot is None:
            free = free or state
            continue
        variant = parse_variant(state.snapshot)
        if variant.trouble or variant.guards == artifact.guards:
            use = _classify(repo, variant, secret)
            if use != "other":
                return variant if use == "usable" else state
    assert free is not None, "iter_states ends with unused names"
    return free


def _classify(repo: Repository, variant: StoredVariant, secret: bytes | None) -> Literal["usable", "broken", "other"]:
    """Classify a variant with the same guards: "usable", "broken" (to be replaced), or "other" (for other readers)."""
    if isinstance(variant.trouble, NewerFormat):
        return "other"
    try:
        entries = read_verified(repo, variant, trust=Trust(everything=True))
    except (Corrupt, NewerFormat, NotFound):
        return "broken"
    assert variant.snapshot is not None, "only artifacts with a record can be read"
    statement, _ = describe_content(variant.key_digest, list_signed(variant.snapshot.metadata), entries)
    if secret is None or is_signed(variant, statement, secret):
        return "usable"
    # Signed with another key: processes that have that key can use it. Unsigned: replace it with a signed one.
    return "other" if variant.mac else "broken"


def _report_existing(existing: CommittedSnapshot, *, seconds: float) -> SaveResult:
    size = existing.logical_bytes
    return SaveResult(existing.name, existing.digest, existing.generation, size, 0, size, seconds, existed=True)


USES: Final = f"{RESERVED}compiled-use/"
_USE_ATTEMPTS: Final = 4


class KeyUses(NamedTuple):
    """The recorded uses of one key."""

    last_s: float
    days: int
    """The number of days on which it was used, as far as their records are kept."""


def record_use(repo: Repository, hits: Iterable[StoredVariant]) -> bool:
    """Record that these artifacts were used today. Return whether anything was written. Raises no HoldfastError.

    Artifacts saved within the last day, or already recorded today by any process, are skipped: of a thousand processes
    that start with the same artifacts, one writes.
    """
    now_s = repo.store.clock()
    keys = {hit.key_digest for hit in hits if hit.snapshot and now_s - hit.snapshot.time_s > DAY_S}
    try:
        return bool(keys) and _add(repo, USES + _format_day(now_s), keys)
    except HoldfastError:
        return False  # use records are optional: a read-only or full store is not an error


def read_uses(store: ObjectStore) -> dict[str, KeyUses]:
    """Return when each key was last used, where recorded, to within a day; and how often. Lists all names."""
    return _find_uses(_list_days(store))


def delete_old_uses(store: ObjectStore, *, kept: set[str]) -> int:
    """Delete records older than a day that are not the last use of any key in `kept`. Return how many."""
    days = _list_days(store)
    uses = _find_uses(days)
    oldest_s = store.clock() - DAY_S
    idle = [
        day for day in days if not any(uses[key].last_s == day.time_s for key in kept.intersection(_parse_keys(day)))
    ]
    names = [day.name for day in idle if day.time_s < oldest_s]
    for name in names:
        with suppress(NameInUse, NotFound):
            delete_snapshot(store, name)
    return len(names)


def _list_days(store: ObjectStore) -> list[CommittedSnapshot]:
    return [found for found in iter_names(store, USES) if isinstance(found, CommittedSnapshot)]


def _find_uses(days: Iterable[CommittedSnapshot]) -> dict[str, KeyUses]:
    uses: dict[str, KeyUses] = {}
    for day in days:
        for key in set(_parse_keys(day)):
            last_s, count = uses.get(key, (0.0, 0))
            uses[key] = KeyUses(max(last_s, day.time_s), count + 1)
    return uses


def _add(repo: Repository, name: str, keys: set[str]) -> bool:
    for _ in range(_USE_ATTEMPTS):
        existing = read_name(repo.store, name).snapshot
        known = set(_parse_keys(existing)) if existing else set()
        if keys <= known:
            return False
        try:
            save(
                repo,
                Request(
                    name,
                    [],
                    options=WriteOptions(metadata={"used": sorted(known | keys)}, overwrite=existing is not None),
                ),
            )
        except NameInUse:
            continue  # another process has added its keys: read them and add these
        return True
    return False


def _parse_keys(snapshot: CommittedSnapshot) -> tuple[str, ...]:
    try:
        return Fields(snapshot.name, snapshot.metadata).texts("used")
    except HoldfastError:
        return ()  # malformed: the uses of that day are unknown


def _format_day(time_s: float) -> str:
    return time.strftime("%Y-%m-%d", time.gmtime(time_s))
