"""Describes snapshot records and damaged names as JSON: what `--json` prints, and what the web server answers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from holdfast.json_text import Json
from holdfast.repo.names.snapshots import CommittedSnapshot, DamagedName
from holdfast.repo.names.tags import Tag
from holdfast.texts import format_utc

_Found = TypeVar("_Found", CommittedSnapshot, Tag)


def describe_snapshot(snapshot: CommittedSnapshot, tags: Iterable[Tag]) -> dict[str, Json]:
    """Return a snapshot's record as JSON."""
    return {
        "name": snapshot.name,
        "time": format_utc(snapshot.time_s),
        "time_s": snapshot.time_s,
        "entries": snapshot.num_entries,
        "logical_bytes": snapshot.logical_bytes,
        "digest": snapshot.digest.hex(),
        "generation": snapshot.generation,
        "tags": [tag.name for tag in tags if tag.snapshot_name == snapshot.name],
        "metadata": snapshot.metadata,
    }


def split_damaged(found: Iterable[_Found | DamagedName]) -> tuple[list[_Found], list[DamagedName]]:
    """Split a listing into intact and damaged items."""
    intact: list[_Found] = []
    damaged: list[DamagedName] = []
    for item in found:
        if isinstance(item, DamagedName):
            damaged.append(item)
        else:
            intact.append(item)
    return intact, damaged


def describe_damage(name: DamagedName) -> dict[str, Json]:
    """Return a damaged name as JSON."""
    return {"key": name.stem, "error": str(name.error)}
