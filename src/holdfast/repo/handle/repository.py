"""The handle on one repository: its object store, its config and its budget."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from holdfast.display.readable import readable_repr
from holdfast.errors import NotAStore, NotFound, ObjectExists, StoreGone
from holdfast.objects.disk_cache import DiskCache, ReadCacheStatistics
from holdfast.objects.protocol import ObjectInfo, ObjectStore
from holdfast.repo.format.chunk import BLOSC2, DELTA
from holdfast.repo.format.layout import CONFIG, generation_key
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
from holdfast.repo.handle.remembered import ChangeHints, CommitWatch, RecentSnapshots, VerifiedChunks
from holdfast.repo.names.generations import read_record
from holdfast.repo.names.record_cache import RecordCache
from holdfast.repo.stages import Stage, StageName, Stages

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
