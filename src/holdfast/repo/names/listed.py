"""Lists snapshots fast: records that were read before come from a cache, others are read on several threads."""

from __future__ import annotations

import threading
import unicodedata
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from holdfast.objects.protocol import ObjectInfo, ObjectStore
from holdfast.objects.together import run_together
from holdfast.repo.format.layout import SNAPSHOTS, is_reserved, is_reserved_stem, make_stem_filter
from holdfast.repo.names.generations import iter_stem_objects
from holdfast.repo.names.snapshots import CommittedSnapshot, DamagedName, read_listed_snapshot

MAX_CACHED_BYTES: Final = 64 << 20
"""Records are remembered up to this sum of their sizes; others are read each time."""


@dataclass(frozen=True, slots=True)
class CachedRecord:
    """The highest record of a name, as it was when its file had this size and version."""

    size_bytes: int
    version: str
    snapshot: CommittedSnapshot | None
    """None for a deleted name."""


class RecordCache:
    """Records by key. Safe in any thread. It may be emptied at any time: what it lacks is read again."""

    def __init__(self, *, limit_bytes: int = MAX_CACHED_BYTES) -> None:
        """Remember nothing yet."""
        self._limit_bytes = limit_bytes
        self._records: dict[str, CachedRecord] = {}
        self._size_bytes = 0
        self.num_new = 0
        """How many records were added by `put`, and not by `put_records`."""
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """Return how many records are remembered."""
        return len(self._records)

    def find(self, info: ObjectInfo) -> CachedRecord | None:
        """Return the record of an object if that is remembered and the object is still the same."""
        found = self._records.get(info.key)
        is_same = found is not None and (found.size_bytes, found.version) == (info.size_bytes, info.version)
        return found if is_same else None

    def put(self, info: ObjectInfo, snapshot: CommittedSnapshot | None) -> None:
        """Remember the record of an object, if there is room and the store tells when an object was replaced."""
        if info.version:
            record = CachedRecord(info.size_bytes, info.version, snapshot)
            self.num_new += self.put_records({info.key: record})

    def put_records(self, records: Mapping[str, CachedRecord]) -> int:
        """Remember records by their keys; return for how many there was room."""
        num_put = 0
        with self._lock:
            for key, record in records.items():
                self._drop(key)
                if self._size_bytes + record.size_bytes <= self._limit_bytes:
                    self._records[key] = record
                    self._size_bytes += record.size_bytes
                    num_put += 1
        return num_put

    def keep_only(self, keys: Collection[str]) -> None:
        """Forget the records of all other keys."""
        with self._lock:
            for key in self._records.keys() - keys:
                self._drop(key)

    def iter_records(self) -> Iterator[tuple[str, CachedRecord]]:
        """Yield every record with its key."""
        with self._lock:
            return iter(list(self._records.items()))

    def _drop(self, key: str) -> None:
        dropped = self._records.pop(key, None)
        self._size_bytes -= dropped.size_bytes if dropped else 0


_THREADS: Final = 8
"""A read waits for the disk or the network, so more threads than cores are of use."""
_BATCH: Final = 64
"""Records that a thread reads for one task if requests do not wait; fewer are read without threads."""

Listed = CommittedSnapshot | DamagedName


@dataclass(frozen=True, slots=True)
class ListedName:
    """The objects of one name, lowest generation first."""

    stem: str
    generations: list[int]
    highest: ObjectInfo
    modified_s: float
    """When the last of them was stored, by the store's clock."""

    @property
    def is_reserved(self) -> bool:
        """Whether the name is one of Holdfast's own, such as a part of a recorded run."""
        return is_reserved_stem(self.stem)


def list_user_names(store: ObjectStore, prefix: str, cache: RecordCache) -> list[Listed]:
    """Return what `iter_user_names` yields, in no order; reads only the records that the cache lacks."""
    prefix = unicodedata.normalize("NFC", prefix)
    return read_wanted(store, prefix, list_wanted(store, prefix, cache), cache)


def read_wanted(store: ObjectStore, prefix: str, wanted: Sequence[ListedName], cache: RecordCache) -> list[Listed]:
    """Return the snapshots of listed names that begin with `prefix`; reads only the records that the cache lacks."""
    cached = [cache.find(each.highest) for each in wanted]
    unread = [each for each, known in zip(wanted, cached, strict=True) if known is None]
    found = [known.snapshot for known in cached if known] + read_names(store, unread, cache)
    return [each for each in found if isinstance(each, DamagedName) or (each and is_listed(each.name, prefix))]


def list_wanted(store: ObjectStore, prefix: str, cache: RecordCache, *, in_sequence: bool = False) -> list[ListedName]:
    """List the user's names that may begin with `prefix`; the cache forgets records that are gone."""
    is_wanted, is_own = make_stem_filter(prefix), is_reserved(prefix)
    names = list_all(store, cache, in_sequence=in_sequence)
    return [each for each in names if is_wanted(each.stem) and (is_own or not each.is_reserved)]


def list_all(store: ObjectStore, cache: RecordCache, *, in_sequence: bool = False) -> list[ListedName]:
    """List all names, with those that are reserved; the cache forgets records that are gone."""
    listed = iter_stem_objects(store, SNAPSHOTS, in_sequence=in_sequence)
    names = [_make_name(stem, infos) for stem, infos in listed]
    # What is not listed any more is gone for good: generations never start again.
    cache.keep_only({each.highest.key for each in names})
    return names


def _make_name(stem: str, infos: Mapping[int, ObjectInfo]) -> ListedName:
    generations = list(infos)
    return ListedName(stem, generations, infos[generations[-1]], max(info.modified_s for info in infos.values()))


def is_listed(name: str, prefix: str) -> bool:
    """Return whether a listing of `prefix` shows a name."""
    return name.startswith(prefix) and (is_reserved(prefix) or not is_reserved(name))


def read_names(store: ObjectStore, names: Sequence[ListedName], cache: RecordCache) -> list[Listed | None]:
    """Read the snapshots of listed names, on several threads if that is faster; None for a deleted name."""
    at_once = store.traits.requests_at_once
    size = max(1, _BATCH // at_once)
    batches = [names[start : start + size] for start in range(0, len(names), size)]
    reads = [partial(_read_some, store, batch, cache) for batch in batches]
    return [found for some in run_together(reads, max(at_once, _THREADS)) for found in some]


def _read_some(store: ObjectStore, names: Sequence[ListedName], cache: RecordCache) -> list[Listed | None]:
    return [_read_one(store, each, cache) for each in names]


def _read_one(store: ObjectStore, each: ListedName, cache: RecordCache) -> Listed | None:
    found = read_listed_snapshot(store, each.stem, each.generations)
    # Not a record below a torn one: its file is not the one that was listed as the highest.
    if found is None or (isinstance(found, CommittedSnapshot) and found.generation == each.generations[-1]):
        cache.put(each.highest, found)
    return found
