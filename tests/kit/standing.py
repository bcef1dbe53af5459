"""Leases and marks in any state, and a collection that need not wait, for the tests of what collectors do."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Sequence

from holdfast.json_text import Json
from holdfast.objects.protocol import ObjectStore
from holdfast.repo.format.layout import MANIFESTS, MARKS, PACKS, generation_key, lease_stem, new_write_id, snapshot_stem
from holdfast.repo.format.record import encode_record
from holdfast.repo.names.generations import create_generation, list_generations
from holdfast.repo.names.snapshots import CommittedSnapshot, read_snapshot
from holdfast.repo.upkeep.collect import Collected, Rules, collect
from tests.kit.saving import keys

LEASE_ID = "a" * 24
NOW = Rules(min_age_s=0.0)


def show_lease(store: ObjectStore, state: str, lease_id: str = LEASE_ID, **other: Json) -> None:
    """Create the next generation of a lease."""
    put_lease(store, len(list_generations(store, lease_stem(lease_id))), state, lease_id, **other)


def put_lease(
    store: ObjectStore, generation: int, state: str = "live", lease_id: str = LEASE_ID, **other: Json
) -> None:
    """Create any generation of a lease."""
    fields: dict[str, Json] = {
        "kind": "lease", "lease": lease_id, "state": state, "write_id": new_write_id(), "purpose": "save 'x'",
        "host": socket.gethostname(), "pid": os.getpid(), "time": store.clock(),
    }  # fmt: skip
    create_generation(store, lease_stem(lease_id), generation, {**fields, **other})


def put_under_lease(store: ObjectStore, name: str, lease_id: str = LEASE_ID) -> CommittedSnapshot:
    """Write the newest record of a name anew, as committed under a lease of ours."""
    snapshot = read_snapshot(store, name)
    stem = snapshot_stem(name)
    old = store.read(generation_key(stem, snapshot.generation), limit_bytes=1 << 20)
    store.delete(generation_key(stem, snapshot.generation))
    text = old[112:].replace(f'"lease":"{snapshot.lease_id}"'.encode(), f'"lease":"{lease_id}"'.encode())
    store.create(generation_key(stem, snapshot.generation), reseal(text))
    return read_snapshot(store, name)


def reseal(body: bytes) -> bytes:
    """Return a record with this JSON as its body, and a header that proves it."""
    return encode_record(json.loads(body))


def put_mark(store: ObjectStore, named: Sequence[str], mark_id: str = "f" * 24, **other: Json) -> str:
    """Publish a mark as another collector would; returns its stem."""
    fields: dict[str, Json] = {"kind": "mark", "write_id": new_write_id(), "keys": list(named), "leases": []}
    create_generation(store, MARKS + mark_id, 0, {**fields, **other})
    return MARKS + mark_id


def collect_now(store: ObjectStore) -> Collected:
    return collect(store, NOW)


def data_keys(store: ObjectStore) -> set[str]:
    """Return the keys of all packs and manifests."""
    return {*keys(store, PACKS), *keys(store, MANIFESTS)}
