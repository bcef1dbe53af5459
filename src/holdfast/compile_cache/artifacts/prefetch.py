"""Reads artifacts into memory in the background, within a byte budget, so that hits do not wait for the store."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Iterator, Sequence

import torch

from holdfast.compile_cache.artifacts.artifact import Artifact, read_artifact
from holdfast.compile_cache.artifacts.catalog import StoredVariant, iter_artifacts, iter_variants
from holdfast.compile_cache.artifacts.trust import Trust
from holdfast.digest import DIGEST_BYTES
from holdfast.errors import HoldfastError
from holdfast.repo.handle.repository import Repository

_log = logging.getLogger(__name__)


class Prefetch:
    """The progress of a prefetch."""

    def __init__(self) -> None:
        self._done = threading.Event()
        self.num_artifacts = 0
        self.num_bytes = 0

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the prefetch has ended, and return whether it has: False after a timeout."""
        return self._done.wait(timeout_s)

    def add(self, variant: StoredVariant) -> None:
        """Count an artifact that was read."""
        self.num_artifacts += 1
        self.num_bytes += variant.size_bytes

    def end(self) -> None:
        """Mark the prefetch as ended, and wake up waiting threads."""
        self._done.set()


class PrefetchedArtifacts:
    """Verified and trusted artifacts in memory. Each can be taken once. Thread-safe."""

    def __init__(self, repo: Repository, trust: Trust) -> None:
        """Read from `repo` the artifacts that `trust` accepts."""
        self._repo = repo
        self._trust = trust
        self._lock = threading.Lock()
        self._artifacts: dict[str, dict[str, tuple[StoredVariant, Artifact]]] = {}

    def find(self, digest: str) -> list[StoredVariant]:
        """Return the variants of a key that are in memory."""
        with self._lock:
            return [variant for variant, _ in self._artifacts.get(digest, {}).values()]

    def take(self, variant: StoredVariant) -> Artifact | None:
        """Remove an artifact from memory and return it; None if it is not there."""
        with self._lock:
            stored = self._artifacts.get(variant.key_digest, {}).pop(variant.name, None)
        return stored[1] if stored and stored[0] == variant else None

    def fetch(self, keys: Sequence[str]) -> Prefetch:
        """Start to read the artifacts of `keys`, whole or prefixes, or all if empty. Skips those for another torch."""
        prefetch = Prefetch()
        work = threading.Thread(target=self._fetch, args=(keys, prefetch), name="holdfast-prefetch", daemon=True)
        work.start()
        return prefetch

    def _fetch(self, keys: Sequence[str], prefetch: Prefetch) -> None:
        try:
            for variant in self._iter_wanted(keys):
                if prefetch.num_bytes + variant.size_bytes > self._repo.budget_bytes:
                    _log.info("prefetch stops before %s: it would exceed the memory budget", variant.name)
                    return
                self._read(variant)
                prefetch.add(variant)
        except HoldfastError as error:
            # The same error is reported when the artifact is needed.
            _log.info("prefetch ended early: %s", error)
        finally:
            prefetch.end()

    def _read(self, variant: StoredVariant) -> None:
        artifact = read_artifact(self._repo, variant, trust=self._trust)
        with self._lock:
            self._artifacts.setdefault(variant.key_digest, {})[variant.name] = variant, artifact

    def _iter_wanted(self, keys: Sequence[str]) -> Iterator[StoredVariant]:
        exact = [key for key in keys if len(key) == 2 * DIGEST_BYTES]
        starts = tuple(key for key in keys if len(key) < 2 * DIGEST_BYTES)
        for key in exact:
            yield from _iter_usable(iter_variants(self._repo.store, key))
        if starts or not keys:
            listed = _iter_usable(iter_artifacts(self._repo.store))
            yield from (variant for variant in listed if not starts or variant.key_digest.startswith(starts))


def _iter_usable(variants: Iterable[StoredVariant]) -> Iterator[StoredVariant]:
    release = _cut(torch.__version__)
    return (variant for variant in variants if not variant.trouble and _cut(variant.torch) == release)


def _cut(version: str) -> str:
    return version.partition("+")[0]
