"""Snapshot records without content, for tests of what is asked about records."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from holdfast.digest import Digest, hash_bytes
from holdfast.json_text import Json
from holdfast.objects.protocol import ObjectStore
from holdfast.query.expression import parse_expression
from holdfast.query.facts import Facts
from holdfast.query.select import holds
from holdfast.repo.format.layout import ManifestRef, new_file_id, new_lease_id, new_write_id
from holdfast.repo.names.snapshots import CommittedSnapshot, commit_snapshot, read_name


def make_committed(
    name: str,
    metadata: Mapping[str, Json] | None = None,
    *,
    environment: Mapping[str, Json] | None = None,
    time_s: float = 1_700_000_000.0,
    content: str = "",
    size_bytes: int = 1000,
) -> CommittedSnapshot:
    """Return the record of a snapshot; `content` decides its digest, by default its name."""
    lease_id = new_lease_id()
    return CommittedSnapshot(
        name=name,
        manifest=ManifestRef(new_file_id(lease_id), Digest(bytes(32)), 100),
        digest=hash_bytes((content or name).encode()),
        time_s=time_s,
        num_entries=3,
        logical_bytes=size_bytes,
        metadata=dict(metadata or {}),
        lease_id=lease_id,
        generation=0,
        write_id=new_write_id(),
        environment=dict(environment or {}),
    )


def make_one_fact(
    metadata: Mapping[str, Json] | None = None, *, name: str = "run/step-100", tags: tuple[str, ...] = ()
) -> Facts:
    """Return the facts about one snapshot, saved a day ago on 8 ranks."""
    environment = {"host": "gpu-3", "world_size": 8, "torch": "2.10.1"}
    return Facts(make_committed(name, metadata, environment=environment), tags, 1_700_000_000.0 + 86400)


def is_true(text: str, metadata: Mapping[str, Json] | None = None, *, tags: tuple[str, ...] = ()) -> bool:
    """Return whether an expression holds for one snapshot."""
    return holds(parse_expression(text), make_one_fact(metadata, tags=tags))


def commit(store: ObjectStore, snapshot: CommittedSnapshot) -> CommittedSnapshot:
    """Create a record as the next generation of its name, without packs or manifests."""
    placed = replace(snapshot, generation=read_name(store, snapshot.name).next_generation)
    commit_snapshot(store, placed)
    return placed
