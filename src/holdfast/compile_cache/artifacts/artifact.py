"""Reads artifacts: snapshots of a graph, its kernels and its key. Does not need torch.

The record of an artifact has the digest of a statement of all that the artifact contains, and a signature of it if
there is a secret. Reading verifies every entry against that statement.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from holdfast.compile_cache.artifacts.catalog import StoredVariant, list_signed
from holdfast.compile_cache.artifacts.trust import Trust, verify_can_be_trusted, verify_trusted
from holdfast.compile_cache.key_parts import GraphKey
from holdfast.digest import hash_bytes, hash_kind
from holdfast.errors import Corrupt
from holdfast.json_text import Json, canonical_json, parse_json
from holdfast.repo.handle.repository import Repository
from holdfast.repo.read.reader import SnapshotReader, open_snapshot

GRAPH: Final = "graph"
KEY: Final = "key.json"
KERNELS: Final = "kernels/"
MAX_ARTIFACT_BYTES: Final = 1 << 30
"""More than any compiler writes, and small enough to be read into memory."""


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


def read_artifact(repo: Repository, variant: StoredVariant, *, trust: Trust) -> Artifact:
    """Read an artifact. Returns only after all of its bytes are verified and trusted.

    Raises:
        Corrupt, NewerFormat: it is damaged, does not match its record, or has a newer format.
        Untrusted: it is not signed with the secret, and other users could have written it.
        NotFound: it was deleted and collected after it was found.
    """
    entries = read_verified(repo, variant, trust=trust)
    kernels = {name.removeprefix(KERNELS): data for name, data in entries.items() if name.startswith(KERNELS)}
    key = GraphKey(variant.key_digest, variant.digests, parse_parts(entries[KEY], variant))
    return Artifact(key, variant.guards, entries[GRAPH], kernels, variant.seconds)


def read_parts(repo: Repository, variant: StoredVariant) -> dict[str, Json]:
    """Read the parts of an artifact's key. They are data and run no code, so they need no signature."""
    if variant.trouble:
        raise variant.trouble
    assert variant.snapshot is not None, "a variant without trouble has a record"
    with open_snapshot(repo, variant.snapshot) as reader:
        return parse_parts(reader.read_entry(KEY), variant)


def describe_content(key_digest: str, facts: Mapping[str, Json], entries: Mapping[str, bytes]) -> tuple[bytes, str]:
    """Return a statement that these facts and entries belong to that key, and its digest in hex.

    It covers the key and the whole record, so that no part of one artifact can be used in another. It does not cover
    the variant number, so that a copy under another number is valid too.
    """
    digests = {name: hash_bytes(data).hex() for name, data in entries.items()}
    statement = canonical_json({"artifact of": key_digest, "facts": dict(facts), "entries": digests})
    return statement, hash_kind("artifact", [statement]).hex()


def read_verified(repo: Repository, variant: StoredVariant, *, trust: Trust) -> dict[str, bytes]:
    """Read all entries of an artifact, by name. Raises Corrupt, NewerFormat, Untrusted or NotFound.

    The signature is checked on the bytes in memory that are returned, so later changes in the store have no effect.
    """
    if variant.trouble:
        raise variant.trouble
    assert variant.snapshot is not None, "a variant without trouble has a record"
    verify_can_be_trusted(repo.store, variant, trust)
    with open_snapshot(repo, variant.snapshot) as reader:
        entries = _read_entries(reader, variant.name)
    statement, content = describe_content(variant.key_digest, list_signed(variant.snapshot.metadata), entries)
    if not hmac.compare_digest(content, variant.content):
        raise Corrupt(
            f"{variant.name!r} does not contain the artifact that its record describes; the graph is compiled and saved"
            " again when it is next needed",
            key=variant.name,
        )
    verify_trusted(repo.store, variant, statement, trust)
    return entries


def parse_parts(data: bytes | bytearray, variant: StoredVariant) -> dict[str, Json]:
    """Parse the parts of a key. Raises Corrupt."""
    parts = parse_json(memoryview(data), where=f"{variant.name}, {KEY}")
    if not isinstance(parts, dict):
        raise Corrupt(f"{variant.name!r}: {KEY} does not contain the parts of a key", key=variant.name)
    return parts


def _read_entries(reader: SnapshotReader, name: str) -> dict[str, bytes]:
    listed = {entry.name: entry for entry in reader.manifest.iter_entries()}
    strange = [entry for entry in listed if entry not in (GRAPH, KEY) and not entry.startswith(KERNELS)]
    if strange or not {GRAPH, KEY} <= listed.keys():
        raise Corrupt(f"{name!r} does not have the entries of an artifact, but {sorted(listed)[:8]}", key=name)
    if sum(entry.size_bytes for entry in listed.values()) > MAX_ARTIFACT_BYTES:
        raise Corrupt(f"{name!r} is larger than {MAX_ARTIFACT_BYTES} bytes according to its manifest", key=name)
    buffers = {entry: bytearray(listed[entry].size_bytes) for entry in listed}
    reader.read_all([(listed[entry], memoryview(buffers[entry])) for entry in listed])
    return {entry: bytes(data) for entry, data in buffers.items()}


def is_equivalent(existing: StoredVariant, variant: StoredVariant) -> bool:
    """Return whether `existing`, of the same key, serves every process that `variant` serves.

    Their guards are equal, and a process that trusts `variant` by its signature also trusts `existing`.
    """
    is_trusted = existing.mac == variant.mac or not variant.mac
    return not existing.trouble and existing.guards == variant.guards and is_trusted
