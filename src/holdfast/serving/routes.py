"""The API: which path asks for what, what is remembered between requests, and how much work runs at once."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Final

from holdfast import __version__
from holdfast.compile_cache.artifacts.limits import StoredKey, read_stored
from holdfast.errors import BadName, Corrupt, NotFound
from holdfast.json_text import Json
from holdfast.query.facts import Facts
from holdfast.repo.handle.repository import Repository
from holdfast.repo.names.snapshots import CommittedSnapshot
from holdfast.serving.answer import ApiRequest, HttpAnswer, answer_json, answer_lines
from holdfast.serving.answers.compiled import MAX_KEYS, describe_cache, describe_miss
from holdfast.serving.answers.diffs import iter_diff
from holdfast.serving.answers.outline import (
    MAX_LEAVES,
    ChosenLines,
    LeafChoice,
    SnapshotOutline,
    choose_lines,
    describe_leaves,
    describe_parts,
    list_members,
    read_outline,
)
from holdfast.serving.answers.pieces import (
    MAX_PIECES,
    RankedSnapshot,
    describe_cuts,
    describe_pieces,
    describe_ranks,
    read_ranked,
)
from holdfast.serving.answers.snapshots import (
    MAX_PAGE,
    choose,
    describe_children,
    describe_facts,
    describe_page,
    describe_series,
    find_named,
    read_sizes,
)
from holdfast.serving.answers.upkeep import (
    PlannedPrune,
    describe_activity,
    describe_prune,
    describe_requests,
    iter_check,
    parse_keep,
    plan_prune,
)
from holdfast.serving.remembered import RememberedValues, WatchedListing

if TYPE_CHECKING:
    from holdfast.serving.answers.runs import RunComparison, RunOutline
    from holdfast.serving.answers.sharing import LedgerReader, StoreSpace
    from holdfast.serving.answers.tensors import OpenTensor
    from holdfast.snapshot.lazy import Snapshot

_MAX_REMEMBERED_EVENTS: Final = 100_000
"""Events of all runs that are kept in memory, about 1 KiB each; a run with more is kept alone, and only in part."""
_MAX_CHOSEN: Final = 400_000
"""Positions of events that filters have chosen."""
_MAX_FOUND: Final = 64
_MAX_STEP: Final = 10**18 - 1


class RunsApi:
    """Answers requests about one recorded run. Safe in any thread."""

    def __init__(self, repo: Repository, listing: WatchedListing, heavy: AbstractContextManager[Any]) -> None:
        """Answer about a repository; `heavy` limits what is computed at once."""
        self._repo = repo
        self._listing = listing
        self._heavy = heavy
        self._outlines: RememberedValues[tuple[str, str], RunOutline] = RememberedValues(
            _MAX_REMEMBERED_EVENTS, size_of=lambda outline: outline.size + 100
        )
        self._chosen: RememberedValues[tuple[str, str, str, int | None], Sequence[int]] = RememberedValues(
            _MAX_CHOSEN, size_of=lambda positions: len(positions) + 100
        )
        self._found: RememberedValues[tuple[str, str], dict[str, Json]] = RememberedValues(_MAX_FOUND)
        self.answers: Mapping[str, Callable[[ApiRequest], HttpAnswer]] = {
            "run": self._answer_run,
            "events": self._answer_events,
            "nonfinite": self._answer_nonfinite,
        }

    def _find_key(self, request: ApiRequest) -> tuple[str, str]:
        """Return what changes whenever a part of a run is stored, and the name of the run."""
        return self._listing.read().runs_mark, request.read_required("name")

    def _read(self, key: tuple[str, str]) -> RunOutline:
        from holdfast.serving.answers.runs import read_outline

        def read() -> RunOutline:
            with self._heavy:
                return read_outline(self._repo, key[1])

        return self._outlines.find_or_compute(key, read)

    def _answer_run(self, request: ApiRequest) -> HttpAnswer:
        from holdfast.serving.answers.runs import describe_outline

        return answer_json(describe_outline(self._read(self._find_key(request))))

    def _answer_events(self, request: ApiRequest) -> HttpAnswer:
        from holdfast.serving.answers.runs import MAX_EVENTS, choose_events, describe_events

        page = request.read_page(200, most=MAX_EVENTS)
        step = request.read_number("step", 0, most=_MAX_STEP) if request.read_text("step") else None
        text = request.read_text("filter").strip()
        key = self._find_key(request)
        outline = self._read(key)
        chosen = self._chosen.find_or_compute((*key, text, step), lambda: choose_events(outline, text, step))
        with self._heavy:
            return answer_json(describe_events(outline, chosen, step, *page))

    def _answer_nonfinite(self, request: ApiRequest) -> HttpAnswer:
        from holdfast.serving.answers.runs import describe_nonfinite

        key = self._find_key(request)
        outline = self._read(key)

        def find() -> dict[str, Json]:
            with self._heavy:
                return describe_nonfinite(outline)

        return answer_json(self._found.find_or_compute(key, find))


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
        from holdfast.serving.answers.sharing import LedgerReader, read_space

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


API: Final = "/api/v1/"
REPORTS: Final = "/report/"
_MAX_REPORT_BYTES: Final = 64 << 20
"""Reports on two runs that are kept until they are opened; the one that was made last is always kept."""
_MAX_SIZES: Final = 64
_HEAVY_AT_ONCE: Final = 2
"""Requests that read tensors or large manifests at the same time; others wait. Each takes some dozens of MiB."""
_MAX_REMEMBERED_ROWS: Final = 400_000
"""Leaves of all outlines, and of all orders of them, that are kept in memory; one that is larger is kept alone."""
_MAX_OPENED_ENTRIES: Final = 200_000
"""Entries of all snapshots that are kept open for their tensors: each takes twice the memory of a leaf."""
_MAX_MANIFEST_BYTES: Final = 64 << 20
"""Manifests of snapshots of many ranks that are kept in memory, as stored; one that is larger is kept alone."""
_MAX_REMEMBERED_CHOICES: Final = 8
_CHOICE_AGE_S: Final = 5.0
"""A condition on `age` gives another answer after a while, although the store has not changed."""


class StoreApi:
    """Answers requests about one repository, and only reads it. Safe in any thread."""

    def __init__(self, repo: Repository) -> None:
        """Answer about a repository; nothing is read yet."""
        self._repo = repo
        self._listing = WatchedListing(repo)
        self._started_s = repo.store.clock()
        self._requests_before = repo.store.count_requests()
        self._heavy = threading.BoundedSemaphore(_HEAVY_AT_ONCE)
        # Manifests never change, so whatever follows from one is remembered by its id.
        self._sizes: RememberedValues[str, Mapping[str, int]] = RememberedValues(100_000)
        self._outlines: RememberedValues[str, SnapshotOutline] = RememberedValues(
            _MAX_REMEMBERED_ROWS, size_of=lambda outline: len(outline.rows) + 100
        )
        self._lines: RememberedValues[tuple[str, str, LeafChoice], ChosenLines] = RememberedValues(
            _MAX_REMEMBERED_ROWS, size_of=lambda lines: len(lines.order) + 100
        )
        self._opened: RememberedValues[str, Snapshot] = RememberedValues(
            _MAX_OPENED_ENTRIES, size_of=lambda snapshot: snapshot.record.num_entries + 100
        )
        self._ranked: RememberedValues[str, RankedSnapshot] = RememberedValues(
            _MAX_MANIFEST_BYTES, size_of=lambda ranked: ranked.manifests.size_bytes
        )
        self._choices: RememberedValues[tuple[str, ...], list[Facts]] = RememberedValues(_MAX_REMEMBERED_CHOICES)
        self._reports: RememberedValues[str, RunComparison] = RememberedValues(
            _MAX_REPORT_BYTES, size_of=lambda found: len(found.page)
        )
        self._answers: Mapping[str, Callable[[ApiRequest], HttpAnswer]] = {
            "store": self._answer_store,
            "changes": self._answer_changes,
            "snapshots": self._answer_snapshots,
            "series": self._answer_series,
            "sizes": self._answer_sizes,
            "snapshot": self._answer_snapshot,
            "leaves": self._answer_leaves,
            "ranks": self._answer_ranks,
            "pieces": self._answer_pieces,
            "tensor": self._answer_tensor,
            "values": self._answer_values,
            "heat": self._answer_heat,
            "diff": self._answer_diff,
            "movement": self._answer_movement,
            "activity": self._answer_activity,
            "check": self._answer_check,
            "miss": self._answer_miss,
            "runs": self._answer_runs,
            "report": self._answer_report,
            **RunsApi(repo, self._listing, self._heavy).answers,
            **SpaceApi(repo, self._listing, self._heavy, self._choose).answers,
        }

    def answer(self, request: ApiRequest) -> HttpAnswer:
        """Return the answer to a request; raises an error of Holdfast if there is none."""
        found = self._answers.get(request.path.removeprefix(API)) if request.path.startswith(API) else None
        if found is None:
            raise NotFound(f"the API has nothing at {request.path[:200]!r}", name=request.path)
        self._listing.verify_same()
        return found(request)

    def _answer_store(self, _: ApiRequest) -> HttpAnswer:
        state = self._listing.read()
        found: dict[str, Json] = {
            "store": self._repo.store.url,
            "id": self._repo.identity.store_id or None,
            "version": __version__,
            "api": 1,
            "state": state.mark,
            "snapshots": len(state.facts),
            "logical_bytes": sum(each.snapshot.logical_bytes for each in state.facts),
        }
        return answer_json(found)

    def _answer_changes(self, _: ApiRequest) -> HttpAnswer:
        state = self._listing.read()
        return answer_json({"state": state.mark, "runs": state.runs_mark})

    def _choose(self, request: ApiRequest) -> list[Facts]:
        state = self._listing.read()
        text, sort = request.read_text("filter"), request.read_text("sort")
        key = (state.mark, str(int(state.read_s / _CHOICE_AGE_S)), text, sort)
        return self._choices.find_or_compute(key, lambda: choose(state, text, sort))

    def _answer_snapshots(self, request: ApiRequest) -> HttpAnswer:
        offset, limit = request.read_page(100, most=MAX_PAGE)
        found = self._choose(request)
        return answer_json(describe_page(self._listing.read(), found, offset, limit, url=self._repo.store.url))

    def _answer_series(self, request: ApiRequest) -> HttpAnswer:
        return answer_json(describe_series(self._listing.read(), self._choose(request)))

    def _answer_sizes(self, request: ApiRequest) -> HttpAnswer:
        state = self._listing.read()
        found: dict[str, Json] = {}
        damaged: dict[str, Json] = {}
        for name in request.read_texts("name", most=_MAX_SIZES):
            # One damaged manifest must not hide the sizes of all other snapshots.
            try:
                found[name] = dict(self._read_sizes(find_named(state, name).snapshot))
            except Corrupt as error:
                damaged[name] = str(error)
        return answer_json({"sizes": found, "damaged": damaged})

    def _read_sizes(self, snapshot: CommittedSnapshot) -> Mapping[str, int]:
        def read() -> Mapping[str, int]:
            with self._heavy:
                return read_sizes(self._repo, snapshot)

        return self._sizes.find_or_compute(snapshot.manifest.manifest_id, read)

    def _read_outline(self, snapshot: CommittedSnapshot) -> SnapshotOutline:
        def read() -> SnapshotOutline:
            with self._heavy:
                return read_outline(self._repo, snapshot)

        # The page asks for the facts and for the first lines at once: the manifest is read for one of them.
        outline = self._outlines.find_or_compute(snapshot.manifest.manifest_id, read)
        self._sizes.put(snapshot.manifest.manifest_id, outline.sizes)
        return outline

    def _answer_snapshot(self, request: ApiRequest) -> HttpAnswer:
        state = self._listing.read()
        facts = find_named(state, request.read_required("name"))
        outline = self._read_outline(facts.snapshot)
        found: dict[str, Json] = {
            **describe_facts(state, facts),
            **outline.sizes,
            "leaves": len(outline.rows),
            "lines": len(outline.folds),
            "items": sum(row.items for row in outline.rows),
            "ranks": outline.num_ranks,
            "parts": describe_parts(outline),
            "children": describe_children(state, facts.snapshot.name),
        }
        return answer_json(found)

    def _answer_leaves(self, request: ApiRequest) -> HttpAnswer:
        facts = find_named(self._listing.read(), request.read_required("name"))
        outline = self._read_outline(facts.snapshot)
        below, is_folded = request.read_text("fold"), request.read_flag("folded")
        if below:
            outline, is_folded = list_members(outline, below), False
        choice = LeafChoice(request.read_text("filter").strip(), request.read_text("sort"), is_folded)
        key = (facts.snapshot.manifest.manifest_id, below, choice)
        lines = self._lines.find_or_compute(key, lambda: choose_lines(outline, choice))
        found = describe_leaves(outline, lines, *request.read_page(200, most=MAX_LEAVES))
        if outline.num_ranks:
            ranked = self._read_ranked(facts.snapshot)
            found["cuts"] = describe_cuts(ranked, {line["first"] for line in found["lines"]})
        return answer_json(found)

    def _read_ranked(self, snapshot: CommittedSnapshot) -> RankedSnapshot:
        def read() -> RankedSnapshot:
            with self._heavy:
                return read_ranked(self._repo, snapshot)

        return self._ranked.find_or_compute(snapshot.manifest.manifest_id, read)

    def _answer_ranks(self, request: ApiRequest) -> HttpAnswer:
        facts = find_named(self._listing.read(), request.read_required("name"))
        page = request.read_page(200, most=MAX_PIECES)
        return answer_json(describe_ranks(self._read_ranked(facts.snapshot), request.read_text("sort"), *page))

    def _answer_pieces(self, request: ApiRequest) -> HttpAnswer:
        facts = find_named(self._listing.read(), request.read_required("name"))
        page = request.read_page(200, most=MAX_PIECES)
        return answer_json(describe_pieces(self._read_ranked(facts.snapshot), request.read_required("leaf"), *page))

    def _open(self, snapshot: CommittedSnapshot) -> Snapshot:
        from holdfast.snapshot.lazy import Snapshot
        from holdfast.trees.registered import Types

        return self._opened.find_or_compute(
            snapshot.manifest.manifest_id, lambda: Snapshot(self._repo, snapshot, Types(()))
        )

    def _open_tensor(self, request: ApiRequest) -> OpenTensor:
        from holdfast.serving.answers.tensors import open_tensor

        facts = find_named(self._listing.read(), request.read_required("name"))
        return open_tensor(self._open(facts.snapshot), request.read_required("leaf"))

    def _answer_tensor(self, request: ApiRequest) -> HttpAnswer:
        from holdfast.serving.answers.tensors import iter_summary

        with self._heavy:
            tensor = self._open_tensor(request)
        return answer_lines(self._limit(iter_summary(tensor)))

    def _answer_values(self, request: ApiRequest) -> HttpAnswer:
        from holdfast.serving.answers.tensors import read_values

        with self._heavy:
            return answer_json(read_values(self._open_tensor(request), request.read_text("index")))

    def _answer_heat(self, request: ApiRequest) -> HttpAnswer:
        from holdfast.serving.answers.tensors import read_heat

        with self._heavy:
            return answer_json(read_heat(self._open_tensor(request), request.read_text("index")))

    def _answer_diff(self, request: ApiRequest) -> HttpAnswer:
        state = self._listing.read()
        a, b = (find_named(state, request.read_required(side)).snapshot for side in "ab")
        return answer_lines(self._limit(iter_diff(self._repo, a, b, values=request.read_flag("values"))))

    def _answer_movement(self, request: ApiRequest) -> HttpAnswer:
        from holdfast.serving.answers.movement import (
            DEFAULT_COMPARED,
            MAX_COMPARED,
            choose_series,
            iter_moves,
            make_grouping,
        )

        by = request.read_text("by", "layer")
        if by not in ("layer", "leaf"):
            raise BadName(f"the parameter by={by[:40]!r} is neither layer nor leaf")
        limit = request.read_number("limit", DEFAULT_COMPARED, most=MAX_COMPARED)
        chosen = choose_series(self._choose(request), request.read_text("series"), limit)
        grouping = make_grouping(request.read_text("leaves").strip(), by_leaf=by == "leaf")
        return answer_lines(self._limit(iter_moves(self._repo, chosen, grouping)))

    def _answer_activity(self, _: ApiRequest) -> HttpAnswer:
        store = self._repo.store
        requests = describe_requests(store, self._requests_before, self._started_s)
        return answer_json({**describe_activity(self._repo), "requests": requests})

    def _answer_check(self, request: ApiRequest) -> HttpAnswer:
        return answer_lines(self._limit(iter_check(self._repo, read=request.read_flag("read"))))

    def _answer_miss(self, request: ApiRequest) -> HttpAnswer:
        with self._heavy:
            return answer_json(describe_miss(self._repo, request.read_required("key")))

    def _answer_runs(self, _: ApiRequest) -> HttpAnswer:
        from holdfast.serving.answers.runs import list_runs

        with self._heavy:
            return answer_json({"runs": list_runs(self._repo)})

    def _answer_report(self, request: ApiRequest) -> HttpAnswer:
        from holdfast.serving.answers.runs import compare_runs

        a, b = (request.read_required(side) for side in "ab")
        with self._heavy:
            found = compare_runs(self._repo, a, b)
        # The page is opened by its address alone, so that address is a secret like the token.
        path = f"{REPORTS}{secrets.token_urlsafe(24)}"
        self._reports.put(path, found)
        return answer_json({"headline": found.headline, "is_match": found.is_match, "path": path})

    def answer_page(self, path: str) -> HttpAnswer | None:
        """Return the page of a report that was made before; None if the path is not that of one."""
        found = self._reports.find(path)
        if found is None:
            return None
        policy = {"Content-Security-Policy": f"{found.policy}; frame-ancestors 'none'"}
        return HttpAnswer(200, "text/html; charset=utf-8", found.page, policy)

    def _limit(self, values: Iterable[Json]) -> Iterator[Json]:
        """Yield values while at most `_HEAVY_AT_ONCE` streams compute; one that waits for its reader counts, too."""
        with self._heavy:
            yield from values
