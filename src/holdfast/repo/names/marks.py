"""Marks: what a collector is about to delete. A writer treats whatever is marked, or known to be bad, as absent."""

from __future__ import annotations

from typing import Final

from holdfast.errors import Corrupt, NotFound
from holdfast.objects.listing import iter_objects
from holdfast.objects.protocol import ObjectStore
from holdfast.repo.format.layout import BAD, MANIFESTS, MARKS, PACKS, is_file_id
from holdfast.repo.names.generations import read_record

_RELISTS: Final = 8
ABANDONED_S: Final = 6 * 3600.0


def read_marked(store: ObjectStore) -> frozenset[str]:
    """Return the keys of all packs and manifests that some collector has marked.

    A mark that is damaged may have meant any of them, so then all count as marked: a save still works, but
    builds on nothing that others wrote. Marks are not fsynced, so the loss of power can leave such a one.
    """
    for _ in range(_RELISTS):
        try:
            return frozenset(key for info in iter_objects(store, MARKS) for key in _read_keys(store, info.key))
        except NotFound:
            continue  # its collector is done and has removed it; what is there now is not what was listed
    raise Corrupt(f"{store.url}: marks keep vanishing while they are read; try again", key=MARKS)


def _read_keys(store: ObjectStore, key: str) -> list[str]:
    try:
        fields = read_record(store, key)
        if fields is None:
            return []
        fields.expect(kind="mark")
        return list(fields.texts("keys"))
    except Corrupt:
        return [info.key for prefix in (PACKS, MANIFESTS) for info in iter_objects(store, prefix)]


def find_abandoned(store: ObjectStore) -> list[str]:
    """Return the marks of collections that seem to have been given up; what they marked is not shared until then."""
    oldest_s = store.clock() - ABANDONED_S
    return [info.key for info in iter_objects(store, MARKS) if info.modified_s < oldest_s]


def read_bad_packs(store: ObjectStore) -> frozenset[str]:
    """Return the keys of packs known to hold damaged chunks; nothing new is built on them."""
    found = (info.key.removeprefix(BAD).partition("@")[0] for info in iter_objects(store, BAD))
    return frozenset(PACKS + pack_id for pack_id in found if is_file_id(pack_id))
