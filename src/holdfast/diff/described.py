"""Describes the differences between two snapshots as JSON: what `--json` prints, and what the web server answers."""

from __future__ import annotations

from holdfast.diff.changes import Change, Diff, Distance
from holdfast.json_text import Json, describe_number


def describe_diff(diff: Diff) -> dict[str, Json]:
    """Return a diff as JSON, with all changes."""
    return {**summarize_diff(diff), "changes": [describe_change(change) for change in diff.changes]}


def summarize_diff(diff: Diff) -> dict[str, Json]:
    """Return both snapshots and the counts of a diff as JSON."""
    return {
        "a": {"name": diff.a.name, "digest": diff.a.digest.hex()},
        "b": {"name": diff.b.name, "digest": diff.b.digest.hex()},
        "is_equal": diff.is_equal,
        "added": len(diff.added),
        "removed": len(diff.removed),
        "changed": len(diff.changed),
        "equal": diff.equal,
        "equal_bytes": diff.equal_bytes,
        "shared_bytes": diff.shared_bytes,
    }


def describe_change(change: Change) -> dict[str, Json]:
    """Return a change as JSON."""
    return {
        "name": change.name,
        "path": list(change.path),
        "kind": change.kind,
        "before": change.before.describe() if change.before else None,
        "after": change.after.describe() if change.after else None,
        "aspects": [
            {"what": aspect.what, "before": aspect.before, "after": aspect.after, "part": aspect.part}
            for aspect in change.aspects
        ],
        "distances": [_describe_distance(distance) for distance in change.distances],
    }


def _describe_distance(distance: Distance) -> dict[str, Json]:
    return {
        "part": distance.part,
        "unit": distance.unit,
        "total": distance.total,
        "mismatches": distance.mismatches,
        "max_abs": describe_number(distance.max_abs),
        "at": None if distance.at is None else list(distance.at),
        "relative_l2": describe_number(distance.relative_l2),
        "cosine": describe_number(distance.cosine),
        "nan": list(distance.nan),
        "inf": list(distance.inf),
    }
