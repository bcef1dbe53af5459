"""Repacking: copies live chunks of mostly dead packs into new packs, and commits the snapshots that use them again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from holdfast.errors import NameInUse, NotFound
from holdfast.progress import Progress, Silent
from holdfast.repo.format.rank_manifests import read_needs
from holdfast.repo.handle.repository import Repository
from holdfast.repo.names.snapshots import CommittedSnapshot, NameState, read_name
from holdfast.repo.upkeep.transfer import Job, transfer_snapshot
from holdfast.repo.upkeep.usage import read_usage

DEAD_SHARE: Final = 0.5
"""A pack with a larger share of dead bytes than this is repacked."""
SLACK_SHARE: Final = 0.1
"""The dead bytes that a thorough repack may leave, as a share of the live bytes."""


@dataclass(frozen=True, slots=True)
class RepackPlan:
    """Packs to be emptied, and the snapshots that use them."""

    victims: frozenset[str]
    """Pack ids."""
    snapshots: tuple[CommittedSnapshot, ...]
    live_bytes: int
    """Bytes to be copied."""
    freed_bytes: int
    """Bytes that collecting the victims will free, less those copied."""


def plan_repack(
    repo: Repository,
    snapshots: Sequence[CommittedSnapshot],
    *,
    dead_share: float = DEAD_SHARE,
    slack_share: float | None = None,
) -> RepackPlan:
    """Choose the packs that are still used and whose dead share is more than `dead_share`. Reads only.

    With `slack_share`, also choose the next most dead packs, until the dead bytes in all others are at most that share
    of the live bytes.
    """
    used = [pack for pack in read_usage(repo.store, snapshots).packs if pack.live_bytes]
    left = sum(pack.dead_bytes for pack in used)
    allowed = left if slack_share is None else slack_share * sum(pack.live_bytes for pack in used)
    chosen = []
    for pack in sorted(used, key=lambda pack: pack.dead_share, reverse=True):
        if pack.dead_share > dead_share or (pack.dead_bytes and left > allowed):
            chosen.append(pack)
            left -= pack.dead_bytes
    victims = frozenset(pack.pack_id for pack in chosen)
    concerned = tuple(snapshot for snapshot in snapshots if victims.intersection(_find_packs(repo, snapshot)))
    live = sum(pack.live_bytes for pack in chosen)
    return RepackPlan(victims, concerned, live, sum(pack.dead_bytes for pack in chosen))


def _find_packs(repo: Repository, snapshot: CommittedSnapshot) -> list[str]:
    try:
        return read_needs(repo.store, snapshot.manifest).packs
    except NotFound:
        return []  # it was deleted and collected after it was listed


def apply_repack(repo: Repository, plan: RepackPlan, *, progress: Progress | None = None) -> list[CommittedSnapshot]:
    """Commit a new generation of each snapshot that needs none of the victims; return the moved snapshots.

    Content digest, commit time and metadata are kept. A name that was changed after the plan was made is skipped.
    """
    progress = progress or Silent()
    repo.verify_may_write()
    moved = []
    for snapshot in plan.snapshots:
        state = read_name(repo.store, snapshot.name)
        if state.snapshot is None or state.snapshot.write_id != snapshot.write_id:
            continue
        try:
            moved.append(move_snapshot(repo, state, snapshot, plan.victims, progress))
        except NameInUse:
            continue
        except NotFound:
            if read_name(repo.store, snapshot.name).next_generation == state.next_generation:
                raise  # it was not deleted, so its files are lost
    return moved


def move_snapshot(
    repo: Repository, state: NameState, snapshot: CommittedSnapshot, victims: frozenset[str], progress: Progress
) -> CommittedSnapshot:
    """Commit a new generation of `snapshot` that has no chunks in the packs `victims`."""
    return transfer_snapshot(Job("repack", repo, snapshot, repo, state, victims=victims), progress).snapshot
