"""Uploads what a mirror lacks: whose turn it is, one pass that can be repeated, and what is known while it runs."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Protocol

from holdfast.compile_cache.artifacts.catalog import ARTIFACTS
from holdfast.compile_cache.artifacts.storing import copy_artifact
from holdfast.digest import hash_bytes
from holdfast.display.markup import readable_repr
from holdfast.errors import Corrupt, NameInUse, NewerFormat, NotFound
from holdfast.mirror.plan import KnownCopies, MirrorPlan, compare_stores
from holdfast.mirror.setting import MirrorScope
from holdfast.objects.local.files import PosixFiles
from holdfast.objects.local.local_store import LocalStore
from holdfast.objects.protocol import ObjectStore
from holdfast.progress import Progress, Silent
from holdfast.repo.handle.repository import Repository
from holdfast.repo.names.snapshots import CommittedSnapshot, set_tag
from holdfast.repo.upkeep.transfer import copy_snapshot


@dataclass(frozen=True, slots=True)
class MirrorState:
    """What a mirror has, and what is waiting to be uploaded."""

    url: str
    present: int
    """How many snapshots of the store the mirror has, as far as they were looked up."""
    waiting: tuple[str, ...]
    """The names of the snapshots that the mirror lacks, in the order of the uploads."""
    waiting_bytes: int
    """Their size; chunks that the mirror already has are not sent."""
    refused: Mapping[str, str]
    """Snapshots that will not be uploaded, and why: the mirror has later content, or they were deleted there."""
    uploading: str = ""
    """What is being uploaded at this moment; empty if nothing is."""
    done_bytes: int = 0
    total_bytes: int = 0
    sent_bytes: int = 0
    """Bytes of chunks that this process has sent."""
    last_error: str = ""
    """Why the last upload failed; empty if it has succeeded."""

    __repr__ = readable_repr

    @property
    def is_complete(self) -> bool:
        """Whether the mirror has everything that it is meant to have."""
        return not self.waiting


class UploadNews:
    """Collects the reports of uploads, from a thread of this process or a child. Safe in any thread."""

    def __init__(self, url: str, *, progress: Progress | None = None) -> None:
        """Know nothing about the mirror at `url` yet; `progress` receives the bytes of each snapshot as well."""
        self.url = url
        self._progress = progress or Silent()
        self._lock = threading.Lock()
        self._known: dict[str, str] = {}
        self._waiting: dict[str, int] = {}
        self._refused: dict[str, str] = {}
        self._fresh: dict[str, CommittedSnapshot] = {}
        """Committed since the last look at both stores."""
        self._task = ""
        self._done_bytes = self._total_bytes = self._sent_bytes = 0
        self.last_error = ""
        """Why the last upload failed; empty if it has succeeded."""
        self.store_id = ""
        """The id of the store that the last upload found or created there: what is known, is known of that one."""
        self._doubts = 0

    @property
    def known(self) -> frozenset[tuple[str, str]]:
        """Name and write id of the local snapshots that the mirror has; empty while that is in doubt."""
        with self._lock:
            return frozenset() if self._doubts else frozenset(self._known.items())

    @property
    def doubts(self) -> int:
        """How often the mirror was found to have lost something since an upload last compared all names."""
        return self._doubts

    def add_doubts(self, count: int) -> None:
        """Add a doubt, or subtract those from before an upload that has compared all names."""
        with self._lock:
            self._doubts += count

    def read(self) -> MirrorState:
        """Return the state as far as it is known; asks neither store."""
        with self._lock:
            waiting = self._waiting | {name: each.logical_bytes for name, each in self._fresh.items()}
            return MirrorState(
                self.url,
                len(self._known),
                tuple(waiting),
                sum(waiting.values()),
                dict(self._refused),
                self._task,
                self._done_bytes,
                self._total_bytes,
                self._sent_bytes,
                self.last_error,
            )

    def add_waiting(self, snapshot: CommittedSnapshot) -> None:
        """Note a snapshot that was committed just now."""
        with self._lock:
            self._known.pop(snapshot.name, None)
            self._fresh[snapshot.name] = snapshot

    def forget_fresh(self) -> None:
        """Note that an upload has ended that began after the last commit: what it did not list is gone."""
        with self._lock:
            self._fresh.clear()

    def begin(self, task: str, total_bytes: int) -> None:
        """Note which snapshot is being sent."""
        self._task, self._done_bytes, self._total_bytes = task, 0, total_bytes
        self._progress.begin(task, total_bytes)

    def advance(self, num_bytes: int) -> None:
        """Count bytes as done."""
        self._done_bytes += num_bytes
        self._progress.advance(num_bytes)

    def end(self) -> None:
        """Note that nothing is being sent."""
        self._task = ""
        self._progress.end()

    def opened(self, store_id: str) -> None:
        """Note which store is there."""
        self.store_id = store_id

    def planned(self, plan: MirrorPlan) -> None:
        """Note what the mirror has, and what is waiting."""
        self._note_plan(
            {each.name: each.write_id for each in plan.present},
            {each.name: each.logical_bytes for each in plan.waiting},
            {each.snapshot.name: each.reason for each in plan.refused},
        )

    def copied(self, snapshot: CommittedSnapshot, sent_bytes: int) -> None:
        """Note that the mirror has a snapshot now."""
        self._note_copied(snapshot.name, snapshot.write_id, sent_bytes)

    def failed(self, snapshot: CommittedSnapshot, error: Exception) -> None:
        """Note that a snapshot could not be uploaded."""
        self.last_error = f"{snapshot.name}: {error}"

    def read_line(self, line: dict[str, Any]) -> None:
        """Note one line of the child, which has the same facts as the calls above."""
        if "waiting" in line:
            self._note_plan(dict(line["present"]), dict(line["waiting"]), dict(line["refused"]))
        elif "copied" in line:
            name, write_id = line["copied"]
            self._note_copied(name, write_id, line["sent"])
        elif "store" in line:
            self.opened(line["store"])
        elif "failed" in line:
            self.last_error = f"{line['failed']}: {line['reason']}"
        elif "total" in line:
            self.begin(line["task"], line["total"])
        elif "done" in line:
            self._done_bytes = line["done"]

    def _note_plan(self, present: dict[str, str], waiting: dict[str, int], refused: dict[str, str]) -> None:
        with self._lock:
            self._known, self._waiting, self._refused = present, waiting, refused
            listed = {*waiting, *refused}
            self._fresh = {
                name: each
                for name, each in self._fresh.items()
                if name not in listed and present.get(name) != each.write_id
            }

    def _note_copied(self, name: str, write_id: str, sent_bytes: int) -> None:
        with self._lock:
            self._known[name] = write_id
            self._waiting.pop(name, None)
            if name in self._fresh and self._fresh[name].write_id == write_id:
                del self._fresh[name]
            self._sent_bytes += sent_bytes
            self._task = ""


_POLL_S: Final = 0.2
_NOTE_BYTES: Final = 4096
_ERROR_CHARACTERS: Final = 1000


@dataclass(frozen=True, slots=True)
class UploadNote:
    """What the last uploader left: which process it was, and the error that ended it, if there was one."""

    host: str = ""
    pid: int = 0
    time_s: float = 0.0
    error: str = ""


class UploadTurn:
    """The right to upload to one mirror. Only a local store has one: without it, two uploaders may send chunks twice.

    That is harmless, because both commit the same content, and the second finds it there.
    """

    def __init__(self, store: ObjectStore, url: str) -> None:
        """Use two files in the directory of `store`; their names begin with a dot, so they are no objects of it."""
        self._path = ""
        if isinstance(store, LocalStore):
            self._path = os.path.join(os.path.abspath(store.url), f".mirror-{hash_bytes(url.encode()).hex()[:16]}")
            self._files = PosixFiles(os.path.dirname(self._path))

    @property
    def _note_path(self) -> str:
        # Not the lock file: to release the lock is to empty that.
        return f"{self._path}.note"

    @contextmanager
    def hold(self, *, is_stopped: Callable[[], bool] = lambda: False) -> Iterator[bool]:
        """Wait until no other process uploads; yields False if `is_stopped` returned True before."""
        handle = None
        while self._path:
            try:
                handle = self._files.lock(self._path, exclusive=True)
            except OSError:
                break  # a filesystem without locks, or one that cannot be written to
            if handle is not None or is_stopped():
                break
            time.sleep(_POLL_S)
        try:
            yield not is_stopped()
        finally:
            if handle is not None:
                self._files.unlock(handle)

    def is_held(self) -> bool:
        """Return whether a process is uploading at this moment."""
        if not self._path or not os.path.exists(self._path):
            return False
        with suppress(OSError):
            handle = self._files.lock(self._path, exclusive=True)
            if handle is None:
                return True
            self._files.unlock(handle)
        return False

    def write_note(self, error: str) -> None:
        """Keep the error of this uploader for `holdfast mirror`, or note that it had none."""
        if not self._path:
            return
        note = UploadNote(socket.gethostname(), os.getpid(), time.time(), error[:_ERROR_CHARACTERS])
        data = json.dumps(asdict(note)).encode()[:_NOTE_BYTES].ljust(_NOTE_BYTES)
        with suppress(OSError):  # a full disk: the state of the mirror does not depend on the note
            handle = os.open(self._note_path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
            try:
                os.pwrite(handle, data, 0)
            finally:
                os.close(handle)

    def read_note(self) -> UploadNote:
        """Return what the last uploader left; an empty note if there is none."""
        with suppress(OSError, ValueError, TypeError):
            handle = os.open(self._note_path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
            try:
                return UploadNote(**json.loads(os.pread(handle, _NOTE_BYTES, 0)))
            finally:
                os.close(handle)
        return UploadNote()


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
