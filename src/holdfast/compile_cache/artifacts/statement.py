"""The signed statement of what an artifact contains. Reads the entries of an artifact and verifies them against it."""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from typing import Final

from holdfast.compile_cache.artifacts.catalog import StoredVariant, list_signed
from holdfast.compile_cache.artifacts.trust import Trust, verify_promising, verify_trusted
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


def describe_content(key_digest: str, facts: Mapping[str, Json], entries: Mapping[str, bytes]) -> tuple[bytes, str]:
    """Return a statement that these facts and entries belong to that key, and its digest in hex.

    It covers the key and the whole record, so that no part of one artifact can be used in another. It does not cover
    the variant number, so that a copy under another number is valid too.
    """
    digests = {name: hash_bytes(data).hex() for name, data in entries.items()}
    statement = canonical_json({"artifact of": key_digest, "facts": dict(facts), "entries": digests})
    return statement, hash_kind("artifact", [statement]).hex()


def read_proven(repo: Repository, found: StoredVariant, *, trust: Trust) -> dict[str, bytes]:
    """Read all entries of an artifact, by name. Raises Corrupt, NewerFormat, Untrusted or NotFound.

    The signature is checked on the bytes in memory that are returned, so later changes in the store have no effect.
    """
    if found.trouble:
        raise found.trouble
    assert found.snapshot is not None, "a variant without trouble has a record"
    verify_promising(repo.store, found, trust)
    with open_snapshot(repo, found.snapshot) as reader:
        entries = _read_entries(reader, found.name)
    statement, content = describe_content(found.key_digest, list_signed(found.snapshot.metadata), entries)
    if not hmac.compare_digest(content, found.content):
        raise Corrupt(
            f"{found.name!r} does not contain the artifact that its record describes; the graph is compiled and saved"
            " again when it is next needed",
            key=found.name,
        )
    verify_trusted(repo.store, found, statement, trust)
    return entries


def read_parts(repo: Repository, found: StoredVariant) -> dict[str, Json]:
    """Read the parts of an artifact's key. They are data and run no code, so they need no signature."""
    if found.trouble:
        raise found.trouble
    assert found.snapshot is not None, "a variant without trouble has a record"
    with open_snapshot(repo, found.snapshot) as reader:
        return parse_parts(reader.read_entry(KEY), found)


def parse_parts(data: bytes | bytearray, found: StoredVariant) -> dict[str, Json]:
    """Parse the parts of a key. Raises Corrupt."""
    parts = parse_json(memoryview(data), where=f"{found.name}, {KEY}")
    if not isinstance(parts, dict):
        raise Corrupt(f"{found.name!r}: {KEY} does not contain the parts of a key", key=found.name)
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
