"""Uploads behind a store, in a child process: starts after a commit, ends when the mirror has everything."""

from __future__ import annotations

import json
import logging
import sys
import threading
import weakref
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from time import monotonic
from typing import Any, Final

from holdfast.errors import HoldfastError, StoreError
from holdfast.low_priority import ChildJob, ProgressAnswers, answer, lower_priority, write_answer
from holdfast.mirror.plan import MirrorPlan, is_mirrored
from holdfast.mirror.setting import MirrorSetting, record_mirror
from holdfast.mirror.upload import UploadJob, UploadNews, upload_all
from holdfast.objects.at_exit import before_exit
from holdfast.objects.local.local_store import LocalStore
from holdfast.objects.storage_options import StorageOptions
from holdfast.objects.thread_pool import BackgroundThread
from holdfast.objects.url import open_store
from holdfast.repo.handle.repository import Repository, open_repository
from holdfast.repo.names.snapshots import CommittedSnapshot


def can_upload_apart(repo: Repository, setting: MirrorSetting) -> bool:
    """Return whether another process can open both stores in the same way."""
    is_shared = isinstance(repo.store, LocalStore) and not setting.url.startswith("memory:")
    return is_shared and bool(sys.executable) and _is_json(dict(setting.options))


def _is_json(options: object) -> bool:
    try:
        json.dumps(options)
    except (TypeError, ValueError):
        return False
    return True


def make_upload_job(repo: Repository, setting: MirrorSetting, news: UploadNews) -> ChildJob:
    """Return the job to upload what is not in `news.known`. If it is stopped, the next one finds what was sent."""
    job = {
        "url": repo.store.url,
        "store_id": repo.identity.store_id,
        "budget_bytes": repo.budget_bytes,
        "mirror": [setting.url, setting.wait, dict(setting.options), setting.scope],
        "known": [list(each) for each in news.known],
        "known_in": news.store_id,
    }
    # Ctrl-C in the terminal is for the training, which may save before it ends.
    return ChildJob(__name__, job, has_own_session=True)


def upload_apart(child: ChildJob, news: UploadNews) -> None:
    """Run the job of `make_upload_job` until it has ended; raises StoreError with the text of the child's error."""
    last: dict[str, Any] = {}
    for last in child.iter_answers():
        news.read_line(last)
    if child.is_stopped:
        return
    if "error" in last:
        raise StoreError(last["error"])
    if "end" not in last:
        raise StoreError(
            f"the process that uploaded to {news.url} ended with code {child.code}; the next upload goes on"
        )


class _UploadAnswers:
    """Sends to the parent what `UploadNews` notes."""

    def __init__(self) -> None:
        self._progress = ProgressAnswers()

    def begin(self, task: str, total_bytes: int) -> None:
        self._progress.begin(task, total_bytes)

    def advance(self, num_bytes: int) -> None:
        self._progress.advance(num_bytes)

    def end(self) -> None:
        self._progress.end()

    def opened(self, store_id: str) -> None:
        write_answer({"store": store_id})

    def planned(self, plan: MirrorPlan) -> None:
        write_answer(
            {
                "present": [[each.name, each.write_id] for each in plan.present],
                "waiting": [[each.name, each.logical_bytes] for each in plan.waiting],
                "refused": [[each.snapshot.name, each.reason] for each in plan.refused],
            }
        )

    def copied(self, snapshot: CommittedSnapshot, sent_bytes: int) -> None:
        write_answer({"copied": [snapshot.name, snapshot.write_id], "sent": sent_bytes})

    def failed(self, snapshot: CommittedSnapshot, error: Exception) -> None:
        write_answer({"failed": snapshot.name, "reason": str(error)})


def serve(job: dict[str, Any]) -> None:
    """Carry out a job; the child ends here."""
    answer(lambda: _upload(job))


def _upload(job: dict[str, Any]) -> dict[str, Any]:
    budget_bytes, (url, wait, options, scope) = job["budget_bytes"], job["mirror"]
    setting = MirrorSetting(url, wait, StorageOptions(options), scope)
    source = open_repository(
        open_store(job["url"], read_only=True), budget_bytes=budget_bytes, store_id=job["store_id"]
    )
    known = frozenset((name, write_id) for name, write_id in job["known"])
    target = setting.open(budget_bytes)
    upload_all(UploadJob(source, target, setting.scope, known, job["known_in"]), _UploadAnswers())
    return {"end": True}


_log = logging.getLogger(__name__)

_STOP_S: Final = 60.0
"""How long to wait for an upload that was told to stop; one in a thread ends its snapshot first."""


class UploadWorker:
    """Runs one upload at a time in the background. Safe in any thread."""

    def __init__(self, repo: Repository, setting: MirrorSetting) -> None:
        """Upload from `repo` once `note_commit` is called; nothing is opened yet."""
        self.news = UploadNews(setting.url)
        self._repo = repo
        self.setting = setting
        """How this process opens the mirror."""
        self._lock = threading.Lock()
        self._thread: BackgroundThread | None = None
        self._child: ChildJob | None = None
        self._wanted = self._done = 0
        """How many uploads were asked for, and the number of the last one that an upload has covered."""
        self._is_stopped = False
        self._is_awaited = False
        self._is_reported = False

    @property
    def is_idle(self) -> bool:
        """Whether no upload was asked for that has not succeeded."""
        return self._wanted == self._done

    def note_commit(self, snapshot: CommittedSnapshot) -> None:
        """Start to upload a snapshot that was committed just now; never raises, because the save has succeeded."""
        if self._is_stopped or not is_mirrored(snapshot, self.setting.url, self.setting.scope):
            return
        self.news.add_waiting(snapshot)
        try:
            self.start()
        except (RuntimeError, MemoryError) as error:
            self._report(f"no thread could be started: {error}")

    def note_lacking(self, snapshots: Iterable[CommittedSnapshot]) -> None:
        """Compare all names again if the mirror has lost snapshots that it is known to have had, and upload them."""
        known = self.news.known
        lost = [each for each in snapshots if (each.name, each.write_id) in known]
        if lost:
            # Nothing that is known is relied on: an upload that runs now still does, so another one follows it.
            self.news.add_doubts(1)
        for snapshot in lost:
            self.note_commit(snapshot)

    def start(self) -> None:
        """Start an upload, or let the one that runs look again when it has ended."""
        self._await_at_exit()
        with self._lock:
            self._wanted += 1
            if self._thread is None or not self._thread.is_alive():
                self._thread = BackgroundThread(self._run, "holdfast-mirror")
                self._thread.start()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the running upload has ended; return False if it runs longer than the time allows."""
        deadline_s = None if timeout_s is None else monotonic() + timeout_s
        while (thread := self._thread) is not None and thread.is_alive():
            left_s = None if deadline_s is None else deadline_s - monotonic()
            if left_s is not None and left_s <= 0:
                return False
            thread.join(left_s)
        return True

    def stop(self) -> None:
        """End the running upload; the next one goes on where it was."""
        self._is_stopped = True
        with self._lock:
            child = self._child
        if child is not None:
            child.stop()
        self.wait(_STOP_S)

    def finish(self) -> None:
        """Wait for the uploads as the user has chosen, and report what is left."""
        if self._is_stopped:
            return
        wait = self.setting.wait
        if wait is not False:
            self._retry_once()
            self.wait(None if wait is True else float(wait))
        self.stop()
        left = self.news.read()
        if wait is not False and left.waiting:
            why = left.last_error or "the time was up"
            count = len(left.waiting)
            _log.warning(
                "%s: %d snapshots were not uploaded to %s (%s); the next process that saves with this mirror uploads"
                " them, and so does `holdfast -s %s mirror --yes`",
                *(self._repo.store.url, count, self.setting.url, why, self._repo.store.url),
            )

    def _retry_once(self) -> None:
        if not self.is_idle and self.wait(0):
            with suppress(RuntimeError, MemoryError):
                self.start()

    def _run(self) -> None:
        lower_priority()
        while not self._is_ended():
            wanted = self._wanted
            try:
                self._upload()
            except Exception as error:  # noqa: BLE001  # of any kind: an error of the mirror must not reach the training
                self._report(str(error) or type(error).__name__)
                return
            if self._is_ended():
                return
            with self._lock:
                self._done, self._is_reported = wanted, False
                if self._wanted == wanted:
                    self.news.forget_fresh()
                    # A thread that begins after this reads what is committed later.
                    self._thread = None
                    return

    def _is_ended(self) -> bool:
        return self._is_stopped

    def _upload(self) -> None:
        self.news.last_error = ""
        # First, so that other processes prune nothing that the mirror lacks, even if it cannot be reached.
        self._record()
        before, doubts = self.news.store_id, self.news.doubts
        try:
            self._upload_once()
            self.news.add_doubts(-doubts)
        finally:
            if self.news.store_id != before:
                self._record()
        if before and self.news.store_id != before:
            _log.warning(
                "%s: another store is at %s now (%s, and not %s), so all snapshots were uploaded there again",
                *(self._repo.store.url, self.setting.url, self.news.store_id, before),
            )

    def _record(self) -> None:
        setting, store_id = self.setting, self.news.store_id
        record_mirror(self._repo, setting.url, setting.scope, store_id=store_id, options=setting.option_names)

    def _upload_once(self) -> None:
        if can_upload_apart(self._repo, self.setting):
            self._upload_apart()
            return
        # Opened each time, as a process does: another store may be there now.
        target, news = self.setting.open(self._repo.budget_bytes), self.news
        job = UploadJob(self._repo, target, self.setting.scope, news.known, news.store_id, self._is_ended)
        upload_all(job, news)

    def _upload_apart(self) -> None:
        child = make_upload_job(self._repo, self.setting, self.news)
        with self._lock:
            self._child = child
        if not self._is_stopped:
            upload_apart(child, self.news)

    def _report(self, error: str) -> None:
        """Log an error once, until an upload has succeeded; the state has it as well."""
        self.news.last_error = error
        self.news.end()
        if not self._is_reported:
            self._is_reported = True
            _log.warning(
                "%s: snapshots are saved, but not uploaded to %s: %s. The next save tries again;"
                " `holdfast -s %s mirror` shows what is waiting",
                *(self._repo.store.url, self.setting.url, error, self._repo.store.url),
            )

    def _await_at_exit(self) -> None:
        if not self._is_awaited:
            before_exit(partial(_finish, weakref.ref(self)), stage="uploads")
            self._is_awaited = True


def _finish(worker: weakref.ref[UploadWorker]) -> None:
    found = worker()
    if found is not None:
        with suppress(HoldfastError):
            found.finish()
