"""Answers about upkeep: what prune would delete, findings of a check, saves and collectors at work."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Final

from holdfast.errors import BadName, HoldfastError
from holdfast.json_text import Json
from holdfast.mirror.retention import keep_unmirrored
from holdfast.objects.protocol import ObjectStore
from holdfast.objects.request_tally import RequestCount, RequestKind
from holdfast.repo.handle.repository import Repository
from holdfast.repo.names.leases import read_bad_packs, read_marks
from holdfast.repo.names.roots import read_leases
from holdfast.repo.upkeep.check import Checker
from holdfast.repo.upkeep.prune import Keep, PruneDecision, parse_best, read_prune_plan
from holdfast.serving.answer import ApiRequest, choose_sort
from holdfast.texts import format_utc, parse_duration

if TYPE_CHECKING:
    from holdfast.serving.answers.sharing import ChunkLedger

MAX_ROWS: Final = 2000
"""Leases, or bad packs, in an answer."""


@dataclass(frozen=True, slots=True)
class PlannedPrune:
    """What the rules of `holdfast prune` would delete, and what that frees."""

    decisions: tuple[PruneDecision, ...]
    freed_bytes: int


def plan_prune(repo: Repository, keep: Keep, prefix: str, ledger: ChunkLedger) -> PlannedPrune:
    """Decide which snapshots to delete; raises BadName for rules that cannot be meant."""
    try:
        plan = keep_unmirrored(repo, read_prune_plan(repo.store, prefix, keep), only_reads=True)
    except ValueError as error:
        if isinstance(error, HoldfastError):
            raise
        raise BadName(str(error)) from error
    doomed = {snapshot.manifest.manifest_id for snapshot in plan.delete}
    places = [at for at, each in enumerate(ledger.snapshots) if each.manifest.manifest_id in doomed]
    return PlannedPrune(plan.verdicts, ledger.sum_freed(places))


_PRUNE_SORTS: Final = ("name", "verdict")


def describe_prune(planned: PlannedPrune, sort: str, offset: int, limit: int) -> dict[str, Json]:
    """Return a part of the plan; raises BadName for a field that cannot be sorted by."""
    decisions: Sequence[PruneDecision] = planned.decisions  # in order of their names
    if choose_sort(sort, _PRUNE_SORTS) == "verdict":
        decisions = sorted(decisions, key=lambda each: bool(each.reasons), reverse=sort.startswith("-"))
    elif sort.startswith("-"):
        decisions = decisions[::-1]
    delete = sum(not each.reasons for each in planned.decisions)
    return {
        "keep": len(planned.decisions) - delete,
        "delete": delete,
        "freed_bytes": planned.freed_bytes,
        "total": len(decisions),
        "offset": offset,
        "verdicts": [
            {"name": each.snapshot.name, "bytes": each.snapshot.logical_bytes, "reasons": list(each.reasons)}
            for each in decisions[offset : offset + limit]
        ],
    }


def parse_keep(request: ApiRequest) -> Keep:
    """Return the rules in a request; raises BadName for a rule that cannot be meant."""
    best = request.read_text("keep_best")
    try:
        return Keep(
            request.read_number("keep_last", 0, most=1 << 40),
            request.read_number("keep_every", 0, most=1 << 40),
            parse_duration(request.read_text("keep_within") or "0s"),
            # A metric alone keeps the one with its smallest value.
            best=parse_best(best if ":" in best else f"{best}:1") if best else None,
        )
    except ValueError as error:
        if isinstance(error, HoldfastError):
            raise
        raise BadName(str(error)) from error


def describe_requests(
    store: ObjectStore, before: Mapping[RequestKind, RequestCount], since_s: float
) -> dict[str, Json] | None:
    """Return the requests since some were counted, by kind; None for a store without a server."""
    counts = store.count_requests()
    if not counts:
        return None
    nothing = RequestCount()
    return {
        "since": format_utc(since_s),
        "kinds": {
            kind: {
                "requests": found.requests - before.get(kind, nothing).requests,
                "bytes": found.size_bytes - before.get(kind, nothing).size_bytes,
            }
            for kind, found in counts.items()
        },
    }


def describe_activity(repo: Repository) -> dict[str, Json]:
    """Return the saves and collectors at work: leases, marked files, and packs that are known to be bad."""
    leases, marks = read_leases(repo.store), read_marks(repo.store)
    return {
        "now": format_utc(repo.store.clock()),
        "leases": [
            {
                "id": lease.lease_id,
                "standing": lease.state,
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
