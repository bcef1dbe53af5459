"""Walk a listing page by page; tell what a listing may name, and what it may meet."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Protocol, runtime_checkable

from holdfast.errors import BadName
from holdfast.objects.protocol import PAGE_LIMIT, ObjectInfo, ObjectStore, verify_key

_MAX_PAGE: Final = 16 * PAGE_LIMIT


def is_key(text: str) -> bool:
    """Tell whether `text` obeys the rules for keys."""
    try:
        verify_key(text)
    except BadName:
        return False
    return True


def iter_objects(store: ObjectStore, prefix: str) -> Iterator[ObjectInfo]:
    """Yield every object whose key starts with `prefix`, ordered by key, holding one page at a time."""
    after, limit = "", PAGE_LIMIT
    while True:
        page = store.list(prefix, after=after, limit=limit)
        yield from page
        if len(page) < limit:
            return
        after = page[-1].key
        # A directory gives all its names for every page, so equal pages would cost the square of what they list.
        limit = min(2 * limit, _MAX_PAGE)


@runtime_checkable
class LinkedStore(Protocol):
    """What a store offers in which symbolic links may lie; none of its methods ever follows one."""

    def iter_links(self) -> Iterator[str]:
        """Yield where each link lies, relative to the root; it need not be a valid key."""

    def passing_over_links(self) -> ObjectStore:
        """Return the same store, whose listings leave links out; else a listing that meets one raises StoreError."""


def read_first_link(store: ObjectStore) -> str | None:
    """Return where a link lies that listings meet, because it could be an object or a directory; None if nowhere."""
    if not isinstance(store, LinkedStore):
        return None
    return next(filter(is_key, store.iter_links()), None)
