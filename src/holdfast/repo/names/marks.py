"""Reads marks (files that a collector is about to delete) and bad packs; writers treat both as absent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from holdfast.errors import Corrupt, NotFound
from holdfast.objects.protocol import ObjectInfo, ObjectStore
from holdfast.repo.format.layout import BAD, MANIFESTS, MARKS, PACKS, is_file_id
from holdfast.repo.names.generations import RELISTS, read_record

ABANDONED_S: Final = 6 * 3600.0
"""A mark of this age was probably left by an interrupted collection."""


@dataclass(frozen=True, slots=True)
class MarksView:
    """All marks, as read at one time."""

    keys: frozenset[str]
    """The packs and manifests that some collector has marked."""
    abandoned: Sequence[str]
    """The keys of marks older than ABANDONED_S, whose collection was probably interrupted. Until another one finishes
    it, saves write the marked chunks again."""


def read_marks(store: ObjectStore) -> MarksView:
    """Read all marks.

    A damaged mark may have named any pack or manifest, so then all count as marked: a save still works, but reuses
    nothing that is stored. Marks are not fsynced, so a power loss can damage one.
    """
    for _ in range(RELISTS):
        listed = list(store.iter_objects(MARKS))
        try:
            named = store.run_together([partial(_read_keys, store, info.key) for info in listed])
        except NotFound:
            continue  # its collector has finished and deleted it, so the listing is out of date
        return MarksView(frozenset(key for keys in named for key in keys), _find_abandoned(store, listed))
    raise Corrupt(f"{store.url}: marks keep disappearing while they are read; try again", key=MARKS)


def read_marked(store: ObjectStore) -> frozenset[str]:
    """Return the keys of all packs and manifests that some collector has marked; see `read_marks`."""
    return read_marks(store).keys


def _read_keys(store: ObjectStore, key: str) -> list[str]:
    try:
        fields = read_record(store, key)
        if fields is None:
            return []
        fields.expect(kind="mark")
        return list(fields.texts("keys"))
    except Corrupt:
        return [info.key for prefix in (PACKS, MANIFESTS) for info in store.iter_objects(prefix)]


def read_abandoned(store: ObjectStore) -> list[str]:
    """Return the keys of abandoned marks, without reading any; see `MarksView`."""
    return _find_abandoned(store, list(store.iter_objects(MARKS)))


def _find_abandoned(store: ObjectStore, listed: Sequence[ObjectInfo]) -> list[str]:
    oldest_s = store.clock() - ABANDONED_S
    return [info.key for info in listed if info.modified_s < oldest_s]


def read_bad_packs(store: ObjectStore) -> frozenset[str]:
    """Return the keys of packs known to contain damaged chunks; new saves do not refer to them."""
    found = (info.key.removeprefix(BAD).partition("@")[0] for info in store.iter_objects(BAD))
    return frozenset(PACKS + pack_id for pack_id in found if is_file_id(pack_id))
