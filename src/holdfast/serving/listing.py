"""The names and tags of a store, read at most once a second however many requests ask for them."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from holdfast.digest import fingerprint
from holdfast.query.described import split_damaged
from holdfast.query.facts import Facts, make_facts
from holdfast.repo.handle.repository import Repository
from holdfast.repo.names.listed import list_all, read_wanted
from holdfast.repo.names.snapshots import DamagedName
from holdfast.repo.names.tags import Tag, iter_tags

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
