"""Uploads what a mirror lacks: one pass over both stores, which any process can repeat after a crash."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from holdfast.compile_cache.artifacts.catalog import ARTIFACTS
from holdfast.compile_cache.artifacts.storing import copy_artifact
from holdfast.errors import Corrupt, NameInUse, NewerFormat, NotFound
from holdfast.mirror.compare import KnownCopies, compare_stores
from holdfast.mirror.plan import MirrorPlan
from holdfast.mirror.recorded import MirrorScope
from holdfast.mirror.turn import UploadTurn
from holdfast.progress import Progress
from holdfast.repo.handle.repository import Repository
from holdfast.repo.names.snapshots import CommittedSnapshot
from holdfast.repo.names.tags import set_tag
from holdfast.repo.upkeep.transfer import copy_snapshot


class UploadReport(Progress, Protocol):
    """Receives what happens during an upload, and the bytes of each snapshot as progress."""

    def opened(self, store_id: str) -> None:
        """Note which store is there, by its id."""

    def planned(self, plan: MirrorPlan) -> None:
        """Note what the mirror has, and what is waiting."""

    def copied(self, snapshot: CommittedSnapshot, sent_bytes: int) -> None:
        """Note that the mirror has a snapshot now."""

    def failed(self, snapshot: CommittedSnapshot, error: Exception) -> None:
        """Note that one snapshot could not be uploaded; the others are."""


@dataclass(frozen=True, slots=True)
class UploadJob:
    """An upload from one store to another."""

    source: Repository
    target: Repository
    scope: MirrorScope = "all"
    known: KnownCopies = frozenset()
    known_in: str = ""
    """The id of the store that `known` is about; if another store is there now, nothing is known of it."""
    is_stopped: Callable[[], bool] = field(default=lambda: False)


def upload_all(job: UploadJob, report: UploadReport) -> None:
    """Upload until the mirror has everything; raises the error of a store that cannot be used.

    A snapshot that is damaged in the source is reported and skipped. Waits while another process uploads.
    """
    turn = UploadTurn(job.source.store, job.target.store.url)
    with turn.hold(is_stopped=job.is_stopped) as is_mine:
        if not is_mine:
            return
        try:
            error = _upload_until_complete(job, report)
        except Exception as failure:
            turn.write_note(str(failure))
            raise
        finally:
            # Known when it was opened, or when the first snapshot was copied.
            if job.target.identity.store_id:
                report.opened(job.target.identity.store_id)
        turn.write_note(error)


def _upload_until_complete(job: UploadJob, report: UploadReport) -> str:
    """Upload, and look again for what was saved meanwhile; return the last error of a single snapshot."""
    is_known = job.target.identity.store_id == job.known_in
    known, skipped, error = set(job.known if is_known else ()), set[str](), ""
    while not job.is_stopped():
        plan = compare_stores(job.source, job.target, scope=job.scope, known=frozenset(known))
        report.planned(plan)
        known |= {(each.name, each.write_id) for each in plan.present}
        waiting = [each for each in plan.waiting if each.write_id not in skipped]
        for snapshot in waiting:
            if job.is_stopped():
                return error
            skipped.add(snapshot.write_id)
            failure = _upload_one(job, snapshot, report)
            if failure is None:
                known.add((snapshot.name, snapshot.write_id))
            error = failure or error
        _set_tags(job, plan)
        if not waiting:
            break
    return error


def _upload_one(job: UploadJob, snapshot: CommittedSnapshot, report: UploadReport) -> str | None:
    """Copy one snapshot; return None, or why it was not copied: empty if it is gone from the source."""
    try:
        report.copied(snapshot, _copy(job, snapshot, report))
    except NotFound:
        return ""  # it was deleted or overwritten after it was listed: the next look shows what is left to do
    except (Corrupt, NameInUse, NewerFormat) as error:
        report.failed(snapshot, error)
        return str(error)
    return None


def _copy(job: UploadJob, snapshot: CommittedSnapshot, progress: Progress) -> int:
    if snapshot.name.startswith(ARTIFACTS):
        return copy_artifact(job.source, snapshot, job.target, progress=progress).new_bytes

    def is_older(current: CommittedSnapshot) -> bool:
        return current.time_s <= snapshot.time_s

    return copy_snapshot(job.source, snapshot, job.target, may_replace=is_older, progress=progress).new_bytes


def _set_tags(job: UploadJob, plan: MirrorPlan) -> None:
    """Set the tags whose snapshots the mirror has; the others follow with their snapshots."""
    present = {each.name: each for each in plan.present}
    for tag in plan.tags:
        snapshot = present.get(tag.snapshot_name)
        if snapshot is not None:
            set_tag(job.target.store, tag.name, snapshot, move=True, time_s=tag.time_s)
