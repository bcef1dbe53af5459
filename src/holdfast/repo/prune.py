"""Retention: which snapshots to keep, decided apart from deleting the others."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from holdfast.errors import Corrupt, NameInUse
from holdfast.repo.layout import natural_order
from holdfast.repo.snapshots import DamagedName, Snapshot, delete_held, iter_names, read_name
from holdfast.repo.tags import Tag, iter_tags
from holdfast.store.protocol import ObjectStore

_STEP: Final = re.compile(r"([0-9]+)[^0-9]*\Z")


@dataclass(frozen=True, slots=True)
class Keep:
    """What to keep; a snapshot stays if any rule says so."""

    last: int = 0
    """The newest so many, by commit time."""
    every: int = 0
    """Those whose step, the last number in the name, is a multiple of this."""
    within_s: float = 0.0
    """Those committed within so many seconds."""
    tagged: bool = True
    """Those that a tag points to."""

    def __post_init__(self) -> None:
        """Refuse rules that would keep nothing by mistake."""
        if min(self.last, self.every, self.within_s) < 0:
            raise ValueError("rules of what to keep cannot be negative")
        if math.isnan(self.within_s):
            raise ValueError("keep_within= (within_s) is not a number")
        if not (self.last or self.every or self.within_s):
            raise ValueError("say what to keep: keep_last=, keep_every= or keep_within= (--keep-last, ...)")


@dataclass(frozen=True, slots=True)
class Verdict:
    """One snapshot, and why it stays; without a reason it goes."""

    snapshot: Snapshot
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PrunePlan:
    """What to keep and what to delete, in natural order of names."""

    verdicts: tuple[Verdict, ...]

    @property
    def delete(self) -> tuple[Snapshot, ...]:
        """The snapshots to delete."""
        return tuple(verdict.snapshot for verdict in self.verdicts if not verdict.reasons)

    @property
    def keep(self) -> tuple[Snapshot, ...]:
        """The snapshots to keep."""
        return tuple(verdict.snapshot for verdict in self.verdicts if verdict.reasons)


def plan_prune(snapshots: Sequence[Snapshot], tags: Iterable[Tag], keep: Keep, *, now_s: float) -> PrunePlan:
    """Decide for each snapshot; pure."""
    tagged: dict[str, list[str]] = {}
    for tag in tags:
        tagged.setdefault(tag.snapshot_name, []).append(tag.name)
    newest = sorted(snapshots, key=lambda snapshot: (snapshot.time_s, natural_order(snapshot.name)), reverse=True)
    last = {snapshot.name for snapshot in newest[: keep.last]}
    verdicts = []
    for snapshot in sorted(snapshots, key=lambda snapshot: natural_order(snapshot.name)):
        step = _STEP.search(snapshot.name)
        reasons = []
        if snapshot.name in last:
            reasons.append(f"among the last {keep.last}")
        if keep.every and step and int(step[1]) % keep.every == 0:
            reasons.append(f"step is a multiple of {keep.every}")
        if keep.within_s and now_s - snapshot.time_s <= keep.within_s:
            reasons.append("recent")
        if keep.tagged and snapshot.name in tagged:
            reasons.append("tagged " + ", ".join(sorted(tagged[snapshot.name])))
        verdicts.append(Verdict(snapshot, tuple(reasons)))
    return PrunePlan(tuple(verdicts))


def read_prune_plan(store: ObjectStore, prefix: str, keep: Keep) -> PrunePlan:
    """Read what is under `prefix` and decide; a tag that cannot be read is an error, for it might protect anything."""
    tags = []
    for tag in iter_tags(store):
        if isinstance(tag, DamagedName):
            raise Corrupt(f"{tag.error}; it might protect a snapshot, so nothing is pruned", key=tag.stem)
        tags.append(tag)
    snapshots = [found for found in iter_names(store, prefix) if isinstance(found, Snapshot)]
    return plan_prune(snapshots, tags, keep, now_s=store.clock())


def apply_prune(store: ObjectStore, plan: PrunePlan) -> list[Snapshot]:
    """Delete what the plan says, passing over names that changed since it was made; returns what was deleted."""
    deleted = []
    for snapshot in plan.delete:
        state = read_name(store, snapshot.name)
        if state.snapshot is None or state.snapshot.write_id != snapshot.write_id:
            continue
        try:
            delete_held(store, state)
        except NameInUse:
            continue  # overwritten just now: no longer what was planned for
        deleted.append(state.snapshot)
    return deleted


def prune(store: ObjectStore, prefix: str, keep: Keep) -> list[Snapshot]:
    """Decide and delete in one call; returns what was deleted."""
    return apply_prune(store, read_prune_plan(store, prefix, keep))
