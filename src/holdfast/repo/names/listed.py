"""Lists snapshots fast: records that were read before come from a cache, others are read on several threads."""

from __future__ import annotations

import itertools
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from holdfast.objects.listing import iter_objects
from holdfast.objects.protocol import ObjectInfo, ObjectStore
from holdfast.objects.thread_pool import ThreadPool
from holdfast.repo.format.layout import SNAPSHOTS, is_reserved, is_reserved_stem, make_stem_filter, split_generation
from holdfast.repo.names.record_cache import RecordCache
from holdfast.repo.names.snapshots import CommittedSnapshot, DamagedName, read_listed_snapshot

_THREADS: Final = 8
"""A read waits for the disk or the network, so more threads than cores are of use."""
_BATCH: Final = 64
"""Records that a thread reads for one task; fewer are read without threads."""

Listed = CommittedSnapshot | DamagedName


@dataclass(frozen=True, slots=True)
class _Stem:
    """The objects of one name, lowest generation first."""

    stem: str
    generations: list[int]
    highest: ObjectInfo


def list_user_names(store: ObjectStore, prefix: str, cache: RecordCache) -> list[Listed]:
    """Return what `iter_user_names` yields, in no order; reads only the records that the cache lacks."""
    prefix = unicodedata.normalize("NFC", prefix)
    stems = list(_iter_stems(store))
    # What is not listed any more is gone for good: generations never start again.
    cache.keep_only({each.highest.key for each in stems})
    is_wanted, is_own = make_stem_filter(prefix), is_reserved(prefix)
    wanted = [each for each in stems if is_wanted(each.stem) and (is_own or not is_reserved_stem(each.stem))]
    cached = [cache.find(each.highest) for each in wanted]
    unread = [each for each, known in zip(wanted, cached, strict=True) if known is None]
    found = [known.snapshot for known in cached if known] + _read_all(store, unread, cache)
    return [each for each in found if isinstance(each, DamagedName) or (each and _is_listed(each.name, prefix))]


def _iter_stems(store: ObjectStore) -> Iterator[_Stem]:
    splits = ((split, info) for info in iter_objects(store, SNAPSHOTS) if (split := split_generation(info.key)))
    for stem, group in itertools.groupby(splits, key=lambda pair: pair[0][0]):
        pairs = list(group)
        yield _Stem(stem, [generation for (_, generation), _ in pairs], pairs[-1][1])


def _is_listed(name: str, prefix: str) -> bool:
    return name.startswith(prefix) and (is_reserved(prefix) or not is_reserved(name))


def _read_all(store: ObjectStore, stems: Sequence[_Stem], cache: RecordCache) -> list[Listed | None]:
    if len(stems) <= _BATCH:
        return _read_some(store, stems, cache)
    batches = [stems[start : start + _BATCH] for start in range(0, len(stems), _BATCH)]
    reads: list[Callable[[], list[Listed | None]]] = [partial(_read_some, store, batch, cache) for batch in batches]
    pool = ThreadPool("holdfast-list", min(_THREADS, len(batches)))
    try:
        tasks = [pool.submit(read) for read in reads]
        return [found for task in tasks for found in task.result()]
    finally:
        pool.shutdown()


def _read_some(store: ObjectStore, stems: Sequence[_Stem], cache: RecordCache) -> list[Listed | None]:
    return [_read_one(store, each, cache) for each in stems]


def _read_one(store: ObjectStore, each: _Stem, cache: RecordCache) -> Listed | None:
    found = read_listed_snapshot(store, each.stem, each.generations)
    # Not a record below a torn one: its file is not the one that was listed as the highest.
    if found is None or (isinstance(found, CommittedSnapshot) and found.generation == each.generations[-1]):
        cache.put(each.highest, found)
    return found
