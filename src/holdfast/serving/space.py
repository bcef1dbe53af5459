"""Answers about the space of a store, which need all manifests: computed once, and remembered by the store's state."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Final

from holdfast.compile_cache.artifacts.limits import StoredKey, read_stored
from holdfast.query.facts import Facts
from holdfast.repo.handle.repository import Repository
from holdfast.serving.answer import HttpAnswer, answer_json
from holdfast.serving.answers.compiled import MAX_KEYS, describe_cache
from holdfast.serving.answers.snapshots import find_named
from holdfast.serving.answers.upkeep import PlannedPrune, describe_prune, parse_keep, plan_prune
from holdfast.serving.listing import WatchedListing
from holdfast.serving.remembered import RememberedValues
from holdfast.serving.request import ApiRequest

if TYPE_CHECKING:
    from holdfast.serving.answers.ledger import LedgerReader
    from holdfast.serving.answers.sharing import StoreSpace

_AGE_S: Final = 600.0
"""Files that gc deletes do not change the state of the store, so what was computed is used for ten minutes at most."""
_CACHE_AGE_S: Final = 60.0
_MAX_DECISIONS: Final = 400_000
"""Decisions of all plans that are remembered; a longer plan is kept alone."""
_PAGE: Final = 2000


class SpaceApi:
    """Answers requests about space. Safe in any thread."""

    def __init__(
        self,
        repo: Repository,
        listing: WatchedListing,
        heavy: AbstractContextManager[Any],
        choose: Callable[[ApiRequest], Sequence[Facts]],
    ) -> None:
        """Answer about a repository; `heavy` limits what is computed at once, `choose` returns filtered snapshots."""
        self._repo = repo
        self._listing = listing
        self._heavy = heavy
        self._choose = choose
        self._reader: LedgerReader | None = None
        self._reading = threading.Lock()
        self._fresh = 0
        """How often somebody has asked for what the store contains now."""
        self._space: RememberedValues[tuple[Hashable, ...], StoreSpace] = RememberedValues(1)
        self._keys: RememberedValues[tuple[Hashable, ...], list[StoredKey]] = RememberedValues(1)
        self._plans: RememberedValues[tuple[Hashable, ...], PlannedPrune] = RememberedValues(
            _MAX_DECISIONS, size_of=lambda planned: len(planned.decisions) + 1
        )
        self.answers: Mapping[str, Callable[[ApiRequest], HttpAnswer]] = {
            "usage": self._answer_usage,
            "pairs": self._answer_pairs,
            "shares": self._answer_shares,
            "prune": self._answer_prune,
            "cache": self._answer_cache,
        }

    def _find_time(self, age_s: float, *, fresh: bool = False) -> tuple[int, int]:
        """Return what changes after a while, and with each request for a fresh answer."""
        self._fresh += fresh
        return int(self._repo.store.clock() / age_s), self._fresh

    def _read(self, *, fresh: bool = False) -> StoreSpace:
        key = (self._listing.read().mark, *self._find_time(_AGE_S, fresh=fresh))
        return self._space.find_or_compute(key, self._compute)

    def _compute(self) -> StoreSpace:
        from holdfast.serving.answers.ledger import LedgerReader
        from holdfast.serving.answers.sharing import read_space

        # Requests for different states of the store may compute at the same time; the reader is for one thread.
        with self._reading:
            if self._reader is None:
                self._reader = LedgerReader(self._repo)
            with self._heavy:
                return read_space(self._repo, self._reader)

    def _answer_usage(self, request: ApiRequest) -> HttpAnswer:
        from holdfast.serving.answers.sharing import describe_usage

        page = request.read_page(_PAGE, most=_PAGE)
        space = self._read(fresh=request.read_flag("fresh"))
        return answer_json(describe_usage(space, request.read_text("sort", "-own_bytes"), *page))

    def _answer_pairs(self, request: ApiRequest) -> HttpAnswer:
        from holdfast.serving.answers.sharing import MAX_PAIRED, describe_pairs

        page = request.read_page(MAX_PAIRED, most=MAX_PAIRED)
        return answer_json(describe_pairs(self._read(), self._choose(request), *page))

    def _answer_shares(self, request: ApiRequest) -> HttpAnswer:
        from holdfast.serving.answers.sharing import describe_shares

        page = request.read_page(_PAGE, most=_PAGE)
        name = find_named(self._listing.read(), request.read_required("name")).snapshot.name
        return answer_json(describe_shares(self._read(), name, request.read_text("sort", "-shared_bytes"), *page))

    def _answer_prune(self, request: ApiRequest) -> HttpAnswer:
        page = request.read_page(_PAGE, most=_PAGE)
        keep, prefix = parse_keep(request), request.read_text("prefix")
        space = self._read()

        def plan() -> PlannedPrune:
            with self._heavy:
                return plan_prune(self._repo, keep, prefix, space.ledger)

        key = (self._listing.read().mark, *self._find_time(_AGE_S), keep, prefix)
        planned = self._plans.find_or_compute(key, plan)
        return answer_json(describe_prune(planned, request.read_text("sort"), *page))

    def _answer_cache(self, request: ApiRequest) -> HttpAnswer:
        page = request.read_page(MAX_KEYS, most=MAX_KEYS)
        key = self._find_time(_CACHE_AGE_S, fresh=request.read_flag("fresh"))
        keys = self._keys.find_or_compute(key, self._read_keys)
        return answer_json(describe_cache(keys, request.read_text("sort", "-used_s"), *page))

    def _read_keys(self) -> list[StoredKey]:
        with self._heavy:
            return read_stored(self._repo.store)
