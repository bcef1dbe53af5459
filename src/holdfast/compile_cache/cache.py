"""The compile cache of one process: finds artifacts and loads them, keeps new ones, and tells what it did and why."""

from __future__ import annotations

import atexit
import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from holdfast.compile_cache import inductor
from holdfast.compile_cache.artifacts.artifact import Artifact, iter_variants, read_artifact, write_artifact
from holdfast.compile_cache.artifacts.catalog import StoredVariant, iter_artifacts
from holdfast.compile_cache.artifacts.last_use import DAY_S, record_use
from holdfast.compile_cache.artifacts.prefetch import Prefetch, Ready
from holdfast.compile_cache.artifacts.statement import read_parts
from holdfast.compile_cache.artifacts.trust import Trust
from holdfast.compile_cache.artifacts.why import Candidate, Explanation, explain
from holdfast.compile_cache.counters import CacheCounters, CacheStatistics
from holdfast.compile_cache.inductor import CompiledGraph
from holdfast.compile_cache.key.key import GraphKey
from holdfast.compile_cache.single_flight import Turn, Waiting, single_flight
from holdfast.errors import Corrupt, HoldfastError, NewerFormat, NotFound, Untrusted
from holdfast.repo.handle.repository import Repository

_log = logging.getLogger(__name__)

_REMEMBERED_MISSES: Final = 32
"""Each holds the parts of a key: some kilobytes for a large graph."""

CompiledCall = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Sought:
    """What a search for a graph came to."""

    run: CompiledCall | None
    """The graph, ready to be called."""
    guards: tuple[str, ...] = ()
    """Of entries for the same key and other sizes."""


@dataclass(frozen=True, slots=True)
class Missed:
    """A graph that was not there."""

    key: GraphKey
    guards: tuple[str, ...]
    time_s: float
    """By the store's clock."""


class CompileCache:
    """The artifacts of one repository, as one process uses them. Safe in any thread."""

    def __init__(self, repo: Repository, *, trust: Trust, waiting: Waiting | None = None) -> None:
        """Use the artifacts that `trust` admits; sign new ones with its secret."""
        self.repo = repo
        self.counters = CacheCounters()
        self._trust = trust
        self._waiting = waiting
        self._ready = Ready(repo, trust)
        self._turn = threading.Lock()
        self._bad: set[tuple[str, int]] = set()
        self._noted: set[str] = set()
        self._used: dict[str, None] = {}
        self._missed: deque[Missed] = deque(maxlen=_REMEMBERED_MISSES)
        atexit.register(_tell_at_exit, weakref.ref(self))

    @property
    def statistics(self) -> CacheStatistics:
        """What it has done so far."""
        return self.counters.read()

    @property
    def used(self) -> tuple[str, ...]:
        """The keys of all graphs that this process has loaded or saved: what the next one may prefetch."""
        return tuple(self._used)

    def find(self, key: GraphKey, inputs: Sequence[Any], options: dict[str, Any]) -> Sought:
        """Look for a graph whose guards hold for the sizes among `inputs`, and load it. Raises StoreError."""
        tried: list[str] = []
        for found in self._iter_variants(key.digest):
            if self._is_bad(found):
                continue
            if found.trouble:
                self._complain(found, found.trouble)
            elif not inductor.hold(found.guards, inputs):
                tried.append(found.guards)
            elif (run := self._load(found, inputs, options)) is not None:
                self._note_use(found)
                return Sought(run)
        return Sought(None, tuple(tried))

    def keep(self, key: GraphKey, compiled: CompiledGraph) -> str:
        """Save what was compiled; returns why that was not possible, if so."""
        if compiled.graph is None:
            return compiled.why_not
        artifact = Artifact(key, compiled.guards, compiled.graph, compiled.kernels, compiled.seconds)
        try:
            with self.counters.timed("save"):
                write_artifact(self.repo, artifact, secret=self._trust.secret)
        except (HoldfastError, OSError) as error:
            _log.warning("a compiled graph was not saved in %s: %s", self.repo.store.url, error)
            return f"it could not be saved ({type(error).__name__})"
        self._used[key.digest] = None
        return ""

    def compile_once(
        self, key: GraphKey, find: Callable[[], CompiledCall | None]
    ) -> AbstractContextManager[Turn[CompiledCall]]:
        """Be the one of all processes that compiles this graph, or wait for who does."""
        return single_flight(self.repo, key.digest, find, self._waiting)

    def remember_miss(self, key: GraphKey, guards: tuple[str, ...]) -> None:
        """Remember a graph that was not there, so that it can be explained."""
        self._missed.append(Missed(key, guards, self.repo.store.clock()))

    def explain(self) -> tuple[Explanation, ...]:
        """Say of each graph that was lately missed how it differs from the nearest that is stored; lists the store."""
        stored = [found for found in iter_artifacts(self.repo.store) if not found.trouble]
        return tuple(self._explain(missed, stored) for missed in list(self._missed))

    def prefetch(self, keys: Iterable[str] = ()) -> Prefetch:
        """Read artifacts in the background, so that hits find them in memory: of these keys, or beginnings; or all."""
        return self._ready.fetch(tuple(keys))

    def _explain(self, missed: Missed, stored: Sequence[StoredVariant]) -> Explanation:
        # What was saved since, by this process too, is not why.
        before = [found for found in stored if found.snapshot and found.snapshot.time_s <= missed.time_s]
        candidates = [
            Candidate(found.name, found.digests, partial(read_parts, self.repo, found), found.guards)
            for found in before
            if found.key_digest != missed.key.digest
        ]
        return explain(missed.key, candidates, guards=missed.guards)

    def _iter_variants(self, digest: str) -> Iterable[StoredVariant]:
        ready = self._ready.find(digest)
        yield from ready
        names = {found.name for found in ready}
        for found in iter_variants(self.repo, digest):
            if found.name not in names:
                yield found

    def _load(self, found: StoredVariant, inputs: Sequence[Any], options: dict[str, Any]) -> CompiledCall | None:
        try:
            with self.counters.timed("find"):
                artifact = self._ready.take(found) or read_artifact(self.repo, found, trust=self._trust)
        except NotFound:
            return None  # deleted just now
        except (Corrupt, NewerFormat, Untrusted) as error:
            self._complain(found, error)
            return None
        try:
            with self.counters.timed("load"):
                run = inductor.load_graph(artifact.graph, artifact.kernels, options=options)
                is_held = inductor.hold(found.guards, inputs, install=True)
        except Exception as error:  # noqa: BLE001 - it is foreign code that fails in its own ways; compiling helps
            self._complain(found, error)
            return None
        if not is_held:
            return None
        self.counters.count_hit(seconds_saved=found.seconds)
        return run

    def _is_bad(self, found: StoredVariant) -> bool:
        return _identify(found) in self._bad

    def _complain(self, found: StoredVariant, error: Exception) -> None:
        """Count an entry that is of no use, and warn of it, once."""
        self._bad.add(_identify(found))
        refused = isinstance(error, Untrusted)
        self.counters.count("refused" if refused else "corrupt")
        said = str(error).strip().partition("\n")[0][:500] or type(error).__name__
        if refused:
            _log.warning("%s", said)
        else:
            _log.warning("%s in %s cannot be used, the graph is compiled: %s", found.name, self.repo.store.url, said)

    def _note_use(self, found: StoredVariant) -> None:
        """Record that an artifact is in use, behind, at most once for each and only if it is a day old."""
        self._used[found.key_digest] = None
        with self._turn:
            is_old = found.snapshot is not None and self.repo.store.clock() - found.snapshot.time_s > DAY_S
            if not is_old or found.key_digest in self._noted:
                return
            self._noted.add(found.key_digest)
        threading.Thread(target=record_use, args=(self.repo, [found]), name="holdfast-use", daemon=True).start()


def _identify(found: StoredVariant) -> tuple[str, int]:
    return found.name, found.snapshot.generation if found.snapshot else -1


def _tell_at_exit(reference: weakref.ref[CompileCache]) -> None:
    cache = reference()
    if cache is None:
        return
    told = cache.statistics
    if told.hit or told.miss or told.bypass:
        _log.info("compile cache %s: %s", cache.repo.store.url, told)
