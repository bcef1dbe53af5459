"""Artifacts read ahead: in the background and within a budget, so that a hit need not wait for the store."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Iterator, Sequence

import torch

from holdfast.compile_cache.artifacts.artifact import Artifact, iter_variants, read_artifact
from holdfast.compile_cache.artifacts.catalog import StoredVariant, iter_artifacts
from holdfast.compile_cache.artifacts.trust import Trust
from holdfast.digest import DIGEST_BYTES
from holdfast.errors import HoldfastError
from holdfast.repo.handle.repository import Repository

_log = logging.getLogger(__name__)


class Prefetch:
    """Reading ahead that is under way."""

    def __init__(self) -> None:
        """Begin with nothing."""
        self._over = threading.Event()
        self.num_artifacts = 0
        self.num_bytes = 0

    @property
    def is_over(self) -> bool:
        """Whether all was read that is going to be."""
        return self._over.is_set()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until all is read; returns whether it is."""
        return self._over.wait(timeout_s)

    def add(self, found: StoredVariant) -> None:
        """Count one that was read."""
        self.num_artifacts += 1
        self.num_bytes += found.size_bytes

    def end(self) -> None:
        """Let go who waits."""
        self._over.set()


class Ready:
    """Artifacts in memory, proven and trusted, each to be taken once. Safe in any thread."""

    def __init__(self, repo: Repository, trust: Trust) -> None:
        """Hold nothing yet."""
        self._repo = repo
        self._trust = trust
        self._turn = threading.Lock()
        self._held: dict[str, dict[str, tuple[StoredVariant, Artifact]]] = {}

    def find(self, digest: str) -> list[StoredVariant]:
        """Return the variants of a key that are in memory."""
        with self._turn:
            return [found for found, _ in self._held.get(digest, {}).values()]

    def take(self, found: StoredVariant) -> Artifact | None:
        """Return an artifact if it is in memory, and hold it no longer."""
        with self._turn:
            held = self._held.get(found.key_digest, {}).pop(found.name, None)
        return held[1] if held and held[0] == found else None

    def fetch(self, keys: Sequence[str]) -> Prefetch:
        """Begin to read the artifacts of these keys, or of those that begin so; of none given, all for this torch."""
        prefetch = Prefetch()
        work = threading.Thread(target=self._fetch, args=(keys, prefetch), name="holdfast-prefetch", daemon=True)
        work.start()
        return prefetch

    def _fetch(self, keys: Sequence[str], prefetch: Prefetch) -> None:
        try:
            for found in self._iter_wanted(keys):
                if prefetch.num_bytes + found.size_bytes > self._repo.budget_bytes:
                    _log.info("prefetch: %s and more would take more than the budget; they are not read", found.name)
                    return
                self._hold(found)
                prefetch.add(found)
        except HoldfastError as error:
            # Whoever needs the artifact meets the same, and says so.
            _log.info("prefetch ended early: %s", error)
        finally:
            prefetch.end()

    def _hold(self, found: StoredVariant) -> None:
        artifact = read_artifact(self._repo, found, trust=self._trust)
        with self._turn:
            self._held.setdefault(found.key_digest, {})[found.name] = found, artifact

    def _iter_wanted(self, keys: Sequence[str]) -> Iterator[StoredVariant]:
        exact = [key for key in keys if len(key) == 2 * DIGEST_BYTES]
        starts = tuple(key for key in keys if len(key) < 2 * DIGEST_BYTES)
        for key in exact:
            yield from _iter_usable(iter_variants(self._repo, key))
        if starts or not keys:
            listed = _iter_usable(iter_artifacts(self._repo.store))
            yield from (found for found in listed if not starts or found.key_digest.startswith(starts))


def _iter_usable(variants: Iterable[StoredVariant]) -> Iterator[StoredVariant]:
    release = _cut(torch.__version__)
    return (found for found in variants if not found.trouble and _cut(found.torch) == release)


def _cut(version: str) -> str:
    return version.partition("+")[0]
