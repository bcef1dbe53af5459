"""Series of snapshots: `Follower` yields new ones as they are committed; `publish` numbers versions."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from types import TracebackType
from typing import Any, Final, NamedTuple, Protocol

import torch.distributed as dist
from typing_extensions import Self

from holdfast.digest import Digest
from holdfast.distributed.checkpoint.checkpoint import World, find_world, reporting_early
from holdfast.distributed.talk.failures import is_caused_by
from holdfast.errors import BadName, HoldfastError, NameInUse, RankError, SnapshotGone
from holdfast.json_text import Json
from holdfast.mirror.retention import keep_unmirrored
from holdfast.repo.format.layout import ManifestRef, escape_prefix, split_stem, verify_user_name
from holdfast.repo.handle.repository import Repository
from holdfast.repo.names.latest import NameWaiter, NameWatch
from holdfast.repo.names.listed import ListedName, list_wanted, read_wanted
from holdfast.repo.names.snapshots import CommittedSnapshot
from holdfast.repo.upkeep.prune import Keep, PrunePlan, apply_prune, read_prune_plan
from holdfast.repo.write.writer import SaveResult
from holdfast.snapshot.lazy import Snapshot
from holdfast.snapshot.save import SaveOptions
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


_PUBLISH: Final = "publish"
_DIGITS: Final = 8
_NUMBER: Final = re.compile(r"[0-9]{8}|[1-9][0-9]{8,14}")
"""Eight digits, or more without leading zeros, so that a number has one name."""
_MAX_NUMBER: Final = 10**15 - 1
_MAX_AHEAD_S: Final = 24 * 3600.0
"""By how much the clock of one publisher may be ahead of another's."""
_ATTEMPTS: Final = 1000
"""How often another publisher may be first; each time, it has published."""


@dataclass(frozen=True, slots=True)
class PublishOptions:
    """How a version is saved, and what is kept afterwards."""

    keep: int = 2
    """How many of the newest versions are not deleted."""
    gc: bool = True
    """Free the bytes of deleted versions."""
    saving: SaveOptions = field(default_factory=SaveOptions)

    def __post_init__(self) -> None:
        """Refuse to keep nothing."""
        if self.keep < 1:
            raise ValueError(f"keep= is a number of versions, at least 1, not {self.keep!r}")


class NextVersion(NamedTuple):
    """The name of the next version, and the latest commit time of those before it."""

    name: str
    after_s: float


def verify_series(prefix: str) -> str:
    """Return the prefix of a series without a slash at its end; raises BadName if its names would not be allowed."""
    series = verify_user_name(prefix.removesuffix("/"), what="series")
    if not escape_prefix(f"{series}/{_MAX_NUMBER}"):
        raise BadName(
            f"series name {series[:80]!r} is refused: with a number, it is too long to be found by its number"
        )
    return series


def publish(
    repo: Repository,
    series: str,
    options: PublishOptions,
    world: World | None,
    *,
    save: Callable[[str, SaveOptions], SaveResult],
    collect: Callable[[], object],
) -> SaveResult:
    """Save the next version of a series, then delete old versions; all ranks must call this.

    `save` saves the tree under a name. If another publisher takes the number first, the next one is used.
    """
    with reporting_early(world, _PUBLISH, str(series)):
        series = verify_series(series)
    for _ in range(_ATTEMPTS):
        version = _read_next_together(repo, series, world)
        try:
            result = save(version.name, replace(options.saving, after_s=version.after_s))
        except (NameInUse, RankError) as error:
            if isinstance(error, RankError) and not is_caused_by(error, NameInUse):
                raise
            _log.info("%r was published by another process; taking the next number", version.name)
            continue
        if not result.existed:  # otherwise another process has published the same content under it
            if world is None or world.is_first_rank:
                _clean_up(repo, series, version.name, options, collect)
            return result
    raise NameInUse(f"{_ATTEMPTS} times in a row, another process took the next number of {series!r}", name=series)


def _read_next_together(repo: Repository, series: str, world: World | None) -> NextVersion:
    if world is None:
        return read_next(repo, series)
    with world.join(_PUBLISH, series) as ranks:
        return NextVersion(*ranks.broadcast("number", lambda: tuple(read_next(repo, series))))


def read_next(repo: Repository, series: str) -> NextVersion:
    """Return the next version of a series: its number is higher than any in the store, deleted ones included."""
    prefix = f"{series}/"
    listed = list_wanted(repo.store, prefix, repo.records, in_sequence=True)
    start = escape_prefix(prefix)
    stems = (split_stem(each.stem) for each in listed)
    numbers = [
        int(stem[len(start) :]) for stem in stems if stem.startswith(start) and _NUMBER.fullmatch(stem[len(start) :])
    ]
    number = max(numbers, default=0) + 1
    if number > _MAX_NUMBER:
        raise BadName(f"series {series!r} has used up its numbers: {series}/{_MAX_NUMBER} exists; choose another")
    return NextVersion(f"{prefix}{number:0{_DIGITS}d}", _find_last_time(repo, series, listed))


def _find_last_time(repo: Repository, series: str, listed: Sequence[ListedName]) -> float:
    """Return the latest commit time of a series; times that no clock can have are ignored with a warning."""
    found = read_wanted(repo.store, f"{series}/", listed, repo.records)
    versions = [each for each in found if isinstance(each, CommittedSnapshot) and is_version(each.name, series)]
    most_s = repo.store.clock() + _MAX_AHEAD_S
    for each in versions:
        if each.time_s > most_s:
            _log.warning("%r claims to be from the future, so new versions are not the latest: delete it", each.name)
    return max((each.time_s for each in versions if each.time_s <= most_s), default=0.0)


def is_version(name: str, series: str) -> bool:
    """Return whether a name is one of a series."""
    return name.startswith(f"{series}/") and _NUMBER.fullmatch(name[len(series) + 1 :]) is not None


def _clean_up(
    repo: Repository, series: str, published: str, options: PublishOptions, collect: Callable[[], object]
) -> None:
    """Delete all but the newest versions, and free their bytes; the new version is committed, so nothing is raised."""
    own = re.compile(re.escape(f"{series}/") + f"(?:{_NUMBER.pattern})")
    try:
        names = list_wanted(repo.store, f"{series}/", repo.records, in_sequence=True)
        listed = read_wanted(repo.store, f"{series}/", names, repo.records)
        plan = read_prune_plan(repo.store, f"{series}/", Keep(last=options.keep), only=own, listed=listed)
        plan = _keep_published(keep_unmirrored(repo, plan), published)
        deleted = apply_prune(repo.verify_same(), plan).deleted
        if deleted and options.gc:
            collect()
    except HoldfastError as error:
        _log.warning("old versions of %r are still there, the next publish deletes them: %s", series, error)


def _keep_published(plan: PrunePlan, name: str) -> PrunePlan:
    """Return a plan that keeps the new version, whatever the times of the others are."""
    kept = tuple(
        replace(verdict, reasons=("just published",)) if verdict.snapshot.name == name else verdict
        for verdict in plan.verdicts
    )
    return replace(plan, verdicts=kept)
