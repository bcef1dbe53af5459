"""The verb `show`: prints a snapshot's record, its leaves or files, and its packs."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NoReturn

from holdfast.cli.lookup import open_to_read, read_named_snapshot, suggest
from holdfast.cli.output import Output, count, format_bytes, format_time
from holdfast.cli.verb import add_json, document
from holdfast.cli.verbs.names import label_tags
from holdfast.digest import short_hex
from holdfast.errors import NotFound
from holdfast.json_text import Json, canonical_json
from holdfast.objects.protocol import ObjectStore
from holdfast.query.facts import describe_snapshot
from holdfast.query.lineage import LINEAGE, parse_lineage
from holdfast.repo.format.chunk import iter_places
from holdfast.repo.format.entry import Entry
from holdfast.repo.format.layout import pack_key
from holdfast.repo.format.manifest import Manifest
from holdfast.repo.format.rank_manifests import Manifests, read_manifests
from holdfast.repo.names.snapshots import CommittedSnapshot, DamagedName, Tag, iter_tags
from holdfast.repo.upkeep.usage import StoredBytes, find_leases, find_new_bytes, find_stored_bytes, sum_new_bytes
from holdfast.trees.folding import Fold, FoldableLeaf, fold_leaves

if TYPE_CHECKING:
    from holdfast.diff.facts import Described, LeafEntry

_TREE: Final = "tree"
"""Key of the encoded tree in a manifest's spec; a snapshot of files has none."""
_NO_TREE: Final = object()


def declare_show(parser: ArgumentParser) -> None:
    """Declare the verb `show`."""
    more = (
        "Lists the leaves of a saved tree, or the files that `holdfast put` saved. RNG\n"
        "state and leaves of repeated layers (layers.#) are one line each; LEAF and --all\n"
        "list every leaf.\n\n"
        "SIZE adds up to the size of the snapshot. NEW counts the bytes that the save,\n"
        "copy or repack of this snapshot wrote; the others were already in the store.\n"
        "Small values are inline: they are stored in the manifest and not in a pack, and\n"
        "are always new, because each snapshot has its own manifest. Plain values (-) are\n"
        "stored in the manifest too, as part of the tree. Bytes that two leaves share\n"
        "count as new for the first. `stored` is what `holdfast du` calls STORED: the\n"
        "chunks in packs, each counted once, and the manifest. Exits with 1 if a pack is\n"
        "missing."
    )
    examples = [
        "holdfast show run1/step-100",
        "holdfast show run1/step-100 model.weight",
        "holdfast show best --chunks",
    ]
    document(parser, more, examples=examples)
    parser.add_argument("name", metavar="NAME", help="a snapshot or a tag")
    parser.add_argument("leaf", metavar="LEAF", nargs="?", help="only this leaf, or the leaves below this name")
    parser.add_argument("--all", action="store_true", help="list every leaf, also of RNG state and repeated layers")
    parser.add_argument("--chunks", action="store_true", help="list every chunk")
    add_json(parser)
    parser.set_defaults(run_verb=run_show)


def run_show(options: Namespace, url: str, output: Output) -> int:
    """Print a snapshot's record, its leaves or files, and their packs; or one leaf."""
    store = open_to_read(url, output).store
    tags = [tag for tag in iter_tags(store) if not isinstance(tag, DamagedName)]
    snapshot = read_named_snapshot(store, options.name, output)
    manifests = read_manifests(store, snapshot.manifest)
    manifest = manifests.view()
    new = _find_new(snapshot, manifests, manifest)
    leaves = _find_leaves(options, snapshot, manifest)
    entries = _find_entries(options, snapshot, manifest, leaves)
    packs = _read_packs(store, entries)
    if options.json:
        output.json(_describe(snapshot, manifest, entries, packs, tags, new) | _describe_leaves(leaves))
    else:
        if options.leaf is None:
            _print_record(snapshot, manifest, tags, new, output)
            output.line()
        if leaves:
            _print_leaves(leaves, new, output, is_folded=options.leaf is None and not options.all)
            _print_files(entries, new, output)
        else:
            _print_entries(entries, new, output)
        if options.chunks:
            _print_chunks(entries, output)
        _print_packs(packs, output)
    missing = [pack for pack in packs if pack.file_bytes is None]
    for pack in missing:
        output.note(f"pack {pack.pack_id} is missing; run `holdfast check` to see what is lost")
    return 1 if missing else 0


def _find_leaves(options: Namespace, snapshot: CommittedSnapshot, manifest: Manifest) -> list[Described]:
    """Return the requested leaves of a tree; empty for a snapshot of files."""
    tree = manifest.spec.get(_TREE, _NO_TREE) if isinstance(manifest.spec, dict) else _NO_TREE
    if tree is _NO_TREE:
        return []
    from holdfast.diff.facts import iter_described

    found = list(iter_described(manifest, tree))
    names = [described.leaf.name for described in found]
    return [described for described in found if _is_wanted(described.leaf.name, options.leaf)] or _raise_not_found(
        options.leaf, snapshot, names
    )


def _find_entries(
    options: Namespace, snapshot: CommittedSnapshot, manifest: Manifest, leaves: Sequence[Described]
) -> list[Entry]:
    """Return the requested entries: those of the leaves, or files by name."""
    if options.leaf is None:
        return list(manifest.iter_entries())
    if leaves:
        return [part.entry for described in leaves for part in described.parts.values()]
    found = [manifest.find_entry(name) for name in manifest.names if _is_wanted(name, options.leaf)]
    return found or _raise_not_found(options.leaf, snapshot, manifest.names)


def _is_wanted(name: str, wanted: str | None) -> bool:
    return wanted is None or name == wanted or name.startswith((f"{wanted}.", f"{wanted}/"))


def _raise_not_found(wanted: str | None, snapshot: CommittedSnapshot, names: Sequence[str]) -> NoReturn:
    hint = suggest(wanted or "", names) or f"`holdfast show {snapshot.name}` lists them"
    raise NotFound(f"no leaf {wanted!r} in {snapshot.name!r}; {hint}", name=wanted or "")


@dataclass(frozen=True, slots=True)
class _PackUse:
    """The chunks that one snapshot uses in one pack."""

    pack_id: str
    num_chunks: int
    used_bytes: int
    file_bytes: int | None
    """None if the pack is missing."""


def _read_packs(store: ObjectStore, entries: Iterable[Entry]) -> list[_PackUse]:
    """Return each pack that the entries use, for bases of deltas, too; a chunk that is used twice counts once."""
    chunks_of_pack: dict[str, dict[int, int]] = {}
    for entry in entries:
        for chunk in entry.chunks:
            for at in iter_places(chunk.location) if chunk.location else ():
                chunks_of_pack.setdefault(at.pack_id, {})[at.offset] = at.stored_bytes
    infos = store.stat_many(list(map(pack_key, chunks_of_pack)))
    sizes = {key: info.size_bytes for key, info in infos.items()}
    return [
        _PackUse(pack_id, len(chunks), sum(chunks.values()), sizes.get(pack_key(pack_id)))
        for pack_id, chunks in chunks_of_pack.items()
    ]


def _kind(entry: Entry) -> str:
    kind = entry.spec.get("type") if isinstance(entry.spec, dict) else None
    return kind if isinstance(kind, str) else "bytes"


def _inline_bytes(entry: Entry) -> int:
    return sum(chunk.size_bytes for chunk in entry.chunks if chunk.location is None)


@dataclass(frozen=True, slots=True)
class _Sizes:
    """How many bytes the save of a snapshot wrote, and how many it takes in the store."""

    total_bytes: int
    """New bytes of all ranks."""
    content_bytes: int
    """Bytes that all ranks saved, new or reused."""
    by_entry: Mapping[str, int]
    stored: StoredBytes


def _find_new(snapshot: CommittedSnapshot, manifests: Manifests, view: Manifest) -> _Sizes:
    leases = find_leases(snapshot, manifests)
    entries = list(view.iter_entries())
    names = [entry.name for entry in entries]
    return _Sizes(
        total_bytes=sum_new_bytes(leases, manifests),
        content_bytes=manifests.content_bytes,
        by_entry=dict(zip(names, find_new_bytes(leases, entries), strict=True)),
        stored=find_stored_bytes(manifests),
    )


def _print_record(
    snapshot: CommittedSnapshot, manifest: Manifest, tags: Iterable[Tag], new: _Sizes, output: Output
) -> None:
    facts = [
        ("name", snapshot.name),
        ("tags", label_tags(snapshot, tags) or "none"),
        ("saved", format_time(snapshot.time_s)),
        ("digest", snapshot.digest.hex()),
        ("size", f"{format_bytes(snapshot.logical_bytes)} ({snapshot.logical_bytes} bytes)"),
        ("new", f"{format_bytes(new.total_bytes)}; {format_bytes(new.content_bytes - new.total_bytes)} reused"),
        ("stored", _format_stored(new.stored)),
        ("entries", f"{snapshot.num_entries} in {count(manifest.num_chunks, 'chunk')}"),
        ("manifest", f"{snapshot.manifest.manifest_id} ({format_bytes(snapshot.manifest.size_bytes)})"),
        ("generation", str(snapshot.generation)),
    ]
    lineage = parse_lineage(snapshot.environment)
    environment = [item for item in snapshot.environment.items() if item[0] != LINEAGE]
    if environment:
        facts.append(("environment", ", ".join(map(_format_fact, environment))))
    facts += [("loaded", origin.name) for origin in lineage.loaded]
    facts += [("saved after", lineage.previous)] if lineage.previous else []
    for key, value in snapshot.metadata.items():
        facts.append((f"meta {key}", value if isinstance(value, str) else canonical_json(value).decode()))
    output.columns(facts)


def _format_stored(stored: StoredBytes) -> str:
    # A manifest is compressed, so it may be smaller than the inline values in it.
    inline = f" with {format_bytes(stored.inline_bytes)} of inline values" if stored.inline_bytes else ""
    raw = f" (raw {format_bytes(stored.raw_bytes)})" if stored.raw_bytes > stored.packed_bytes else ""
    places = f"{format_bytes(stored.packed_bytes)} in packs{raw}, {format_bytes(stored.manifest_bytes)} in the manifest"
    bases = f"; bases of {count(stored.deltas, 'delta')}: {format_bytes(stored.base_bytes)}" if stored.deltas else ""
    return f"{format_bytes(stored.total_bytes)}: {places}{inline}{bases}"


def _format_fact(item: tuple[str, Json]) -> str:
    key, value = item
    return f"{key.replace('_', ' ')} {value if isinstance(value, str) else canonical_json(value).decode()}"


@dataclass(frozen=True, slots=True)
class _LeafRow:
    """A line of the list of leaves, and the lines of its parts."""

    name: str
    what: str
    size_bytes: int | None
    """None for a plain value."""
    new_bytes: int
    parts: list[list[str]]


def _print_leaves(leaves: Sequence[Described], new: _Sizes, output: Output, *, is_folded: bool) -> None:
    rows = list(_iter_rows(leaves, new))
    folds = _fold(rows) if is_folded else [Fold(row.name, row.what, (at,)) for at, row in enumerate(rows)]
    cells = []
    for fold in folds:
        members = [rows[position] for position in fold.members]
        sizes = [row.size_bytes for row in members if row.size_bytes is not None]
        new_bytes = sum(row.new_bytes for row in members)
        cells.append(
            [fold.name, fold.label, *([format_bytes(sum(sizes)), format_bytes(new_bytes)] if sizes else ["-", "-"])]
        )
        cells += members[0].parts if len(members) == 1 else []
    output.table(["LEAF", "WHAT", "SIZE", "NEW"], cells, right="SIZE NEW")
    if len(folds) < len(rows):
        output.line(f"{count(len(rows), 'leaf')} in {count(len(folds), 'line')}; --all lists each")


def _iter_rows(leaves: Sequence[Described], new: _Sizes) -> Iterator[_LeafRow]:
    sharing: dict[int, str] = {}
    for described in leaves:
        name, parts = described.leaf.name or "(the tree)", described.parts
        entries = [part.entry for part in parts.values()]
        alias = parts[""].entry.alias if "" in parts else 0
        first = sharing.setdefault(alias, name) if alias else name
        what = _label(described) + ("" if first == name else f", shares memory with {first}")
        new_bytes = sum(new.by_entry[entry.name] for entry in entries)
        size_bytes = described.facts.size_bytes if parts else None
        below = [_format_part(role, part, new) for role, part in parts.items()] if len(entries) > 1 else []
        yield _LeafRow(name, what, size_bytes, new_bytes, below)


def _fold(rows: Sequence[_LeafRow]) -> list[Fold]:
    return fold_leaves([FoldableLeaf(row.name, row.what, row.size_bytes is None) for row in rows])


def _label(described: Described) -> str:
    """Return what a leaf is; for a tensor, also its unusual properties."""
    part = described.parts.get("")
    if part is None or part.kind != "tensor":
        return str(described.facts)
    more = [str(part.spec["role"])] if "role" in part.spec else []
    more += [flag.replace("_", " ") for flag in ("requires_grad", "conj", "neg", "meta") if part.spec.get(flag)]
    stride = part.spec.get("stride")
    if isinstance(stride, list):
        more.append(f"strides {tuple(stride)}")
    return ", ".join([str(described.facts), *more])


def _format_part(role: str, part: LeafEntry, new: _Sizes) -> list[str]:
    entry, shape = part.entry, part.spec.get("shape")
    what = f"{part.spec.get('dtype', part.kind)} {tuple(shape) if isinstance(shape, list) else ''}".strip()
    return [f"  {role or 'itself'}", what, format_bytes(entry.size_bytes), format_bytes(new.by_entry[entry.name])]


def _print_entries(entries: Sequence[Entry], new: _Sizes, output: Output) -> None:
    rows = [
        [
            entry.name,
            _kind(entry),
            format_bytes(entry.size_bytes),
            str(len(entry.chunks)),
            format_bytes(new.by_entry[entry.name]),
            format_bytes(_inline_bytes(entry)),
        ]
        for entry in entries
    ]
    output.table(["ENTRY", "KIND", "SIZE", "CHUNKS", "NEW", "INLINE"], rows, right="SIZE CHUNKS NEW INLINE")


def _print_files(entries: Sequence[Entry], new: _Sizes, output: Output) -> None:
    """Print the files that an import carried along, beside the leaves of its tree."""
    files = [entry for entry in entries if _kind(entry) == "file"]
    if files:
        output.line()
        _print_entries(files, new, output)


def _print_chunks(entries: Iterable[Entry], output: Output) -> None:
    rows = []
    for entry in entries:
        start = 0
        for chunk in entry.chunks:
            location = [chunk.location.pack_id, str(chunk.location.offset)] if chunk.location else ["inline", "-"]
            rows.append([entry.name, str(start), str(chunk.size_bytes), short_hex(chunk.digest), *location])
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
    snapshot: CommittedSnapshot,
    manifest: Manifest,
    entries: Iterable[Entry],
    packs: Iterable[_PackUse],
    tags: Iterable[Tag],
    new: _Sizes,
) -> dict[str, Json]:
    return {
        **describe_snapshot(snapshot, tags),
        "new_bytes": new.total_bytes,
        "reused_bytes": new.content_bytes - new.total_bytes,
        "stored_bytes": new.stored.total_bytes,
        "packed_bytes": new.stored.packed_bytes,
        "raw_bytes": new.stored.raw_bytes,
        "delta_chunks": new.stored.deltas,
        "base_bytes": new.stored.base_bytes,
        "manifest_bytes": new.stored.manifest_bytes,
        "inline_bytes": new.stored.inline_bytes,
        "environment": snapshot.environment,
        "manifest": {
            "id": snapshot.manifest.manifest_id,
            "digest": snapshot.manifest.digest.hex(),
            "bytes": snapshot.manifest.size_bytes,
        },
        "spec": manifest.spec,
        "content": [_describe_entry(entry, new) for entry in entries],
        "packs": [
            {"id": p.pack_id, "chunks": p.num_chunks, "used_bytes": p.used_bytes, "file_bytes": p.file_bytes}
            for p in packs
        ],
    }


def _describe_leaves(leaves: Sequence[Described]) -> dict[str, Json]:
    if not leaves:
        return {}
    return {
        "leaves": [
            {
                "name": described.leaf.name,
                "path": list(described.leaf.path_json),
                **described.facts.describe(),
                "entries": [part.entry.name for part in described.parts.values()],
            }
            for described in leaves
        ]
    }


def _describe_entry(entry: Entry, new: _Sizes) -> dict[str, Json]:
    return {
        "name": entry.name,
        "bytes": entry.size_bytes,
        "kind": _kind(entry),
        "spec": entry.spec,
        "note": entry.note,
        "new_bytes": new.by_entry[entry.name],
        "inline_bytes": _inline_bytes(entry),
        "chunks": [
            {
                "digest": chunk.digest.hex(),
                "bytes": chunk.size_bytes,
                "pack": chunk.location.pack_id if chunk.location else None,
                "offset": chunk.location.offset if chunk.location else None,
                "stored": chunk.location.stored_bytes if chunk.location else chunk.size_bytes,
                "codec": chunk.location.codec if chunk.location else 0,
                "base": chunk.location.base.digest.hex() if chunk.location and chunk.location.base else None,
            }
            for chunk in entry.chunks
        ],
    }
