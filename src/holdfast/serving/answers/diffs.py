"""Answers about two snapshots: what changed, as lines that are sent while values are still being measured."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Final

from holdfast.diff.changes import Change, describe_change, summarize_diff
from holdfast.diff.compare import compare
from holdfast.json_text import Json
from holdfast.repo.handle.repository import Repository
from holdfast.repo.names.snapshots import CommittedSnapshot

_BATCH: Final = 500
_REPORT_S: Final = 0.2


def iter_diff(repo: Repository, a: CommittedSnapshot, b: CommittedSnapshot, *, values: bool) -> Iterator[Json]:
    """Yield the counts of a diff, then batches of its changes; with `values`, measured one after the other."""
    diff = compare(repo, a, b)
    yield {**summarize_diff(diff), "total": len(diff.changes)}
    changes = iter(diff.changes)
    if values and diff.changes:
        from holdfast.diff.values import iter_measured

        changes = iter_measured(repo, diff)
    yield from ({"changes": [describe_change(change) for change in batch]} for batch in _iter_batches(changes))


def _iter_batches(changes: Iterable[Change]) -> Iterator[list[Change]]:
    """Yield the changes in lists: full ones, or what there is after a fifth of a second."""
    batch: list[Change] = []
    started_s = time.monotonic()
    for change in changes:
        batch.append(change)
        if len(batch) >= _BATCH or time.monotonic() - started_s > _REPORT_S:
            yield batch
            batch, started_s = [], time.monotonic()
    if batch:
        yield batch
