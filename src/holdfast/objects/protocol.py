"""The contract of object stores: what every store must do, and what every caller may rely on."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Protocol, runtime_checkable

from typing_extensions import Self

from holdfast.digest import Buffer
from holdfast.errors import BadName
from holdfast.objects.blocks import LentBlock

MAX_KEY_BYTES: Final = 512
MAX_COMPONENT_BYTES: Final = 240
PAGE_LIMIT: Final = 1000

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

    exclusive_create: bool
    """`create` always refuses a key that exists. If False, only one writer at a time is safe."""
    durable: bool
    """Objects that were created with `durable` survive a power loss."""
    shared_by_hosts: bool
    """Other hosts may write to the store; no lock of this host excludes them."""
    stale_listings: bool
    """A listing may miss objects that another host has created a short time ago, because this host caches it."""
    replace_if_match: bool = False
    delete_if_match: bool = False
    upload_bytes: int | None = None
    """The size from which on a writer should begin another upload: the store keeps an upload in memory until it is
    committed. None if it does not."""
    checked_uploads: bool = False
    """What the server has accepted is what was sent: a checksum or TLS proves it, and the server detects or repairs
    what its disks damage. A save then reuses an object that is present without reading it."""
    requests_at_once: int = 1
    """How many requests should be in flight, because most of their time is spent waiting. 1 if requests do not wait."""


class Upload(Protocol):
    """An object that is being written: appended to, then committed whole or not at all."""

    def append(self, *buffers: Buffer) -> None:
        """Append `buffers`; they may be reused once this returns. Raises StoreFull, StoreError."""

    def commit(self) -> None:
        """Make the object visible, whole and durable; the same outcomes as `ObjectStore.create`."""

    def abort(self) -> None:
        """Drop what was appended. Does nothing after a commit or a first abort. Never raises StoreError."""

    def __enter__(self) -> Self:
        """Return this upload."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Abort unless committed."""


@runtime_checkable
class BlockUpload(Upload, Protocol):
    """Optional: an upload that can append memory without copying it."""

    def append_block(self, block: LentBlock) -> None:
        """Append a block, without a copy if it starts at a page boundary of the object; raises as `append` does.

        The block is released once, when it was written or never will be, also if this raises. If a commit fails and a
        request might still be reading the block, it is never released.
        """


class ObjectStore(Protocol):
    """Maps keys to immutable bytes.

    Every method may be called from any thread. A key that `verify_key` refuses raises BadName before anything is read
    or written. Objects are immutable: they are created once and may be deleted. A read or list that starts after a
    create returned MUST see the object (strong consistency).
    """

    @property
    def url(self) -> str:
        """The path or URL, for messages and for opening the store again."""

    @property
    def traits(self) -> StoreTraits:
        """Properties of this store; the first call may test them by writing and removing a scratch object."""

    def prepare(self, prefixes: Sequence[str]) -> None:
        """Prepare the store, durably, for keys that start with one of `prefixes` (each ending in "/").

        Called before the first object is created; may be repeated. In a filesystem, a process that dies after creating
        a directory and before syncing it would otherwise leave a directory that later writers assume to be durable.
        """

    def sync(self, prefix: str) -> None:
        """Make all visible objects below `prefix` (ending in "/") durable that were created with `durable`.

        Their creator may have died after making them visible and before making them durable. A caller that reports
        success because such an object exists must call this first. Raises StoreError.
        """

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

    def upload(self, key: str) -> Upload:
        """Begin a durable create of an object that is too large for memory."""

    def read(self, key: str, *, limit_bytes: int) -> bytes:
        """Return the whole object; raises NotFound, or Corrupt if it is larger than `limit_bytes`."""

    def read_into(self, key: str, start: int, buffer: memoryview) -> None:
        """Fill `buffer` with the bytes from `start` on; raises NotFound, or Corrupt if the object ends before."""

    def list(self, prefix: str, *, after: str = "", limit: int = PAGE_LIMIT) -> list[ObjectInfo]:
        """Return one page: the first `limit` objects, ordered by key, whose key starts with `prefix` and is > `after`.

        `after` may be any text, and need not be a valid key. A page shorter than `limit` is the last. Objects present
        during the whole call MUST be in it; those created or deleted during the call may be.
        """

    def delete(self, key: str) -> None:
        """Delete `key`; no error if it is absent, so that retries are harmless. A power loss may bring it back."""

    def hold(self, *, exclusive: bool) -> AbstractContextManager[bool]:
        """Lock the store, shared with other writers or exclusively; yields whether the lock was acquired.

        A writer has the shared lock for a whole save. If a collector has the exclusive lock, the writer waits for a
        limited time. After that this yields False, logs a warning that names the holder, and the writer continues
        with a lease that records the missing lock (`repo.names.leases`). A store without locks yields True to writers.

        The exclusive lock proves that no writer has the shared lock at this moment, on any host. If a store cannot
        prove that, or another process has a lock, this yields False at once. Safety never depends on the exclusive
        lock: it only saves a collector the wait.
        """

    def remove_debris(self, *, older_than_s: float) -> int:
        """Remove leftovers of interrupted creates that are older than `older_than_s`; return how many.

        With 0 all of them are removed. A negative age also removes leftovers whose time is that far in the future.
        """

    def stat(self, key: str) -> ObjectInfo:
        """Return size, time and version of `key` without reading it; raises NotFound."""

    def clock(self) -> float:
        """Return the time of the clock that sets `modified_s`, in seconds since 1970."""

    def find_free_bytes(self) -> int | None:
        """Return how many bytes can still be written, or None if there is no limit."""


@runtime_checkable
class MappableStore(Protocol):
    """Optional: a store that can map objects into memory."""

    def map(self, key: str, start: int, size_bytes: int) -> memoryview:
        """Return bytes as private memory; raises NotFound, or Corrupt if the object ends before.

        Changes to the memory are not written back. It stays valid if the object is deleted, as long as the view lives.
        """


@runtime_checkable
class LendingStore(Protocol):
    """Optional: a store that allocates memory for what it reads, which the caller may use instead of a copy."""

    @property
    def reads_at_once(self) -> int:
        """How many reads of a mebibyte or more should be in flight: those that fill the link, and no more."""

    def read_range(self, key: str, start: int, size_bytes: int) -> memoryview:
        """Return `size_bytes` bytes from `start` on, read-only; raises NotFound, or Corrupt if the object ends before.

        The memory is freed when the last view of it is gone.
        """


ReadInto = Callable[[str, int, memoryview], None]
"""Fills a buffer, as `ObjectStore.read_into` does."""


class KeptReads(Protocol):
    """The reads of one caller, whose bytes stay in the memory of the system while there is room."""

    def run(self) -> AbstractContextManager[ReadInto]:
        """Begin reads that mostly follow each other in an object; yields the function to read with, for one thread."""


@runtime_checkable
class KeepingStore(Protocol):
    """Optional: a store whose reads can stay in the memory of the system, for the next reader of the same bytes."""

    def keep_reads(self) -> KeptReads:
        """Begin the reads of bytes that are likely to be wanted again, by this process or another one."""


@runtime_checkable
class WatchedStore(Protocol):
    """Optional: a store that can tell, for less than a listing, that no object was created or deleted."""

    def read_folder_state(self, folder: str, names: Sequence[str]) -> str:
        """Return a text that differs after any object was created or deleted directly in one of these folders.

        They are in `folder`, which ends with a slash. Returns "" if the store cannot tell, so that the caller lists:
        always, or because a folder has changed so recently that another change might show the same time.
        """


@runtime_checkable
class PlacedStore(Protocol):
    """Optional: a store that can tell an empty directory from one that does not exist yet."""

    def is_bare(self) -> bool:
        """Return whether the store's directory exists and is empty; it may be an unmounted mount point."""


@runtime_checkable
class SkewedStore(Protocol):
    """Optional: a store whose objects get their times from another clock than this host's."""

    def learn_clock(self) -> None:
        """Find the difference between the two clocks, unless it is known, so that `clock` returns the store's time."""


@runtime_checkable
class ConditionalStore(Protocol):
    """Optional: changes that succeed only for a given version.

    For programs that use an object store directly; Holdfast itself never calls these methods, because no safety rule
    needs compare-and-swap. A store that has them sets `replace_if_match` and `delete_if_match` in its traits, and the
    contract suite tests them.
    """

    def replace_if_match(self, key: str, data: Buffer, *, version: str) -> ObjectInfo:
        """Replace `key` if its version is still `version`; raises ObjectExists if it changed, NotFound if absent."""

    def delete_if_match(self, key: str, *, version: str) -> None:
        """Delete `key` if its version is still `version`; raises ObjectExists if it changed, NotFound if absent."""
