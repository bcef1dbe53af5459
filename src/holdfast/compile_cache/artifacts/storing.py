"""Writes and copies artifacts. A hit only reads, and does without this module. Does not need torch."""

from __future__ import annotations

import socket
import time
from typing import Final, Literal

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
    StoredVariant,
    iter_states,
    list_signed,
    parse_variant,
)
from holdfast.compile_cache.artifacts.trust import Trust, is_signed, sign
from holdfast.compile_cache.key_parts import GraphKey
from holdfast.errors import Corrupt, NameInUse, NewerFormat, NotFound
from holdfast.json_text import Json, canonical_json
from holdfast.progress import Progress
from holdfast.repo.format.source import BytesSource
from holdfast.repo.handle.repository import Repository
from holdfast.repo.names.snapshots import CommittedSnapshot, NameState
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
