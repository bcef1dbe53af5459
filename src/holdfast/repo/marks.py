"""Marks: what a collector is about to delete. A writer treats whatever is marked, or known to be bad, as absent."""

from __future__ import annotations

from holdfast.errors import Corrupt, NotFound
from holdfast.repo.generations import read_record
from holdfast.repo.layout import BAD, MANIFESTS, MARKS, PACKS, is_file_id
from holdfast.store.listing import iter_objects
from holdfast.store.protocol import ObjectStore


def read_marked(store: ObjectStore) -> frozenset[str]:
    """Return the keys of all packs and manifests that some collector has marked.

    A mark that is damaged may have meant any of them, so then all count as marked: a save still works, but
    builds on nothing that others wrote. Marks are not fsynced, so the loss of power can leave such a one.
    """
    marked: set[str] = set()
    for info in iter_objects(store, MARKS):
        try:
            fields = read_record(store, info.key)
            if fields:
                fields.expect(kind="mark")
                marked.update(fields.texts("keys"))
        except NotFound:
            continue  # its collector is done and has removed it
        except Corrupt:
            marked.update(found.key for prefix in (PACKS, MANIFESTS) for found in iter_objects(store, prefix))
    return frozenset(marked)


def read_bad_packs(store: ObjectStore) -> frozenset[str]:
    """Return the keys of packs known to hold damaged chunks; nothing new is built on them."""
    found = (info.key.removeprefix(BAD).partition("@")[0] for info in iter_objects(store, BAD))
    return frozenset(PACKS + pack_id for pack_id in found if is_file_id(pack_id))
