"""Artifacts as snapshots: a compiled graph, its kernels and its key, proven before they return; needs no torch."""

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
from holdfast.repo.format.record import Json, canonical_json
from holdfast.repo.format.source import BytesSource
from holdfast.repo.handle.repository import Repository
from holdfast.repo.names.snapshots import NameState
from holdfast.repo.write.writer import Request, SaveResult, save

_ATTEMPTS: Final = 16
"""How often a writer looks again after another was faster; each of them has stored a variant, or mended one."""


@dataclass(frozen=True, slots=True)
class Artifact:
    """What a compilation leaves for the next start."""

    key: GraphKey
    guards: str
    """When it fits, as an expression over sizes; empty if always."""
    graph: bytes
    """Opaque: unpickling it runs code."""
    kernels: Mapping[str, bytes]
    """Compiled libraries by the hash of their source."""
    seconds: float
    """How long it took to compile."""


def write_artifact(repo: Repository, artifact: Artifact, *, secret: bytes | None) -> SaveResult:
    """Save an artifact as the next variant of its key, signed if there is a secret.

    A variant with the same guards that can be read makes it superfluous; one that cannot, or that lacks the signature,
    is replaced. Raises what `save` raises, but NameInUse only if others keep being faster.
    """
    started = time.monotonic()
    metadata, sources = _describe(artifact, secret)
    for _ in range(_ATTEMPTS):
        place = _find_place(repo, artifact, secret)
        if isinstance(place, StoredVariant):
            return _describe_held(place, seconds=time.monotonic() - started)
        request = Request(place.name, sources, metadata=metadata, overwrite=place.snapshot is not None)
        try:
            return save(repo, request)
        except NameInUse:
            continue  # somebody else has stored a variant there: perhaps this one
    raise NameInUse(
        f"others keep storing variants of {artifact.key.digest}; nothing was written", name=artifact.key.digest
    )


def iter_variants(repo: Repository, key_digest: str) -> Iterator[StoredVariant]:
    """Yield the variants of a key, by exact names; their guards are known without reading them."""
    return catalog.iter_variants(repo.store, key_digest)


def read_artifact(repo: Repository, found: StoredVariant, *, trust: Trust) -> Artifact:
    """Read an artifact, and return none of its bytes before all of them are proven and trusted.

    Raises:
        Corrupt, NewerFormat: it is damaged, or not what its record says.
        Untrusted: nothing vouches for it.
        NotFound: it was deleted and collected meanwhile.
    """
    entries = read_proven(repo, found, trust=trust)
    kernels = {name.removeprefix(KERNELS): data for name, data in entries.items() if name.startswith(KERNELS)}
    key = GraphKey(found.key_digest, found.digests, parse_parts(entries[KEY], found))
    return Artifact(key, found.guards, entries[GRAPH], kernels, found.seconds)


def _describe(artifact: Artifact, secret: bytes | None) -> tuple[dict[str, Json], list[BytesSource]]:
    """Return what the record will say, and the bytes that it speaks of."""
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
    """Return the version of torch that a key was made for, which is a part of it: to ask torch itself would load it."""
    system = key.parts.get("system")
    version = system.get("torch") if isinstance(system, dict) else None
    return version if isinstance(version, str) else ""


def _find_place(repo: Repository, artifact: Artifact, secret: bytes | None) -> StoredVariant | NameState:
    """Return the variant that makes this one superfluous, or the name that it belongs under and what that holds."""
    free: NameState | None = None
    for state in catalog.iter_states(repo.store, artifact.key.digest):
        if isinstance(state, StoredVariant):
            continue  # a name whose record is damaged cannot be written to
        if state.snapshot is None:
            free = free or state
            continue
        found = catalog.parse_found(state.snapshot)
        if found.trouble or found.guards == artifact.guards:
            verdict = _judge(repo, found, secret)
            if verdict != "other":
                return found if verdict == "held" else state
    assert free is not None, "names end with one that is free"
    return free


def _judge(repo: Repository, found: StoredVariant, secret: bytes | None) -> Literal["held", "broken", "other"]:
    """Say of a variant with the same guards whether it is "held", to be mended as "broken", or "other" people's."""
    if isinstance(found.trouble, NewerFormat):
        return "other"
    try:
        entries = read_proven(repo, found, trust=Trust(everything=True))
    except (Corrupt, NewerFormat, NotFound):
        return "broken"
    assert found.snapshot is not None, "it could be read"
    statement, _ = describe_content(found.key_digest, list_signed(found.snapshot.metadata), entries)
    if secret is None or is_signed(found, statement, secret):
        return "held"
    # Signed with another key it is of use to those who have that one.
    return "other" if found.mac else "broken"


def _describe_held(found: StoredVariant, *, seconds: float) -> SaveResult:
    held = found.snapshot
    assert held is not None, "it could be read"
    size = held.logical_bytes
    return SaveResult(held.name, held.digest, held.generation, size, 0, size, seconds, existed=True)
