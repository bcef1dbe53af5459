"""`Follower`: yields new snapshots as they are committed, on all ranks alike, and loads them into a tree."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any, Protocol

import torch.distributed as dist
from typing_extensions import Self

from holdfast.digest import Digest
from holdfast.distributed.checkpoint.checkpoint import find_world
from holdfast.distributed.talk.failures import is_caused_by
from holdfast.errors import RankError, SnapshotGone
from holdfast.json_text import Json
from holdfast.repo.format.layout import ManifestRef
from holdfast.repo.handle.repository import Repository
from holdfast.repo.names.snapshots import CommittedSnapshot
from holdfast.repo.names.watch import NameWaiter, NameWatch
from holdfast.snapshot.view.lazy import Snapshot
from holdfast.trees.registered import Types

_log = logging.getLogger(__name__)


class FollowedStore(Protocol):
    """The methods of a Store that a follower calls; `Store` says what they do."""

    @property
    def repository(self) -> Repository:
        """The repository that the store is."""

    @property
    def load_into(self) -> Callable[..., Any]:
        """Load a snapshot in place."""


@dataclass(frozen=True, slots=True)
class FollowOptions:
    """What to follow, and how."""

    since: CommittedSnapshot | None = None
    """Yield only snapshots that are newer than this one."""
    every: bool = False
    """Yield every new snapshot in order, and not only the newest."""
    poll_s: float | None = None
    """The longest pause between two looks at the store; None leaves the choice to `NameWaiter`."""
    timeout_s: float | None = None
    """End the iteration after so many seconds without a new snapshot; None waits for ever."""
    collective: bool = True
    """False to follow in this process only."""
    process_group: dist.ProcessGroup | None = None


class Follower:
    """Yields the newest snapshot under a prefix, and again each time there is a newer one.

    Iterate over it, or call `poll`. `close`, from any thread, ends the iteration; there is nothing to free otherwise.
    On many ranks, all iterate together, and rank 0 decides: it looks for snapshots, and its `close` and timeout count.
    """

    def __init__(self, store: FollowedStore, prefix: str, types: Types, options: FollowOptions) -> None:
        """Follow the snapshots of `store` whose names begin with `prefix`."""
        self._store, self._prefix, self._types, self._options = store, prefix, types, options
        repo = store.repository
        watch = NameWatch(repo.store, prefix, repo.records, since=options.since, every=options.every)
        self._waiter = NameWaiter(repo.store, watch, poll_s=options.poll_s, timeout_s=options.timeout_s)

    def __repr__(self) -> str:
        """Show the prefix, and whether it is closed."""
        return f"<Follower of {self._prefix!r}{', closed' if self._waiter.is_closed else ''}>"

    def __enter__(self) -> Self:
        """Return this follower."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the follower."""
        self.close()

    def __iter__(self) -> Self:
        """Return this follower."""
        return self

    def __next__(self) -> Snapshot:
        """Wait for a newer snapshot; ends the iteration when `close` was called, or after `timeout_s` without one."""
        found = self._find_together(self._waiter.wait)
        if found is None:
            raise StopIteration
        return found

    def poll(self) -> Snapshot | None:
        """Return a newer snapshot, or None if there is none now. On many ranks, all must call this."""
        return self._find_together(lambda beat: self._waiter.take())

    def iter_into(self, tree: Any, **options: Any) -> Iterator[Snapshot]:
        """Load each snapshot into `tree`, in place, and yield it when the whole tree holds it, on every rank.

        The first load reads everything, each later one what has changed, and changes nothing if it fails
        (`Store.load_into`, `since`). A snapshot that is deleted and collected before it is loaded is skipped. Any other
        error is raised; the tree then holds what was yielded last. `options` are those of `Store.load_into`.
        """
        held: Snapshot | None = None
        for snapshot in self:
            try:
                self._store.load_into(snapshot, tree, since=held, **self._choose_ranks(), **options)
            except (SnapshotGone, RankError) as error:
                if isinstance(error, RankError) and not is_caused_by(error, SnapshotGone):
                    raise
                _log.warning("%r was deleted before it was loaded; waiting for a newer one: %s", snapshot.name, error)
                continue
            held = snapshot
            yield snapshot

    def close(self) -> None:
        """End the iteration, at once if it waits. May be called from any thread, and more than once."""
        self._waiter.close()

    def _choose_ranks(self) -> dict[str, Any]:
        return {"collective": self._options.collective, "process_group": self._options.process_group}

    def _find_together(self, find: Callable[[Callable[[], None]], CommittedSnapshot | None]) -> Snapshot | None:
        """Call `find` on rank 0, with a function that gives a sign of life; return its snapshot on every rank."""
        world = find_world(collective=self._options.collective, process_group=self._options.process_group)
        if world is None:
            record = find(lambda: None)
        else:
            with world.join("follow", self._prefix) as ranks:
                verify_alive = ranks.watch_others()

                def stay() -> None:
                    # Rank 0 may wait without end; the other ranks learn only from it that a rank is lost.
                    ranks.beat()
                    ranks.check_failures()
                    verify_alive()

                fields = ranks.broadcast("follow", lambda: _encode(find(stay)))
            record = _decode(fields)
        return None if record is None else Snapshot(self._store.repository, record, self._types)


def _encode(record: CommittedSnapshot | None) -> dict[str, Json] | None:
    """Return a record as plain values, to send it to other ranks."""
    return None if record is None else asdict(record)


def _decode(fields: dict[str, Any] | None) -> CommittedSnapshot | None:
    if fields is None:
        return None
    manifest = ManifestRef(**fields.pop("manifest"))
    return CommittedSnapshot(**{**fields, "digest": Digest(fields["digest"])}, manifest=manifest)
