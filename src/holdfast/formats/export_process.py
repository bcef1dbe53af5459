"""Exports in a process of its own, so that the training keeps its interpreter lock: both ends of the conversation.

The parent sends one job as JSON to standard input. The child answers with lines of JSON on standard output: its
progress, and at the end a result or an error.
"""

from __future__ import annotations

import builtins
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from time import monotonic
from typing import IO, Any, Final

from holdfast import errors
from holdfast.errors import NotFound, StoreError
from holdfast.formats.export import ExportOptions, ExportResult, export
from holdfast.formats.receipt import read_receipt
from holdfast.objects.local.local_store import LocalStore
from holdfast.objects.url import open_store
from holdfast.progress import Progress, Silent
from holdfast.repo.handle.repository import Repository, open_repository
from holdfast.repo.names.snapshots import CommittedSnapshot, read_name
from holdfast.tensors.dtypes import dtype_name, find_dtype

LOWEST_PRIORITY: Final = 19
_ANSWERS: Final = 1
"""The descriptor of the pipe to the parent."""
_REPORT_S: Final = 0.2
"""The child reports its progress this often."""
# The path of modules comes first: the parent may have changed its own.
_PROGRAM: Final = """
import json, sys
job = json.load(sys.stdin)
sys.path[:] = job["modules"]
from holdfast.formats.export_process import serve
serve(job)
"""


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
        "modules": sys.path,
        "url": repo.store.url,
        "budget_bytes": repo.budget_bytes,
        "name": snapshot.name,
        "digest": snapshot.digest.hex(),
        "destination": os.path.abspath(destination),
        "options": _encode_options(options),
    }
    with subprocess.Popen([sys.executable, "-c", _PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        with child.stdin:
            child.stdin.write(json.dumps(job).encode())
        last = _follow(child.stdout, progress or Silent())
    if "result" in last:
        found = last["result"]
        return ExportResult(found["path"], read_receipt(found["receipt_path"]), found["receipt_path"], found["bytes"])
    if "error" in last:
        raise _decode_error(last["error"]["type"], last["error"]["text"])
    raise StoreError(
        f"the process that exported {snapshot.name!r} ended with code {child.returncode} and without a result;"
        f" nothing appeared at {destination}"
    )


def _follow(lines: IO[bytes], progress: Progress) -> dict[str, Any]:
    """Pass on the progress of the child, and return its last line."""
    last: dict[str, Any] = {}
    done_bytes = 0
    for line in lines:
        last = json.loads(line)
        if "total" in last:
            progress.begin(last["task"], last["total"])
        elif "done" in last:
            progress.advance(last["done"] - done_bytes)
            done_bytes = last["done"]
    progress.end()
    return last


def _encode_options(options: ExportOptions) -> dict[str, Any]:
    return {
        "format": options.format,
        "select": options.select,
        "exclude": list(options.exclude),
        "dtype": None if options.dtype is None else dtype_name(options.dtype),
        "max_shard_bytes": options.max_shard_bytes,
        "replace": options.replace,
        "receipt_path": None if options.receipt_path is None else os.path.abspath(options.receipt_path),
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


@dataclass
class _Reports:
    """Writes the progress of the child, a few lines each second."""

    done_bytes: int = 0
    reported_s: float = 0.0

    def begin(self, task: str, total_bytes: int) -> None:
        _write({"task": task, "total": total_bytes})

    def advance(self, num_bytes: int) -> None:
        self.done_bytes += num_bytes
        if monotonic() - self.reported_s >= _REPORT_S:
            self.reported_s = monotonic()
            _write({"done": self.done_bytes})

    def end(self) -> None:
        _write({"done": self.done_bytes})


def serve(job: dict[str, Any]) -> None:
    """Carry out a job; the child ends here."""
    os.nice(LOWEST_PRIORITY)
    try:
        done = _export(job)
        _write({"result": {"path": done.path, "receipt_path": done.receipt_path, "bytes": done.num_bytes}})
    except Exception as error:  # noqa: BLE001  # the parent raises it
        _write({"error": {"type": type(error).__name__, "text": str(error)}})


def _export(job: dict[str, Any]) -> ExportResult:
    store = open_store(job["url"], read_only=True)
    repo = open_repository(store, budget_bytes=job["budget_bytes"])
    found = read_name(store, job["name"]).snapshot
    if found is None or found.digest.hex() != job["digest"]:
        name = job["name"]
        raise NotFound(f"{name!r} was overwritten or deleted before its export began; export it again", name=name)
    options = {**job["options"]}
    dtype = options.pop("dtype")
    chosen = ExportOptions(**options, dtype=None if dtype is None else find_dtype(dtype))
    return export(repo, found, job["destination"], chosen, progress=_Reports())


def _write(line: dict[str, Any]) -> None:
    # If the parent has died, this raises, and the export leaves nothing behind.
    with open(_ANSWERS, "wb", closefd=False) as pipe:
        pipe.write(json.dumps(line).encode() + b"\n")
