"""Iterates over listings page by page, and finds symbolic links in a store."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, Protocol, runtime_checkable

from holdfast.errors import BadName
from holdfast.objects.protocol import PAGE_LIMIT, ObjectInfo, ObjectStore, verify_key

_MAX_PAGE: Final = 16 * PAGE_LIMIT


def is_key(text: str) -> bool:
    """Return whether `text` is a valid key."""
    try:
        verify_key(text)
    except BadName:
        return False
    return True


def iter_objects(store: ObjectStore, prefix: str) -> Iterator[ObjectInfo]:
    """Yield every object whose key starts with `prefix`, ordered by key, with one page at a time in memory."""
    if isinstance(store, FlatStore):
        yield from store.list_all(prefix)
        return
    after, limit = "", PAGE_LIMIT
    while True:
        page = store.list(prefix, after=after, limit=limit)
        yield from page
        if len(page) < limit:
            return
        after = page[-1].key
        # Listing a directory reads all its names for every page, so pages of equal size would cost quadratic time.
        limit = min(2 * limit, _MAX_PAGE)


@runtime_checkable
class FlatStore(Protocol):
    """Extra method of a store that lists all objects below a prefix at the cost of a page."""

    def list_all(self, prefix: str) -> Sequence[ObjectInfo]:
        """Return every object whose key starts with `prefix`, ordered by key."""


@runtime_checkable
class LinkedStore(Protocol):
    """Extra methods of a store that may contain symbolic links; no method of such a store follows one."""

    def iter_links(self) -> Iterator[str]:
        """Yield the path of each link, relative to the root; it need not be a valid key."""

    def skipping_links(self) -> ObjectStore:
        """Return a view of the store whose listings skip links, instead of raising StoreError for them."""


def read_first_link(store: ObjectStore) -> str | None:
    """Return the path of a link whose name is a valid key, so that listings raise for it; None if there is none."""
    if not isinstance(store, LinkedStore):
        return None
    return next(filter(is_key, store.iter_links()), None)
