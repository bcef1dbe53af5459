"""Values that are expensive to compute, kept within a limit, and the names and tags of a store."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Generic

from holdfast.digest import fingerprint
from holdfast.lru import Key, LruCache, Value
from holdfast.query.facts import Facts, make_facts, split_damaged
from holdfast.repo.handle.repository import Repository
from holdfast.repo.names.listed import list_all, read_wanted
from holdfast.repo.names.snapshots import DamagedName, Tag, iter_tags


class RememberedValues(Generic[Key, Value]):
    """The most recently used values, whose sizes add up to at most `limit`. Safe in any thread."""

    def __init__(self, limit: int, *, size_of: Callable[[Value], int] = lambda _: 1) -> None:
        """Count values; with `size_of`, add up their sizes instead, which must not change."""
        self._lock = threading.Lock()
        self._values: LruCache[Key, Value] = LruCache(limit, size_of=size_of)
        self._computing: dict[Key, threading.Event] = {}

    @property
    def size(self) -> int:
        """The sizes of all values, added up."""
        with self._lock:
            return self._values.size

    def find(self, key: Key) -> Value | None:
        """Return a value if it is known."""
        with self._lock:
            return self._values.get(key)

    def put(self, key: Key, value: Value) -> None:
        """Add or replace a value."""
        with self._lock:
            self._values.put(key, value)

    def find_or_compute(self, key: Key, compute: Callable[[], Value]) -> Value:
        """Return a value; if it is not known, compute it. If that raises in one thread, the next one tries again."""
        while (other := self._begin(key)) is not None:
            other.wait()
        try:
            found = self.find(key)
            if found is None:
                found = compute()
                self.put(key, found)
            return found
        finally:
            with self._lock:
                self._computing.pop(key).set()

    def _begin(self, key: Key) -> threading.Event | None:
        """Return what to wait for if another thread computes the value; otherwise, others wait for this thread."""
        with self._lock:
            other = self._computing.get(key)
            if other is None:
                self._computing[key] = threading.Event()
            return other


_AGE_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class StoreState:
    """What a store contained at one moment."""

    facts: tuple[Facts, ...]
    """The user's snapshots, in no order."""
    tags: Mapping[str, tuple[Tag, ...]]
    """By the name of the snapshot."""
    damaged: tuple[DamagedName, ...]
    """Names and tags whose records are damaged."""
    mark: str
    """Changes whenever a snapshot or a tag is added, removed or replaced."""
    runs_mark: str
    """Changes whenever a part of a recorded run is added or removed."""
    read_s: float
    """When it was read, by the store's clock."""


class WatchedListing:
    """The current state of a store. Safe in any thread: one thread reads, others wait for it."""

    def __init__(self, repo: Repository) -> None:
        """Watch a repository; nothing is read yet."""
        self._repo = repo
        self._lock = threading.Lock()
        self._state: StoreState | None = None
        self._verified_s = float("-inf")

    def verify_same(self) -> None:
        """Raise StoreGone if the store is gone, or if another one is at its place; looks at most once a second."""
        with self._lock:
            now_s = self._repo.store.clock()
            if not 0 <= now_s - self._verified_s < _AGE_S:
                self._repo.read_same()
                self._verified_s = now_s

    def read(self) -> StoreState:
        """Return the state of the store, at most a second old; raises StoreGone if the store is not there any more."""
        with self._lock:
            now_s = self._repo.store.clock()
            if self._state is None or not 0 <= now_s - self._state.read_s < _AGE_S:
                self._state = _read_state(self._repo, now_s)
            return self._state


def _read_state(repo: Repository, now_s: float) -> StoreState:
    repo.read_same()
    listed = list_all(repo.store, repo.records)
    wanted = [each for each in listed if not each.is_reserved]
    snapshots, damaged = split_damaged(read_wanted(repo.store, "", wanted, repo.records))
    tags, damaged_tags = split_damaged(iter_tags(repo.store))
    by_name: dict[str, tuple[Tag, ...]] = {}
    for tag in sorted(tags, key=lambda tag: tag.name):
        by_name[tag.snapshot_name] = (*by_name.get(tag.snapshot_name, ()), tag)
    broken = (*damaged, *damaged_tags)
    facts = tuple(make_facts(snapshots, tags, now_s=now_s))
    lines = [f"{each.name}\0{each.generation}" for each in snapshots]
    lines += [f"{tag.name}\0{tag.snapshot_name}\0{tag.digest.hex()}" for tag in tags]
    lines += [each.stem for each in broken]
    runs_mark = _make_mark([each.highest.key for each in listed if each.is_reserved])
    return StoreState(facts, by_name, broken, _make_mark(lines), runs_mark, now_s)


def _make_mark(lines: list[str]) -> str:
    return fingerprint("\n".join(sorted(lines)).encode("utf-8", "surrogatepass")).hex()
