"""The verbs about what snapshots hold: show, put, get, cat."""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from holdfast.cli.lookup import find_snapshot, open_to_read, open_to_write
from holdfast.cli.names import describe_snapshot, label_tags
from holdfast.cli.output import Output, count, format_bytes, format_time
from holdfast.digest import short_hex
from holdfast.errors import BadName, NameInUse, NotFound
from holdfast.repo.filetree import is_below, plan_files, restore
from holdfast.repo.layout import pack_key
from holdfast.repo.manifest import Entry
from holdfast.repo.reader import SnapshotReader, open_snapshot
from holdfast.repo.record import Json, canonical_json
from holdfast.repo.repository import Repository
from holdfast.repo.snapshots import DamagedName, Snapshot, read_name
from holdfast.repo.tags import Tag, iter_tags, read_tag
from holdfast.repo.writer import Request, save
from holdfast.store.protocol import ObjectStore


def run_show(options: Namespace, url: str, output: Output) -> int:
    """Show a snapshot's record, its entries and the packs they lie in."""
    repo = open_to_read(url)
    tags = [tag for tag in iter_tags(repo.store) if not isinstance(tag, DamagedName)]
    with _open(repo, options.name, output) as reader:
        entries = list(reader.manifest.iter_entries())
        packs = _read_packs(repo.store, entries)
        if options.json:
            output.json(_describe(reader, entries, packs, tags))
        else:
            _print_record(reader, tags, output)
            _print_entries(reader.snapshot, entries, output)
            if options.chunks:
                _print_chunks(entries, output)
            _print_packs(packs, output)
    missing = [pack for pack in packs if pack.file_bytes is None]
    for pack in missing:
        output.note(f"pack {pack.pack_id} is missing; run `holdfast check` to see what is lost")
    return 1 if missing else 0


def run_put(options: Namespace, url: str, output: Output) -> int:
    """Save files as a snapshot."""
    metadata = _parse_metadata(options.meta)
    repo = open_to_write(url)
    _verify_no_tag(repo.store, options.name)
    sources = plan_files(options.paths, outside=repo.store.url)
    if not sources:
        raise NotFound(f"there are no files in {', '.join(options.paths)}; nothing was saved")
    request = Request(options.name, sources, metadata=metadata, overwrite=options.overwrite)
    result = save(repo, request, progress=output.progress())
    what = f"{result.name}: {count(len(sources), 'file')}, {format_bytes(result.logical_bytes)}"
    if result.existed:
        output.line(f"{what}; it held exactly this already, nothing was written")
        return 0
    sizes = f"{format_bytes(result.new_bytes)} new, {format_bytes(result.reused_bytes)} reused"
    output.line(f"saved {what} ({sizes}) in {result.seconds:.2f} s; digest {short_hex(result.digest)}")
    return 0


def run_get(options: Namespace, url: str, output: Output) -> int:
    """Write the entries of a snapshot as files."""
    repo = open_to_read(url)
    if is_below(options.directory, repo.store.url):
        raise BadName(f"{options.directory} lies inside the store {repo.store.url}; choose a directory outside of it")
    started = time.monotonic()
    with _open(repo, options.name, output) as reader:
        done = restore(
            reader, options.directory, only=options.only, overwrite=options.overwrite, progress=output.progress()
        )
    seconds = time.monotonic() - started
    size = f"{count(done.num_files, 'file')}, {format_bytes(done.num_bytes)}"
    output.line(f"wrote {size} to {options.directory} in {seconds:.2f} s")
    return 0


def run_cat(options: Namespace, url: str, output: Output) -> int:
    """Write the bytes of one entry to standard output, each piece verified before it is written."""
    with _open(open_to_read(url), options.name, output) as reader:
        for piece in reader.iter_entry(reader.find_entry(options.entry)):
            output.raw(piece)
    return 0


def _open(repo: Repository, name: str, output: Output) -> SnapshotReader:
    """Open the snapshot that a name or tag means; a tag whose snapshot has changed since is worth a word."""
    snapshot, tag = find_snapshot(repo.store, name)
    if tag and tag.digest != snapshot.digest:
        output.note(f"tag {tag.name!r} was set before {snapshot.name!r} was overwritten; this is the newer content")
    return open_snapshot(repo, snapshot)


def _verify_no_tag(store: ObjectStore, name: str) -> None:
    """Refuse a new name that would hide a tag: names are looked up before tags."""
    tag = read_tag(store, name) if read_name(store, name).snapshot is None else None
    if tag:
        raise NameInUse(
            f"{name!r} is a tag for {tag.snapshot_name!r}, which a snapshot of that name would hide;"
            " choose another name, or delete the tag",
            name=name,
        )


def _parse_metadata(pairs: Iterable[str]) -> dict[str, Json]:
    metadata: dict[str, Json] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise BadName(f"--meta {pair!r} is not of the form KEY=VALUE")
        if key in metadata:
            raise BadName(f"--meta gives the key {key!r} twice")
        metadata[key] = value
    return metadata


@dataclass(frozen=True, slots=True)
class _PackUse:
    """What one snapshot has in one pack."""

    pack_id: str
    num_chunks: int
    used_bytes: int
    file_bytes: int | None
    """None if the pack is missing."""


def _read_packs(store: ObjectStore, entries: Iterable[Entry]) -> list[_PackUse]:
    """Look up each pack that the entries use; a chunk used twice lies there once."""
    places: dict[str, dict[int, int]] = {}
    for entry in entries:
        for chunk in entry.chunks:
            if chunk.location:
                at = chunk.location
                places.setdefault(at.pack_id, {})[at.offset] = at.stored_bytes
    return [
        _PackUse(pack_id, len(chunks), sum(chunks.values()), _read_size(store, pack_key(pack_id)))
        for pack_id, chunks in places.items()
    ]


def _read_size(store: ObjectStore, key: str) -> int | None:
    try:
        return store.stat(key).size_bytes
    except NotFound:
        return None


def _kind(entry: Entry) -> str:
    kind = entry.spec.get("type") if isinstance(entry.spec, dict) else None
    return kind if isinstance(kind, str) else "bytes"


def _inline_bytes(entry: Entry) -> int:
    return sum(chunk.size_bytes for chunk in entry.chunks if chunk.location is None)


def _new_bytes(snapshot: Snapshot, entry: Entry) -> int:
    """Return how many bytes of an entry lie in packs that this save wrote: a pack's id begins with its lease."""
    own = snapshot.lease_id + "-"
    return sum(chunk.size_bytes for chunk in entry.chunks if chunk.location and chunk.location.pack_id.startswith(own))


def _print_record(reader: SnapshotReader, tags: Iterable[Tag], output: Output) -> None:
    snapshot = reader.snapshot
    facts = [
        ("name", snapshot.name),
        ("tags", label_tags(snapshot, tags) or "none"),
        ("saved", format_time(snapshot.time_s)),
        ("digest", snapshot.digest.hex()),
        ("size", f"{format_bytes(snapshot.logical_bytes)} ({snapshot.logical_bytes} bytes)"),
        ("entries", f"{snapshot.num_entries} in {count(reader.manifest.num_chunks, 'chunk')}"),
        ("manifest", f"{snapshot.manifest.manifest_id} ({format_bytes(snapshot.manifest.size_bytes)})"),
        ("generation", str(snapshot.generation)),
    ]
    for key, value in snapshot.metadata.items():
        facts.append((f"meta {key}", value if isinstance(value, str) else canonical_json(value).decode()))
    width = max(len(label) for label, _ in facts)
    for label, value in facts:
        output.line(f"{label.ljust(width)}  {value}")


def _print_entries(snapshot: Snapshot, entries: Sequence[Entry], output: Output) -> None:
    rows = [
        [
            entry.name,
            _kind(entry),
            format_bytes(entry.size_bytes),
            str(len(entry.chunks)),
            format_bytes(_new_bytes(snapshot, entry)),
            format_bytes(_inline_bytes(entry)),
        ]
        for entry in entries
    ]
    output.line()
    output.table(["ENTRY", "KIND", "SIZE", "CHUNKS", "NEW", "INLINE"], rows, right="SIZE CHUNKS NEW INLINE")


def _print_chunks(entries: Iterable[Entry], output: Output) -> None:
    rows = []
    for entry in entries:
        start = 0
        for chunk in entry.chunks:
            place = [chunk.location.pack_id, str(chunk.location.offset)] if chunk.location else ["inline", "-"]
            rows.append([entry.name, str(start), str(chunk.size_bytes), short_hex(chunk.digest), *place])
            start += chunk.size_bytes
    output.line()
    output.table(["ENTRY", "START", "BYTES", "DIGEST", "PACK", "OFFSET"], rows, right="START BYTES OFFSET")


def _print_packs(packs: Sequence[_PackUse], output: Output) -> None:
    if packs:
        rows = [
            [
                pack.pack_id,
                str(pack.num_chunks),
                format_bytes(pack.used_bytes),
                "missing" if pack.file_bytes is None else format_bytes(pack.file_bytes),
            ]
            for pack in packs
        ]
        output.line()
        output.table(["PACK", "CHUNKS", "USED", "OF"], rows, right="CHUNKS USED OF")


def _describe(
    reader: SnapshotReader, entries: Iterable[Entry], packs: Iterable[_PackUse], tags: Iterable[Tag]
) -> dict[str, Json]:
    snapshot = reader.snapshot
    return {
        **describe_snapshot(snapshot, tags),
        "manifest": {
            "id": snapshot.manifest.manifest_id,
            "digest": snapshot.manifest.digest.hex(),
            "bytes": snapshot.manifest.size_bytes,
        },
        "spec": reader.manifest.spec,
        "content": [_describe_entry(snapshot, entry) for entry in entries],
        "packs": [
            {"id": p.pack_id, "chunks": p.num_chunks, "used_bytes": p.used_bytes, "file_bytes": p.file_bytes}
            for p in packs
        ],
    }


def _describe_entry(snapshot: Snapshot, entry: Entry) -> dict[str, Json]:
    return {
        "name": entry.name,
        "bytes": entry.size_bytes,
        "kind": _kind(entry),
        "spec": entry.spec,
        "note": entry.note,
        "new_bytes": _new_bytes(snapshot, entry),
        "inline_bytes": _inline_bytes(entry),
        "chunks": [
            {
                "digest": chunk.digest.hex(),
                "bytes": chunk.size_bytes,
                "pack": chunk.location.pack_id if chunk.location else None,
                "offset": chunk.location.offset if chunk.location else None,
            }
            for chunk in entry.chunks
        ],
    }
