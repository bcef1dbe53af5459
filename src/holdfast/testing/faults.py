"""A store that fails at the n-th operation, in each way in which a store can fail, or that is only slow."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from enum import Enum
from typing import Final, TypeVar

from holdfast.digest import Buffer
from holdfast.errors import ObjectExists, StoreError, StoreFull
from holdfast.objects.protocol import PAGE_LIMIT, ObjectInfo, ObjectStore, StoreTraits, Upload

T = TypeVar("T")


class Crashed(BaseException):
    """Simulates the death of the process. Not an Exception, so that the code under test does not handle it."""


class Fault(Enum):
    """What happens at the chosen operation."""

    ONCE = "it is not performed and raises StoreError with fate unknown; later ones work"
    FOR_GOOD = "it and all later ones are not performed and raise StoreError with fate unknown"
    CRASH = "the process dies before it is performed"
    CRASH_AFTER = "it is performed, then the process dies"
    REPLY_LOST = "it is performed, then raises StoreError with fate unknown; later ones work"
    TORN_WRITE = "a create or commit leaves an object with only a part of the bytes, then the process dies"
    NO_SPACE = "it and all later writes raise StoreFull; reads and deletes work"


@dataclass(frozen=True, slots=True)
class Operation:
    """One call to the store: the method's name (for uploads also `append`, `commit` and `abort`) and the key."""

    name: str
    key: str


_WRITES: Final = frozenset({"prepare", "create", "upload", "append", "commit"})


class FaultyStore(ObjectStore):
    """Forwards every operation to `inner`, except that the `at`-th one (from 1) fails.

    Run once without a fault; then run once for each `at` from 1 to `len(store.log)`. `url`, `traits` and `clock` do not
    count as operations. Every `read_into` takes `delay_s` longer.
    """

    def __init__(self, inner: ObjectStore, *, fault: Fault | None = None, at: int = 1, delay_s: float = 0.0) -> None:
        self._inner = inner
        self._delay_s = delay_s
        self._fault = fault
        self._at = at
        self._lock = threading.Lock()
        self._log: list[Operation] = []
        self._dead = False

    @property
    def log(self) -> Sequence[Operation]:
        """All operations so far, including failed ones."""
        with self._lock:
            return tuple(self._log)

    def __repr__(self) -> str:
        """Show the URL."""
        return f"<FaultyStore {self.url}>"

    @property
    def url(self) -> str:
        return self._inner.url

    @property
    def traits(self) -> StoreTraits:
        return self._inner.traits

    def prepare(self, prefixes: Sequence[str]) -> None:
        self._perform("prepare", "", lambda: self._inner.prepare(prefixes))

    def sync(self, prefix: str) -> None:
        self._perform("sync", prefix, lambda: self._inner.sync(prefix))

    def create(self, key: str, data: Buffer, *, durable: bool = True) -> None:
        def tear() -> None:
            self._inner.create(key, _cut(bytes(data)), durable=durable)

        self._perform("create", key, lambda: self._inner.create(key, data, durable=durable), tear=tear)

    def upload(self, key: str) -> Upload:
        return _FaultyUpload(self, key, self._perform("upload", key, lambda: self._inner.upload(key)))

    def read(self, key: str, *, limit_bytes: int) -> bytes:
        return self._perform("read", key, lambda: self._inner.read(key, limit_bytes=limit_bytes))

    def read_into(self, key: str, start: int, buffer: memoryview) -> None:
        time.sleep(self._delay_s)
        self._perform("read_into", key, lambda: self._inner.read_into(key, start, buffer))

    def list(self, prefix: str, *, after: str = "", limit: int = PAGE_LIMIT) -> list[ObjectInfo]:
        return self._perform("list", prefix, lambda: self._inner.list(prefix, after=after, limit=limit))

    def delete(self, key: str) -> None:
        self._perform("delete", key, lambda: self._inner.delete(key))

    def hold(self, *, exclusive: bool) -> AbstractContextManager[bool]:
        return self._perform("hold", "", lambda: self._inner.hold(exclusive=exclusive))

    def remove_debris(self, *, older_than_s: float) -> int:
        return self._perform("remove_debris", "", lambda: self._inner.remove_debris(older_than_s=older_than_s))

    def stat(self, key: str) -> ObjectInfo:
        return self._perform("stat", key, lambda: self._inner.stat(key))

    def clock(self) -> float:
        return self._inner.clock()

    def find_free_bytes(self) -> int | None:
        return self._perform("find_free_bytes", "", self._inner.find_free_bytes)

    def _perform(self, name: str, key: str, act: Callable[[], T], *, tear: Callable[[], None] | None = None) -> T:
        fault = self._log_operation(name, key)
        if fault is Fault.TORN_WRITE and tear is not None:
            with suppress(ObjectExists):
                tear()
        if fault in (Fault.CRASH, Fault.TORN_WRITE):
            raise Crashed(f"before {name} {key}")
        if fault in (Fault.ONCE, Fault.FOR_GOOD):
            raise StoreError(f"{name} {key} failed, as requested, and was not performed", key=key, fate="unknown")
        if fault is Fault.NO_SPACE:
            raise StoreFull(f"no room for {name} {key}: the store is full, as requested; delete some", key=key)
        result = act()
        if fault is Fault.CRASH_AFTER:
            raise Crashed(f"after {name} {key}")
        if fault is Fault.REPLY_LOST:
            raise StoreError(f"the reply to {name} {key} was lost, as requested", key=key, fate="unknown")
        return result

    def _log_operation(self, name: str, key: str) -> Fault | None:
        """Add an operation to the log and return the fault that it gets."""
        with self._lock:
            if self._dead:
                raise Crashed(f"the process died before {name} {key}")
            self._log.append(Operation(name, key))
            count = len(self._log)
            if self._fault is Fault.FOR_GOOD:
                return self._fault if count >= self._at else None
            if self._fault is Fault.NO_SPACE:
                return self._fault if count >= self._at and name in _WRITES else None
            if count != self._at:
                return None
            self._dead = self._fault in (Fault.CRASH, Fault.CRASH_AFTER, Fault.TORN_WRITE)
            return self._fault


class _FaultyUpload(Upload):
    """An upload; each of its steps is an operation of the store."""

    def __init__(self, store: FaultyStore, key: str, inner: Upload) -> None:
        self._store = store
        self._key = key
        self._inner = inner
        self._broken = False
        # Kept only for a fault that needs them: uploads may be large.
        self._kept: list[bytes] = []

    def append(self, *buffers: Buffer) -> None:
        if self._store._fault is Fault.TORN_WRITE:
            self._kept += [bytes(buffer) for buffer in buffers]
        self._step("append", lambda: self._inner.append(*buffers))

    def commit(self) -> None:
        self._step("commit", self._inner.commit, tear=self._tear)

    def abort(self) -> None:
        try:
            self._store._perform("abort", self._key, self._inner.abort)
        except StoreError:
            # By contract an abort never raises, even if it leaves something behind.
            return

    def _step(self, name: str, act: Callable[[], None], *, tear: Callable[[], None] | None = None) -> None:
        """Perform one step; as in every store, a failed step ends the upload."""
        if self._broken:
            raise StoreError(f"the upload of {self._key} has ended; begin a new one", key=self._key)
        try:
            self._store._perform(name, self._key, act, tear=tear)
        except StoreError:
            self._broken = True
            raise

    def _tear(self) -> None:
        self._store._inner.create(self._key, _cut(b"".join(self._kept)))


def _cut(data: bytes) -> bytes:
    """Return the first half of `data`."""
    return data[: len(data) // 2]
