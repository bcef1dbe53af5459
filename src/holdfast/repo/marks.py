"""Marks: what a collector is about to delete. A writer treats whatever is marked, or known to be bad, as absent."""

from __future__ import annotations

from holdfast.errors import NotFound
from holdfast.repo.generations import read_record
from holdfast.repo.layout import BAD, MARKS, PACKS, is_file_id
from holdfast.store.listing import iter_objects
from holdfast.store.protocol import ObjectStore


def read_marked(store: ObjectStore) -> frozenset[str]:
    """Return the keys of all packs and manifests that some collector has marked."""
    marked: set[str] = set()
    for info in iter_objects(store, MARKS):
        try:
            fields = read_record(store, info.key)
        except NotFound:
            continue  # its collector is done and has removed it
        if fields:
            fields.expect(kind="mark")
            marked.update(fields.texts("keys"))
    return frozenset(marked)


def read_bad_packs(store: ObjectStore) -> frozenset[str]:
    """Return the keys of packs known to hold damaged chunks; nothing new is built on them."""
    found = (info.key.removeprefix(BAD).partition("@")[0] for info in iter_objects(store, BAD))
    return frozenset(PACKS + pack_id for pack_id in found if is_file_id(pack_id))
