"""What an object store must do: the contract that every store keeps and every caller may rely on."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Protocol, Self, runtime_checkable

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
    """Return `key`, or raise BadName if it could leave the store, hide in it, or collide with another."""
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
    """Opaque; changes when somebody replaces the object or its bytes, and may change at other times, too: an ETag, or
    inode and times of a file. It does not tell that a disk has damaged the bytes. Empty if the store cannot tell."""


@dataclass(frozen=True, slots=True)
class StoreTraits:
    """What a store can do beyond the contract, and where it falls short of it."""

    exclusive_create: bool
    """`create` is certain to refuse a key that is present. If False, only one writer at a time is safe."""
    durable: bool
    """What was created durably survives the loss of power."""
    network: bool
    """Other hosts may reach it, so their clocks and caches count."""
    replace_if_match: bool = False
    delete_if_match: bool = False


class Upload(Protocol):
    """An object under way: appended to, then committed whole or not at all."""

    def append(self, *buffers: Buffer) -> None:
        """Append `buffers`; they may be reused once this returns. Raises StoreFull, StoreError."""

    def commit(self) -> None:
        """Make the object visible, whole and durable; the same outcomes as `ObjectStore.create`."""

    def abort(self) -> None:
        """Drop what was appended; after a commit, or twice, does nothing. Never raises StoreError."""

    def __enter__(self) -> Self:
        """Return itself."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Abort unless committed."""


@runtime_checkable
class BlockUpload(Upload, Protocol):
    """The optional way to append memory without copying it."""

    def append_block(self, block: LentBlock) -> None:
        """Append a block, written from where it is if it begins on a page of the object too; raises as `append` does.

        The block is released exactly once, when it was written or never will be, also if this raises.
        """


class ObjectStore(Protocol):
    """Keys to bytes.

    Every method may be called from any thread. Keys obey `verify_key`; a key that does not raises BadName
    before anything is touched. Objects are immutable: they are created once and may be deleted. A read
    that starts after a create returned MUST see it, and so MUST a list (strong consistency).
    """

    @property
    def url(self) -> str:
        """Where this is, for messages and for opening it again."""

    @property
    def traits(self) -> StoreTraits:
        """What this store can do; may probe it once, writing and removing a scratch object."""

    def prepare(self, prefixes: Sequence[str]) -> None:
        """Make ready, durably, for keys that start with one of `prefixes` (each ending in "/").

        Called before a store's first object is created; repeating it is harmless. Where keys need directories,
        who dies between making one and making it durable would otherwise leave a trap for whoever comes next.
        """

    def sync(self, prefix: str) -> None:
        """Make durable what others have created durably below `prefix` (ending in "/"), as far as it is visible.

        Whoever created it may have died between making it visible and making it durable; who reports success on the
        strength of it must be sure. Raises StoreError.
        """

    def create(self, key: str, data: Buffer, *, durable: bool = True) -> None:
        """Create `key` holding `data`, if and only if no object is there.

        Atomic: others see nothing or all of it. Of many concurrent creates of one key exactly one returns.
        With `durable` it MUST survive the loss of power once this returned, name included.

        Raises:
            ObjectExists: an object is there and nothing was changed. It may be our own, created by an
                attempt whose reply was lost: only a look at its bytes can tell (see `store.settle`).
            StoreFull, ReadOnlyStore: nothing was created.
            StoreError: with `fate` "absent", nothing was created; "unknown", it may have been; "volatile", it
                is there but may not survive, and no retry can mend that.
        """

    def upload(self, key: str) -> Upload:
        """Begin a durable create of an object too large to hold in memory."""

    def read(self, key: str, *, limit_bytes: int) -> bytes:
        """Return the whole object; raises NotFound, or Corrupt if it is larger than `limit_bytes`."""

    def read_into(self, key: str, start: int, buffer: memoryview) -> None:
        """Fill `buffer` with the bytes from `start` on; raises NotFound, or Corrupt if the object ends before."""

    def list(self, prefix: str, *, after: str = "", limit: int = PAGE_LIMIT) -> list[ObjectInfo]:
        """Return one page: the first `limit` objects, ordered by key, whose key starts with `prefix` and is > `after`.

        A page shorter than `limit` is the last. Objects present during the whole call MUST be in it;
        those created or deleted meanwhile may be.
        """

    def delete(self, key: str) -> None:
        """Delete `key`; an absent one is no error (so that a retry is harmless). A loss of power may bring it back."""

    def hold(self, *, exclusive: bool) -> AbstractContextManager[bool]:
        """Hold the store together with other writers, or alone; yields whether it is held.

        A writer holds it together with others for the whole of a save. If somebody holds it alone, the writer waits,
        for a bounded time; then the answer is False, a warning in the log says who holds it, and the writer goes on
        with a lease that says so (`repo.leases`). Where a store has no lock the answer to a writer is True.

        Alone means that no writer holds it at this moment, on any host that can be told about: where a store cannot
        tell, and where somebody else holds it, the answer is False at once. No rule of safety needs it; it only
        spares a collector the wait.
        """

    def remove_debris(self, *, older_than_s: float) -> int:
        """Remove what interrupted creates have left behind, if it is older than that; return how many.

        With 0 all of it goes; a negative age also takes what is so much younger than now.
        """

    def stat(self, key: str) -> ObjectInfo:
        """Return what is known of `key` without reading it; raises NotFound."""

    def clock(self) -> float:
        """Return the time by the clock that stamps `modified_s`, in seconds since 1970."""

    def find_free_bytes(self) -> int | None:
        """Return how many bytes may still be written, or None where there is no such limit."""


@runtime_checkable
class MappableStore(Protocol):
    """The optional way to have an object in memory without reading it."""

    def map(self, key: str, start: int, size_bytes: int) -> memoryview:
        """Return bytes as private memory; raises NotFound, or Corrupt if the object ends before.

        Changes to it are nobody else's. It stays valid when the object is deleted, as long as the view lives.
        """


@runtime_checkable
class PlacedStore(Protocol):
    """The optional way to tell a place that was made for something from one that does not exist yet."""

    def is_bare(self) -> bool:
        """Tell whether the place exists, and holds nothing: an empty directory, perhaps one to mount on."""


@runtime_checkable
class ConditionalStore(Protocol):
    """The optional half: mutation guarded by a version. No safety rule of the repository needs it."""

    def replace_if_match(self, key: str, data: Buffer, *, version: str) -> ObjectInfo:
        """Replace `key` if its version is still `version`; raises ObjectExists if it changed, NotFound if gone."""

    def delete_if_match(self, key: str, *, version: str) -> None:
        """Delete `key` if its version is still `version`; raises ObjectExists if it changed, NotFound if it is gone."""
