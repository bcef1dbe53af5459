"""The contract of object stores: what every store must do, and what every caller may rely on."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Final, TypeVar

from typing_extensions import Self

from holdfast.digest import Buffer
from holdfast.errors import BadName, NotFound
from holdfast.objects.blocks import LentBlock
from holdfast.objects.disk_cache import DiskCache
from holdfast.objects.request_tally import RequestCount, RequestKind
from holdfast.objects.together import EagerCall, iter_together, run_together

Result = TypeVar("Result")
ReadInto = Callable[[str, int, memoryview], None]
"""Fills a buffer, as `ObjectStore.read_into` does."""

MAX_KEY_BYTES: Final = 512
MAX_COMPONENT_BYTES: Final = 240
PAGE_LIMIT: Final = 1000
_MAX_PAGE: Final = 16 * PAGE_LIMIT

# Lower case only: two keys that differ in case would be one file on some filesystems. No component starts
# with a dot: that excludes `.` and `..` and keeps dot-names for a store's own temporary files.
_COMPONENT: Final = re.compile(r"[a-z0-9_%@=-][a-z0-9._%@=-]*\Z")


def verify_key(key: str) -> str:
    """Return `key`, or raise BadName if it could point outside the store, be hidden, or collide with another key."""
    if len(key) > MAX_KEY_BYTES or not all(
        len(part) <= MAX_COMPONENT_BYTES and _COMPONENT.match(part) for part in key.split("/")
    ):
        raise BadName(
            f"object key {key[:80]!r} is refused: components of a-z 0-9 . _ % @ = - joined by '/',"
            f" none empty or starting with a dot, each at most {MAX_COMPONENT_BYTES} bytes"
        )
    return key


def is_key(text: str) -> bool:
    """Return whether `text` is a valid key."""
    try:
        verify_key(text)
    except BadName:
        return False
    return True


def verify_prefix(prefix: str) -> str:
    """Return `prefix` if some valid key could start with it, or raise BadName."""
    if prefix:
        verify_key(prefix + "0" if prefix.endswith("/") else prefix)
    return prefix


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """What a store knows about one object without reading it."""

    key: str
    size_bytes: int
    modified_s: float
    """When it was created, by the store's own clock (`ObjectStore.clock`)."""
    version: str = ""
    """Opaque: an ETag, or inode and times of a file. Changes when the object or its bytes are replaced, and perhaps at
    other times. Does not change when a disk damages the bytes. Empty if the store has no versions."""


@dataclass(frozen=True, slots=True)
class StoreTraits:
    """Properties in which stores differ."""

    durable: bool
    """Objects that were created with `durable` survive a power loss."""
    shared_by_hosts: bool
    """Other hosts may write to the store; no lock of this host excludes them."""
    stale_listings: bool
    """A listing may miss objects that another host has created a short time ago, because this host caches it."""
    upload_bytes: int | None = None
    """The size from which on a writer should begin another upload: the store keeps an upload in memory until it is
    committed. None if it does not."""
    checked_uploads: bool = False
    """What the server has accepted is what was sent: a checksum or TLS proves it, and the server detects or repairs
    what its disks damage. A save then reuses an object that is present without reading it."""
    requests_at_once: int = 1
    """How many requests should be in flight, because most of their time is spent waiting. 1 if requests do not wait."""
    reads_at_once: int | None = None
    """How many reads of a mebibyte or more should be in flight: those that fill the link, and no more. None for a few
    more than there are cores."""
    wait_bytes: int = 0
    """How many bytes a request transfers in the time that it waits: reading fewer is not faster. 0 if requests do not
    wait."""
    lends_reads: bool = False
    """The store allocates memory for what it reads, so `read_range` saves the copy that `read_into` makes."""
    cheap_listings: bool = True
    """Listing all names costs little, however many there are. If False, each 1,000 of them are a request."""
    reliable_times: bool = False
    """`modified_s` is set by one clock, of the server, and no user can change it."""
    compresses: bool = False
    """Sending bytes takes longer than encoding them, so a save that states no `compression` compresses."""
    poll_s: float = 0.1
    """How often to look for new objects."""


class Upload(ABC):
    """An object that is being written: appended to, then committed whole or not at all. Use it in a `with`."""

    @abstractmethod
    def append(self, *buffers: Buffer) -> None:
        """Append `buffers`; they may be reused once this returns. Raises StoreFull, StoreError."""

    @abstractmethod
    def commit(self) -> None:
        """Make the object visible, whole and durable; the same outcomes as `ObjectStore.create`."""

    @abstractmethod
    def abort(self) -> None:
        """Drop what was appended. Does nothing after a commit or a first abort. Never raises StoreError."""

    def append_block(self, block: LentBlock) -> None:
        """Append a block, without a copy if the store can; raises as `append` does.

        The block is released once, when it was written or never will be, also if this raises. If a commit fails and a
        request might still be reading the block, it is never released.
        """
        try:
            self.append(block.memory)
        finally:
            block.release()

    def __enter__(self) -> Self:
        """Return this upload."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Abort unless committed."""
        self.abort()


class PageCacheReads:
    """The reads of one caller, whose bytes stay in the memory of the system while there is room."""

    def __init__(self, read_into: ReadInto) -> None:
        """Read with `read_into`, and leave it to the system what stays in memory."""
        self._read_into = read_into

    def run(self) -> AbstractContextManager[ReadInto]:
        """Begin reads that mostly follow each other in an object; yields the function to read with, for one thread."""
        return nullcontext(self._read_into)


class ObjectStore(ABC):
    """Maps keys to immutable bytes.

    Every method may be called from any thread. A key that `verify_key` refuses raises BadName before anything is read
    or written. Objects are immutable: they are created once and may be deleted. A read or list that starts after a
    create returned MUST see the object (strong consistency).

    Methods that are not abstract have a default, which is right for every store: override one if the store has a faster
    way, or more to tell.
    """

    cache: DiskCache | None = None
    """Used by those who read snapshots (`use_cache`). A check, a collection and a save always ask the store itself."""

    @property
    @abstractmethod
    def url(self) -> str:
        """The path or URL, for messages and for opening the store again."""

    @property
    @abstractmethod
    def traits(self) -> StoreTraits:
        """Properties of this store, known without a request to it."""

    @abstractmethod
    def prepare(self, prefixes: Sequence[str]) -> None:
        """Prepare the store, durably, for keys that start with one of `prefixes` (each ending in "/").

        Called before the first object is created; may be repeated. In a filesystem, a process that dies after creating
        a directory and before syncing it would otherwise leave a directory that later writers assume to be durable.
        """

    @abstractmethod
    def sync(self, prefix: str) -> None:
        """Make all visible objects below `prefix` (ending in "/") durable that were created with `durable`.

        Their creator may have died after making them visible and before making them durable. A caller that reports
        success because such an object exists must call this first. Raises StoreError.
        """

    @abstractmethod
    def create(self, key: str, data: Buffer, *, durable: bool = True) -> None:
        """Create `key` holding `data`, if and only if no object is there.

        Atomic: others see nothing or all of it. Of many concurrent creates of one key exactly one returns.
        With `durable`, the object and its name MUST survive a power loss once this has returned.

        Raises:
            ObjectExists: an object is there and nothing was changed. It may be our own, created by an
                attempt whose reply was lost: only reading its bytes can tell (see `objects.settle`).
            StoreFull, ReadOnlyStore: nothing was created.
            StoreError: with `fate` "absent", nothing was created; "unknown", it may have been; "volatile", it
                is there but may not survive, and no retry can repair that.
        """

    @abstractmethod
    def upload(self, key: str) -> Upload:
        """Begin a durable create of an object that is too large for memory."""

    @abstractmethod
    def read(self, key: str, *, limit_bytes: int) -> bytes:
        """Return the whole object; raises NotFound, or Corrupt if it is larger than `limit_bytes`."""

    @abstractmethod
    def read_into(self, key: str, start: int, buffer: memoryview) -> None:
        """Fill `buffer` with the bytes from `start` on; raises NotFound, or Corrupt if the object ends before."""

    @abstractmethod
    def list(self, prefix: str, *, after: str = "", limit: int = PAGE_LIMIT) -> list[ObjectInfo]:
        """Return one page: the first `limit` objects, ordered by key, whose key starts with `prefix` and is > `after`.

        `after` may be any text, and need not be a valid key. A page shorter than `limit` is the last. Objects present
        during the whole call MUST be in it; those created or deleted during the call may be.
        """

    @abstractmethod
    def delete(self, key: str) -> None:
        """Delete `key`; no error if it is absent, so that retries are harmless. A power loss may bring it back."""

    @abstractmethod
    def hold(self, *, exclusive: bool) -> AbstractContextManager[bool]:
        """Lock the store, shared with other writers or exclusively; yields whether the lock was acquired.

        A writer has the shared lock for a whole save. If a collector has the exclusive lock, the writer waits for a
        limited time. After that this yields False, logs a warning that names the holder, and the writer continues
        with a lease that records the missing lock (`repo.names.leases`). A store without locks yields True to writers.

        The exclusive lock proves that no writer has the shared lock at this moment, on any host. If a store cannot
        prove that, or another process has a lock, this yields False at once. Safety never depends on the exclusive
        lock: it only saves a collector the wait.
        """

    @abstractmethod
    def remove_debris(self, *, older_than_s: float) -> int:
        """Remove leftovers of interrupted creates that are older than `older_than_s`; return how many.

        With 0 all of them are removed. A negative age also removes leftovers whose time is that far in the future.
        """

    @abstractmethod
    def stat(self, key: str) -> ObjectInfo:
        """Return size, time and version of `key` without reading it; raises NotFound."""

    @abstractmethod
    def clock(self) -> float:
        """Return the time of the clock that sets `modified_s`, in seconds since 1970."""

    @abstractmethod
    def find_free_bytes(self) -> int | None:
        """Return how many bytes can still be written, or None if there is no limit."""

    def map(self, key: str, start: int, size_bytes: int) -> memoryview | None:
        """Return bytes as private memory, or None if the store cannot map objects.

        Changes to the memory are not written back. It stays valid if the object is deleted, as long as the view lives.
        Raises NotFound, or Corrupt if the object ends before.
        """
        return None

    def read_range(self, key: str, start: int, size_bytes: int) -> memoryview:
        """Return `size_bytes` bytes from `start` on; raises NotFound, or Corrupt if the object ends before.

        The memory may be read-only, and is freed when the last view of it is gone.
        """
        data = memoryview(bytearray(size_bytes))
        self.read_into(key, start, data)
        return data

    def keep_reads(self) -> PageCacheReads:
        """Begin the reads of bytes that are likely to be wanted again, by this process or another one."""
        return PageCacheReads(self.read_into)

    def use_cache(self, cache: DiskCache | None) -> None:  # noqa: B027 - the default
        """Let those who read snapshots use `cache`; does nothing if the store is as fast as a cache."""

    def read_folder_state(self, folder: str, names: Sequence[str]) -> str:
        """Return a text that differs after any object was created or deleted directly in one of these folders.

        They are in `folder`, which ends with a slash. Returns "" if the store cannot tell, so that the caller lists:
        always, or because a folder has changed so recently that another change might show the same time.
        """
        return ""

    def is_bare(self) -> bool:
        """Return whether the store's directory exists and is empty; it may be an unmounted mount point."""
        return False

    def learn_clock(self) -> None:  # noqa: B027 - the default
        """Find the difference between this host's clock and the store's, so that `clock` returns the store's time.

        Does nothing if the difference is known, or if there is one clock only.
        """

    def count_requests(self) -> Mapping[RequestKind, RequestCount]:
        """Return the requests that this handle has made to a server, by kind; empty if the store has no server."""
        return {}

    def iter_links(self) -> Iterator[str]:
        """Yield the path of each symbolic link in the store, relative to its root; it need not be a valid key.

        No method of a store follows a link.
        """
        return iter(())

    def skipping_links(self) -> ObjectStore:
        """Return a view of the store whose listings skip links, instead of raising StoreError for them."""
        return self

    def iter_objects(self, prefix: str) -> Iterator[ObjectInfo]:
        """Yield every object whose key starts with `prefix`, ordered by key."""
        after, limit = "", PAGE_LIMIT
        while True:
            page = self.list(prefix, after=after, limit=limit)
            yield from page
            if len(page) < limit:
                return
            after = page[-1].key
            # Listing a directory reads all its names for every page, so equal pages would cost quadratic time.
            limit = min(2 * limit, _MAX_PAGE)

    def iter_folders(self, folder: str, expected: Sequence[str]) -> Iterator[ObjectInfo]:
        """Yield all objects below `folder`, ordered by key; `expected` are the folders that it should contain.

        A store that answers many requests at once is asked for all folders at the same time. The names of folders end
        with a slash.
        """
        return self.iter_objects(folder)

    def iter_names(self, folder: str) -> Iterator[str]:
        """Yield the keys and the folders that are directly in `folder`, in order; names of folders end with a slash."""
        after = ""
        while page := self.list(folder, after=after, limit=1):
            name, slash, _ = page[0].key[len(folder) :].partition("/")
            yield folder + name + slash
            # No character of a key is greater than "~".
            after = f"{folder}{name}/~" if slash else page[0].key

    def list_at_most(self, prefix: str, limit: int) -> Sequence[ObjectInfo] | None:
        """Return every object below `prefix`, which ends with "/", ordered by key; None if there are over `limit`.

        A caller asks for this beside another request, because it may need the names. A store whose requests do not wait
        returns None: its callers list what they need when they need it.
        """
        return None

    def list_together(self, prefixes: Sequence[str]) -> Sequence[Sequence[ObjectInfo]]:
        """Return all objects below each prefix, ordered by key; the listings run together."""
        return self.run_together([partial(_list_below, self, prefix) for prefix in prefixes])

    def stat_many(self, keys: Sequence[str]) -> Mapping[str, ObjectInfo]:
        """Return what `stat` returns for those of `keys` that exist."""
        found = self.run_together([partial(_try_stat, self, key) for key in keys])
        return {info.key: info for info in found if info}

    def delete_many(self, keys: Sequence[str]) -> None:
        """Delete objects in no order; no error for those that are absent. An error may leave some."""
        self.run_together([partial(self.delete, key) for key in keys])

    def run_together(self, works: Sequence[Callable[[], Result]]) -> Sequence[Result]:
        """Call functions that make requests, as many at a time as the store answers best; return the results in order.

        The first failure, in order, is raised. When this returns or raises, no work is in progress.
        """
        return run_together(works, self.traits.requests_at_once)

    def run_early(self, works: Iterable[Callable[[], Result]]) -> Sequence[Result]:
        """Call functions, as `run_together` does, whose results will probably be needed; return the results.

        Where requests do not wait, doing that early gains nothing: this then takes no function from `works`, and
        returns no results.
        """
        return self.run_together(list(works)) if self.traits.requests_at_once > 1 else ()

    def iter_together(self, works: Iterable[tuple[Callable[[], Result], int]]) -> Generator[Result, None, None]:
        """Yield the results of functions in order, while later ones run; each comes with the bytes that it will read.

        Few bytes are read ahead of the caller. The first failure, in order, is raised. When this ends, for whatever
        reason, no work is in progress. Where requests do not wait, a function runs when its result is taken.
        """
        return iter_together(works, self.traits.requests_at_once)

    def begin(self, work: Callable[[], Result]) -> EagerCall[Result]:
        """Begin work whose result is needed later; where requests do not wait, it runs when its result is taken."""
        return EagerCall(work, is_eager=self.traits.requests_at_once > 1)


def _list_below(store: ObjectStore, prefix: str) -> Sequence[ObjectInfo]:
    return list(store.iter_objects(prefix))


def _try_stat(store: ObjectStore, key: str) -> ObjectInfo | None:
    try:
        return store.stat(key)
    except NotFound:
        return None
