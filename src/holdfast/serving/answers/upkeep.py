"""Answers about space and health: who shares bytes with whom, what prune and gc would free, findings, running saves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Final

from holdfast.errors import BadName, HoldfastError, NotFound
from holdfast.json_text import Json
from holdfast.mirror.retention import keep_unmirrored
from holdfast.repo.format.layout import natural_order, split_prefix
from holdfast.repo.format.manifests_ahead import iter_manifests, take_read
from holdfast.repo.handle.repository import Repository
from holdfast.repo.names.marks import read_bad_packs, read_marks
from holdfast.repo.names.roots import read_leases, read_live
from holdfast.repo.names.snapshots import CommittedSnapshot
from holdfast.repo.upkeep.check import Checker
from holdfast.repo.upkeep.collect import plan_collect
from holdfast.repo.upkeep.prune import Best, Keep, read_prune_plan
from holdfast.repo.upkeep.usage import PackPosition, iter_positions, read_freed_bytes, read_usage
from holdfast.serving.request import ApiRequest
from holdfast.texts import format_utc, parse_duration

MAX_SERIES: Final = 24
"""Series in the map of shared bytes; of more, those with the most snapshots."""
MAX_ROWS: Final = 2000
"""Snapshots in an answer; of more, those that take the most space of their own."""


def describe_usage(repo: Repository) -> dict[str, Json]:
    """Return the space of each snapshot as `holdfast du --json` does, shared bytes, what gc frees."""
    current = sorted(read_live(repo.store).current, key=lambda snapshot: natural_order(snapshot.name))
    usage = read_usage(repo.store, current)
    plan = plan_collect(repo.store, min_age_s=0.0)
    shown = sorted(usage.snapshots, key=lambda each: -each.own_bytes)[:MAX_ROWS]
    series, shared = read_shared(repo, current)
    return {
        "total": len(usage.snapshots),
        "snapshots": [
            {
                "name": each.snapshot.name,
                "logical_bytes": each.snapshot.logical_bytes,
                "stored_bytes": each.stored_bytes,
                "shared_bytes": each.shared_bytes,
                "own_bytes": each.own_bytes,
            }
            for each in shown
        ],
        "logical_bytes": usage.logical_bytes,
        "stored_bytes": usage.stored_bytes,
        "reclaimable_bytes": usage.reclaimable_bytes,
        "compression_saved_bytes": usage.saved_bytes,
        "gc": {"files": len(plan.dead), "dead_bytes": plan.dead_bytes, "live_bytes": plan.live_bytes},
        "series": series,
        "shared": shared,
    }


def read_shared(repo: Repository, snapshots: Sequence[CommittedSnapshot]) -> tuple[list[str], list[list[int]]]:
    """Return series of names, and for each two of them the bytes that both use; in the diagonal, all that one uses."""
    counts: dict[str, int] = {}
    for snapshot in snapshots:
        counts[_find_series(snapshot)] = counts.get(_find_series(snapshot), 0) + 1
    names = sorted(sorted(counts, key=lambda name: -counts[name])[:MAX_SERIES], key=natural_order)
    number = {name: at for at, name in enumerate(names)}
    users: dict[PackPosition, tuple[int, int]] = {}
    for snapshot, manifests in zip(
        snapshots, iter_manifests(repo.store, [each.manifest for each in snapshots]), strict=True
    ):
        at = number.get(_find_series(snapshot))
        if at is None or isinstance(manifests, NotFound):
            continue
        for position, size in iter_positions(take_read(manifests)):
            users[position] = (users.get(position, (0, 0))[0] | 1 << at, size.stored_bytes)
    totals: dict[int, int] = {}
    for bits, size_bytes in users.values():
        totals[bits] = totals.get(bits, 0) + size_bytes
    return names, [
        [sum(size for bits, size in totals.items() if bits >> row & bits >> column & 1) for column in range(len(names))]
        for row in range(len(names))
    ]


def _find_series(snapshot: CommittedSnapshot) -> str:
    return split_prefix(snapshot.name) or snapshot.name


def describe_prune(repo: Repository, request: ApiRequest) -> dict[str, Json]:
    """Return which snapshots the rules of `holdfast prune` would delete, why others are kept, and what that frees."""
    try:
        plan = keep_unmirrored(repo, read_prune_plan(repo.store, request.read_text("prefix"), _parse_keep(request)))
    except ValueError as error:
        if isinstance(error, HoldfastError):
            raise
        raise BadName(str(error)) from error
    freed_bytes = read_freed_bytes(repo.store, read_live(repo.store).current, plan.delete) if plan.delete else 0
    return {
        "keep": len(plan.keep),
        "delete": len(plan.delete),
        "freed_bytes": freed_bytes,
        "verdicts": [
            {"name": verdict.snapshot.name, "reasons": list(verdict.reasons)} for verdict in plan.verdicts[:MAX_ROWS]
        ],
    }


def _parse_keep(request: ApiRequest) -> Keep:
    best = request.read_text("keep_best")
    return Keep(
        request.read_number("keep_last", 0, most=1 << 40),
        request.read_number("keep_every", 0, most=1 << 40),
        parse_duration(request.read_text("keep_within") or "0s"),
        best=Best(best, 1) if best else None,
    )


def describe_activity(repo: Repository) -> dict[str, Json]:
    """Return the saves and collectors at work: leases, marked files, and packs that are known to be bad."""
    leases, marks = read_leases(repo.store), read_marks(repo.store)
    return {
        "now": format_utc(repo.store.clock()),
        "leases": [
            {
                "id": lease.lease_id,
                "standing": lease.standing,
                "purpose": lease.purpose,
                "host": lease.host,
                "renewed": format_utc(lease.renewed_s),
                "age_s": max(0.0, repo.store.clock() - lease.renewed_s),
            }
            for lease in sorted(leases.values(), key=lambda lease: -lease.renewed_s)[:MAX_ROWS]
        ],
        "marked": len(marks.keys),
        "abandoned_marks": len(marks.abandoned),
        "bad_packs": sorted(read_bad_packs(repo.store))[:MAX_ROWS],
    }


def iter_check(repo: Repository, *, read: bool) -> Iterator[Json]:
    """Yield each finding of `holdfast check` when it is found, and at the end what was checked."""
    checker = Checker(repo.store, read=read)
    for finding in checker.iter_findings():
        yield {"finding": asdict(finding)}
    yield {"checked": asdict(checker.tally)}
