"""The handle on one repository: its object store, config and budget, and what it remembers between saves."""

from __future__ import annotations

import itertools
import logging
import math
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from time import monotonic
from typing import Any, Final

from holdfast.digest import Digest, Seeded, hash_bytes
from holdfast.display.markup import readable_repr
from holdfast.errors import NotAStore, NotFound, ObjectExists, StoreGone
from holdfast.lru import LruCache
from holdfast.objects.disk_cache import DiskCache, ReadCacheStatistics
from holdfast.objects.protocol import ObjectInfo, ObjectStore
from holdfast.repo.engine import Stage, StageName, Stages
from holdfast.repo.format.chunk import BLOSC2, DELTA, Location
from holdfast.repo.format.layout import CONFIG, generation_key, split_prefix
from holdfast.repo.format.record import Fields
from holdfast.repo.handle.compression import Compression, DeltaChoice, Speeds, choose_compression, verify_delta
from holdfast.repo.handle.config import (
    CODEC_FEATURE,
    DELTA_FEATURE,
    LIKELY,
    Config,
    confirm_config,
    create_config,
    declare_feature,
    ensure_config,
    parse_config,
    read_config,
    verify_empty,
)
from holdfast.repo.handle.index import ChunkIndex
from holdfast.repo.names.generations import read_record
from holdfast.repo.names.listed import RecordCache
from holdfast.repo.names.snapshots import CommittedSnapshot

TRUST_S: Final = 24 * 3600.0
"""How long a verification is valid: a run that saves for weeks reads everything again once a day."""
SAMPLE_SHARE: Final = 64
"""Each save reads one in 64 of the remembered copies, different ones each time, so all of them within 64 saves."""
_LIMIT: Final = 1 << 20
"""How many chunks each memory has room for. Beyond that all are forgotten: one save has to read or hash them again."""
HINTED_BYTES: Final = 16 << 10
"""Below this size a hint costs as much as the hash."""
_RECENT_PREFIXES: Final = 64


class RecentSnapshots:
    """The snapshot last saved under each prefix by this handle: a save finds the previous step without a listing.

    Safe in any thread.
    """

    def __init__(self) -> None:
        self._snapshots: LruCache[str, CommittedSnapshot] = LruCache(_RECENT_PREFIXES)
        self._lock = threading.Lock()

    def find(self, name: str) -> CommittedSnapshot | None:
        """Return the snapshot last saved under the prefix of `name`; it may have been deleted since."""
        with self._lock:
            return self._snapshots.get(split_prefix(name))

    def remember(self, snapshot: CommittedSnapshot) -> None:
        """Remember `snapshot`; forgets the least recently used prefix if there are too many."""
        with self._lock:
            self._snapshots.put(split_prefix(snapshot.name), snapshot)


class CommitWatch:
    """Calls functions for every snapshot that this handle commits; with several ranks, on the one that commits."""

    def __init__(self) -> None:
        self._watchers: list[Callable[[CommittedSnapshot], None]] = []

    def watch(self, watcher: Callable[[CommittedSnapshot], None]) -> None:
        """Call `watcher` from now on; it must be fast and must not raise, because the commit has succeeded."""
        self._watchers.append(watcher)

    def note(self, snapshot: CommittedSnapshot) -> None:
        """Call all watchers."""
        for watcher in self._watchers:
            watcher(snapshot)


@dataclass(slots=True)
class _Proof:
    """What was verified in one pack; valid while its version stays the same."""

    version: str
    written_s: float = -math.inf
    read_s: dict[int, float] = field(default_factory=dict)
    """When the copy at each offset was read and found intact."""


class VerifiedChunks:
    """Copies that the handle wrote or verified itself, and may reuse without reading them. Safe in any thread.

    Versions are those of `ObjectInfo`: they change when a pack is written to. They do not change when its disk damages
    it; the sample and the time limit are there to find that.
    """

    def __init__(self, *, clock: Callable[[], float] = monotonic) -> None:
        """Start empty; `clock` is in seconds and never goes back."""
        self._clock = clock
        self._proofs: dict[str, _Proof] = {}
        self._count = 0
        self._turns = itertools.count()

    def begin_turn(self) -> int:
        """Return a number for a new save; it selects the sample of copies that this save reads."""
        return next(self._turns)

    def add_pack(self, pack_id: str, *, version: str) -> None:
        """Remember a pack that was just written and made durable."""
        self._proofs[pack_id] = _Proof(version, written_s=self._clock())

    def add(self, location: Location, *, version: str) -> None:
        """Remember a copy that was just read and found intact; `version` is that of its pack before the read."""
        self.add_all(location.pack_id, [location.offset], version=version)

    def add_all(self, pack_id: str, offsets: Sequence[int], *, version: str) -> None:
        """Do the same for the copies at these offsets in a pack."""
        if self._count >= _LIMIT:
            self._proofs.clear()
            self._count = 0
        proof = self._proofs.get(pack_id)
        if proof is None or proof.version != version:
            proof = self._proofs[pack_id] = _Proof(version)
        before = len(proof.read_s)
        proof.read_s.update(dict.fromkeys(offsets, self._clock()))
        self._count += len(proof.read_s) - before

    def forget(self, pack_id: str) -> None:
        """Forget all copies in a pack, because something in it was found to be damaged."""
        self._proofs.pop(pack_id, None)

    def covers(self, location: Location, *, version: str, turn: int) -> bool:
        """Return whether the save `turn` may reuse a copy unread; `version` is the current one of its pack."""
        proof = self._proofs.get(location.pack_id)
        if proof is None or proof.version != version:
            return False
        verified_s = max(proof.written_s, proof.read_s.get(location.offset, -math.inf))
        is_sampled = hash((location.pack_id, location.offset)) % SAMPLE_SHARE == turn % SAMPLE_SHARE
        return self._clock() - verified_s < TRUST_S and not is_sampled


class ChangeHints:
    """Keyed hashes of memory at its last save: unchanged memory is not hashed with BLAKE3 again. Safe in any thread.

    A hint is XXH3-128 with a secret random seed: different memory has the same hint with a chance of 1 in 2**128,
    unless an attacker can read this process. A hint never leaves the process and is never used as an address.
    """

    def __init__(self) -> None:
        self._hint_of = Seeded(int.from_bytes(os.urandom(8), "little"))
        self._seen: dict[tuple[str, int, int], tuple[bytes, Digest]] = {}

    def hash(self, name: str, start: int, data: memoryview) -> Digest:
        """Return the BLAKE3 of a chunk of the entry `name`; the remembered one, if its hint has not changed."""
        if data.nbytes < HINTED_BYTES:
            return hash_bytes(data)
        key = (name, start, data.nbytes)
        hint = self._hint_of(data)
        seen = self._seen.get(key)
        if seen and seen[0] == hint:
            return seen[1]
        digest = hash_bytes(data)
        # Memory that changed between the two hashes must not be remembered: hint and digest would not match.
        if self._hint_of(data) == hint:
            if len(self._seen) >= _LIMIT:
                self._seen.clear()
            self._seen[key] = (hint, digest)
        return digest


_log = logging.getLogger(__name__)

_LIKELY_CONFIGS: Final = tuple(generation_key(CONFIG, generation) for generation in LIKELY)
"""The keys of the config in most stores."""
_FEATURES: Final = {BLOSC2: (CODEC_FEATURE,), DELTA: (CODEC_FEATURE, DELTA_FEATURE)}
"""The features that a reader of chunks with a codec must know."""
DEFAULT_BUDGET_BYTES: Final = 256 << 20
MIN_BUDGET_BYTES: Final = 16 << 20


class StoreIdentity:
    """The id of the store that a handle saw first; changes to any other store are refused. Safe in any thread."""

    def __init__(self, store_id: str = "") -> None:
        """Expect the store `store_id`; if empty, the first store that is seen."""
        self.store_id = store_id
        self.declared: set[str] = set()
        """Features that, as this handle knows, the store's config durably declares."""
        self._seen: tuple[ObjectInfo, Config] | None = None

    def read_config(self, store: ObjectStore) -> Config | None:
        """Return the config that the store has now, like `config.read_config`.

        A listing shows that the record which was read last is still the newest and unchanged: no record is ever
        replaced, and if the store was deleted and created again, its record has another version. If listings may be
        stale, the record is read.
        """
        if self._seen is None or store.traits.stale_listings:
            return self._read_anew(store, likely=_LIKELY_CONFIGS)
        listed = _list_configs(store)
        if listed and listed[-1] == self._seen[0]:
            return self._seen[1]
        self._seen = None
        return self._read_anew(store, likely=(listed[-1].key,)) if listed else None

    def _read_anew(self, store: ObjectStore, *, likely: Sequence[str]) -> Config | None:
        """Read the records `likely` while the configs are listed: mostly one of them is the newest."""
        with ExitStack() as stack:
            begun = {key: stack.enter_context(store.begin(partial(_read_present, store, key))) for key in likely}
            listed = _list_configs(store)
            if not listed:
                return None
            newest = listed[-1].key
            fields = begun[newest].result() if newest in begun else _read_present(store, newest)
        if fields is None:
            return read_config(store)  # torn, or replaced meanwhile: the general way finds what counts
        config = parse_config(fields, url=store.url)
        if listed[-1].version:
            self._seen = (listed[-1], config)
        return config

    def verify(self, config: Config | None, *, url: str) -> None:
        """Raise StoreGone unless `config`, just read, is that of the expected store; None means there is no store."""
        found_id = config.store_id if config else ""
        if not self.store_id:
            self.store_id = found_id
        if found_id == self.store_id:
            return
        what = (
            f"another store ({found_id}) is there now, and not the one that was opened ({self.store_id})"
            if found_id
            else f"the store that was opened ({self.store_id}) is gone, and no other is there"
        )
        raise StoreGone(
            f"{url}: {what}. Was a filesystem unmounted, or the directory moved or deleted? Put the store back and try"
            " again. To use the store that is at this path now, open it again",
            expected_id=self.store_id,
            found_id=found_id,
        )


def _list_configs(store: ObjectStore) -> list[ObjectInfo]:
    return list(store.iter_objects(CONFIG))


def _read_present(store: ObjectStore, key: str) -> Fields | None:
    try:
        return read_record(store, key)
    except NotFound:
        return None


@dataclass(frozen=True, slots=True)
class HandleStatistics:
    """What a handle has done since it was opened."""

    mapped_entries: int
    """Entries that were memory-mapped instead of read."""
    unmapped_entries: int
    """Entries that could not be mapped and were read: not contiguous, packed, or sharing memory."""
    stages: Mapping[StageName, Stage]
    """How long each stage of saving and loading took."""
    cache: ReadCacheStatistics | None = None
    """What came from the local cache and what did not; None without `cache_dir`."""

    __repr__ = readable_repr


@dataclass(slots=True)
class HandleCounters:
    """What a handle counts while it works; see HandleStatistics."""

    mapped_entries: int = 0
    unmapped_entries: int = 0
    stages: Stages = field(default_factory=Stages)
    cache: DiskCache | None = None

    def read(self) -> HandleStatistics:
        """Return the current counts."""
        cache = None if self.cache is None else self.cache.find_statistics()
        return HandleStatistics(self.mapped_entries, self.unmapped_entries, self.stages.read(), cache)


@dataclass(frozen=True, slots=True)
class Repository:
    """An open repository; opening and reading never write."""

    store: ObjectStore
    config: Config | None
    """None if there was no store when the repository was opened: the first save creates it."""
    budget_bytes: int = DEFAULT_BUDGET_BYTES
    recent: RecentSnapshots = field(default_factory=RecentSnapshots)
    counters: HandleCounters = field(default_factory=HandleCounters)
    proven: VerifiedChunks = field(default_factory=VerifiedChunks)
    identity: StoreIdentity = field(default_factory=StoreIdentity)
    records: RecordCache = field(default_factory=RecordCache)
    """Snapshot records that this handle has read, so that a second listing reads only new ones."""
    commits: CommitWatch = field(default_factory=CommitWatch)
    mirrors: dict[str, Any] = field(default_factory=dict)
    """The `UploadWorker` of each mirror that this handle uploads to, by URL; for the layer of mirrors only."""
    compression: Compression = None
    """How saves store new chunks, unless they say otherwise; not "default"."""
    delta: DeltaChoice = "auto"
    """Whether saves store new chunks as deltas, unless they say otherwise."""
    speeds: Speeds = field(default_factory=Speeds)
    """What was measured of the store and of codecs; "auto" decides by it."""
    hints: ChangeHints | None = None
    """Change hints, if the user enabled them (`change_hints`)."""
    index: ChunkIndex = field(init=False)
    """Kept open, so that a save reads only what is new in it; `refresh` it before use."""

    def __repr__(self) -> str:
        """Show the URL."""
        return f"<Repository {self.store.url}>"

    def __post_init__(self) -> None:
        """Set the store's identity and create the index, without reading."""
        if self.config and not self.identity.store_id:
            self.identity.store_id = self.config.store_id
        self.counters.cache = self.store.cache
        object.__setattr__(self, "index", ChunkIndex(self.store, limit_bytes=self.budget_bytes // 4))

    def verify_may_write(self) -> Config:
        """Return the config for a writer, creating it at the first save; raises StoreGone, NewerFormat, StoreError."""
        return self.prepare_write(self.identity.read_config(self.store))

    def prepare_write(self, config: Config | None) -> Config:
        """Do the same with a config that was just read; None means there is no store."""
        if config is None and not self.identity.store_id:
            config = self._create()
        self.identity.verify(config, url=self.store.url)
        assert config is not None, "without one, the verification has raised"
        if not config.is_confirmed:
            config = confirm_config(self.store)
        config.verify_may("write", url=self.store.url)
        return config

    def declare_codec(self, codec: int) -> None:
        """Let the store say that chunks may have this codec, so that older versions refuse it; once for each handle."""
        for feature in _FEATURES[codec]:
            if feature not in self.identity.declared:
                self.identity.verify(declare_feature(self.store, feature), url=self.store.url)
                self.identity.declared.add(feature)

    def verify_same(self) -> ObjectStore:
        """Return the object store, to change it; raises StoreGone if it is not the store that was opened."""
        self.read_same()
        return self.store

    def read_same(self) -> Config | None:
        """Return the config that the store has now; raises StoreGone if it is not the store that was opened."""
        config = self.identity.read_config(self.store)
        self.identity.verify(config, url=self.store.url)
        return config

    def read_whether_made(self) -> bool:
        """Return False if there is no store yet: this handle has seen none, and nothing is there now."""
        return bool(self.identity.store_id or self.store.list("", limit=1))

    def _create(self) -> Config:
        # Checked before the store is created, reported afterwards. A mount point without its filesystem looks the same.
        was_bare = self.store.is_bare()
        config = ensure_config(self.store)
        if was_bare:
            _log.warning(
                "%s: created a new store (%s) in an existing, empty directory. If a filesystem should be mounted"
                " there, mount it and save again. holdfast.open(..., create=False) never creates a store",
                self.store.url,
                config.store_id,
            )
        else:
            _log.info("%s: created a new store (%s)", self.store.url, config.store_id)
        return config


def open_repository(
    store: ObjectStore,
    *,
    budget_bytes: int = DEFAULT_BUDGET_BYTES,
    create: bool = False,
    change_hints: bool = False,
    stages: Stages | None = None,
    store_id: str = "",
    compression: Compression = "default",
    delta: DeltaChoice = "auto",
) -> Repository:
    """Open a repository; raises NotAStore if there is none, unless `create` lets the first save create it.

    With `store_id`, all changes are refused (StoreGone) unless the store there has that id.
    """
    if budget_bytes < MIN_BUDGET_BYTES:
        raise ValueError(f"budget_bytes must be at least {MIN_BUDGET_BYTES}, not {budget_bytes}")
    identity = StoreIdentity(store_id)
    config = identity.read_config(store)
    if config is None:
        verify_empty(store)
        if not create:
            raise NotAStore(f"{store.url} is not a store; create one with `holdfast -s {store.url} init`")
    counters = HandleCounters(stages=stages or Stages())
    hints = ChangeHints() if change_hints else None
    choice = choose_compression(store, compression)
    verify_delta(delta)
    return Repository(
        store,
        config,
        budget_bytes,
        counters=counters,
        identity=identity,
        compression=choice,
        delta=delta,
        hints=hints,
    )


def init_repository(store: ObjectStore) -> Config:
    """Create a store in an empty location; raises NotAStore if there is one already, or it is not empty."""
    if read_config(store) is not None:
        raise NotAStore(f"{store.url} is a store already; nothing was changed")
    try:
        return create_config(store)
    except ObjectExists as error:
        raise NotAStore(f"{store.url} was just made a store by another process; nothing was changed") from error
