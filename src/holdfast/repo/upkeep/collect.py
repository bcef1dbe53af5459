"""Garbage collection while others write: plan, mark, wait, sweep, and delete leftovers of interrupted work."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from holdfast.errors import Corrupt, NewerFormat, NotAStore, NotFound, ObjectExists
from holdfast.json_text import Json
from holdfast.objects.protocol import ObjectInfo, ObjectStore, is_key
from holdfast.objects.settle import create_settled
from holdfast.progress import Progress, Silent
from holdfast.repo.format.layout import (
    BAD,
    INDEX,
    MANIFESTS,
    MARKS,
    PACKS,
    generation_key,
    lease_stem,
    new_lease_id,
    new_write_id,
    parse_file_key,
)
from holdfast.repo.format.record import Fields, encode_record
from holdfast.repo.handle.config import read_config, read_first_other, read_unknown_prefix
from holdfast.repo.handle.index import drop_missing
from holdfast.repo.handle.repository import StoreIdentity
from holdfast.repo.names.generations import (
    create_generation,
    iter_records,
    iter_stem_objects,
    iter_stems,
    list_generations,
    read_record,
)
from holdfast.repo.names.leases import EXPIRE_S
from holdfast.repo.names.roots import DeadRecords, LeaseView, Live, is_present, read_leases, read_live
from holdfast.texts import count, format_bytes

MARK_KEYS: Final = 60_000
"""The most files that one mark names: at 54 bytes each, they fit into a record."""


@dataclass(frozen=True, slots=True)
class Mark:
    """A collector's announcement of files that it will delete."""

    stem: str
    keys: tuple[str, ...]
    published_s: float
    """By the store's clock."""


def iter_marks(store: ObjectStore) -> Iterator[Mark]:
    """Yield every mark that can be read. A torn mark never counted; `check` reports a damaged one."""
    listed = [(stem, infos[0]) for stem, infos in iter_stem_objects(store, MARKS) if 0 in infos]
    records = iter_records(store, (info.key for _, info in listed))
    for (stem, info), record in zip(listed, records, strict=True):
        if isinstance(record.error, NotFound | Corrupt):
            continue
        fields = record.take_fields()
        mark = _parse_mark(stem, fields, info.modified_s) if fields else None
        if mark:
            yield mark


def _parse_mark(stem: str, fields: Fields, published_s: float) -> Mark | None:
    """Return a mark with those of its keys that may be swept; None if the record is not a mark."""
    try:
        fields.expect(kind="mark")
        named = fields.texts("keys")
    except Corrupt:
        return None
    # A collector deletes only packs and manifests, whatever else a mark names by mistake or malice.
    return Mark(stem, tuple(key for key in named if parse_file_key(key)), published_s)


def publish_marks(store: ObjectStore, dead: Sequence[ObjectInfo]) -> list[str]:
    """Announce to all writers that `dead` will be deleted, with as many marks as needed; return their stems."""
    return [publish_mark(store, dead[first : first + MARK_KEYS]) for first in range(0, len(dead), MARK_KEYS)]


def publish_mark(store: ObjectStore, dead: Sequence[ObjectInfo]) -> str:
    """Announce that `dead` will be deleted: every save that starts from now on treats it as absent. Return the stem."""
    stem = MARKS + new_lease_id()
    keys: list[Json] = [info.key for info in dead]
    fields = {"kind": "mark", "write_id": new_write_id(), "generation": 0, "keys": keys, "leases": []}
    # Not `create_generation`, which lists again: the name is unique, and another collector may have swept it already.
    create_settled(store, generation_key(stem, 0), encode_record(fields), durable=False)
    return stem


def read_waiting(store: ObjectStore, stem: str) -> frozenset[str]:
    """Return the leases that a mark has to wait for: those that were live after it was published.

    The list is stored once, as the mark's next generation, so that a later collection waits for the same leases.
    Newer saves have read the mark and need not be waited for.
    """
    fields = _read_mark(store, generation_key(stem, 1))
    if fields is not None:
        return fields
    alive = sorted(lease.lease_id for lease in read_leases(store).values() if lease.is_live)
    record = {"kind": "mark", "write_id": new_write_id(), "keys": [], "leases": alive}
    try:
        create_generation(store, stem, 1, record, durable=False)
    except ObjectExists:
        # Another collector was first. Its list was also made after the mark, so both are valid.
        return _read_mark(store, generation_key(stem, 1)) or frozenset(alive)
    return frozenset(alive)


def _read_mark(store: ObjectStore, key: str) -> frozenset[str] | None:
    try:
        fields = read_record(store, key)
    except (NotFound, Corrupt):
        return None  # a damaged list counts as missing: a new one names the leases that are live now
    return frozenset(fields.texts("leases")) if fields else None


def fence_stale_leases(store: ObjectStore, waiting: Iterable[str], *, expire_s: float) -> list[LeaseView]:
    """Return the leases that must still be waited for; fence those that were not renewed for `expire_s`."""
    leases = read_leases(store)
    blockers = []
    for lease_id in waiting:
        lease = leases.get(lease_id)
        if lease is None or not lease.is_live:
            continue
        if store.clock() - lease.renewed_s < expire_s or not fence(store, lease):
            blockers.append(lease)
    return blockers


def fence(store: ObjectStore, lease: LeaseView) -> bool:
    """Create the next generation of a lease, so that its owner cannot renew it; return whether that succeeded."""
    if lease.is_exhausted:
        return False
    fields = {
        "kind": "lease",
        "lease": lease.lease_id,
        "state": "fenced",
        "write_id": new_write_id(),
        "purpose": lease.purpose,
        # Kept, because only on its own host does the lock show whether the owner is dead.
        "host": lease.host,
        "pid": 0,
        "time": store.clock(),
    }
    stem, generation = lease_stem(lease.lease_id), lease.generations[-1] + 1
    try:
        create_generation(store, stem, generation, fields)
    except ObjectExists:
        return False  # it was renewed or released at the same time: the caller reads it again
    if list_generations(store, stem) == [generation]:
        # It was released and deleted at the same time: our fence is alone, and would look like that of a fenced save.
        store.delete(generation_key(stem, generation))
    return True


def sweep(store: ObjectStore, mark: Mark, live: Live) -> list[str]:
    """Delete marked files that are not needed; return their keys.

    The mark is deleted only when none of its files exists any more. While it exists, no new save relies on them, so
    another collector that sweeps the same mark cannot delete a file in use.
    """
    present = store.stat_many(mark.keys)
    deleted = [key for key in mark.keys if key in present and key not in live.needs]
    store.delete_many(deleted)
    if not store.stat_many(mark.keys):
        remove_mark(store, mark)
    return deleted


def is_mark_present(store: ObjectStore, mark: Mark) -> bool:
    """Return whether a mark still exists."""
    return is_present(store, generation_key(mark.stem, 0))


def remove_mark(store: ObjectStore, mark: Mark) -> None:
    """Delete a mark; call it only if none of its files exists, or with the exclusive lock."""
    # The list of leases first: without it a mark only waits again, but a list without its mark is useless.
    for generation in (1, 0):
        store.delete(generation_key(mark.stem, generation))


def read_idle_marks(store: ObjectStore, live: Live) -> list[str]:
    """Return the stems of marks with nothing to delete: all of their remaining files are needed again."""
    idle = []
    for mark in iter_marks(store):
        left = store.stat_many(mark.keys)
        if left and all(key in live.needs for key in left):
            idle.append(mark.stem)
    return idle


STALE_LISTING_S: Final = 120.0
"""Where listings may be stale, as on a network filesystem, they are so for at most this long."""
MIN_AGE_S: Final = 3600.0
_POLL_S: Final = 0.05
_UNLOCKED_AFTER_S: Final = 5.0
"""No save gives up waiting for the lock within this time: half of what `objects.local.lock.LockWait` allows."""


@dataclass(frozen=True, slots=True)
class Rules:
    """When a collection acts; its safety does not depend on them."""

    min_age_s: float = MIN_AGE_S
    """Younger files are kept, unless it is certain that no process is writing."""
    grace_s: float = 0.0
    """Time between mark and sweep; at least 120 s where listings may be stale, as on a network filesystem."""
    expire_s: float = EXPIRE_S
    """A lease that was not renewed for so long is fenced."""
    wait_s: float = 0.0
    """How long to wait for running saves before the rest is left to the next collection."""
    sleep: Callable[[float], None] = time.sleep


@dataclass(frozen=True, slots=True)
class CollectPlan:
    """The files and records that can be deleted."""

    dead: tuple[ObjectInfo, ...]
    """Packs and manifests."""
    records: tuple[DeadRecords, ...]
    live_bytes: int
    """Bytes of the packs and manifests that are kept."""

    @property
    def dead_bytes(self) -> int:
        """Bytes that sweeping will free."""
        return sum(info.size_bytes for info in self.dead)


@dataclass(slots=True)
class Collected:
    """What a collection did, and what it left for the next one."""

    deleted: int = 0
    freed_bytes: int = 0
    records: int = 0
    leases: int = 0
    debris: int = 0
    pending_marks: int = 0
    pending_bytes: int = 0
    waiting_for: list[str] = field(default_factory=list)
    """Why pending marks were not swept: running saves, or the grace time."""
    unfenced: list[str] = field(default_factory=list)
    """Keys of stale leases that cannot be fenced, their numbers being exhausted; files they may use are kept."""

    def __repr__(self) -> str:
        """Show how much was deleted, and how much is left for the next collection."""
        pending = f", {format_bytes(self.pending_bytes)} pending" if self.pending_marks else ""
        return f"<Collected {count(self.deleted, 'file')}, {format_bytes(self.freed_bytes)} freed{pending}>"


def verify_may_collect(store: ObjectStore, *, store_id: str = "") -> None:
    """Raise unless this version supports everything in the store, no link hides a part, and its id is `store_id`."""
    config = read_config(store)
    if store_id:
        StoreIdentity(store_id).verify(config, url=store.url)
    if config is None:
        if not read_first_other(store):
            raise NotAStore(f"{store.url} is not a store yet: the first save creates it; nothing was collected")
        # A writer creates the config before anything else: perhaps the store was made since it was read.
        config = read_config(store)
    if config is None:
        raise Corrupt(f"{store.url} has no config; nothing is collected", key="config/")
    config.verify_may("collect", url=store.url)
    # A link whose name is no key is in no listing.
    link = next(filter(is_key, store.iter_links()), None)
    if link:
        raise Corrupt(
            f"{store.url} contains the symbolic link {link}, which is not followed; nothing is collected, because its"
            " target may be needed: replace the link by its target, or remove it",
            key=link,
        )
    unknown = read_unknown_prefix(store)
    if unknown:
        raise NewerFormat(
            f"{store.url} contains {unknown!r}, which this Holdfast does not know; nothing is collected: upgrade"
        )


def plan_collect(store: ObjectStore, *, min_age_s: float = MIN_AGE_S) -> CollectPlan:
    """Find files that are dead: not needed, older than `min_age_s`, and not of a running save. Reads only."""
    files = [info for objects in store.list_together((MANIFESTS, PACKS)) for info in objects]
    # Files before leases: the lease of every file seen was there before it.
    leases = read_leases(store)
    live = read_live(store)
    oldest_s = store.clock() - min_age_s
    dead = tuple(info for info in files if _is_dead(info, live, leases, oldest_s))
    live_bytes = sum(info.size_bytes for info in files) - sum(info.size_bytes for info in dead)
    return CollectPlan(dead, tuple(live.dead_records), live_bytes)


def _is_dead(info: ObjectInfo, live: Live, leases: dict[str, LeaseView], oldest_s: float) -> bool:
    file_id = parse_file_key(info.key)
    if file_id is None:
        return False  # not a file of Holdfast
    lease = leases.get(file_id.partition("-")[0])
    is_ended = not (lease and lease.is_live)
    return is_ended and info.key not in live.needs and info.modified_s <= oldest_s


def collect(
    store: ObjectStore, rules: Rules | None = None, *, store_id: str = "", progress: Progress | None = None
) -> Collected:
    """Delete files that nothing needs; while others write, some may be left to the next collection.

    `progress` counts the bytes of the files that are deleted.

    Raises:
        Corrupt: a root cannot be read, or a symbolic link hides something; nothing was deleted.
        NewerFormat: the store contains something that this version does not know; nothing was deleted.
        StoreGone: a `store_id` was passed, and this is another store; nothing was deleted.
    """
    verify_may_collect(store, store_id=store_id)
    progress = progress or Silent()
    try:
        return _Collection(store, rules or Rules(), store_id, progress).run()
    finally:
        progress.end()


def _find_unlocked(leases: Iterable[LeaseView]) -> list[LeaseView]:
    """Return live leases of saves without this host's lock.

    These are saves on other hosts, and saves here that continued without the lock because a collector kept it for too
    long.
    """
    here = socket.gethostname()
    return [lease for lease in leases if lease.is_live and lease.host != here]


class _Collection:
    """One run of a collector."""

    def __init__(self, store: ObjectStore, rules: Rules, store_id: str, progress: Progress) -> None:
        self._progress = progress
        self._store = store
        self._rules = rules
        self._store_id = store_id
        self._outcome = Collected()
        self._swept: list[Mark] = []

    def run(self) -> Collected:
        self._store.learn_clock()  # before any age is computed: a wrong clock would fence the leases of live saves
        is_exclusive = self._clear_if_exclusive()
        # Before the plan: the files of a dead save are kept as long as its lease seems live.
        self._fence_expired()
        plan = plan_collect(self._store, min_age_s=0.0 if is_exclusive else self._rules.min_age_s)
        self._progress.begin("gc", plan.dead_bytes)
        marks = list(iter_marks(self._store))
        marked = {key for mark in marks for key in mark.keys}
        fresh = [info for info in plan.dead if info.key not in marked]
        if fresh:
            publish_marks(self._store, fresh)
        for mark in list(iter_marks(self._store)):
            self._sweep_when_ready(mark)
        self._remove_idle_marks()
        self._remove_records(plan)
        self._remove_leases()
        self._remove_broken_marks(is_exclusive=False)
        self._tidy()
        return self._outcome

    def _clear_if_exclusive(self) -> bool:
        """Delete leftovers of dead writers if it is certain that no process writes; return whether it is."""
        began_s = time.monotonic()  # not a clock that can be set back: the lock would seem to be younger
        with self._store.hold(exclusive=True) as is_locked:
            leases = read_leases(self._store) if is_locked else {}
            if not is_locked or _find_unlocked(leases.values()):
                return False
            # A save continues without the lock only after a longer wait than this. Younger files may belong to one.
            older_than_s = time.monotonic() - began_s - _UNLOCKED_AFTER_S
            self._outcome.debris += self._store.remove_debris(older_than_s=older_than_s)
            self._remove_broken_marks(is_exclusive=True)
            # Saves wait for this lock, so roots are read only if needed: if a fenced save committed and then died, its
            # fence must be kept, because only the fence explains a record whose files may be missing.
            has_fenced = any(lease.state == "fenced" for lease in leases.values())
            explained = read_live(self._store).committed_under if has_fenced else set()
            # A fenced save on another host may only be suspended; without its fence it would renew its lease.
            here = socket.gethostname()
            dead = {lease.lease_id for lease in leases.values() if lease.host == here} - explained
            ended = [each for each in leases.values() if each.state != "fenced" or each.lease_id in dead]
            self._delete_leases(ended)
            return True

    def _remove_broken_marks(self, *, is_exclusive: bool) -> None:
        """Delete torn marks; damaged ones, for which writers treat every file as marked, only if exclusive."""
        stems = list(iter_stems(self._store, MARKS))
        listed = {generation_key(stem, each): 0 in generations for stem, generations in stems for each in generations}
        for (key, has_first), record in zip(listed.items(), iter_records(self._store, listed), strict=True):
            try:
                is_broken = record.take_fields() is None
            except NotFound:
                continue
            except Corrupt:
                is_broken = is_exclusive
            # A list of leases without its mark: another collector swept the mark while the list was being written.
            if is_broken or not has_first:
                self._store.delete(key)
                self._outcome.debris += 1

    def _fence_expired(self) -> None:
        for lease in read_leases(self._store).values():
            if not lease.is_live or self._store.clock() - lease.renewed_s < self._rules.expire_s:
                continue
            if lease.is_exhausted:
                self._outcome.unfenced.append(generation_key(lease_stem(lease.lease_id), lease.generations[-1]))
            else:
                fence(self._store, lease)

    def _sweep_when_ready(self, mark: Mark) -> None:
        sizes = self._read_sizes(mark)
        reason = self._wait(mark)
        if reason:
            self._leave_pending(sizes, reason)
            return
        # A collector with the exclusive lock may delete a mark, and must not while we rely on this one. So unlike a
        # save, a sweep never continues without the lock.
        with self._store.hold(exclusive=False) as is_locked:
            if not is_locked:
                self._leave_pending(sizes, "another collection, which holds the lock")
                return
            if not is_mark_present(self._store, mark):
                return
            verify_may_collect(self._store, store_id=self._store_id)
            deleted = sweep(self._store, mark, read_live(self._store))
        self._swept.append(mark)
        self._outcome.deleted += len(deleted)
        freed_bytes = sum(sizes.get(key, 0) for key in deleted)
        self._outcome.freed_bytes += freed_bytes
        self._progress.advance(freed_bytes)

    def _leave_pending(self, sizes: Mapping[str, int], reason: str) -> None:
        self._outcome.pending_marks += 1
        self._outcome.pending_bytes += sum(sizes.values())
        self._outcome.waiting_for.append(reason)

    def _remove_idle_marks(self) -> None:
        """Delete swept marks whose remaining files are needed again; only with the exclusive lock.

        While another collector runs, a mark must be kept: that one may have read other roots and be about to delete.
        """
        remaining = [mark for mark in self._swept if is_mark_present(self._store, mark)]
        if not remaining:
            return
        with self._store.hold(exclusive=True) as is_locked:
            if is_locked and not _find_unlocked(read_leases(self._store).values()):
                for mark in remaining:
                    remove_mark(self._store, mark)

    def _read_sizes(self, mark: Mark) -> dict[str, int]:
        return {key: info.size_bytes for key, info in self._store.stat_many(mark.keys).items()}

    def _wait(self, mark: Mark) -> str:
        """Wait until no save can rely on the marked files; return what blocks it if that takes too long."""
        waiting = read_waiting(self._store, mark.stem)
        deadline_s = self._store.clock() + self._rules.wait_s
        slept_s = 0.0
        while True:
            reason = self._find_reason(mark, waiting, slept_s)
            # The store's clock may be set back by hours during the wait, so the time slept counts as well.
            if not reason or self._store.clock() >= deadline_s or slept_s >= self._rules.wait_s:
                return reason
            self._rules.sleep(_POLL_S)
            slept_s += _POLL_S

    def _find_reason(self, mark: Mark, waiting: frozenset[str], slept_s: float) -> str:
        # If no process writes at this moment, every save from before the mark has ended, whatever its lease says.
        with self._store.hold(exclusive=True) as is_locked:
            if is_locked and not _find_unlocked(read_leases(self._store).values()):
                return ""
        blockers = fence_stale_leases(self._store, waiting, expire_s=self._rules.expire_s)
        if blockers:
            return f"{len(blockers)} under way: {blockers[0].purpose or blockers[0].lease_id}"
        grace_s = max(self._rules.grace_s, STALE_LISTING_S if self._store.traits.stale_listings else 0.0)
        # A mark from the future comes from a clock that was ahead of ours. Then the time that we slept counts.
        left_s = grace_s - max(self._store.clock() - mark.published_s, slept_s)
        return f"{left_s:.0f} s of grace" if left_s > 0 else ""

    def _remove_records(self, plan: CollectPlan) -> None:
        """Delete dead records, the lowest generation of each name first."""
        deepest = max((len(dead.generations) for dead in plan.records), default=0)
        for position in range(deepest):
            # Of each name one at a time: while a record exists, so do the dead ones above it (see design note 0024).
            deep = (dead for dead in plan.records if position < len(dead.generations))
            keys = [generation_key(dead.stem, dead.generations[position]) for dead in deep]
            self._store.delete_many(keys)
            self._outcome.records += len(keys)

    def _remove_leases(self) -> None:
        """Delete the files of released leases; those of fenced ones must be kept (see `roots.read_lease_state`)."""
        self._delete_leases([lease for lease in read_leases(self._store).values() if lease.state == "released"])

    def _delete_leases(self, leases: Sequence[LeaseView]) -> None:
        """Delete the files of leases, the highest generation of each last, so that none seems alive again."""
        files = [[generation_key(lease_stem(each.lease_id), number) for number in each.generations] for each in leases]
        self._store.delete_many([key for keys in files for key in keys[:-1]])
        self._store.delete_many([keys[-1] for keys in files])
        self._outcome.leases += len(leases)

    def _tidy(self) -> None:
        """Delete old temporary files, and drop deleted packs from the index and the list of bad packs."""
        self._outcome.debris += self._store.remove_debris(older_than_s=max(self._rules.min_age_s, EXPIRE_S))
        # Packs are listed last: a pack that is sealed after an earlier listing would be missing from it, and its
        # index fragment would be dropped.
        fragments, bad = self._store.list_together((INDEX, BAD))
        present = {info.key.removeprefix(PACKS) for info in self._store.iter_objects(PACKS)}
        drop_missing(self._store, fragments, present)
        gone = [info.key for info in bad if info.key.removeprefix(BAD).partition("@")[0] not in present]
        self._store.delete_many(gone)
