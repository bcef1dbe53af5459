"""The compile cache of one process: finds, loads and saves artifacts, counts what it does, and explains misses."""

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
from holdfast.compile_cache.artifacts.artifact import Artifact, read_artifact, read_parts
from holdfast.compile_cache.artifacts.catalog import DAY_S, StoredVariant, iter_artifacts, iter_variants
from holdfast.compile_cache.artifacts.prefetch import Prefetch, PrefetchedArtifacts
from holdfast.compile_cache.artifacts.trust import Trust
from holdfast.compile_cache.artifacts.why import Candidate, Explanation, explain
from holdfast.compile_cache.counters import CacheCounters, CacheStatistics
from holdfast.compile_cache.inductor import CompiledGraph
from holdfast.compile_cache.key_parts import GraphKey
from holdfast.compile_cache.single_flight import Turn, WaitOptions, single_flight
from holdfast.errors import Corrupt, HoldfastError, NewerFormat, NotFound, Untrusted
from holdfast.repo.handle.repository import Repository

_log = logging.getLogger(__name__)

_REMEMBERED_MISSES: Final = 32
"""Bounds memory: each miss keeps the parts of its key, some kilobytes for a large graph."""

CompiledCall = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The result of a search for a graph."""

    run: CompiledCall | None
    """The loaded graph; None if nothing usable was found."""
    guards: tuple[str, ...] = ()
    """Guards of the entries that have the same key but are for other sizes."""


@dataclass(frozen=True, slots=True)
class Miss:
    """A graph that was not found."""

    key: GraphKey
    guards: tuple[str, ...]
    time_s: float
    """When it was missed, by the store's clock."""


class CompileCache:
    """Loads and saves the artifacts of one repository. Thread-safe."""

    def __init__(self, repo: Repository, *, trust: Trust, waiting: WaitOptions | None = None) -> None:
        """Make a cache in `repo`.

        Args:
            repo: the repository that stores the artifacts.
            trust: which artifacts are loaded; new ones are signed with its secret.
            waiting: how long to wait for another process that compiles the same graph.
        """
        self.repo = repo
        self.counters = CacheCounters()
        self._trust = trust
        self._waiting = waiting
        self._prefetched = PrefetchedArtifacts(repo, trust)
        self._lock = threading.Lock()
        self._unusable: set[tuple[str, int]] = set()
        self._recorded: set[str] = set()
        self._used: dict[str, None] = {}
        self._misses: deque[Miss] = deque(maxlen=_REMEMBERED_MISSES)
        atexit.register(_log_at_exit, weakref.ref(self))

    def __repr__(self) -> str:
        """Show the store."""
        return f"<CompileCache {self.repo.store.url}>"

    @property
    def statistics(self) -> CacheStatistics:
        """Counts and times of everything done so far."""
        return self.counters.read()

    @property
    def used(self) -> tuple[str, ...]:
        """The keys of all graphs that this process has loaded or saved; pass them to `prefetch` at the next start."""
        return tuple(self._used)

    def find(self, key: GraphKey, inputs: Sequence[Any], options: dict[str, Any]) -> SearchResult:
        """Load a stored graph of this key whose guards hold for the sizes among `inputs`. Raises StoreError."""
        tried: list[str] = []
        for variant in self._iter_variants(key.digest):
            if self._is_unusable(variant):
                continue
            if variant.trouble:
                self._reject(variant, variant.trouble)
            elif not inductor.evaluate_guards(variant.guards, inputs):
                tried.append(variant.guards)
            elif (run := self._load(variant, inputs, options)) is not None:
                self._note_use(variant)
                return SearchResult(run)
        return SearchResult(None, tuple(tried))

    def save(self, key: GraphKey, compiled: CompiledGraph) -> str:
        """Save a compiled graph. Return the reason if it was not saved, otherwise ""."""
        if compiled.graph is None:
            return compiled.why_not_saved
        from holdfast.compile_cache.artifacts.storing import write_artifact

        artifact = Artifact(key, compiled.guards, compiled.graph, compiled.kernels, compiled.seconds)
        try:
            with self.counters.timed("save"):
                write_artifact(self.repo, artifact, secret=self._trust.secret)
        except (HoldfastError, OSError) as error:
            _log.warning("cannot save a compiled graph in %s: %s", self.repo.store.url, error)
            return f"it could not be saved ({type(error).__name__})"
        self._used[key.digest] = None
        return ""

    def compile_once(
        self, key: GraphKey, find: Callable[[], CompiledCall | None]
    ) -> AbstractContextManager[Turn[CompiledCall]]:
        """Become the only process that compiles this graph, or wait for the one that does."""
        return single_flight(self.repo, key.digest, find, self._waiting)

    def remember_miss(self, key: GraphKey, guards: tuple[str, ...]) -> None:
        """Remember a miss for `explain`."""
        self._misses.append(Miss(key, guards, self.repo.store.clock()))

    def explain(self) -> tuple[Explanation, ...]:
        """Return, for each recent miss, how its key differs from the nearest stored one. Lists the whole store."""
        stored = [variant for variant in iter_artifacts(self.repo.store) if not variant.trouble]
        return tuple(self._explain(missed, stored) for missed in list(self._misses))

    def prefetch(self, keys: Iterable[str] = ()) -> Prefetch:
        """Read artifacts into memory in the background: those of `keys`, which may be prefixes, or all if empty."""
        return self._prefetched.fetch(tuple(keys))

    def _explain(self, missed: Miss, stored: Sequence[StoredVariant]) -> Explanation:
        # Artifacts saved after the miss, by this process too, cannot explain it.
        before = [variant for variant in stored if variant.snapshot and variant.snapshot.time_s <= missed.time_s]
        candidates = [
            Candidate(variant.name, variant.digests, partial(read_parts, self.repo, variant), variant.guards)
            for variant in before
            if variant.key_digest != missed.key.digest
        ]
        return explain(missed.key, candidates, guards=missed.guards)

    def _iter_variants(self, digest: str) -> Iterable[StoredVariant]:
        in_memory = self._prefetched.find(digest)
        yield from in_memory
        names = {variant.name for variant in in_memory}
        for variant in iter_variants(self.repo.store, digest):
            if variant.name not in names:
                yield variant

    def _load(self, variant: StoredVariant, inputs: Sequence[Any], options: dict[str, Any]) -> CompiledCall | None:
        try:
            with self.counters.timed("find"):
                artifact = self._prefetched.take(variant) or read_artifact(self.repo, variant, trust=self._trust)
        except NotFound:
            return None  # deleted after it was listed
        except (Corrupt, NewerFormat, Untrusted) as error:
            self._reject(variant, error)
            return None
        try:
            with self.counters.timed("load"):
                run = inductor.load_graph(artifact.graph, artifact.kernels, options=options)
                is_valid = inductor.evaluate_guards(variant.guards, inputs, install=True)
        except Exception as error:  # noqa: BLE001 - loading runs stored code, which can raise anything; the graph can still be compiled
            self._reject(variant, error)
            return None
        if not is_valid:
            return None
        self.counters.count_hit(seconds_saved=variant.seconds)
        return run

    def _is_unusable(self, variant: StoredVariant) -> bool:
        return _identify(variant) in self._unusable

    def _reject(self, variant: StoredVariant, error: Exception) -> None:
        """Count an unusable entry and log a warning, once per entry."""
        self._unusable.add(_identify(variant))
        refused = isinstance(error, Untrusted)
        self.counters.count("refused" if refused else "corrupt")
        message = str(error).strip().partition("\n")[0][:500] or type(error).__name__
        if refused:
            _log.warning("%s", message)
        else:
            _log.warning(
                "%s in %s cannot be used, so the graph is compiled: %s", variant.name, self.repo.store.url, message
            )

    def _note_use(self, variant: StoredVariant) -> None:
        """Record in the background that an artifact is in use: once per key, and only if it is older than a day."""
        self._used[variant.key_digest] = None
        with self._lock:
            is_old = variant.snapshot is not None and self.repo.store.clock() - variant.snapshot.time_s > DAY_S
            if not is_old or variant.key_digest in self._recorded:
                return
            self._recorded.add(variant.key_digest)
        from holdfast.compile_cache.artifacts.storing import record_use

        threading.Thread(target=record_use, args=(self.repo, [variant]), name="holdfast-use", daemon=True).start()


def _identify(variant: StoredVariant) -> tuple[str, int]:
    return variant.name, variant.snapshot.generation if variant.snapshot else -1


def _log_at_exit(reference: weakref.ref[CompileCache]) -> None:
    cache = reference()
    if cache is None:
        return
    statistics = cache.statistics
    if statistics.hit or statistics.miss or statistics.bypass:
        _log.info("compile cache %s: %s", cache.repo.store.url, statistics)
