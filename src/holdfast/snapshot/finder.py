"""Finds snapshots by name, tag or prefix: in a store, and in its mirror those that the store lacks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from operator import attrgetter

from holdfast.errors import BadName, NotFound, StoreError
from holdfast.progress import Progress
from holdfast.query.bisect import Bisection, bisect, order_series
from holdfast.query.facts import Facts
from holdfast.query.select import BestMode, Query, find_best, read_facts, select
from holdfast.repo.handle.repository import Repository
from holdfast.repo.names.latest import find_latest, read_latest
from holdfast.repo.names.listed import list_user_names
from holdfast.repo.names.snapshots import CommittedSnapshot, Tag, read_named, set_tag
from holdfast.repo.upkeep.transfer import copy_snapshot, is_same
from holdfast.repo.write.writer import SaveResult
from holdfast.snapshot.lazy import Snapshot
from holdfast.trees.registered import Types

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SnapshotFinder:
    """The snapshots of a store, and those that only its mirror has. A name that the store has is read from the store.

    If the mirror cannot be reached, the store alone answers, with a warning; if it has no answer, the error is raised.
    """

    repo: Repository
    types: Types
    open_mirror: Callable[[], Repository] | None = None
    """Opens the repository of the mirror, which may fail; None without a mirror."""

    def open(self, name: str | Snapshot) -> Snapshot:
        """Return the snapshot with a name or tag, or one that was found before; raises NotFound."""
        if not isinstance(name, str):
            return name
        try:
            return self.open_here(name)
        except NotFound:
            if self.open_mirror is None:
                raise
            with suppress(NotFound):
                mirror = self.open_mirror()
                return Snapshot(mirror, read_named(mirror.store, name), self.types)
            raise

    def open_here(self, name: str | Snapshot) -> Snapshot:
        """Return a snapshot of the store itself; raises NotFound for one that only the mirror has."""
        if isinstance(name, Snapshot) and name.repository is self.repo:
            return name
        text = name if isinstance(name, str) else name.name
        return Snapshot(self.repo, read_named(self.repo.store, text), self.types)

    def is_named(self, name: object) -> bool:
        """Return whether there is a snapshot with a name or tag."""
        try:
            return isinstance(name, str) and self.open(name) is not None
        except (NotFound, BadName):
            return False

    def list_snapshots(self, prefix: str, query: Query) -> list[Snapshot]:
        """Return the user's snapshots whose names begin with `prefix` and that match a query, in its order."""
        found = self._list_all(prefix)
        return [found[each.snapshot.name] for each in select(self._read_facts(found, query), query)]

    def open_best(self, prefix: str, *, metric: str, mode: BestMode, query: Query) -> Snapshot:
        """Return the one of them with the best value of a metric; raises NotFound if none has it."""
        found = self._list_all(prefix)
        facts = select(self._read_facts(found, query), query)
        return found[find_best(facts, metric, mode=mode, prefix=prefix).snapshot.name]

    def bisect(self, prefix: str, test: Callable[[Snapshot], bool | None]) -> Bisection[Snapshot]:
        """Find the first one of them for which a test returns False."""
        found = self._list_all(prefix)
        series, _ = order_series(self._read_facts(found, Query()))
        return bisect([found[each.snapshot.name] for each in series], test, label=attrgetter("name"), prefix=prefix)

    def open_latest(self, prefix: str) -> Snapshot | None:
        """Return the most recently committed one of them; None if there is none."""
        here = read_latest(self.repo.store, prefix, self.repo.records)
        there = None
        if self.open_mirror is not None:
            try:
                mirror = self.open_mirror()
                there = read_latest(mirror.store, prefix, mirror.records)
            except StoreError as error:
                self._verify_answered(here, error)
        if there is None or (here and is_same(here, there)):
            return None if here is None else Snapshot(self.repo, here, self.types)
        # A name that both have is the store's, so its record in the mirror does not count.
        found = self._list_all(prefix)
        newest = find_latest(each.record for each in found.values())
        return None if newest is None else found[newest.name]

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
        snapshot = self.open(name)
        return copy_snapshot(snapshot.repository, snapshot.record, target, overwrite=overwrite, progress=progress)

    def _list_all(self, prefix: str) -> dict[str, Snapshot]:
        """List the snapshots under a prefix, by name."""
        found = self._list(self.repo, prefix)
        if self.open_mirror is not None:
            try:
                found = self._list(self.open_mirror(), prefix) | found
            except StoreError as error:
                self._verify_answered(found, error)
        return found

    def _list(self, repo: Repository, prefix: str) -> dict[str, Snapshot]:
        listed = list_user_names(repo.store, prefix, repo.records)
        return {each.name: Snapshot(repo, each, self.types) for each in listed if isinstance(each, CommittedSnapshot)}

    def _read_facts(self, found: Mapping[str, Snapshot], query: Query) -> list[Facts]:
        return read_facts(self.repo.store, [each.record for each in found.values()], query)

    def _verify_answered(self, answer: object, error: StoreError) -> None:
        """Warn that the mirror has failed; raise its error if the store alone has no answer."""
        if not answer:
            raise error
        _log.warning(
            "%s: only the store itself was searched, because its mirror failed: %s", self.repo.store.url, error
        )
