"""Iterates over listings page by page, and finds symbolic links in a store."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol, runtime_checkable

from holdfast.errors import BadName
from holdfast.objects.protocol import PAGE_LIMIT, ObjectInfo, ObjectStore, verify_key
from holdfast.objects.together import run_together

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


def list_together(store: ObjectStore, prefixes: Sequence[str]) -> list[list[ObjectInfo]]:
    """Return all objects below each prefix, ordered by key; the listings run at once if the store wants that."""
    return run_together(store, [partial(_list_below, store, prefix) for prefix in prefixes])


def _list_below(store: ObjectStore, prefix: str) -> list[ObjectInfo]:
    return list(iter_objects(store, prefix))


@dataclass(frozen=True, slots=True)
class FolderListing:
    """What is in a folder."""

    objects: Sequence[ObjectInfo]
    folders: Sequence[str] = ()
    """Prefixes, each ending with a slash, that contain objects."""


def iter_folders(store: ObjectStore, folder: str, expected: Sequence[str]) -> Iterator[ObjectInfo]:
    """Yield all objects below `folder`, ordered by key; `expected` are the folders that it should contain.

    A store that wants many requests at once is asked for each expected folder, and at the same time for what else the
    folder contains: that takes as long as listing its largest folder. The names of folders end with a slash.
    """
    if not isinstance(store, FolderStore):
        yield from iter_objects(store, folder)
        return
    works = [partial(store.list_folder, folder), *(partial(_list_whole, store, each) for each in expected)]
    top, *parts = run_together(store, works)
    others = list_together(store, [each for each in top.folders if each not in expected])
    found = (top.objects, *(part.objects for part in parts), *others)
    yield from sorted((info for objects in found for info in objects), key=lambda info: info.key)


def _list_whole(store: ObjectStore, folder: str) -> FolderListing:
    return FolderListing(_list_below(store, folder))


@runtime_checkable
class FlatStore(Protocol):
    """Extra method of a store that lists all objects below a prefix at the cost of a page."""

    def list_all(self, prefix: str) -> Sequence[ObjectInfo]:
        """Return every object whose key starts with `prefix`, ordered by key."""


@runtime_checkable
class FolderStore(Protocol):
    """Extra method of a store that lists one folder without the folders in it."""

    def list_folder(self, folder: str) -> FolderListing:
        """Return what is directly in a folder, which ends with a slash or is empty for all keys."""


@runtime_checkable
class BoundedStore(Protocol):
    """Extra method of a store that stops a listing which turns out to be long."""

    def list_at_most(self, prefix: str, limit: int) -> Sequence[ObjectInfo] | None:
        """Return every object below `prefix`, which ends with "/", ordered by key; None if there are over `limit`."""


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
