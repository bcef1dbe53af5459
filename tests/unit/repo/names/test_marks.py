"""Marks and the list of bad packs: what a writer must treat as absent."""

from __future__ import annotations

import pytest

from holdfast.json_text import Json
from holdfast.objects.memory import MemoryStore
from holdfast.repo.format.record import encode_record
from holdfast.repo.names.leases import read_bad_packs, read_marked
from tests.kit.saving import PACK_ID, Watched, rot


def mark(store: MemoryStore, number: int, *marked: str, kind: Json = "mark") -> None:
    store.create(f"marks/{number}", encode_record({"kind": kind, "keys": list(marked)}))


def test_a_store_without_collectors_has_no_marks(store: MemoryStore) -> None:
    assert read_marked(store) == frozenset()


def test_the_marks_of_all_collectors_count(store: MemoryStore) -> None:
    mark(store, 0, "packs/a", "manifests/b")
    mark(store, 1, "packs/a", "packs/c")
    assert read_marked(store) == {"packs/a", "manifests/b", "packs/c"}


def test_a_torn_mark_never_counted(store: MemoryStore) -> None:
    store.create("marks/0", b"holdfast-record 00")
    assert read_marked(store) == frozenset()


@pytest.mark.parametrize("kind", ["mark", "tag", None])
def test_a_mark_that_cannot_be_believed_marks_everything(store: MemoryStore, kind: Json) -> None:
    for key in ("packs/a", "packs/b", "manifests/c", "index/d"):
        store.create(key, b"")
    mark(store, 0, "packs/a", kind=kind)
    if kind == "mark":
        rot(store, "marks/0", 130)
    assert read_marked(store) == {"packs/a", "packs/b", "manifests/c"}


class Vanishing(Watched):
    """Lists a mark that is gone when it is read."""

    def read(self, key: str, *, limit_bytes: int) -> bytes:
        if key == "marks/0":
            self.inner.delete(key)
        return super().read(key, limit_bytes=limit_bytes)


def test_a_mark_removed_during_the_read_does_not_count(store: MemoryStore) -> None:
    mark(store, 0, "packs/a")
    mark(store, 1, "packs/b")
    assert read_marked(Vanishing(store)) == {"packs/b"}


def test_bad_packs_are_named_by_key_whatever_the_record_holds(store: MemoryStore) -> None:
    store.create(f"bad/{PACK_ID}", b"")
    store.create(f"bad/{PACK_ID}@00000001", b"")
    store.create("bad/odd", b"")
    assert read_bad_packs(store) == {f"packs/{PACK_ID}"}
