"""Decides what a mirror lacks, from the names of both stores; reads nothing and changes nothing."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from holdfast.compile_cache.artifacts.artifact import is_equivalent
from holdfast.compile_cache.artifacts.catalog import ARTIFACTS, StoredVariant, parse_variant
from holdfast.compile_cache.artifacts.last_use import USES
from holdfast.mirror.recorded import MIRRORS, MirrorScope
from holdfast.repo.format.layout import is_reserved, natural_order
from holdfast.repo.names.snapshots import CommittedSnapshot
from holdfast.repo.names.tags import Tag
from holdfast.repo.upkeep.transfer import is_same

MIRROR_NOTE: Final = "mirror"
"""The key in a snapshot's environment that names the mirror it was saved for, with `save(mirror=...)`."""


@dataclass(frozen=True, slots=True)
class DeletedName:
    """A name that was deleted, and the snapshot that it had before; None if the store cannot tell."""

    snapshot: CommittedSnapshot | None


@dataclass(frozen=True, slots=True)
class LocalListing:
    """What a mirror is meant to have."""

    snapshots: Mapping[str, CommittedSnapshot] = field(default_factory=dict)
    tags: Mapping[str, Tag] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class MirrorListing:
    """What a mirror has."""

    snapshots: Mapping[str, CommittedSnapshot | DeletedName] = field(default_factory=dict)
    tags: Mapping[str, Tag] = field(default_factory=dict)
    variants: Mapping[str, Sequence[StoredVariant]] = field(default_factory=dict)
    """Compiled graphs by the digest of their key: each store numbers its variants by itself."""


@dataclass(frozen=True, slots=True)
class MirrorRefusal:
    """A snapshot that is not uploaded, because the mirror has decided otherwise."""

    snapshot: CommittedSnapshot
    reason: str
    is_lacking: bool = True
    """Whether the mirror lacks content that only the local store has, and may get it later by a decision of a user."""


@dataclass(frozen=True, slots=True)
class MirrorPlan:
    """What is in the mirror, what is waiting in the order of the uploads, and what will not be uploaded."""

    present: tuple[CommittedSnapshot, ...] = ()
    waiting: tuple[CommittedSnapshot, ...] = ()
    refused: tuple[MirrorRefusal, ...] = ()
    tags: tuple[Tag, ...] = ()
    """Tags to set in the mirror, once their snapshots are there."""
    copies: Mapping[str, CommittedSnapshot] = field(default_factory=dict)
    """The mirror's records of what is present, by the name in the store; not of names that were not looked up."""

    @property
    def waiting_bytes(self) -> int:
        """The size of what is waiting; chunks that the mirror already has are not sent."""
        return sum(snapshot.logical_bytes for snapshot in self.waiting)

    @property
    def is_complete(self) -> bool:
        """Whether nothing is left to do."""
        return not self.waiting and not self.tags


def is_mirrored(snapshot: CommittedSnapshot, url: str, scope: MirrorScope) -> bool:
    """Return whether a mirror is meant to have a snapshot: not the store's own lists of mirrors and of uses."""
    if snapshot.name == MIRRORS or snapshot.name.startswith(USES):
        return False
    return scope == "all" or snapshot.environment.get(MIRROR_NOTE) == url


def plan_mirror(local: LocalListing, there: MirrorListing, *, copied: Collection[str] = ()) -> MirrorPlan:
    """Compare two stores. The newest snapshots go first, then Holdfast's own in the order of their commits.

    `copied` are names that the mirror is known to have, and that were not looked up.
    """
    present: list[CommittedSnapshot] = []
    copies: dict[str, CommittedSnapshot] = {}
    waiting: list[CommittedSnapshot] = []
    refused: list[MirrorRefusal] = []
    for snapshot in local.snapshots.values():
        found = None if snapshot.name in copied else _judge(snapshot, there)
        if isinstance(found, MirrorRefusal):
            refused.append(found)
        elif found is None and snapshot.name not in copied:
            waiting.append(snapshot)
        else:
            present.append(snapshot)
            copies |= {} if found is None else {snapshot.name: found}
    names = {snapshot.name: snapshot for snapshot in (*present, *waiting)}
    tags = [tag for tag in local.tags.values() if _is_due(tag, there.tags.get(tag.name), names)]
    refused.sort(key=lambda each: natural_order(each.snapshot.name))
    return MirrorPlan(tuple(present), tuple(sorted(waiting, key=_order)), tuple(refused), tuple(tags), copies)


def _judge(snapshot: CommittedSnapshot, there: MirrorListing) -> CommittedSnapshot | MirrorRefusal | None:
    """Return the mirror's record of a snapshot, or why it will not be uploaded; None if the mirror lacks it."""
    if snapshot.name.startswith(ARTIFACTS):
        variant = parse_variant(snapshot)
        if variant.trouble:
            return MirrorRefusal(snapshot, str(variant.trouble))
        variants = there.variants.get(variant.key_digest, ())
        return next((existing.snapshot for existing in variants if is_equivalent(existing, variant)), None)
    found = there.snapshots.get(snapshot.name)
    if found is None:
        return None
    if isinstance(found, DeletedName):
        # Deleted there on purpose: to upload it again would undo that. Other content was never there, or is not known
        # to have been: it is uploaded, whatever the times are, because the clocks of two machines cannot be compared.
        is_wanted = found.snapshot is None or not is_same(found.snapshot, snapshot)
        return None if is_wanted else MirrorRefusal(snapshot, "it was deleted in the mirror", is_lacking=False)
    if is_same(found, snapshot):
        return found
    if found.time_s > snapshot.time_s:
        return MirrorRefusal(snapshot, "the mirror has other content under this name, which was saved later")
    return None


def _order(snapshot: CommittedSnapshot) -> tuple[bool, float]:
    # A recorded run refers to its earlier segments, so these go first.
    is_own = is_reserved(snapshot.name)
    return is_own, snapshot.time_s if is_own else -snapshot.time_s


def _is_due(tag: Tag, there: Tag | None, names: Mapping[str, CommittedSnapshot]) -> bool:
    snapshot = names.get(tag.snapshot_name)
    if snapshot is None or snapshot.digest != tag.digest:
        return False  # the mirror does not get what the tag points to
    if there is None:
        return True
    return (there.snapshot_name, there.digest) != (tag.snapshot_name, tag.digest) and there.time_s < tag.time_s
