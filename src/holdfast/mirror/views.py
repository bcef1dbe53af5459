"""Finds snapshots in a store and in its mirror: what the store lacks is read from the mirror."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from holdfast.errors import BadName, NotFound, StoreError
from holdfast.progress import Progress
from holdfast.query.bisect import Bisection, bisect, order_series
from holdfast.query.facts import Facts
from holdfast.query.select import BestMode, Query, find_best, read_facts, select
from holdfast.repo.format.layout import natural_order
from holdfast.repo.handle.repository import Repository
from holdfast.repo.names.listed import list_user_names
from holdfast.repo.names.snapshots import CommittedSnapshot
from holdfast.repo.names.tags import Tag, set_tag
from holdfast.repo.upkeep.transfer import copy_snapshot, is_same
from holdfast.repo.write.writer import SaveResult
from holdfast.snapshot.view import lazy
from holdfast.snapshot.view.lazy import Snapshot
from holdfast.trees.registered import Types

if TYPE_CHECKING:
    from holdfast.mirror.mirror import Mirror

_log = logging.getLogger(__name__)

Found = TypeVar("Found")


@dataclass(frozen=True, slots=True)
class Views:
    """The snapshots of a store, and those that only its mirror has. A name that the store has is read from the store.

    If the mirror cannot be reached, the store alone answers, with a warning; if it has no answer, the error is raised.
    """

    repo: Repository
    mirror: Mirror | None
    types: Types

    def open_named(self, name: str) -> Snapshot:
        """Return the snapshot with a name or tag; raises NotFound."""
        try:
            return lazy.open_named(self.repo, name, self.types)
        except NotFound:
            if self.mirror is None:
                raise
            try:
                return lazy.open_named(self.mirror.repository, name, self.types)
            except NotFound:
                pass
            raise

    def open_here(self, name: str | Snapshot) -> Snapshot:
        """Return a snapshot of the store itself; raises NotFound for one that only the mirror has."""
        if isinstance(name, Snapshot) and name.repository is self.repo:
            return name
        text = name if isinstance(name, str) else name.name
        return lazy.open_named(self.repo, text, self.types)

    def choose_repository(self, name: str | Snapshot) -> Repository:
        """Return the repository that has a snapshot: the store's, unless only the mirror has it."""
        if not isinstance(name, str):
            return name.repository
        if self.mirror is None or lazy.is_named(self.repo, name, self.types):
            return self.repo
        return self.mirror.repository if lazy.is_named(self.mirror.repository, name, self.types) else self.repo

    def is_named(self, name: object) -> bool:
        """Return whether there is a snapshot with a name or tag."""
        try:
            return isinstance(name, str) and self.open_named(name) is not None
        except (NotFound, BadName):
            return False

    def list_snapshots(self, prefix: str, query: Query) -> list[Snapshot]:
        """Return the user's snapshots whose names begin with `prefix` and that match a query, in its order."""
        if self.mirror is None:
            return lazy.list_snapshots(self.repo, prefix, self.types, query)
        found = _Union(self, prefix)
        return [found.open(each) for each in select(found.read_facts(query), query)]

    def open_best(self, prefix: str, *, metric: str, mode: BestMode, query: Query) -> Snapshot:
        """Return the one of them with the best value of a metric; raises NotFound if none has it."""
        if self.mirror is None:
            return lazy.open_best(self.repo, prefix, self.types, metric=metric, mode=mode, query=query)
        found = _Union(self, prefix)
        facts = select(found.read_facts(query), query)
        return found.open(find_best(facts, metric, mode=mode, prefix=prefix))

    def bisect(self, prefix: str, test: Callable[[Snapshot], bool | None]) -> Bisection[Snapshot]:
        """Find the first one of them for which a test returns False."""
        if self.mirror is None:
            return lazy.bisect_snapshots(self.repo, prefix, self.types, test)
        found = _Union(self, prefix)
        series, _ = order_series(found.read_facts(Query()))
        return bisect([found.open(each) for each in series], test, label=lambda each: each.name, prefix=prefix)

    def open_latest(self, prefix: str) -> Snapshot | None:
        """Return the most recently committed one of them; None if there is none."""
        here = lazy.open_latest(self.repo, prefix, self.types)
        if self.mirror is None:
            return here
        mirror = self.mirror
        there = self.ask_mirror(lambda: lazy.open_latest(mirror.repository, prefix, self.types), here)
        if there is here or there is None or (here and is_same(here.record, there.record)):
            return here
        # A name that both have is the store's, so its record in the mirror does not count.
        newest = max(_Union(self, prefix).iter_records(), key=_find_age, default=None)
        return None if newest is None else _Union(self, prefix).open_record(newest)

    def set_tag(self, tag: str, name: str | Snapshot, *, move: bool) -> Tag:
        """Point a tag to a snapshot of the store; the mirror gets it, too."""
        store = self.repo.verify_same()
        record = self.open_here(name).record
        found = set_tag(store, tag, record, move=move)
        self.repo.commits.note(record)  # so that a mirror looks at the snapshot again
        return found

    def copy(
        self, name: str | Snapshot, target: Repository, *, overwrite: bool, progress: Progress | None
    ) -> SaveResult:
        """Copy a snapshot to another repository; raises NotFound, NameInUse."""
        snapshot = self.open_named(name) if isinstance(name, str) else name
        return copy_snapshot(snapshot.repository, snapshot.record, target, overwrite=overwrite, progress=progress)

    def ask_mirror(self, ask: Callable[[], Found], instead: Found) -> Found:
        """Return what the mirror answers; `instead`, with a warning, if it fails and that is an answer."""
        try:
            return ask()
        except StoreError as error:
            if not instead:
                raise
            _log.warning(
                "%s: only the store itself was searched, because its mirror failed: %s", self.repo.store.url, error
            )
            return instead


def _find_age(record: CommittedSnapshot) -> tuple[float, tuple[tuple[int, int, str], ...]]:
    return record.time_s, natural_order(record.name)


class _Union:
    """The records of a store under a prefix, and of its mirror under names that the store lacks."""

    def __init__(self, views: Views, prefix: str) -> None:
        assert views.mirror is not None, "without a mirror there is nothing to unite"
        self._views = views
        self._here = _list(views.repo, prefix)
        mirror = views.mirror
        there = views.ask_mirror(lambda: _list(mirror.repository, prefix), self._here)
        self._there = {name: each for name, each in there.items() if name not in self._here}

    def iter_records(self) -> Iterable[CommittedSnapshot]:
        return (*self._here.values(), *self._there.values())

    def read_facts(self, query: Query) -> list[Facts]:
        return read_facts(self._views.repo.store, self.iter_records(), query)

    def open(self, facts: Facts) -> Snapshot:
        return self.open_record(facts.snapshot)

    def open_record(self, record: CommittedSnapshot) -> Snapshot:
        views = self._views
        assert views.mirror is not None
        repo = views.repo if record.name in self._here else views.mirror.repository
        return Snapshot(repo, record, views.types)


def _list(repo: Repository, prefix: str) -> dict[str, CommittedSnapshot]:
    listed = list_user_names(repo.store, prefix, repo.records)
    return {each.name: each for each in listed if isinstance(each, CommittedSnapshot)}
