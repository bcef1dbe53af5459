"""Walking a listing: everything once and in order, in few pages."""

from __future__ import annotations

import pytest

from holdfast.objects.listing import FolderListing, iter_folders, iter_objects, list_together
from holdfast.objects.memory import MemoryStore
from holdfast.objects.protocol import PAGE_LIMIT, ObjectInfo


class PagedStore(MemoryStore):
    """Remembers how large the pages were that it was asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.limits: list[int] = []

    def list(self, prefix: str, *, after: str = "", limit: int = PAGE_LIMIT) -> list[ObjectInfo]:
        self.limits.append(limit)
        return super().list(prefix, after=after, limit=limit)


@pytest.mark.parametrize("number", [0, 1, PAGE_LIMIT - 1, PAGE_LIMIT, PAGE_LIMIT + 1, 3 * PAGE_LIMIT, 3500])
def test_every_object_comes_once_and_in_order(number: int) -> None:
    store = PagedStore()
    for i in range(number):
        store.create(f"a/{i:05}", b"", durable=False)
    store.create("b", b"")
    assert [info.key for info in iter_objects(store, "a/")] == [f"a/{i:05}" for i in range(number)]


def test_pages_grow_so_that_there_are_few() -> None:
    store = PagedStore()
    for i in range(3500):
        store.create(f"a/{i:05}", b"", durable=False)
    assert len(list(iter_objects(store, "a/"))) == 3500
    assert store.limits == [PAGE_LIMIT, 2 * PAGE_LIMIT, 4 * PAGE_LIMIT]


class FolderedStore(PagedStore):
    """Lists a folder without the folders in it."""

    def list_folder(self, folder: str) -> FolderListing:
        infos = super().list(folder, limit=100_000)
        folders = {folder + rest.partition("/")[0] + "/" for info in infos if "/" in (rest := info.key[len(folder) :])}
        return FolderListing([info for info in infos if "/" not in info.key[len(folder) :]], sorted(folders))


def test_listings_of_several_prefixes_come_in_the_order_of_these() -> None:
    store = MemoryStore()
    for key in ("a/1", "b/1", "a/2"):
        store.create(key, b"")
    assert [[info.key for info in infos] for infos in list_together(store, ("b/", "c/", "a/"))] == [
        ["b/1"],
        [],
        ["a/1", "a/2"],
    ]


@pytest.mark.parametrize("store", [PagedStore(), FolderedStore()], ids=["plain", "with folders"])
def test_folders_are_listed_with_what_is_beside_them(store: PagedStore) -> None:
    keys = ["a/00/x", "a/00/y", "a/01/z", "a/0stray", "a/ff/unexpected", "a/stray"]
    for key in (*keys, "b/other"):
        store.create(key, b"")
    assert [info.key for info in iter_folders(store, "a/", ("a/00/", "a/01/", "a/02/"))] == keys


def test_the_whole_store_is_listed_by_its_folders() -> None:
    store = FolderedStore()
    for key in ("a/00/x", "b/y", "c"):
        store.create(key, b"")
    assert [info.key for info in iter_folders(store, "", ("a/",))] == ["a/00/x", "b/y", "c"]
