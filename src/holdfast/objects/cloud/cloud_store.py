"""An object store in the cloud: conditional, checksummed puts, ranged reads, and an estimate of the server's clock."""

from __future__ import annotations

import logging
import math
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, TypeVar
from uuid import uuid4

import obstore
from obstore import exceptions

from holdfast.digest import Buffer
from holdfast.errors import Corrupt, NotFound, ObjectExists, ReadOnlyStore, StoreError
from holdfast.objects.blocks import GrowingBlock, LentBlock
from holdfast.objects.cloud.client import LARGE_BYTES, ClientOwner, Load
from holdfast.objects.cloud.failures import Attempt, CloudAction, find_cause, is_cut, translate
from holdfast.objects.cloud.place import CloudPlace
from holdfast.objects.disk_cache import DiskCache
from holdfast.objects.protocol import (
    PAGE_LIMIT,
    ObjectInfo,
    ObjectStore,
    StoreTraits,
    Upload,
    is_key,
    verify_key,
    verify_prefix,
)
from holdfast.objects.request_tally import RequestCount, RequestKind, RequestTally
from holdfast.objects.storage_options import StorageOptions

RESOLUTION_S: Final = 2.0
"""Servers round times to seconds, so a smaller difference between two clocks is none."""
_MAX_SPAN_S: Final = 10.0
_FRESH_S: Final = 600.0


@dataclass(frozen=True, slots=True)
class _Created:
    """An object, and when this host began and ended its creation."""

    key: str
    began_s: float
    ended_s: float


class ServerClock:
    """The clock of a server. Makes no requests: it learns from the answers to those that are made anyway."""

    def __init__(self) -> None:
        self._created: _Created | None = None
        self._learned_monotonic_s: float | None = None
        self.skew_s: float = 0.0
        """How far the clock of the server is ahead of this host's; 0 until an object has shown it."""

    @property
    def is_known(self) -> bool:
        """Whether the clocks were compared in the last ten minutes."""
        learned = self._learned_monotonic_s
        return learned is not None and time.monotonic() - learned < _FRESH_S

    def now(self) -> float:
        """Return the time of the server, in seconds since 1970."""
        return time.time() + self.skew_s

    def note_created(self, key: str, *, began_s: float) -> None:
        """Note that `key` was created between `began_s`, by the clock of this host, and now."""
        ended_s = time.time()
        # The creation of a large object, or one that was repeated, may have taken place at any time in between.
        if 0.0 <= ended_s - began_s <= _MAX_SPAN_S:
            self._created = _Created(key, began_s, ended_s)

    def note_seen(self, infos: Iterable[ObjectInfo]) -> None:
        """Compare the clocks, if the object that was created last is among `infos`."""
        created = self._created
        info = next((info for info in infos if info.key == created.key), None) if created else None
        if created and info:
            skew_s = info.modified_s - (created.began_s + created.ended_s) / 2
            uncertainty_s = RESOLUTION_S + (created.ended_s - created.began_s) / 2
            self.skew_s = skew_s if abs(skew_s) > uncertainty_s else 0.0
            self._learned_monotonic_s, self._created = time.monotonic(), None


PACK_BYTES: Final = 64 << 20
_PACK_END_BYTES: Final = 12 << 20
"""Room for the last batch of a pack and its footer."""


class CloudUpload(Upload):
    """An object in parts: blocks as they are, and copies of everything else. One put sends all parts, in order."""

    def __init__(self, key: str, *, commit: Callable[[str, Sequence[memoryview]], None]) -> None:
        self._key = key
        self._commit = commit
        self._has_ended = False
        self._parts: list[memoryview] = []
        self._blocks: list[LentBlock] = []
        self._copies: GrowingBlock | None = None
        """The part that is open at the end."""

    def append(self, *buffers: Buffer) -> None:
        """Append copies of `buffers`."""
        self._verify_open()
        for buffer in buffers:
            view = memoryview(buffer).cast("B")
            if view:
                self._copies = self._copies or GrowingBlock(PACK_BYTES + _PACK_END_BYTES)
                self._copies.append(view)

    def append_block(self, block: LentBlock) -> None:
        """Append a block without a copy, wherever it starts."""
        self._verify_open()
        self._close_part()
        self._blocks.append(block)
        self._parts.append(block.memory)

    def commit(self) -> None:
        """Send all bytes and make the object visible.

        If that fails, the blocks are not released. A request that has not ended might still read them, and an object
        with other bytes could be taken for this one.
        """
        self._verify_open()
        self._close_part()
        self._has_ended = True
        parts, blocks = self._parts, self._blocks
        self._parts, self._blocks = [], []
        self._commit(self._key, parts or [memoryview(b"")])
        for block in blocks:
            block.release()

    def abort(self) -> None:
        """Drop what was appended."""
        self._has_ended = True
        blocks, self._parts, self._blocks, self._copies = self._blocks, [], [], None
        for block in blocks:
            block.release()

    def _close_part(self) -> None:
        if self._copies is not None:
            self._parts.append(self._copies.find())
            self._copies = None

    def _verify_open(self) -> None:
        if self._has_ended:
            raise StoreError(f"the upload of {self._key} has ended; begin a new one", key=self._key)


Result = TypeVar("Result")
REQUESTS_AT_ONCE: Final = 64
_NEAR_READS: Final = 16
_NEAR_S: Final = 0.005
"""A server that has answered a request within this time is near: a few large reads fill the link to it."""
MAX_LISTED: Final = 10_000_000
"""More objects than any store has: memory for them is not allocated."""
_UPLOAD_TRIES: Final = 3
_READ_TRIES: Final = 4
"""The client repeats no listing whose answer was cut, and no read whose error message was; neither changes anything."""
_FIRST_PAUSE_S: Final = 0.1
_SCRATCH: Final = ".scratch"
"""Below this are objects for tests of the server. No key begins with a dot, so no listing contains them."""
DELETE_LIMIT: Final = 1000
"""How many objects one request deletes: what S3 allows."""
_FAR_TRAITS: Final = StoreTraits(
    durable=True,
    shared_by_hosts=True,
    stale_listings=False,
    upload_bytes=PACK_BYTES,
    checked_uploads=True,
    requests_at_once=REQUESTS_AT_ONCE,
    reads_at_once=REQUESTS_AT_ONCE,
    wait_bytes=1 << 20,
    lends_reads=True,
    cheap_listings=False,
    reliable_times=True,
    compresses=True,
    poll_s=5.0,
)
_NEAR_TRAITS: Final = replace(_FAR_TRAITS, reads_at_once=_NEAR_READS)
_log: Final = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FolderListing:
    """What is directly in a folder."""

    objects: Sequence[ObjectInfo]
    folders: Sequence[str]
    """Prefixes, each ending with a slash, that contain objects."""


class CloudStore(ObjectStore):
    """Keeps objects below a prefix of a bucket. A pickle of it has no secrets."""

    def __init__(
        self,
        place: CloudPlace,
        *,
        read_only: bool = False,
        single_writer: bool = False,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self.place = place
        self._read_only = read_only
        self._single_writer = single_writer
        self.is_exclusive: bool | None = None
        """Whether the server refuses to create an object that exists; None until the first one was created twice."""
        given = options if isinstance(options, StorageOptions) else StorageOptions(options)
        self.clients = ClientOwner(place, given)
        self._clock = ServerClock()
        self.request_tally = RequestTally()
        self.near_s = _NEAR_S
        self._fastest_s = math.inf

    def __repr__(self) -> str:
        """Show the URL."""
        return f"<CloudStore {self.url}>"

    @property
    def url(self) -> str:
        """The URL of the bucket and prefix."""
        return str(self.place)

    @property
    def traits(self) -> StoreTraits:
        """Properties of this store; fewer large reads at once if the server is near, by its fastest answer so far."""
        return _NEAR_TRAITS if self._fastest_s < self.near_s else _FAR_TRAITS

    def use_cache(self, cache: DiskCache | None) -> None:
        """Let those who read snapshots use `cache`; the methods of this class always ask the server."""
        self.cache = cache

    def count_requests(self) -> Mapping[RequestKind, RequestCount]:
        """Return the requests of this handle, by kind."""
        return self.request_tally.read()

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
        self._put(key, [memoryview(data).cast("B")])

    def upload(self, key: str) -> CloudUpload:
        """Begin an upload, which is kept in memory until it is committed."""
        self._verify_writable(key)
        return CloudUpload(key, commit=self._put_again)

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
        buffer.cast("B")[:] = self.read_range(key, start, buffer.nbytes)

    def read_range(self, key: str, start: int, size_bytes: int) -> memoryview:
        """Return the bytes from `start` on, in the memory that received them."""
        verify_key(key)
        data = self._ask("read", key, lambda: self._read_range(key, start, size_bytes))
        if len(data) != size_bytes:
            raise Corrupt(f"{key} ends before byte {start + size_bytes}", key=key)
        return data

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
        # No order is promised for objects of different directories, and other programs may have put some there.
        found = (info for info in _drop_directories(self._list_folder(folder)) if info.key.startswith(prefix))
        return sorted((info for info in found if is_key(info.key)), key=lambda info: info.key)

    def list_at_most(self, prefix: str, limit: int) -> Sequence[ObjectInfo] | None:
        """Return every object whose key starts with `prefix`, ordered by key; None if there are more than `limit`."""
        assert prefix.endswith("/"), "other objects of the folder would count"
        found = self._list_folder(verify_prefix(prefix).rstrip("/"), limit)
        if len(found) > limit:
            return None
        return sorted((info for info in _drop_directories(found) if is_key(info.key)), key=lambda info: info.key)

    def delete(self, key: str) -> None:
        """Delete `key` if it is there."""
        self._verify_writable(key)
        self._delete(key)

    def list_folder(self, folder: str) -> FolderListing:
        """Return what is directly in a folder, which ends with a slash or is empty for all keys; ordered."""
        verify_prefix(folder)
        found = self._list_level(folder.rstrip("/"))
        return FolderListing(sorted(found.objects, key=lambda info: info.key), sorted(found.folders))

    def iter_objects(self, prefix: str) -> Iterator[ObjectInfo]:
        """Yield what `list_all` returns."""
        yield from self.list_all(prefix)

    def iter_folders(self, folder: str, expected: Sequence[str]) -> Iterator[ObjectInfo]:
        """Yield all objects below `folder`; asks for each expected folder and for what else there is at the same time.

        That takes as long as listing the largest folder.
        """
        top, *parts = self.run_together(
            [partial(self.list_folder, folder), *(partial(self._list_whole, each) for each in expected)]
        )
        others = self.list_together([each for each in top.folders if each not in expected])
        found = (top.objects, *(part.objects for part in parts), *others)
        yield from sorted((info for objects in found for info in objects), key=lambda info: info.key)

    def _list_whole(self, folder: str) -> FolderListing:
        return FolderListing(self.list_all(folder), ())

    def iter_names(self, folder: str) -> Iterator[str]:
        """Yield the keys and folders that are directly in `folder`, found with one listing."""
        found = self.list_folder(folder)
        yield from sorted([*(info.key for info in found.objects), *found.folders])

    def stat_many(self, keys: Sequence[str]) -> Mapping[str, ObjectInfo]:
        """Return what is known about those of `keys` that exist; lists their folders if there are many."""
        if len(keys) <= REQUESTS_AT_ONCE:
            return super().stat_many(keys)
        wanted = frozenset(keys)
        folders = sorted({key.rpartition("/")[0] + "/" for key in keys})
        return {info.key: info for objects in self.list_together(folders) for info in objects if info.key in wanted}

    def delete_many(self, keys: Sequence[str]) -> None:
        """Delete objects, up to 1,000 with one request; a service without such a request gets one for each object."""
        if len(keys) == 1:
            self.delete(keys[0])
            return
        batches = [keys[first : first + DELETE_LIMIT] for first in range(0, len(keys), DELETE_LIMIT)]
        self.run_together([partial(self._delete_batch, batch) for batch in batches])

    def _delete_batch(self, keys: Sequence[str]) -> None:
        for key in keys:
            self._verify_writable(key)
        what = f"{keys[0]} and {len(keys) - 1} more"
        try:
            self._ask("delete", what, lambda: self._delete_all(keys))
        except NotFound:
            # Azure reports an absent object instead of deleting the others.
            self.run_together([partial(self._delete, key) for key in keys])

    def _delete_all(self, keys: Sequence[str]) -> None:
        # Of the services, only Google has no request that deletes several objects.
        self.request_tally.add("delete", requests=len(keys) if self.place.scheme == "gs" else 1)
        obstore.delete(self.clients.find(), [*keys])

    @contextmanager
    def hold(self, *, exclusive: bool) -> Iterator[bool]:
        """Yield False to a collector: a bucket has no locks."""
        yield not exclusive

    def remove_debris(self, *, older_than_s: float) -> int:
        """Remove scratch objects of tests that were interrupted; a put that failed leaves nothing behind."""
        oldest_s = self.clock() - older_than_s
        left = [info.key for info in self.list_scratch() if info.modified_s <= oldest_s]
        for key in left:
            self._delete(key)
        return len(left)

    def stat(self, key: str) -> ObjectInfo:
        """Return size, time and version of `key`."""
        return self._stat(verify_key(key))

    def clock(self) -> float:
        """Return the time of the server, as far as objects that this handle has created have shown it."""
        return self._clock.now()

    def learn_clock(self) -> None:
        """Compare the clocks with a scratch object, unless that was done in the last ten minutes."""
        if not self._read_only and not self._clock.is_known:
            key = self.create_scratch(b"")
            self._stat(key)
            self._delete(key)

    @property
    def skew_s(self) -> float:
        """How far the clock of the server is ahead of this host's, as far as it is known."""
        return self._clock.skew_s

    def create_scratch(self, data: bytes) -> str:
        """Create an object that is in no listing of the store, and return its key; the caller deletes it."""
        key = f"{_SCRATCH}/{uuid4().hex}"
        self.put_once(key, [memoryview(data)])
        return key

    def list_scratch(self) -> Sequence[ObjectInfo]:
        """Return all scratch objects."""
        return self._list_folder(_SCRATCH)

    def delete_scratch(self, key: str) -> None:
        """Delete a scratch object."""
        assert key.startswith(f"{_SCRATCH}/")
        self._delete(key)

    def find_free_bytes(self) -> int | None:
        """Return None: a bucket has no limit."""
        return None

    def _verify_writable(self, key: str) -> None:
        verify_key(key)
        if self._read_only:
            raise ReadOnlyStore(
                f"cannot write {key}: {self.url} was opened read-only; open it without read_only=True", key=key
            )

    def _put_again(self, key: str, parts: Sequence[memoryview]) -> None:
        """Create `key`, and again if that failed and nothing is there: the client repeats neither timeouts nor 409."""
        for attempt in range(_UPLOAD_TRIES):
            try:
                self._put(key, parts)
                return
            except StoreError as error:
                is_last = attempt + 1 == _UPLOAD_TRIES
                if is_last or isinstance(error, ObjectExists) or error.fate != "unknown" or self._may_exist(key):
                    raise
            time.sleep(random.uniform(0.0, _FIRST_PAUSE_S * 2**attempt))

    def _put(self, key: str, parts: Sequence[memoryview]) -> None:
        if self._single_writer and not self.is_exclusive:
            self._verify_absent(key)
        self.put_once(key, parts)
        if self.is_exclusive is None and _count_bytes(parts) < LARGE_BYTES:
            self._test_exclusive(key, parts)

    def put_once(self, key: str, parts: Sequence[memoryview]) -> None:
        """Create an object with one request; verifies neither its key nor that the server honours conditions."""
        client, began_s = self.clients.find(_weigh(_count_bytes(parts))), time.time()
        # obstore sends a list of buffers without copying them.
        payload = parts[0] if len(parts) == 1 else [*parts]

        def put() -> None:
            self.request_tally.add("put", size_bytes=_count_bytes(parts))
            obstore.put(client, key, payload, mode="create", use_multipart=False)

        self._ask("create", key, put)
        self._clock.note_created(key, began_s=began_s)

    def _verify_absent(self, key: str) -> None:
        """Raise ObjectExists for a key in use; all that can be done on a server that ignores conditions."""
        with suppress(NotFound):
            self._stat(key)
            raise ObjectExists(f"{key} is already in {self.url}", key=key)

    def _may_exist(self, key: str) -> bool:
        """Return False if the server says that there is no such object."""
        try:
            self._stat(key)
        except NotFound:
            return False
        except StoreError:
            return True
        return True

    def _test_exclusive(self, key: str, parts: Sequence[memoryview]) -> None:
        """Create the same object again: a server that accepts this would let two writers overwrite each other."""
        try:
            self.put_once(key, parts)
        except ObjectExists:
            self.is_exclusive = True
            return
        except StoreError:
            # The object was created, whatever became of the test: the next creation tests again.
            return
        if self._single_writer:
            self.is_exclusive = False
            _log.warning(
                "%s ignores the condition that an object must not exist yet: only one writer is safe", self.url
            )
            return
        self._delete(key)
        raise StoreError(
            f"the server of {self.url} ignores the condition that an object must not exist yet, so two writers could"
            " overwrite each other; pass single_writer=True if there is only one",
            key=key,
        )

    def _stat(self, key: str) -> ObjectInfo:
        found = self._ask("read", key, lambda: self._head(key))
        # obstore 0.11, the last for Python 3.10, returns the key with the prefix of the store here.
        info = _describe({**found, "path": key})
        self._clock.note_seen([info])
        return info

    def _head(self, key: str) -> Any:
        self.request_tally.add("head")
        return obstore.head(self.clients.find(), key)

    def _delete(self, key: str) -> None:
        def delete() -> None:
            self.request_tally.add("delete")
            obstore.delete(self.clients.find(), key)

        with suppress(NotFound):
            self._ask("delete", key, delete)

    def _read_whole(self, key: str, limit_bytes: int) -> bytes:
        self.request_tally.add("get")
        found = obstore.get(self.clients.find(), key)
        size = found.meta["size"]
        if size > limit_bytes:
            raise Corrupt(f"{key} has {size} bytes, more than the limit of {limit_bytes}", key=key)
        data = bytes(found.bytes())
        self.request_tally.add("get", requests=0, size_bytes=len(data))
        return data

    def _read_range(self, key: str, start: int, size_bytes: int) -> memoryview:
        client = self.clients.find(_weigh(size_bytes))
        self.request_tally.add("get")
        try:
            data = memoryview(obstore.get_range(client, key, start=start, length=size_bytes))
            self.request_tally.add("get", requests=0, size_bytes=len(data))
            return data
        except exceptions.BaseError as error:
            if find_cause(error) == "range":
                raise Corrupt(f"{key} ends before byte {start + size_bytes}", key=key) from None
            raise

    def _list_folder(self, folder: str, limit: int | None = None) -> Sequence[ObjectInfo]:
        """Return all objects below a folder, in any order; not all, if there are more than `limit`."""
        return self._ask("list", folder, lambda: self._read_listing(folder, limit))

    def _read_listing(self, folder: str, limit: int | None) -> Sequence[ObjectInfo]:
        pages = obstore.list(self.clients.find(), prefix=folder or None, chunk_size=PAGE_LIMIT)
        found: dict[str, ObjectInfo] = {}
        self.request_tally.add("list")
        for number, page in enumerate(pages):
            self.request_tally.add("list", requests=min(number, 1))
            before = len(found)
            found |= {meta["path"]: _describe(meta) for meta in page}
            if page and not before < len(found) <= MAX_LISTED:
                raise StoreError(f"cannot list {self.url}/{folder}: {_describe_endless(len(found))}", key=folder)
            if limit is not None and len(found) > limit:
                break  # the following pages are not requested
        self._clock.note_seen(found.values())
        return list(found.values())

    def _list_level(self, folder: str) -> FolderListing:
        """Return what is directly in a folder, in any order."""
        found = self._ask("list", folder, lambda: self._read_level(folder))
        # A server may list the directory itself, as an object whose name ends with a slash. Other programs may have put
        # objects there whose names are no keys.
        start = f"{folder}/" if folder else ""
        objects = [_describe(meta) for meta in found["objects"]]
        self._clock.note_seen(objects)
        folders = {path.rstrip("/") + "/" for path in found["common_prefixes"]} - {start}
        return FolderListing(
            [info for info in objects if info.key.startswith(start) and is_key(info.key)],
            [path for path in folders if path.startswith(start) and is_key(path[:-1])],
        )

    def _read_level(self, folder: str) -> Any:
        self.request_tally.add("list")
        found = obstore.list_with_delimiter(self.clients.find(), prefix=folder or None)
        names = len(found["objects"]) + len(found["common_prefixes"])
        self.request_tally.add("list", requests=max(0, names - 1) // PAGE_LIMIT)
        return found

    def _walk(self, folder: str, prefix: str, after: str) -> Iterator[ObjectInfo]:
        """Yield the objects below one directory in the order of their keys, with one request for each directory."""
        found = self._list_level(folder)
        objects = {info.key: info for info in found.objects}
        for name in sorted((*objects, *found.folders)):
            if name in objects:
                if name.startswith(prefix) and name > after:
                    yield objects[name]
            # All keys below are greater than its name, and less than its name with the last slash replaced.
            elif (name.startswith(prefix) or prefix.startswith(name)) and name[:-1] + "0" > after:
                yield from self._walk(name[:-1], prefix, after)

    def _ask(self, action: CloudAction, key: str, request: Callable[[], Result]) -> Result:
        """Make one request; raises Holdfast's error for one of obstore."""
        began, left = time.monotonic(), _READ_TRIES if action in ("read", "list") else 1
        while True:
            left -= 1
            try:
                result = request()
                self.clients.has_answered = True
                self._fastest_s = min(self._fastest_s, time.monotonic() - began)
                return result
            except (exceptions.BaseError, FileNotFoundError) as error:
                seconds, withheld = time.monotonic() - began, self.clients.options.withheld
                failure = translate(error, Attempt(action, key, self.url, seconds, withheld))
                is_final = not left or not is_cut(error)
            if is_final:
                # Not chained: the text of obstore may have a signature in it.
                raise failure
            time.sleep(random.uniform(0.0, _FIRST_PAUSE_S))


def _describe_endless(count: int) -> str:
    return f"the server lists objects without an end, {count:,} so far, or the same ones again and again"


def _drop_directories(found: Sequence[ObjectInfo]) -> Sequence[ObjectInfo]:
    """Leave out empty objects that are named like a directory of others: some tools create one for each directory."""
    empty = {info.key for info in found if not info.size_bytes}
    if not empty:
        return found
    parents = {info.key[:at] for info in found for at, letter in enumerate(info.key) if letter == "/"}
    directories = empty & parents
    return [info for info in found if info.key not in directories]


def _describe(meta: Any) -> ObjectInfo:
    return ObjectInfo(
        key=meta["path"],
        size_bytes=meta["size"],
        modified_s=meta["last_modified"].timestamp(),
        # Azure writes quotes around it in some answers and not in others.
        version=(meta["e_tag"] or meta["version"] or "").strip('"'),
    )


def _count_bytes(parts: Sequence[memoryview]) -> int:
    return sum(part.nbytes for part in parts)


def _weigh(size_bytes: int) -> Load:
    return "large" if size_bytes >= LARGE_BYTES else "small"
