"""Artifacts with made-up contents, and functions that read and forge them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from holdfast.compile_cache.artifacts.artifact import Artifact
from holdfast.compile_cache.artifacts.catalog import StoredVariant, artifact_name, parse_variant
from holdfast.compile_cache.artifacts.storing import write_artifact
from holdfast.compile_cache.key_parts import PARTS, GraphKey, hash_parts
from holdfast.digest import Buffer
from holdfast.json_text import Json
from holdfast.repo.format.source import BytesSource
from holdfast.repo.handle.repository import Repository
from holdfast.repo.names.snapshots import read_snapshot
from holdfast.repo.write.writer import Request, WriteOptions, save

SECRET: Final = bytes(range(32))
OTHER_SECRET: Final = bytes(range(1, 33))


def make_key(seed: str = "a", **parts: Json) -> GraphKey:
    """Return a key with these parts and short defaults for the others; another seed gives another graph."""
    usual: dict[str, Json] = {part: {} for part in PARTS}
    usual |= {"graph": [f"call {seed}"], "aliasing": [], "system": {"torch": "2.13.0"}}
    return hash_parts(usual | parts)


def make_artifact(
    seed: str = "a",
    *,
    key: GraphKey | None = None,
    guards: str = "",
    graph: bytes = b"graph",
    kernels: Mapping[str, bytes] | None = None,
) -> Artifact:
    held = {"k1": b"library one", "k2": b"library two"} if kernels is None else kernels
    return Artifact(key or make_key(seed), guards, graph, held, 12.5)


def store_artifact(repo: Repository, artifact: Artifact | None = None, *, secret: bytes | None = None) -> StoredVariant:
    """Write an artifact and return it as it is stored."""
    result = write_artifact(repo, artifact or make_artifact(), secret=secret)
    return parse_variant(read_snapshot(repo.store, result.name))


def forge(repo: Repository, name: str, entries: Mapping[str, Buffer], metadata: Mapping[str, Json]) -> StoredVariant:
    """Save an artifact under a name as anyone with write access can: every digest of the store is right."""
    sources = [BytesSource(entry, data, {"type": "artifact"}) for entry, data in entries.items()]
    save(repo, Request(name, sources, options=WriteOptions(metadata=metadata, overwrite=True)))
    return parse_variant(read_snapshot(repo.store, name))


def find_variant(repo: Repository, seed: str = "a", number: int = 0) -> StoredVariant:
    return parse_variant(read_snapshot(repo.store, artifact_name(make_key(seed).digest, number)))


def age(found: StoredVariant, seconds: float) -> StoredVariant:
    """Return it as if it had been saved so much earlier."""
    assert found.snapshot is not None
    return replace(found, snapshot=replace(found.snapshot, time_s=found.snapshot.time_s - seconds))
