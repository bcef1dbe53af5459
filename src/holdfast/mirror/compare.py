"""Reads what two stores have, and returns what the mirror lacks; changes nothing."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from functools import partial
from typing import Final

from holdfast.compile_cache.artifacts.catalog import ARTIFACTS, StoredVariant, iter_variants, parse_variant
from holdfast.errors import Corrupt, NewerFormat
from holdfast.mirror.plan import DeletedName, LocalListing, MirrorListing, MirrorPlan, is_mirrored, plan_mirror
from holdfast.mirror.recorded import MirrorScope
from holdfast.objects.protocol import ObjectStore
from holdfast.repo.format.layout import RESERVED, SNAPSHOTS, snapshot_stem
from holdfast.repo.handle.repository import Repository
from holdfast.repo.names.generations import iter_stems, read_listed, read_newest
from holdfast.repo.names.listed import list_user_names
from holdfast.repo.names.roots import read_deleted, verify_record
from holdfast.repo.names.snapshots import CommittedSnapshot, parse_snapshot
from holdfast.repo.names.tags import Tag, iter_tags

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
