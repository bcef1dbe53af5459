"""Tags: second names for snapshots, which can be set, moved and removed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from holdfast.digest import Digest, short_hex
from holdfast.display.readable import format_when
from holdfast.errors import Corrupt, NameInUse, NewerFormat, NotFound
from holdfast.json_text import Json
from holdfast.objects.protocol import ObjectStore
from holdfast.repo.format.layout import TAGS, escape_name, new_write_id, tag_stem, verify_name
from holdfast.repo.names.generations import USUAL_BYTES, Newest, change_name, iter_stems, read_listed, read_newest
from holdfast.repo.names.snapshots import CommittedSnapshot, DamagedName, read_snapshot


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
