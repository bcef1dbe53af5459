"""Snapshot records, by which a save is committed, and tags, their second names: create, read, withdraw, delete."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

from holdfast.digest import Digest, short_hex
from holdfast.display.markup import format_when
from holdfast.errors import Corrupt, NameInUse, NewerFormat, NotFound
from holdfast.json_text import Json
from holdfast.objects.protocol import ObjectInfo, ObjectStore
from holdfast.repo.format.layout import (
    SNAPSHOTS,
    TAGS,
    ManifestRef,
    escape_name,
    is_file_id,
    is_reserved,
    is_reserved_stem,
    make_stem_filter,
    new_write_id,
    snapshot_stem,
    split_generation,
    tag_stem,
    verify_name,
)
from holdfast.repo.format.record import Fields
from holdfast.repo.names.generations import USUAL_BYTES, Newest, change_name, iter_stems, read_listed, read_newest
from holdfast.texts import format_bytes

MAX_METADATA_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class CommittedSnapshot:
    """One committed generation of a name."""

    name: str
    manifest: ManifestRef
    digest: Digest
    """Content digest: equal digests mean equal content, whatever the name, the packs or the machine."""
    time_s: float
    num_entries: int
    logical_bytes: int
    metadata: dict[str, Json]
    lease_id: str
    """The lease under which it was committed; until its release, the generation before is still a root."""
    generation: int = -1
    write_id: str = ""
    environment: dict[str, Json] = field(default_factory=dict)
    """The machine and software that saved it, if recorded."""

    def __repr__(self) -> str:
        """Show name, digest, size and commit time."""
        when, size = format_when(self.time_s), format_bytes(self.logical_bytes)
        return f"<CommittedSnapshot {self.name!r} {short_hex(self.digest)}: {size}, saved {when}>"


@dataclass(frozen=True, slots=True)
class NameState:
    """The current state of a name: its snapshot, if any, and the generation that a change would create."""

    name: str
    snapshot: CommittedSnapshot | None
    next_generation: int


@dataclass(frozen=True, slots=True)
class DamagedName:
    """A name whose newest record is damaged or of a newer format."""

    stem: str
    error: Corrupt | NewerFormat


def read_name(store: ObjectStore, name: str, *, likely: int | None = None) -> NameState:
    """Read the current state of `name`, at once if its newest generation is `likely` (see `read_newest`)."""
    name = verify_name(name)
    return _parse_state(read_newest(store, snapshot_stem(name), likely=() if likely is None else (likely,)), name)


def read_listed_name(store: ObjectStore, name: str, listed: Iterable[ObjectInfo]) -> NameState:
    """Read the current state of `name` from a listing of all records."""
    stem = snapshot_stem(verify_name(name))
    splits = (split_generation(info.key) for info in listed)
    generations = [split[1] for split in splits if split and split[0] == stem]
    return _parse_state(read_listed(store, stem, generations), name)


def read_snapshot(store: ObjectStore, name: str) -> CommittedSnapshot:
    """Read the current snapshot of `name`, or raise NotFound."""
    snapshot = read_name(store, name, likely=0).snapshot
    if snapshot is None:
        raise NotFound(f"no snapshot {name!r} in {store.url}; `holdfast ls` lists the snapshots", name=name)
    return snapshot


def iter_names(store: ObjectStore, prefix: str = "") -> Iterator[CommittedSnapshot | DamagedName]:
    """Yield the snapshot of every name that starts with `prefix`, in no order; damaged names as DamagedName."""
    prefix = unicodedata.normalize("NFC", prefix)
    return _iter_names(store, prefix, make_stem_filter(prefix))


def iter_user_names(store: ObjectStore, prefix: str = "") -> Iterator[CommittedSnapshot | DamagedName]:
    """Yield like `iter_names`, but without Holdfast's reserved names, unless `prefix` is reserved itself."""
    if is_reserved(prefix):
        yield from iter_names(store, prefix)
        return
    prefix = unicodedata.normalize("NFC", prefix)
    # Filtered by stem, before a record is read: there may be many reserved names.
    may_start = make_stem_filter(prefix)
    wanted = _iter_names(store, prefix, lambda stem: may_start(stem) and not is_reserved_stem(stem))
    yield from (found for found in wanted if isinstance(found, DamagedName) or not is_reserved(found.name))


def _iter_names(
    store: ObjectStore, prefix: str, is_wanted: Callable[[str], bool]
) -> Iterator[CommittedSnapshot | DamagedName]:
    wanted = ((stem, generations) for stem, generations in iter_stems(store, SNAPSHOTS) if is_wanted(stem))
    reads = ((partial(read_listed_snapshot, store, *each), USUAL_BYTES) for each in wanted)
    for found in store.iter_together(reads):
        if isinstance(found, DamagedName) or (found and found.name.startswith(prefix)):
            yield found


def read_listed_snapshot(
    store: ObjectStore, stem: str, generations: list[int]
) -> CommittedSnapshot | DamagedName | None:
    """Read the snapshot at a stem from an earlier listing; None if the name was deleted."""
    try:
        newest = read_listed(store, stem, generations)
        return _parse_state(newest, newest.fields.text("name")).snapshot if newest.fields else None
    except (Corrupt, NewerFormat) as error:
        return DamagedName(stem, error)


def commit_snapshot(store: ObjectStore, snapshot: CommittedSnapshot) -> None:
    """Create the record of `snapshot`, which commits the save; raises NameInUse or CommitUnknown."""
    stem = snapshot_stem(snapshot.name)
    change_name(store, stem, snapshot.generation, _live_fields(snapshot), name=snapshot.name)


def withdraw_snapshot(store: ObjectStore, snapshot: CommittedSnapshot, before: CommittedSnapshot | None) -> None:
    """Undo a commit by creating the next generation: the snapshot `before`, or a tombstone if there was none."""
    generation = snapshot.generation + 1
    if before is None:
        _create_tombstone(store, snapshot.name, generation)
    else:
        restored = replace(before, generation=generation, write_id=new_write_id(), lease_id="")
        commit_snapshot(store, restored)


def delete_snapshot(store: ObjectStore, name: str) -> CommittedSnapshot:
    """Delete a name by creating a tombstone; return its snapshot. Raises NotFound, NameInUse or CommitUnknown."""
    state = read_name(store, name)
    if state.snapshot is None:
        raise NotFound(f"no snapshot {name!r} in {store.url}; nothing was deleted", name=name)
    delete_if_unchanged(store, state)
    return state.snapshot


def delete_if_unchanged(store: ObjectStore, state: NameState) -> None:
    """Delete a name; raises NameInUse if it has changed since `state` was read."""
    _create_tombstone(store, state.name, state.next_generation)


def _create_tombstone(store: ObjectStore, name: str, generation: int) -> None:
    fields = {
        "kind": "snapshot",
        "name": name,
        "state": "deleted",
        "write_id": new_write_id(),
        "time": store.clock(),
    }
    change_name(store, snapshot_stem(name), generation, fields, name=name)


def _live_fields(snapshot: CommittedSnapshot) -> dict[str, Json]:
    return {
        "kind": "snapshot",
        "name": snapshot.name,
        "state": "live",
        "write_id": snapshot.write_id,
        "lease": snapshot.lease_id,
        "time": snapshot.time_s,
        "manifest": snapshot.manifest.manifest_id,
        "manifest_digest": snapshot.manifest.digest.hex(),
        "manifest_bytes": snapshot.manifest.size_bytes,
        "digest": snapshot.digest.hex(),
        "entries": snapshot.num_entries,
        "logical_bytes": snapshot.logical_bytes,
        "metadata": snapshot.metadata,
        "environment": snapshot.environment,
    }


def _parse_state(newest: Newest, name: str) -> NameState:
    """Check the newest record of a name and return the state of the name."""
    fields = newest.fields
    if fields is None:
        return NameState(name, None, newest.next_generation)
    fields.expect(kind="snapshot", name=name)
    if newest.stem != snapshot_stem(name):
        raise Corrupt(f"record {fields.key} has the name {name[:80]!r}, which belongs to another key", key=fields.key)
    state = fields.text("state")
    if state == "deleted":
        return NameState(name, None, newest.next_generation)
    if state != "live":
        raise Corrupt(f"record {fields.key} is in the unknown state {state[:40]!r}", key=fields.key)
    return NameState(name, parse_snapshot(fields), newest.next_generation)


def parse_snapshot(fields: Fields) -> CommittedSnapshot:
    """Check and convert the fields of a live snapshot record."""
    manifest_id = fields.text("manifest")
    if not is_file_id(manifest_id):
        raise Corrupt(f"record {fields.key} has an invalid manifest id", key=fields.key)
    return CommittedSnapshot(
        name=fields.text("name"),
        manifest=ManifestRef(manifest_id, fields.digest("manifest_digest"), fields.integer("manifest_bytes")),
        digest=fields.digest("digest"),
        time_s=fields.number("time"),
        num_entries=fields.integer("entries"),
        logical_bytes=fields.integer("logical_bytes"),
        metadata=fields.mapping("metadata"),
        lease_id=fields.text("lease"),
        generation=fields.integer("generation"),
        write_id=fields.text("write_id"),
        environment=fields.mapping("environment") if "environment" in fields.values else {},
    )


@dataclass(frozen=True, slots=True)
class Tag:
    """A second name for a snapshot."""

    name: str
    snapshot_name: str
    digest: Digest
    """Content digest of the snapshot when the tag was set, so that a later overwrite is noticed."""
    time_s: float

    def __repr__(self) -> str:
        """Show the tag, its snapshot and the digest of that."""
        return f"<Tag {self.name!r} -> {self.snapshot_name!r} {short_hex(self.digest)}, set {format_when(self.time_s)}>"


def read_tag(store: ObjectStore, name: str) -> Tag | None:
    """Read a tag; None if it does not exist."""
    name = verify_name(name, what="tag")
    return _parse_tag(read_newest(store, tag_stem(name), likely=(0,)), name)


def read_named(store: ObjectStore, name: str) -> CommittedSnapshot:
    """Read the snapshot of a name, or else of a tag; raises NotFound."""
    try:
        return read_snapshot(store, name)
    except NotFound:
        tag = read_tag(store, name)
        if tag is None:
            raise
        return read_snapshot(store, tag.snapshot_name)


def iter_tags(store: ObjectStore) -> Iterator[Tag | DamagedName]:
    """Yield every tag, ordered by key; a tag that cannot be read as a DamagedName."""
    reads = ((partial(_read_listed_tag, store, *each), USUAL_BYTES) for each in iter_stems(store, TAGS))
    return (tag for tag in store.iter_together(reads) if tag)


def _read_listed_tag(store: ObjectStore, stem: str, generations: list[int]) -> Tag | DamagedName | None:
    try:
        newest = read_listed(store, stem, generations)
        return _parse_tag(newest, newest.fields.text("name")) if newest.fields else None
    except (Corrupt, NewerFormat) as error:
        return DamagedName(stem, error)


def set_tag(
    store: ObjectStore, name: str, snapshot: CommittedSnapshot, *, move: bool = False, time_s: float | None = None
) -> Tag:
    """Point a tag to `snapshot`; raises NameInUse if it points to another one, unless `move`.

    `time_s` is when the original was set, if this is a copy of a tag.
    """
    name = verify_name(name, what="tag")
    newest = read_newest(store, tag_stem(name))
    found = _parse_tag(newest, name)
    if found and (found.snapshot_name, found.digest) == (snapshot.name, snapshot.digest):
        store.sync(TAGS)
        return found
    if found and not move:
        raise NameInUse(f"tag {name!r} points to {found.snapshot_name!r}; move it with --move (move=True)", name=name)
    tag = Tag(name, snapshot.name, snapshot.digest, store.clock() if time_s is None else time_s)
    fields = {"state": "live", "snapshot": tag.snapshot_name, "digest": tag.digest.hex(), "time": tag.time_s}
    _create(store, newest, name, fields)
    return tag


def delete_tag(store: ObjectStore, name: str) -> Tag:
    """Remove a tag and return it; the snapshot is kept."""
    name = verify_name(name, what="tag")
    newest = read_newest(store, tag_stem(name))
    found = _parse_tag(newest, name)
    if found is None:
        raise NotFound(f"no tag {name!r} in {store.url}; `holdfast tag` lists them", name=name)
    _create(store, newest, name, {"state": "deleted", "time": store.clock()})
    return found


def _create(store: ObjectStore, newest: Newest, name: str, fields: dict[str, Json]) -> None:
    identity = {"kind": "tag", "name": name, "write_id": new_write_id()}
    change_name(store, newest.stem, newest.next_generation, {**identity, **fields}, name=name)


def _parse_tag(newest: Newest, name: str) -> Tag | None:
    fields = newest.fields
    if fields is None:
        return None
    fields.expect(kind="tag", name=name)
    if newest.stem != TAGS + escape_name(name):
        raise Corrupt(f"record {fields.key} has the name {name[:80]!r}, which belongs to another key", key=fields.key)
    state = fields.text("state")
    if state == "deleted":
        return None
    if state != "live":
        raise Corrupt(f"record {fields.key} is in the unknown state {state[:40]!r}", key=fields.key)
    return Tag(name, fields.text("snapshot"), fields.digest("digest"), fields.number("time"))
