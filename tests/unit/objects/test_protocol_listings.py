"""Walking a listing: everything once and in order, in few pages."""

from __future__ import annotations

import pytest

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
    assert [info.key for info in store.iter_objects("a/")] == [f"a/{i:05}" for i in range(number)]


def test_pages_grow_so_that_there_are_few() -> None:
    store = PagedStore()
    for i in range(3500):
        store.create(f"a/{i:05}", b"", durable=False)
    assert len(list(store.iter_objects("a/"))) == 3500
    assert store.limits == [PAGE_LIMIT, 2 * PAGE_LIMIT, 4 * PAGE_LIMIT]


def test_listings_of_several_prefixes_come_in_the_order_of_these() -> None:
    store = MemoryStore()
    for key in ("a/1", "b/1", "a/2"):
        store.create(key, b"")
    assert [[info.key for info in infos] for infos in store.list_together(("b/", "c/", "a/"))] == [
        ["b/1"],
        [],
        ["a/1", "a/2"],
    ]
