"""Repair: turns the findings of a check into a plan that reports every loss, and carries it out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from holdfast.errors import Corrupt, NameInUse, NewerFormat, NotFound, ObjectExists
from holdfast.progress import Progress, Silent
from holdfast.repo.format.layout import BAD, INDEX, MARKS, TAGS, new_write_id, pack_key
from holdfast.repo.format.rank_manifests import read_needs
from holdfast.repo.handle.index import ChunkIndex, write_fragment
from holdfast.repo.handle.repository import Repository
from holdfast.repo.names.generations import create_generation
from holdfast.repo.names.leases import read_bad_packs
from holdfast.repo.names.roots import is_present
from holdfast.repo.names.snapshots import CommittedSnapshot, iter_names, read_name
from holdfast.repo.read.any_copy import iter_footers
from holdfast.repo.upkeep.check import Checker, Finding
from holdfast.repo.upkeep.transfer import move_snapshot, restore_snapshot

ActionKind = Literal["reindex", "quarantine", "heal", "discard", "restore"]


@dataclass(frozen=True, slots=True)
class Action:
    """One step: rebuild the index, list a pack as bad, point a snapshot to intact copies, delete a file, or restore.

    To restore a snapshot is to copy what it lost from another store.
    """

    kind: ActionKind
    target: str
    """A key, a pack id or the name of a snapshot."""
    reason: str


@dataclass(frozen=True, slots=True)
class Loss:
    """An entry or a tag that cannot be read any more and cannot be restored from this store."""

    snapshot: str
    entry: str
    reason: str
    tag: str = ""
    """For a lost tag only this field is set: its snapshot is not lost."""


@dataclass(frozen=True, slots=True)
class RepairPlan:
    """What can be repaired, and what is lost. Snapshots with losses are kept: their other entries can be read."""

    actions: tuple[Action, ...]
    losses: tuple[Loss, ...]


def plan_repair(repo: Repository, *, source: Repository | None = None, progress: Progress | None = None) -> RepairPlan:
    """Read every byte and return the repairs and losses; changes nothing.

    What this store has lost is restored from `source`, if that has a snapshot with the same content.
    """
    findings = list(Checker(repo.store, read=True, progress=progress, stages=repo.counters.stages).iter_findings())
    packs: dict[str, str] = {}
    heal: dict[str, str] = {}
    losses: dict[tuple[str, str, str], Loss] = {}
    for finding in findings:
        if finding.pack and finding.code in ("chunk-damaged", "pack-damaged", "pack-unreadable", "padding"):
            packs.setdefault(finding.pack, finding.message)
        if finding.code == "chunk-hit":
            heal.setdefault(finding.snapshot, finding.message)
        loss = _find_loss(finding)
        if loss:
            losses.setdefault((loss.tag, loss.snapshot, loss.entry), loss)
    for name, pack_id in _iter_users(repo, frozenset(packs)):
        heal.setdefault(name, f"it uses the damaged pack {pack_id}")
    known = read_bad_packs(repo.store)
    actions = [Action("discard", finding.key, finding.message) for finding in findings if _is_discardable(finding)]
    actions += [Action("quarantine", pack_id, why) for pack_id, why in packs.items() if pack_key(pack_id) not in known]
    if not _covers_all(repo) or any(finding.code == "index-damaged" for finding in findings):
        actions.append(Action("reindex", INDEX, "some chunks are missing in the index"))
    lost = {loss.snapshot for loss in losses.values()}
    actions += [Action("heal", name, reason) for name, reason in heal.items() if name not in lost]
    restores = {} if source is None else _plan_restores(repo, source, lost)
    actions += restores.values()
    return RepairPlan(tuple(actions), tuple(loss for loss in losses.values() if loss.snapshot not in restores))


def _plan_restores(repo: Repository, source: Repository, lost: Iterable[str]) -> dict[str, Action]:
    """Return an action for each lost snapshot whose content the source has."""
    found = {}
    for name in filter(None, lost):
        with suppress(Corrupt, NewerFormat):  # the record itself is damaged, so its content is unknown
            snapshot = read_name(repo.store, name).snapshot
            if snapshot and _read_donor(source, snapshot):
                found[name] = Action("restore", name, f"{source.store.url} has the same content")
    return found


def _read_donor(source: Repository, lost: CommittedSnapshot) -> CommittedSnapshot | None:
    """Return a snapshot of the source with the content of `lost`: under its name, or else under any name."""
    with suppress(Corrupt, NewerFormat):
        named = read_name(source.store, lost.name).snapshot
        if named and named.digest == lost.digest:
            return named
    others = (each for each in iter_names(source.store) if isinstance(each, CommittedSnapshot))
    return next((each for each in others if each.digest == lost.digest), None)


def _find_loss(finding: Finding) -> Loss | None:
    """Return the loss that a finding means, or None."""
    if finding.severity != "error":
        return None
    if finding.key.startswith(TAGS):
        return Loss("", "", finding.message, tag=finding.key.removeprefix(TAGS).partition("@")[0])
    return Loss(finding.snapshot, finding.entry, finding.message) if finding.snapshot else None


def _is_discardable(finding: Finding) -> bool:
    # A torn name is kept: it may be all that is left of a save, and its number must not become free again. A torn note
    # in bad/ still names its pack. A lease that cannot be read counts as live until a collector fences it.
    return finding.code == "index-damaged" or (finding.code == "record-torn" and finding.key.startswith(MARKS))


def _iter_users(repo: Repository, packs: frozenset[str]) -> Iterator[tuple[str, str]]:
    """Yield the name of each snapshot that uses one of `packs`, and the pack: its intact chunks are in danger, too."""
    for found in iter_names(repo.store) if packs else ():
        if isinstance(found, CommittedSnapshot):
            with suppress(NotFound, Corrupt, NewerFormat):  # it is reported as a loss
                used = packs.intersection(read_needs(repo.store, found.manifest).packs)
                if used:
                    yield found.name, min(used)


def apply_repair(
    repo: Repository, plan: RepairPlan, *, source: Repository | None = None, progress: Progress | None = None
) -> list[Action]:
    """Carry out a plan and return the completed actions. Nothing that can still be read is deleted."""
    done = []
    bad = frozenset(action.target for action in plan.actions if action.kind == "quarantine")
    for action in plan.actions:
        if action.kind == "restore":
            is_done = source is not None and _restore(repo, source, action.target, progress or Silent())
        else:
            is_done = _apply(repo, action, bad, progress or Silent())
        if is_done:
            done.append(action)
    return done


def _restore(repo: Repository, source: Repository, name: str, progress: Progress) -> bool:
    """Copy what a snapshot has lost from another store; return False if either has changed since the plan was made."""
    lost = read_name(repo.store, name).snapshot
    donor = _read_donor(source, lost) if lost else None
    if lost is None or donor is None:
        return False
    try:
        restore_snapshot(source, donor, repo, lost, progress)
    except NameInUse:
        return False
    return True


def _apply(repo: Repository, action: Action, bad: frozenset[str], progress: Progress) -> bool:
    if action.kind == "discard":
        repo.store.delete(action.target)
        return True
    if action.kind == "quarantine":
        return _quarantine(repo, action)
    if action.kind == "reindex":
        rebuild_index(repo)
        return True
    state = read_name(repo.store, action.target)
    if state.snapshot is None:
        return False
    packs = read_needs(repo.store, state.snapshot.manifest).packs
    gone = {pack_id for pack_id in packs if not is_present(repo.store, pack_key(pack_id))}
    try:
        move_snapshot(repo, state, state.snapshot, bad | gone, progress)
    except NameInUse:
        return False
    return True


def _quarantine(repo: Repository, action: Action) -> bool:
    """List a pack as bad: new saves do not refer to it, but existing snapshots still read from it."""
    fields = {"kind": "bad", "pack": action.target, "write_id": new_write_id(), "reason": action.reason}
    try:
        create_generation(repo.store, BAD + action.target, 0, fields, durable=False)
    except ObjectExists:
        return False
    return True


def _covers_all(repo: Repository) -> bool:
    index = ChunkIndex(repo.store, limit_bytes=repo.budget_bytes // 4).refresh()
    return not any(_find_unknown(repo, index))


def _find_unknown(repo: Repository, index: ChunkIndex) -> Iterable[str]:
    """Yield the packs that have a chunk which is missing in the index."""
    for pack_id, footer in iter_footers(repo.store):
        for chunk in footer.chunks:
            if chunk.location not in index.find(chunk.digest, chunk.size_bytes):
                yield pack_id
                break


def rebuild_index(repo: Repository) -> int:
    """Write index fragments for packs with missing chunks, from their footers; return the number of these packs."""
    index = ChunkIndex(repo.store, limit_bytes=repo.budget_bytes // 4).refresh()
    unknown = set(_find_unknown(repo, index))
    for pack_id, footer in iter_footers(repo.store):
        if pack_id in unknown:
            write_fragment(repo.store, footer.chunks)
    return len(unknown)
