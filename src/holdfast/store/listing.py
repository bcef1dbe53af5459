"""Walk a listing page by page."""

from __future__ import annotations

from collections.abc import Iterator

from holdfast.store.protocol import PAGE_LIMIT, ObjectInfo, ObjectStore


def iter_objects(store: ObjectStore, prefix: str) -> Iterator[ObjectInfo]:
    """Yield every object whose key starts with `prefix`, ordered by key, holding one page at a time."""
    after = ""
    while True:
        page = store.list(prefix, after=after)
        yield from page
        if len(page) < PAGE_LIMIT:
            return
        after = page[-1].key
