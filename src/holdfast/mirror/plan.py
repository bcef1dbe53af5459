"""Decides what a mirror lacks, from the names and records of both stores; changes nothing."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from holdfast.compile_cache.artifacts.artifact import is_equivalent
from holdfast.compile_cache.artifacts.catalog import ARTIFACTS, StoredVariant, iter_variants, parse_variant
from holdfast.compile_cache.artifacts.storing import USES
from holdfast.errors import Corrupt, NewerFormat
from holdfast.mirror.setting import MIRRORS, MirrorScope
from holdfast.objects.protocol import ObjectStore
from holdfast.repo.format.layout import RESERVED, SNAPSHOTS, is_reserved, natural_order, snapshot_stem
from holdfast.repo.handle.repository import Repository
from holdfast.repo.names.generations import iter_stems, read_listed, read_newest
from holdfast.repo.names.listed import list_user_names
from holdfast.repo.names.roots import read_deleted, verify_record
from holdfast.repo.names.snapshots import CommittedSnapshot, Tag, iter_tags, parse_snapshot
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


KnownCopies = frozenset[tuple[str, str]]
"""Name and write id of the local snapshots that were found in the mirror before, or were copied there."""

_Found = CommittedSnapshot | DeletedName | None
_FEW: Final = 32
"""So many names are looked up one by one; for more, all names of the mirror are listed."""


def compare_stores(
    local: Repository, mirror: Repository, *, scope: MirrorScope = "all", known: KnownCopies = frozenset()
) -> MirrorPlan:
    """Return what the mirror has and lacks; snapshots in `known` are not looked up again."""
    here = read_local(local, mirror.store.url, scope)
    copied = frozenset(each.name for each in here.snapshots.values() if (each.name, each.write_id) in known)
    unknown = [each for each in here.snapshots.values() if each.name not in copied]
    return plan_mirror(here, read_there(mirror.store, unknown, has_tags=bool(here.tags)), copied=copied)


def read_local(repo: Repository, url: str, scope: MirrorScope) -> LocalListing:
    """Return the snapshots that the mirror at `url` is meant to have, and all tags; damaged names are left out."""
    listed = [*list_user_names(repo.store, "", repo.records), *list_user_names(repo.store, RESERVED, repo.records)]
    found = [each for each in listed if isinstance(each, CommittedSnapshot) and is_mirrored(each, url, scope)]
    return LocalListing({each.name: each for each in found}, _read_tags(repo.store))


def read_there(store: ObjectStore, wanted: Collection[CommittedSnapshot], *, has_tags: bool = False) -> MirrorListing:
    """Return what a mirror has under the names of these snapshots; many requests at once."""
    artifacts = [each for each in wanted if each.name.startswith(ARTIFACTS)]
    named = [each.name for each in wanted if not each.name.startswith(ARTIFACTS)]
    found = _read_few(store, named) if len(named) <= _FEW else _read_many(store, named)
    keys = list(dict.fromkeys(parse_variant(each).key_digest for each in artifacts))
    variants = store.run_together([partial(_read_variants, store, key) for key in keys if key])
    return MirrorListing(
        {name: each for name, each in zip(named, found, strict=True) if each is not None},
        _read_tags(store) if has_tags else {},
        dict(zip(filter(None, keys), variants, strict=True)),
    )


def _read_few(store: ObjectStore, names: Iterable[str]) -> Sequence[_Found]:
    return store.run_together([partial(_read_one, store, snapshot_stem(name), None) for name in names])


def _read_many(store: ObjectStore, names: Iterable[str]) -> Sequence[_Found]:
    listed = dict(iter_stems(store, SNAPSHOTS))
    stems = [snapshot_stem(name) for name in names]
    found = [stem for stem in stems if stem in listed]
    read = store.run_together([partial(_read_one, store, stem, listed[stem]) for stem in found])
    by_stem = dict(zip(found, read, strict=True))
    return [by_stem.get(stem) for stem in stems]


def _read_one(store: ObjectStore, stem: str, generations: list[int] | None) -> _Found:
    try:
        newest = read_newest(store, stem) if generations is None else read_listed(store, stem, generations)
        if newest.fields is None:
            return None
        verify_record(newest.fields, stem, newest.generation)
        if newest.fields.text("state") == "deleted":
            return DeletedName(read_deleted(store, newest))
        return parse_snapshot(newest.fields)
    except (Corrupt, NewerFormat):
        return None  # the copy fails with an error that names the record


def _read_variants(store: ObjectStore, key_digest: str) -> list[StoredVariant]:
    return [variant for variant in iter_variants(store, key_digest) if not variant.trouble]


def _read_tags(store: ObjectStore) -> dict[str, Tag]:
    return {tag.name: tag for tag in iter_tags(store) if isinstance(tag, Tag)}
