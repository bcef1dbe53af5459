"""Exports in a child process, so that training keeps its interpreter lock: both ends of the pipe."""

from __future__ import annotations

import builtins
import os
import sys
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from holdfast import errors
from holdfast.errors import NotFound, StoreError
from holdfast.formats.export import ExportOptions, ExportResult, export
from holdfast.formats.receipt import read_receipt
from holdfast.low_priority import ChildJob, ProgressAnswers, answer
from holdfast.objects.local.local_store import LocalStore
from holdfast.objects.url import open_store
from holdfast.progress import Progress, Silent
from holdfast.repo.handle.repository import Repository, open_repository
from holdfast.repo.names.snapshots import CommittedSnapshot, read_name
from holdfast.tensors.dtypes import dtype_name, find_dtype


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
