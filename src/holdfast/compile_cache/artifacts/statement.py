"""What an artifact consists of, as one statement that is hashed and signed; and its bytes, read and held against it."""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from typing import Final

from holdfast.compile_cache.artifacts.catalog import StoredVariant, list_signed
from holdfast.compile_cache.artifacts.trust import Trust, verify_promising, verify_trusted
from holdfast.digest import hash_bytes, hash_kind
from holdfast.errors import Corrupt
from holdfast.repo.format.record import Json, canonical_json, parse_json
from holdfast.repo.handle.repository import Repository
from holdfast.repo.read.reader import SnapshotReader, open_snapshot

GRAPH: Final = "graph"
KEY: Final = "key.json"
KERNELS: Final = "kernels/"
MAX_ARTIFACT_BYTES: Final = 1 << 30
"""More than any compiler writes, and less than would hurt."""


def describe_content(key_digest: str, facts: Mapping[str, Json], entries: Mapping[str, bytes]) -> tuple[bytes, str]:
    """Return the statement that these facts and bytes belong to that key, and the digest of it in hex.

    The number of the variant is no part of it: a copy under another number is as good. The key is, and all that the
    record says but this, so that nothing can be taken from one artifact for another.
    """
    digests = {name: hash_bytes(data).hex() for name, data in entries.items()}
    statement = canonical_json({"artifact of": key_digest, "facts": dict(facts), "entries": digests})
    return statement, hash_kind("artifact", [statement]).hex()


def read_proven(repo: Repository, found: StoredVariant, *, trust: Trust) -> dict[str, bytes]:
    """Read the entries of an artifact by name; raises Corrupt, NewerFormat, Untrusted or NotFound before returning any.

    What is trusted is decided after all bytes were read: what is judged is what is returned, whatever happens then.
    """
    if found.trouble:
        raise found.trouble
    assert found.snapshot is not None, "without trouble there is a record"
    verify_promising(repo.store, found, trust)
    with open_snapshot(repo, found.snapshot) as reader:
        entries = _read_entries(reader, found.name)
    statement, content = describe_content(found.key_digest, list_signed(found.snapshot.metadata), entries)
    if not hmac.compare_digest(content, found.content):
        raise Corrupt(
            f"{found.name!r} does not hold the artifact that its record describes; it is compiled and saved again when"
            " it is next needed",
            key=found.name,
        )
    verify_trusted(repo.store, found, statement, trust)
    return entries


def read_parts(repo: Repository, found: StoredVariant) -> dict[str, Json]:
    """Read the parts of an artifact's key, which are data and run nothing, so that nobody need vouch for them."""
    if found.trouble:
        raise found.trouble
    assert found.snapshot is not None, "without trouble there is a record"
    with open_snapshot(repo, found.snapshot) as reader:
        return parse_parts(reader.read_entry(KEY), found)


def parse_parts(data: bytes | bytearray, found: StoredVariant) -> dict[str, Json]:
    """Return the parts of a key, or raise Corrupt."""
    parts = parse_json(memoryview(data), where=f"{found.name}, {KEY}")
    if not isinstance(parts, dict):
        raise Corrupt(f"{found.name!r}: {KEY} does not hold the parts of a key", key=found.name)
    return parts


def _read_entries(reader: SnapshotReader, name: str) -> dict[str, bytes]:
    held = {entry.name: entry for entry in reader.manifest.iter_entries()}
    strange = [entry for entry in held if entry not in (GRAPH, KEY) and not entry.startswith(KERNELS)]
    if strange or not {GRAPH, KEY} <= held.keys():
        raise Corrupt(f"{name!r} does not hold what an artifact consists of: {sorted(held)[:8]}", key=name)
    if sum(entry.size_bytes for entry in held.values()) > MAX_ARTIFACT_BYTES:
        raise Corrupt(f"{name!r} claims to be larger than {MAX_ARTIFACT_BYTES} bytes", key=name)
    buffers = {entry: bytearray(held[entry].size_bytes) for entry in held}
    reader.read_all([(held[entry], memoryview(buffers[entry])) for entry in held])
    return {entry: bytes(data) for entry, data in buffers.items()}
