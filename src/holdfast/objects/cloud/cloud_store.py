"""An object store in the cloud: conditional, checksummed puts, ranged reads, listings that need no order."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any, Final, TypeVar

import obstore
from obstore import exceptions
from typing_extensions import Self

from holdfast.digest import Buffer
from holdfast.errors import Corrupt, Fate, NotFound, ObjectExists, ReadOnlyStore, StoreError
from holdfast.objects.cloud.client import ClientOwner
from holdfast.objects.cloud.failures import find_cause, translate
from holdfast.objects.cloud.place import CloudPlace
from holdfast.objects.protocol import PAGE_LIMIT, ObjectInfo, StoreTraits, verify_key, verify_prefix

Result = TypeVar("Result")
PACK_BYTES: Final = 64 << 20
REQUESTS_AT_ONCE: Final = 64
_TRAITS: Final = StoreTraits(
    exclusive_create=True, durable=True, network=True, upload_bytes=PACK_BYTES, requests_at_once=REQUESTS_AT_ONCE
)


class CloudStore:
    """Keeps objects below a prefix of a bucket."""

    def __init__(
        self,
        place: CloudPlace,
        *,
        read_only: bool = False,
        single_writer: bool = False,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self._place = place
        self._read_only = read_only
        self._single_writer = single_writer
        self._is_proven = False
        self._owner = ClientOwner(place, options or {})
        self._created: tuple[str, float] | None = None
        self._skew_s = 0.0

    @property
    def url(self) -> str:
        """The URL of the bucket and prefix."""
        return str(self._place)

    @property
    def traits(self) -> StoreTraits:
        """Properties of this store."""
        return _TRAITS

    def prepare(self, prefixes: Sequence[str]) -> None:
        """Do nothing: a bucket has no directories."""
        for prefix in prefixes:
            self._verify_writable(prefix.rstrip("/"))

    def sync(self, prefix: str) -> None:
        """Do nothing: an object that is visible is durable."""
        verify_prefix(prefix)

    def create(self, key: str, data: Buffer, *, durable: bool = True) -> None:
        """Create `key` with one conditional put; every object of a bucket is durable."""
        self._verify_writable(key)
        self._put(key, memoryview(data).cast("B"))

    def upload(self, key: str) -> CloudUpload:
        """Begin an upload, which is kept in memory until it is committed."""
        self._verify_writable(key)
        return CloudUpload(key, commit=self._put)

    def read(self, key: str, *, limit_bytes: int) -> bytes:
        """Return the whole object."""
        verify_key(key)
        return self._ask("read", key, lambda: self._read_whole(key, limit_bytes))

    def read_into(self, key: str, start: int, buffer: memoryview) -> None:
        """Fill `buffer` with the bytes from `start` on."""
        assert start >= 0
        verify_key(key)
        if not buffer.nbytes:
            self.stat(key)
            return
        data = self._ask("read", key, lambda: self._read_range(key, start, buffer.nbytes))
        if len(data) != buffer.nbytes:
            raise Corrupt(f"{key} ends before byte {start + buffer.nbytes}", key=key)
        buffer.cast("B")[:] = data

    def list(self, prefix: str, *, after: str = "", limit: int = PAGE_LIMIT) -> list[ObjectInfo]:
        """Return one page of objects, ordered by key, directory by directory."""
        verify_prefix(prefix)
        page: list[ObjectInfo] = []
        for info in self._walk(prefix.rpartition("/")[0], prefix, after) if limit > 0 else ():
            page.append(info)
            if len(page) == limit:
                break
        return page

    def list_all(self, prefix: str) -> Sequence[ObjectInfo]:
        """Return every object whose key starts with `prefix`, ordered by key."""
        verify_prefix(prefix)
        folder = prefix.rpartition("/")[0]
        found = self._ask("list", prefix, lambda: self._read_listing(folder))
        return sorted((info for info in found if info.key.startswith(prefix)), key=lambda info: info.key)

    def delete(self, key: str) -> None:
        """Delete `key` if it is there."""
        self._verify_writable(key)
        with suppress(NotFound):
            self._ask("delete", key, lambda: obstore.delete(self._owner.find(), key))

    @contextmanager
    def hold(self, *, exclusive: bool) -> Iterator[bool]:
        """Yield False to a collector: a bucket has no locks."""
        yield not exclusive

    def remove_debris(self, *, older_than_s: float) -> int:
        """Return 0: a put that failed leaves nothing behind."""
        return 0

    def stat(self, key: str) -> ObjectInfo:
        """Return size, time and version of `key`."""
        verify_key(key)
        return _describe(self._ask("read", key, lambda: obstore.head(self._owner.find(), key)))

    def clock(self) -> float:
        """Return the time of the server: this host's, corrected by the time of the last object that was created."""
        created, self._created = self._created, None
        if created:
            with suppress(NotFound):
                self._skew_s = self.stat(created[0]).modified_s - created[1]
        return time.time() + self._skew_s

    def find_free_bytes(self) -> int | None:
        """Return None: a bucket has no limit."""
        return None

    def _verify_writable(self, key: str) -> None:
        verify_key(key)
        if self._read_only:
            raise ReadOnlyStore(
                f"cannot write {key}: {self.url} was opened read-only; open it without read_only=True", key=key
            )

    def _put(self, key: str, data: memoryview) -> None:
        began = time.time()
        self._put_once(key, data)
        self._created = (key, began)
        if not self._is_proven and not self._single_writer:
            self._verify_exclusive(key, data)

    def _put_once(self, key: str, data: memoryview) -> None:
        client = self._owner.find()
        self._ask("create", key, lambda: obstore.put(client, key, data, mode="create", use_multipart=False))

    def _verify_exclusive(self, key: str, data: memoryview) -> None:
        """Create the same object again: a server that accepts this would let two writers overwrite each other."""
        try:
            self._put_once(key, data)
        except ObjectExists:
            self._is_proven = True
            return
        self.delete(key)
        raise StoreError(
            f"the server of {self.url} ignores the condition that an object must not exist yet, so two writers could"
            " overwrite each other; pass single_writer=True if there is only one",
            key=key,
        )

    def _read_whole(self, key: str, limit_bytes: int) -> bytes:
        found = obstore.get(self._owner.find(), key)
        size = found.meta["size"]
        if size > limit_bytes:
            raise Corrupt(f"{key} has {size} bytes, more than the limit of {limit_bytes}", key=key)
        return bytes(found.bytes())

    def _read_range(self, key: str, start: int, size_bytes: int) -> memoryview:
        try:
            return memoryview(obstore.get_range(self._owner.find(), key, start=start, length=size_bytes))
        except exceptions.BaseError as error:
            if find_cause(error) == "range":
                raise Corrupt(f"{key} ends before byte {start + size_bytes}", key=key) from error
            raise

    def _read_listing(self, folder: str) -> Sequence[ObjectInfo]:
        pages = obstore.list(self._owner.find(), prefix=folder or None)
        return [_describe(meta) for page in pages for meta in page]

    def _walk(self, folder: str, prefix: str, after: str) -> Iterator[ObjectInfo]:
        """Yield the objects below one directory in the order of their keys, with one request for each directory."""
        found = self._ask(
            "list", folder, lambda: obstore.list_with_delimiter(self._owner.find(), prefix=folder or None)
        )
        objects = {meta["path"]: _describe(meta) for meta in found["objects"]}
        folders = {path.rstrip("/") + "/" for path in found["common_prefixes"]}
        for name in sorted(objects.keys() | folders):
            if name in objects:
                if name.startswith(prefix) and name > after:
                    yield objects[name]
            # All keys below are greater than its name, and less than its name with the last slash replaced.
            elif (name.startswith(prefix) or prefix.startswith(name)) and name[:-1] + "0" > after:
                yield from self._walk(name[:-1], prefix, after)

    def _ask(self, action: str, key: str, request: Callable[[], Result]) -> Result:
        began = time.monotonic()
        fate: Fate = "unknown" if action == "create" else "absent"
        try:
            return request()
        except (exceptions.BaseError, FileNotFoundError) as error:
            if isinstance(error, StoreError | NotFound):
                raise
            seconds = time.monotonic() - began
            raise translate(error, action=action, key=key, url=self.url, seconds=seconds, fate=fate) from error


class CloudUpload:
    """An upload that owns its bytes until one put sends them all."""

    def __init__(self, key: str, *, commit: Callable[[str, memoryview], None]) -> None:
        self._key = key
        self._commit = commit
        self._data: bytearray | None = bytearray()

    def append(self, *buffers: Buffer) -> None:
        """Append copies of `buffers`."""
        data = self._verify_open()
        for buffer in buffers:
            data += memoryview(buffer).cast("B")

    def commit(self) -> None:
        """Send all bytes and make the object visible."""
        data = self._verify_open()
        self.abort()
        self._commit(self._key, memoryview(data))

    def abort(self) -> None:
        """Drop what was appended."""
        self._data = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()

    def _verify_open(self) -> bytearray:
        if self._data is None:
            raise StoreError(f"the upload of {self._key} has ended; begin a new one", key=self._key)
        return self._data


def _describe(meta: Any) -> ObjectInfo:
    return ObjectInfo(
        key=meta["path"],
        size_bytes=meta["size"],
        modified_s=meta["last_modified"].timestamp(),
        version=meta["e_tag"] or meta["version"] or "",
    )
