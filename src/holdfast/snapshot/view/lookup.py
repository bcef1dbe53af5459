"""Snapshots by name or tag, by prefix, and the newest of a prefix."""

from __future__ import annotations

from collections.abc import Iterator

from holdfast.errors import NotFound
from holdfast.repo.format.layout import natural_order
from holdfast.repo.handle.repository import Repository
from holdfast.repo.names.snapshots import CommittedSnapshot as Record
from holdfast.repo.names.snapshots import iter_user_names, read_snapshot
from holdfast.repo.names.tags import read_tag
from holdfast.snapshot.view.lazy import Snapshot
from holdfast.trees.registered import Types


def open_named(repo: Repository, name: str, types: Types) -> Snapshot:
    """Return the snapshot with a name or tag; raises NotFound."""
    try:
        return Snapshot(repo, read_snapshot(repo.store, name), types)
    except NotFound:
        tag = read_tag(repo.store, name)
        if tag is None:
            raise
        return Snapshot(repo, read_snapshot(repo.store, tag.snapshot_name), types)


def list_snapshots(repo: Repository, prefix: str, types: Types) -> list[Snapshot]:
    """Return the user's snapshots whose names begin with `prefix`, in natural order."""
    found = sorted(_iter_records(repo, prefix), key=lambda record: natural_order(record.name))
    return [Snapshot(repo, record, types) for record in found]


def open_latest(repo: Repository, prefix: str, types: Types) -> Snapshot | None:
    """Return the most recently committed one of them; None if there is none."""
    order = _iter_records(repo, prefix)
    newest = max(order, key=lambda record: (record.time_s, natural_order(record.name)), default=None)
    return None if newest is None else Snapshot(repo, newest, types)


def _iter_records(repo: Repository, prefix: str) -> Iterator[Record]:
    return (record for record in iter_user_names(repo.store, prefix) if isinstance(record, Record))
