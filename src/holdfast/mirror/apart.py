"""Uploads in a process of the lowest priority, so that training keeps its interpreter lock: both ends of the pipe.

The parent sends one job as JSON to standard input. The child answers with lines of JSON on standard output: what it
has planned and copied, its progress, and at the end its error, if there was one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from time import monotonic
from typing import IO, Any, Final

from holdfast.errors import StoreError
from holdfast.mirror.plan import MirrorPlan
from holdfast.mirror.report import UploadNews
from holdfast.mirror.setting import MirrorSetting
from holdfast.mirror.upload import UploadJob, upload_all
from holdfast.objects.local.local_store import LocalStore
from holdfast.objects.storage_options import StorageOptions
from holdfast.objects.url import open_store
from holdfast.repo.handle.repository import Repository, open_repository
from holdfast.repo.names.snapshots import CommittedSnapshot

_LOWEST_PRIORITY: Final = 19
_ANSWERS: Final = 1
"""The descriptor of the pipe to the parent."""
_REPORT_S: Final = 0.2
"""The child reports its progress this often."""
# The path of modules comes first: the parent may have changed its own.
_PROGRAM: Final = """
import json, sys
job = json.loads(sys.stdin.readline())
sys.path[:] = job["modules"]
from holdfast.mirror.apart import serve
serve(job)
"""


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


class UploadProcess:
    """One upload in a child process; `stop` may be called from any thread."""

    def __init__(self, repo: Repository, setting: MirrorSetting, news: UploadNews) -> None:
        """Prepare to upload what is not in `news.known`; nothing is started yet."""
        self._news = news
        self._url = setting.url
        self._job = {
            "modules": sys.path,
            "url": repo.store.url,
            "store_id": repo.identity.store_id,
            "budget_bytes": repo.budget_bytes,
            "mirror": [setting.url, setting.wait, dict(setting.options), setting.scope],
            "known": [list(each) for each in news.known],
            "known_in": news.store_id,
        }
        self._child: subprocess.Popen[bytes] | None = None
        self._is_stopped = False

    def run(self) -> None:
        """Upload, and return when the mirror has everything; raises StoreError with the text of the child's error."""
        # A session of its own: Ctrl-C in the terminal is for the training, which may save before it ends.
        with subprocess.Popen(
            [sys.executable, "-c", _PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        ) as child:
            self._child = child
            if self._is_stopped:
                child.kill()
            assert child.stdin is not None
            assert child.stdout is not None
            # If the child has ended, writing or closing fails; its last line or its code says why.
            with suppress(BrokenPipeError), child.stdin:
                child.stdin.write(json.dumps(self._job).encode() + b"\n")
            last = self._follow(child.stdout)
        if self._is_stopped:
            return
        if "error" in last:
            raise StoreError(last["error"])
        if "end" not in last:
            raise StoreError(
                f"the process that uploaded to {self._url} ended with code {child.returncode}; the next upload goes on"
            )

    def stop(self) -> None:
        """End the child. What it has sent is found by the next upload."""
        self._is_stopped = True
        if self._child is not None:
            self._child.kill()

    def _follow(self, lines: IO[bytes]) -> dict[str, Any]:
        last: dict[str, Any] = {}
        for line in lines:
            last = json.loads(line)
            self._news.read_line(last)
        return last


@dataclass
class _Lines:
    """Writes what happens as lines of JSON, the progress a few times each second."""

    write: Callable[[dict[str, Any]], None]
    done_bytes: int = 0
    reported_s: float = field(default_factory=monotonic)

    def begin(self, task: str, total_bytes: int) -> None:
        self.done_bytes = 0
        self.write({"task": task, "total": total_bytes})

    def advance(self, num_bytes: int) -> None:
        self.done_bytes += num_bytes
        if monotonic() - self.reported_s >= _REPORT_S:
            self.reported_s = monotonic()
            self.write({"done": self.done_bytes})

    def end(self) -> None:
        self.write({"done": self.done_bytes})

    def opened(self, store_id: str) -> None:
        self.write({"store": store_id})

    def planned(self, plan: MirrorPlan) -> None:
        self.write(
            {
                "present": [[each.name, each.write_id] for each in plan.present],
                "waiting": [[each.name, each.logical_bytes] for each in plan.waiting],
                "refused": [[each.snapshot.name, each.reason] for each in plan.refused],
            }
        )

    def copied(self, snapshot: CommittedSnapshot, sent_bytes: int) -> None:
        self.write({"copied": [snapshot.name, snapshot.write_id], "sent": sent_bytes})

    def failed(self, snapshot: CommittedSnapshot, error: Exception) -> None:
        self.write({"failed": snapshot.name, "reason": str(error)})


def serve(job: dict[str, Any]) -> None:
    """Carry out a job; the child ends here."""
    os.nice(_LOWEST_PRIORITY)
    try:
        _upload(job)
        _write({"end": True})
    except BrokenPipeError:
        return  # the parent has died; the next process uploads the rest
    except Exception as error:  # noqa: BLE001  # the parent raises it
        _write({"error": str(error) or type(error).__name__})


def _upload(job: dict[str, Any]) -> None:
    budget_bytes, (url, wait, options, scope) = job["budget_bytes"], job["mirror"]
    setting = MirrorSetting(url, wait, StorageOptions(options), scope)
    source = open_repository(
        open_store(job["url"], read_only=True), budget_bytes=budget_bytes, store_id=job["store_id"]
    )
    known = frozenset((name, write_id) for name, write_id in job["known"])
    target = setting.open(budget_bytes)
    upload_all(UploadJob(source, target, setting.scope, known, job["known_in"]), _Lines(_write))


def _write(line: dict[str, Any]) -> None:
    with open(_ANSWERS, "wb", closefd=False) as pipe:
        pipe.write(json.dumps(line).encode() + b"\n")
