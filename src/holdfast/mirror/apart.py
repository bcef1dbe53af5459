"""Uploads in a child process, so that training keeps its interpreter lock: both ends of the pipe."""

from __future__ import annotations

import json
import sys
from typing import Any

from holdfast.errors import StoreError
from holdfast.low_priority import ChildJob, ProgressAnswers, answer, write_answer
from holdfast.mirror.plan import MirrorPlan
from holdfast.mirror.report import UploadNews
from holdfast.mirror.setting import MirrorSetting
from holdfast.mirror.upload import UploadJob, upload_all
from holdfast.objects.local.local_store import LocalStore
from holdfast.objects.storage_options import StorageOptions
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
