"""Retention: decides which snapshots to keep, and deletes the others in a separate step."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Final, Literal, get_args

from holdfast.display.markup import readable_repr
from holdfast.errors import Corrupt, NameInUse
from holdfast.objects.protocol import ObjectStore
from holdfast.progress import Progress
from holdfast.repo.format.layout import natural_order
from holdfast.repo.names.snapshots import (
    CommittedSnapshot,
    DamagedName,
    Tag,
    delete_if_unchanged,
    iter_tags,
    iter_user_names,
    read_name,
)
from holdfast.texts import list_some

_STEP: Final = re.compile(r"([0-9]+)[^0-9]*\Z")
_ANY_NAME: Final = re.compile(r".*", re.DOTALL)

_GROUP: Final = 64
"""The number of snapshots that are deleted between two reports of progress."""

Mode = Literal["min", "max"]
BestRule = tuple[str, int] | tuple[str, int, Mode]
"""A `Best` as keyword arguments have it: `("val_loss", 2)` or `("accuracy", 2, "max")`."""


@dataclass(frozen=True, slots=True)
class Best:
    """Keep the best snapshots by a metric, a number in the snapshot's metadata."""

    metric: str
    """The key of the metric in `metadata["metrics"]`, or in `metadata` itself."""
    count: int
    mode: Mode = "min"
    """Whether smaller or larger values are better."""

    def __post_init__(self) -> None:
        """Raise ValueError for a rule that cannot be meant."""
        if not self.metric:
            raise ValueError(f"keep_best= needs the name of a metric, not {self.metric!r}")
        if self.count < 1:
            raise ValueError(f"keep_best= keeps at least one snapshot, not {self.count!r}")
        if self.mode not in get_args(Mode):
            raise ValueError(f"keep_best= takes 'min' or 'max', not {self.mode!r}")

    def __str__(self) -> str:
        """Describe the rule, for reports."""
        return f"among the best {self.count} by {self.metric} ({self.mode})"


def parse_best(text: str) -> Best:
    """Parse METRIC:N, METRIC:N:min or METRIC:N:max; raises ValueError."""
    metric, _, rest = text.partition(":")
    number, _, mode = rest.partition(":")
    if not number.isascii() or not number.isdigit() or mode not in ("", *get_args(Mode)):
        raise ValueError(f"{text!r} is not METRIC:N, METRIC:N:min or METRIC:N:max, such as val_loss:2")
    return Best(metric, int(number), "max" if mode == "max" else "min")


@dataclass(frozen=True, slots=True)
class Keep:
    """Retention rules; a snapshot is kept if any rule applies."""

    last: int = 0
    """Keep so many of the newest, by commit time."""
    every: int = 0
    """Keep those whose step, the last number in the name, is a multiple of this."""
    within_s: float = 0.0
    """Keep those committed within so many seconds."""
    tagged: bool = True
    """Keep those that a tag points to."""
    best: Best | None = None
    """Keep those with the best values of a metric."""

    def __post_init__(self) -> None:
        """Raise ValueError for rules that would keep nothing by mistake."""
        if min(self.last, self.every, self.within_s) < 0:
            raise ValueError("retention rules cannot be negative")
        if math.isnan(self.within_s):
            raise ValueError("keep_within= (within_s) is not a number")
        if not (self.last or self.every or self.within_s or self.best):
            raise ValueError(
                "give at least one rule: --keep-last, --keep-every, --keep-within or --keep-best"
                " (in Python keep_last=, keep_every=, keep_within= or keep_best=)"
            )


def make_keep(
    *,
    keep_last: int = 0,
    keep_every: int = 0,
    keep_within: float | timedelta = 0.0,
    keep_tagged: bool = True,
    keep_best: BestRule | None = None,
) -> Keep:
    """Convert keyword arguments to rules."""
    within_s = keep_within.total_seconds() if isinstance(keep_within, timedelta) else float(keep_within)
    return Keep(keep_last, keep_every, within_s, keep_tagged, None if keep_best is None else Best(*keep_best))


@dataclass(frozen=True, slots=True)
class PruneDecision:
    """A snapshot and the reasons to keep it; without a reason it is deleted."""

    snapshot: CommittedSnapshot
    reasons: tuple[str, ...]

    __repr__ = readable_repr


@dataclass(frozen=True, slots=True)
class PrunePlan:
    """The snapshots to keep and to delete, in natural order of their names."""

    verdicts: tuple[PruneDecision, ...]
    heeds_tags: bool = True
    """Also keep snapshots that are tagged between planning and deleting."""

    def __repr__(self) -> str:
        """Show how many snapshots are kept, and which are deleted."""
        doomed = [snapshot.name for snapshot in self.delete]
        names = f": {list_some(doomed, 3)}" if doomed else ""
        return f"<PrunePlan keeps {len(self.verdicts) - len(doomed)}, deletes {len(doomed)}{names}>"

    @property
    def delete(self) -> tuple[CommittedSnapshot, ...]:
        """The snapshots to delete."""
        return tuple(verdict.snapshot for verdict in self.verdicts if not verdict.reasons)

    @property
    def keep(self) -> tuple[CommittedSnapshot, ...]:
        """The snapshots to keep."""
        return tuple(verdict.snapshot for verdict in self.verdicts if verdict.reasons)


@dataclass(frozen=True, slots=True)
class Pruned:
    """What happened to the snapshots that a plan would delete."""

    deleted: tuple[CommittedSnapshot, ...]
    kept: tuple[PruneDecision, ...]
    """Those that were tagged or overwritten after the plan was made, and those that a mirror was found to lack."""

    __repr__ = readable_repr


def plan_prune(snapshots: Sequence[CommittedSnapshot], tags: Iterable[Tag], keep: Keep, *, now_s: float) -> PrunePlan:
    """Decide for each snapshot whether to keep it; reads nothing and deletes nothing.

    Raises ValueError if the rules name a metric that no snapshot has: it is more likely misspelled than meant.
    """
    tagged = _describe_tagged(tags) if keep.tagged else {}
    newest = sorted(snapshots, key=lambda snapshot: (snapshot.time_s, natural_order(snapshot.name)), reverse=True)
    last = {snapshot.name for snapshot in newest[: keep.last]}
    best = _find_best(newest, keep.best) if keep.best else set()
    verdicts = []
    for snapshot in sorted(snapshots, key=lambda snapshot: natural_order(snapshot.name)):
        step = _STEP.search(snapshot.name)
        reasons = []
        if snapshot.name in last:
            reasons.append(f"among the last {keep.last}")
        if keep.every and step and int(step[1]) % keep.every == 0:
            reasons.append(f"step is a multiple of {keep.every}")
        if snapshot.name in best:
            reasons.append(str(keep.best))
        if keep.within_s and now_s - snapshot.time_s <= keep.within_s:
            reasons.append("recent")
        if snapshot.name in tagged:
            reasons.append(tagged[snapshot.name])
        verdicts.append(PruneDecision(snapshot, tuple(reasons)))
    return PrunePlan(tuple(verdicts), heeds_tags=keep.tagged)


def find_metric(snapshot: CommittedSnapshot, metric: str) -> float | None:
    """Return a metric of a snapshot; None if it has none of that name, or one that is not a finite float."""
    metrics = snapshot.metadata.get("metrics")
    found = metrics.get(metric) if isinstance(metrics, dict) and metric in metrics else snapshot.metadata.get(metric)
    if isinstance(found, bool) or not isinstance(found, int | float):
        return None
    try:
        value = float(found)
    except OverflowError:  # an integer of more than 308 digits
        return None
    return value if math.isfinite(value) else None


def _find_best(newest: Sequence[CommittedSnapshot], best: Best) -> set[str]:
    """Return the names of the best snapshots; of two equal ones, the newer is better."""
    values = [
        (value, snapshot.name) for snapshot in newest if (value := find_metric(snapshot, best.metric)) is not None
    ]
    if newest and not values:
        known = sorted({name for snapshot in newest for name in _list_metrics(snapshot)})
        listed = ", ".join(known[:20]) or "none"
        raise ValueError(f"no snapshot here has the metric {best.metric!r}; metrics that exist: {listed}")
    ordered = sorted(values, key=lambda pair: pair[0], reverse=best.mode == "max")
    return {name for _, name in ordered[: best.count]}


def _list_metrics(snapshot: CommittedSnapshot) -> list[str]:
    metrics = snapshot.metadata.get("metrics")
    names = {*snapshot.metadata, *(metrics if isinstance(metrics, dict) else ())}
    return [name for name in names if find_metric(snapshot, name) is not None]


def _describe_tagged(tags: Iterable[Tag]) -> dict[str, str]:
    """Return the reason to keep each tagged snapshot, by name."""
    tagged: dict[str, list[str]] = {}
    for tag in tags:
        tagged.setdefault(tag.snapshot_name, []).append(tag.name)
    return {name: "tagged " + ", ".join(sorted(found)) for name, found in tagged.items()}


def read_prune_plan(
    store: ObjectStore,
    prefix: str,
    keep: Keep,
    *,
    only: re.Pattern[str] = _ANY_NAME,
    listed: Iterable[CommittedSnapshot | DamagedName] | None = None,
) -> PrunePlan:
    """Read the snapshots under `prefix` and decide; reserved names are included only if `prefix` is reserved.

    The caller may have `listed` them already.

    Snapshots whose whole name `only` does not match are not part of the plan: no rule counts them, and they are kept.
    Raises Corrupt if a tag cannot be read, because it might protect any snapshot.
    """
    tags = _read_tags(store)
    names = iter_user_names(store, prefix) if listed is None else listed
    found = (each for each in names if isinstance(each, CommittedSnapshot))
    return plan_prune([each for each in found if only.fullmatch(each.name)], tags, keep, now_s=store.clock())


def _read_tags(store: ObjectStore) -> list[Tag]:
    tags = []
    for tag in iter_tags(store):
        if isinstance(tag, DamagedName):
            raise Corrupt(f"{tag.error}; it might protect a snapshot, so nothing is pruned", key=tag.stem)
        tags.append(tag)
    return tags


def apply_prune(store: ObjectStore, plan: PrunePlan) -> Pruned:
    """Delete the snapshots in the plan, except those tagged, overwritten or deleted since it was made."""
    tagged = _describe_tagged(_read_tags(store)) if plan.heeds_tags and plan.delete else {}
    works = [partial(_apply_one, store, snapshot, tagged.get(snapshot.name, "")) for snapshot in plan.delete]
    found = [decision for decision in store.run_together(works) if decision]
    deleted = tuple(decision.snapshot for decision in found if not decision.reasons)
    return Pruned(deleted, tuple(decision for decision in found if decision.reasons))


def _apply_one(store: ObjectStore, snapshot: CommittedSnapshot, reason: str) -> PruneDecision | None:
    """Delete a snapshot unless there is a reason to keep it; return what became of it, None if it was gone."""
    state = read_name(store, snapshot.name)
    if state.snapshot is None:
        return None
    if state.snapshot.write_id != snapshot.write_id:
        reason = "overwritten since the plan was made"
    if not reason:
        try:
            delete_if_unchanged(store, state)
        except NameInUse:
            reason = "changed since the plan was made"
    return PruneDecision(state.snapshot, (reason,) if reason else ())


def apply_prune_in_groups(store: ObjectStore, plan: PrunePlan, progress: Progress) -> Pruned:
    """Delete the snapshots in the plan, a group at a time; `progress` counts their bytes, without deduplication."""
    doomed = [verdict for verdict in plan.verdicts if not verdict.reasons]
    progress.begin("prune", sum(verdict.snapshot.logical_bytes for verdict in doomed))
    deleted: list[CommittedSnapshot] = []
    kept: list[PruneDecision] = []
    try:
        for first in range(0, len(doomed), _GROUP):
            group = tuple(doomed[first : first + _GROUP])
            done = apply_prune(store, PrunePlan(group, heeds_tags=plan.heeds_tags))
            deleted += done.deleted
            kept += done.kept
            progress.advance(sum(verdict.snapshot.logical_bytes for verdict in group))
    finally:
        progress.end()
    return Pruned(tuple(deleted), tuple(kept))
