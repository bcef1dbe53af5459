"""Exports in the background, each in a process of low priority; the interpreter waits for them at exit.

A store that no other process can open is exported by a thread of low priority.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from holdfast.errors import StoreError
from holdfast.formats.export import ExportOptions, ExportResult, export
from holdfast.formats.export_process import can_export_apart, export_apart
from holdfast.low_priority import lower_priority
from holdfast.objects.at_exit import before_exit
from holdfast.objects.thread_pool import BackgroundThread
from holdfast.progress import Progress
from holdfast.repo.handle.repository import Repository
from holdfast.repo.names.snapshots import CommittedSnapshot

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
