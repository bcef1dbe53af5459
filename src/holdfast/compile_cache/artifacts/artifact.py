"""Writes artifacts (a graph, its kernels and its key) as snapshots, and verifies what it reads. Does not need torch."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Literal

from holdfast.compile_cache.artifacts import catalog
from holdfast.compile_cache.artifacts.catalog import ARTIFACT_FORMAT, StoredVariant, list_signed
from holdfast.compile_cache.artifacts.statement import (
    GRAPH,
    KERNELS,
    KEY,
    describe_content,
    parse_parts,
    read_proven,
)
from holdfast.compile_cache.artifacts.trust import Trust, is_signed, sign
from holdfast.compile_cache.key_parts import GraphKey
from holdfast.errors import Corrupt, NameInUse, NewerFormat, NotFound
from holdfast.json_text import Json, canonical_json
from holdfast.repo.format.source import BytesSource
from holdfast.repo.handle.repository import Repository
from holdfast.repo.names.snapshots import NameState
from holdfast.repo.write.writer import Request, SaveResult, save

_ATTEMPTS: Final = 16
"""How often a writer tries again after another process has written to the same name first."""


@dataclass(frozen=True, slots=True)
class Artifact:
    """A compiled graph, with everything that another process needs to use it."""

    key: GraphKey
    guards: str
    """The sizes that it is valid for, as an expression; empty if it is valid for all."""
    graph: bytes
    """Serialised by torch. Loading it unpickles it, which runs code."""
    kernels: Mapping[str, bytes]
    """Digest of a kernel's source -> the compiled library."""
    seconds: float
    """How long it took to compile."""


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
            return _report_existing(slot, seconds=time.monotonic() - started)
        request = Request(slot.name, sources, metadata=metadata, overwrite=slot.snapshot is not None)
        try:
            return save(repo, request)
        except NameInUse:
            continue  # another process has written to this name, perhaps the same variant
    raise NameInUse(
        f"other processes keep saving variants of {artifact.key.digest}; nothing was written, try again",
        name=artifact.key.digest,
    )


def iter_variants(repo: Repository, key_digest: str) -> Iterator[StoredVariant]:
    """Yield the variants of a key. Their guards are in their records, so the artifacts are not read."""
    return catalog.iter_variants(repo.store, key_digest)


def read_artifact(repo: Repository, found: StoredVariant, *, trust: Trust) -> Artifact:
    """Read an artifact. Returns only after all of its bytes are verified and trusted.

    Raises:
        Corrupt, NewerFormat: it is damaged, does not match its record, or has a newer format.
        Untrusted: it is not signed with the secret, and other users could have written it.
        NotFound: it was deleted and collected after it was found.
    """
    entries = read_proven(repo, found, trust=trust)
    kernels = {name.removeprefix(KERNELS): data for name, data in entries.items() if name.startswith(KERNELS)}
    key = GraphKey(found.key_digest, found.digests, parse_parts(entries[KEY], found))
    return Artifact(key, found.guards, entries[GRAPH], kernels, found.seconds)


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
    for state in catalog.iter_states(repo.store, artifact.key.digest):
        if isinstance(state, StoredVariant):
            continue  # a name with a damaged record cannot be written to
        if state.snapshot is None:
            free = free or state
            continue
        found = catalog.parse_found(state.snapshot)
        if found.trouble or found.guards == artifact.guards:
            verdict = _classify(repo, found, secret)
            if verdict != "other":
                return found if verdict == "usable" else state
    assert free is not None, "iter_states ends with unused names"
    return free


def _classify(repo: Repository, found: StoredVariant, secret: bytes | None) -> Literal["usable", "broken", "other"]:
    """Classify a variant with the same guards: "usable", "broken" (to be replaced), or "other" (for other readers)."""
    if isinstance(found.trouble, NewerFormat):
        return "other"
    try:
        entries = read_proven(repo, found, trust=Trust(everything=True))
    except (Corrupt, NewerFormat, NotFound):
        return "broken"
    assert found.snapshot is not None, "only artifacts with a record can be read"
    statement, _ = describe_content(found.key_digest, list_signed(found.snapshot.metadata), entries)
    if secret is None or is_signed(found, statement, secret):
        return "usable"
    # Signed with another key: processes that have that key can use it. Unsigned: replace it with a signed one.
    return "other" if found.mac else "broken"


def _report_existing(found: StoredVariant, *, seconds: float) -> SaveResult:
    existing = found.snapshot
    assert existing is not None, "only artifacts with a record can be read"
    size = existing.logical_bytes
    return SaveResult(existing.name, existing.digest, existing.generation, size, 0, size, seconds, existed=True)
