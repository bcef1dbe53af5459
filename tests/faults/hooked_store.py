"""A store that lets a test step in before or after any operation: another process acts at just that moment."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

from holdfast.digest import Buffer
from holdfast.objects.protocol import PAGE_LIMIT, ObjectInfo, ObjectStore, StoreTraits, Upload

Hook = Callable[[str, str], None]
"""Told the operation's name and its key."""


def _nothing(_name: str, _key: str) -> None:
    return


class HookedStore(ObjectStore):
    """Passes every operation on to `inner`, telling `before` and `after` about it."""

    def __init__(self, inner: ObjectStore, *, before: Hook = _nothing, after: Hook = _nothing) -> None:
        self.inner = inner
        self.before = before
        self.after = after

    @property
    def url(self) -> str:
        return self.inner.url

    @property
    def traits(self) -> StoreTraits:
        return self.inner.traits

    def prepare(self, prefixes: Sequence[str]) -> None:
        self.before("prepare", "")
        self.inner.prepare(prefixes)
        self.after("prepare", "")

    def hold(self, *, exclusive: bool) -> AbstractContextManager[bool]:
        return self.inner.hold(exclusive=exclusive)

    def remove_debris(self, *, older_than_s: float) -> int:
        return self.inner.remove_debris(older_than_s=older_than_s)

    def sync(self, prefix: str) -> None:
        self.before("sync", prefix)
        self.inner.sync(prefix)
        self.after("sync", prefix)

    def create(self, key: str, data: Buffer, *, durable: bool = True) -> None:
        self.before("create", key)
        self.inner.create(key, data, durable=durable)
        self.after("create", key)

    def upload(self, key: str) -> Upload:
        self.before("upload", key)
        return _HookedUpload(self, key, self.inner.upload(key))

    def read(self, key: str, *, limit_bytes: int) -> bytes:
        self.before("read", key)
        return self.inner.read(key, limit_bytes=limit_bytes)

    def read_into(self, key: str, start: int, buffer: memoryview) -> None:
        self.before("read_into", key)
        self.inner.read_into(key, start, buffer)

    def list(self, prefix: str, *, after: str = "", limit: int = PAGE_LIMIT) -> list[ObjectInfo]:
        self.before("list", prefix)
        found = self.inner.list(prefix, after=after, limit=limit)
        self.after("list", prefix)
        return found

    def delete(self, key: str) -> None:
        self.before("delete", key)
        self.inner.delete(key)
        self.after("delete", key)

    def stat(self, key: str) -> ObjectInfo:
        self.before("stat", key)
        return self.inner.stat(key)

    def clock(self) -> float:
        return self.inner.clock()

    def find_free_bytes(self) -> int | None:
        return self.inner.find_free_bytes()


class _HookedUpload(Upload):
    def __init__(self, store: HookedStore, key: str, inner: Upload) -> None:
        self._store = store
        self._key = key
        self._inner = inner

    def append(self, *buffers: Buffer) -> None:
        self._inner.append(*buffers)

    def commit(self) -> None:
        self._store.before("commit", self._key)
        self._inner.commit()
        self._store.after("commit", self._key)

    def abort(self) -> None:
        self._inner.abort()


class Once:
    """A hook that acts the `count`-th time that `name` meets a key starting with `prefix`."""

    def __init__(self, name: str, prefix: str, act: Callable[[], None], *, count: int = 1) -> None:
        self._name, self._prefix, self._act, self._left = name, prefix, act, count

    def __call__(self, name: str, key: str) -> None:
        if name == self._name and key.startswith(self._prefix):
            self._left -= 1
            if self._left == 0:
                self._act()

    @property
    def has_acted(self) -> bool:
        return self._left <= 0


def once(name: str, prefix: str, act: Callable[[], None]) -> Once:
    """Return a hook that acts the first time that `name` meets a key starting with `prefix`."""
    return nth(1, name, prefix, act)


def nth(count: int, name: str, prefix: str, act: Callable[[], None]) -> Once:
    """Return a hook that acts the `count`-th time that `name` meets a key starting with `prefix`."""
    return Once(name, prefix, act, count=count)
