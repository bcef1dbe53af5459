"""Keeps snapshots from being pruned that a mirror of the store lacks."""

from __future__ import annotations

from dataclasses import replace

from holdfast.errors import HoldfastError
from holdfast.mirror.compare import read_there
from holdfast.mirror.plan import LocalListing, is_mirrored, plan_mirror
from holdfast.mirror.recorded import read_mirrors
from holdfast.mirror.setting import MirrorSetting
from holdfast.repo.handle.repository import Repository, open_repository
from holdfast.repo.names.snapshots import CommittedSnapshot
from holdfast.repo.upkeep.prune import PruneDecision, PrunePlan


def keep_unmirrored(repo: Repository, plan: PrunePlan) -> PrunePlan:
    """Return the plan with a reason to keep each snapshot that a recorded mirror is meant to have and lacks.

    If a mirror cannot be reached, everything that it may lack is kept.
    """
    mirrors = read_mirrors(repo.store) | repo.mirrors if plan.delete else {}
    reasons: dict[str, list[str]] = {}
    for url, scope in mirrors.items():
        doomed = [each for each in plan.delete if is_mirrored(each, url, "named" if scope == "named" else "all")]
        for name, reason in _read_reasons(url, doomed).items():
            reasons.setdefault(name, []).append(reason)
    return replace(plan, verdicts=tuple(_add(verdict, reasons) for verdict in plan.verdicts)) if reasons else plan


def _add(verdict: PruneDecision, reasons: dict[str, list[str]]) -> PruneDecision:
    more = () if verdict.reasons else reasons.get(verdict.snapshot.name, ())
    return replace(verdict, reasons=(*verdict.reasons, *more))


def _read_reasons(url: str, doomed: list[CommittedSnapshot]) -> dict[str, str]:
    """Return why snapshots must be kept, by name."""
    if not doomed:
        return {}
    try:
        store = open_repository(MirrorSetting(url).open_objects(read_only=True), create=True).store
        there = read_there(store, doomed)
    except HoldfastError as error:
        return dict.fromkeys((each.name for each in doomed), f"its mirror {url} cannot be read: {error}")
    plan = plan_mirror(LocalListing({each.name: each for each in doomed}), there)
    lacking = {each.name: f"not in its mirror {url} yet" for each in plan.waiting}
    return lacking | {
        each.snapshot.name: f"not in its mirror {url}: {each.reason}" for each in plan.refused if each.is_lacking
    }
