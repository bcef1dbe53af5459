"""Exports in the background, each in a child process of low priority; the interpreter waits for them at exit."""

from __future__ import annotations

import builtins
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from holdfast import errors
from holdfast.errors import NotFound, StoreError
from holdfast.formats.export import ExportOptions, ExportResult, export
from holdfast.formats.receipt import read_receipt
from holdfast.low_priority import ChildJob, ProgressAnswers, answer, lower_priority
from holdfast.objects.at_exit import before_exit
from holdfast.objects.local.local_store import LocalStore
from holdfast.objects.thread_pool import BackgroundThread
from holdfast.objects.url import open_store
from holdfast.progress import Progress, Silent
from holdfast.repo.handle.repository import Repository, open_repository
from holdfast.repo.names.snapshots import CommittedSnapshot, read_name
from holdfast.tensors.spec import dtype_name, find_dtype


def can_export_apart(repo: Repository) -> bool:
    """Return whether another process can open the store: a directory can be opened again, other stores perhaps not."""
    return isinstance(repo.store, LocalStore) and bool(sys.executable)


def export_apart(
    repo: Repository,
    snapshot: CommittedSnapshot,
    destination: str,
    options: ExportOptions,
    *,
    progress: Progress | None = None,
) -> ExportResult:
    """Export in another process of the lowest priority, and wait for it; raises what the export raised there."""
    job = {
        "url": repo.store.url,
        "budget_bytes": repo.budget_bytes,
        "name": snapshot.name,
        "digest": snapshot.digest.hex(),
        "destination": os.path.abspath(destination),
        "options": _encode_options(options),
    }
    child = ChildJob(__name__, job)
    last = _follow(child.iter_answers(), progress or Silent())
    if "result" in last:
        found = last["result"]
        return ExportResult(found["path"], read_receipt(found["receipt_path"]), found["receipt_path"], found["bytes"])
    if "error" in last:
        raise _decode_error(last["type"], last["error"])
    raise StoreError(
        f"the process that exported {snapshot.name!r} ended with code {child.code} and without a result;"
        f" nothing appeared at {destination}"
    )


def _follow(answers: Iterable[dict[str, Any]], progress: Progress) -> dict[str, Any]:
    """Pass on the progress of the child, and return its last answer."""
    last: dict[str, Any] = {}
    done_bytes = 0
    for last in answers:
        if "total" in last:
            progress.begin(last["task"], last["total"])
        elif "done" in last:
            progress.advance(last["done"] - done_bytes)
            done_bytes = last["done"]
    progress.end()
    return last


def _encode_options(options: ExportOptions) -> dict[str, Any]:
    return {
        **asdict(options),
        "exclude": options.patterns,
        "dtype": None if options.dtype is None else dtype_name(options.dtype),
        "receipt": None if options.receipt is None else os.path.abspath(options.receipt),
    }


def _decode_error(kind: str, text: str) -> Exception:
    """Return the error that the child raised, or a StoreError that names it."""
    found = getattr(errors, kind, None) or getattr(builtins, kind, None)
    if isinstance(found, type) and issubclass(found, Exception):
        try:
            return found(text)
        except TypeError:
            pass
    return StoreError(f"the export failed in its process: {kind}: {text}")


def serve(job: dict[str, Any]) -> None:
    """Carry out a job; the child ends here."""
    answer(lambda: _export(job))


def _export(job: dict[str, Any]) -> dict[str, Any]:
    store = open_store(job["url"], read_only=True)
    repo = open_repository(store, budget_bytes=job["budget_bytes"])
    found = read_name(store, job["name"]).snapshot
    if found is None or found.digest.hex() != job["digest"]:
        name = job["name"]
        raise NotFound(f"{name!r} was overwritten or deleted before its export began; export it again", name=name)
    options = {**job["options"]}
    dtype = options.pop("dtype")
    chosen = ExportOptions(**options, dtype=None if dtype is None else find_dtype(dtype))
    # If the parent has died, reporting progress raises, and the export leaves nothing behind.
    done = export(repo, found, job["destination"], chosen, progress=ProgressAnswers())
    return {"result": {"path": done.path, "receipt_path": done.receipt_path, "bytes": done.num_bytes}}


Export = Callable[[Progress], ExportResult]
"""Carries out an export, and reports its progress."""


@dataclass(slots=True)
class ExportMeter:
    """The progress of an export, for other threads to read."""

    done_bytes: int = 0
    total_bytes: int = 0

    def begin(self, task: str, total_bytes: int) -> None:
        """Note the number of bytes."""
        self.total_bytes = total_bytes

    def advance(self, num_bytes: int) -> None:
        """Count bytes as done."""
        self.done_bytes += num_bytes

    def end(self) -> None:
        """Do nothing."""


class ExportHandle:
    """An export in the background."""

    def __init__(self, name: str, run: Export) -> None:
        """Prepare the export of the snapshot `name`; `start` begins it."""
        self.name = name
        self._meter = ExportMeter()
        self._result: ExportResult | None = None
        self._is_error_raised = False
        self._thread = BackgroundThread(partial(self._run, run), f"holdfast-export {name}")

    def start(self) -> None:
        """Begin the export; interpreter exit waits for it."""
        self._forget = before_exit(self.finish)
        try:
            self._thread.start()
        except BaseException:
            self._forget()
            raise

    def done(self) -> bool:
        """Return whether the export has ended, successfully or not."""
        return not self._thread.is_alive()

    def progress(self) -> tuple[int, int]:
        """Return how many bytes are done, and the total."""
        return self._meter.done_bytes, self._meter.total_bytes

    def wait(self, timeout_s: float | None = None) -> ExportResult:
        """Wait for the export and return its result; raises its error, or TimeoutError."""
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise TimeoutError(f"the export of {self.name!r} is still under way after {timeout_s} s")
        if self._thread.error is not None:
            self._is_error_raised = True
            self._forget()
            raise self._thread.error
        if self._result is None:
            raise StoreError(f"the export of {self.name!r} was started by another process; wait for it there")
        return self._result

    def finish(self) -> None:
        """Wait for the export; raises its error if no `wait` has raised it."""
        if self._thread.is_own():
            self._thread.join()
            if not self._is_error_raised:
                self.wait()

    def _run(self, run: Export) -> None:
        lower_priority()
        self._result = run(self._meter)
        self._forget()


class ExportRunner:
    """Starts exports, and waits for all of them at the end."""

    def __init__(self) -> None:
        self._handles: list[ExportHandle] = []

    def start(self, name: str, run: Export) -> ExportHandle:
        """Start an export of the snapshot `name` and return at once."""
        handle = ExportHandle(name, run)
        handle.start()
        # Those that have ended are kept until their error is raised.
        self._handles.append(handle)
        return handle

    def export(self, repo: Repository, snapshot: CommittedSnapshot, path: str, options: ExportOptions) -> ExportHandle:
        """Start an export and return at once."""
        act = export_apart if can_export_apart(repo) else export
        return self.start(snapshot.name, lambda progress: act(repo, snapshot, path, options, progress=progress))

    def close(self) -> None:
        """Wait for all exports; raises the first error that no `wait` has raised."""
        while self._handles:
            self._handles.pop(0).finish()
