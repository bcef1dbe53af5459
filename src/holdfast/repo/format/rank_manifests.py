"""Snapshots of several ranks: a root manifest, a manifest per rank, their merged view; read ahead."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import islice
from math import prod
from typing import Final, NamedTuple, TypeVar

from holdfast.digest import Digest
from holdfast.errors import Corrupt, HoldfastError
from holdfast.objects.disk_cache import DiskCache
from holdfast.objects.protocol import ObjectStore
from holdfast.repo.format.boxes import Box, is_span, span_of
from holdfast.repo.format.chunk import ChunkRef
from holdfast.repo.format.entry import NO_RANK, Entry, digest_parts, digest_snapshot, find_shape
from holdfast.repo.format.layout import ManifestRef, PartRef
from holdfast.repo.format.manifest import ChunkPlace, Head, Manifest, build_table, read_head, read_manifest

SPAN_DIMS: Final = 1
"""The dims of an entry that is a span of bytes: the box of a chunk is its first byte and its size."""


@dataclass(frozen=True, slots=True)
class Manifests:
    """The manifests of one snapshot: one, or a root and its parts."""

    root: Manifest
    parts: tuple[Manifest, ...]
    size_bytes: int
    """Size of all manifest files."""

    @property
    def with_chunks(self) -> tuple[Manifest, ...]:
        """The manifests that contain chunks: the parts, or the only manifest."""
        return self.parts or (self.root,)

    @property
    def ids(self) -> list[str]:
        """The ids of the parts."""
        return [part.manifest.manifest_id for part in self.root.parts]

    @property
    def packs(self) -> list[str]:
        """The ids of all packs that the snapshot needs."""
        return list(dict.fromkeys(pack for each in self.with_chunks for pack in each.packs))

    def digest(self) -> Digest:
        """Return the content digest of the snapshot."""
        if not self.parts:
            return digest_snapshot(self.root.spec, list(self.root.iter_entries()))
        digests = [digest_snapshot(part.spec, list(part.iter_entries())) for part in self.parts]
        return digest_parts(self.root.spec, list(self.root.iter_entries()), digests)

    @property
    def content_bytes(self) -> int:
        """Size of all values that any rank saved. Unlike logical bytes, values that differ by rank count for each."""
        return sum(each.chunk_bytes for each in self.with_chunks)

    def iter_places(self) -> Iterator[ChunkPlace]:
        """Yield where each chunk of each part is stored; a chunk that is used several times is yielded for each use."""
        for each in self.with_chunks:
            yield from each.iter_places()

    def iter_entries(self) -> Iterator[Entry]:
        """Yield the entries of all parts; an entry that several parts contribute to is yielded for each of them."""
        for each in self.with_chunks:
            yield from each.iter_entries()

    def view(self, rank: int | None = None) -> Manifest:
        """Return all manifests merged into one, with the values of `rank` where ranks differ.

        Without a rank, the lowest rank that saved a value counts. Raises Corrupt if the parts do not fit the root.
        """
        return merge(self, rank) if self.parts else self.root


def read_manifests(store: ObjectStore, ref: ManifestRef, *, cache: DiskCache | None = None) -> Manifests:
    """Read all manifests of a snapshot; raises NotFound, Corrupt or NewerFormat."""
    root = read_manifest(store, ref, cache=cache)
    parts = store.run_together([partial(read_manifest, store, part.manifest, cache=cache) for part in root.parts])
    return join_parts(ref, root, parts)


def join_parts(ref: ManifestRef, root: Manifest, parts: Iterable[Manifest]) -> Manifests:
    """Return the manifests of a snapshot, of which `root` was read from `ref`."""
    return Manifests(root, tuple(parts), ref.size_bytes + sum(part.manifest.size_bytes for part in root.parts))


def read_view(store: ObjectStore, ref: ManifestRef) -> Manifest:
    """Read all manifests of a snapshot, merged into one; raises NotFound, Corrupt or NewerFormat."""
    return read_manifests(store, ref).view()


class Needs(NamedTuple):
    """The ids of the files that a snapshot needs."""

    manifests: list[str]
    packs: list[str]


def read_needs(store: ObjectStore, ref: ManifestRef) -> Needs:
    """Read only which files a snapshot needs; raises NotFound, Corrupt or NewerFormat."""
    head = read_head(store, ref)
    return find_needs(ref, head, store.run_together([partial(read_head, store, part.manifest) for part in head[1]]))


def find_needs(ref: ManifestRef, root: Head, parts: Iterable[Head]) -> Needs:
    """Return the files that a snapshot needs, from what was read of its root and its parts."""
    packs = dict.fromkeys(pack for head in (root, *parts) for pack in head[0])
    return Needs([ref.manifest_id, *(part.manifest.manifest_id for part in root[1])], list(packs))


def merge(manifests: Manifests, rank: int | None = None) -> Manifest:
    """Merge a root and its parts into one manifest; see `Manifests.view`."""
    own = manifests.parts[rank] if rank is not None and rank < len(manifests.parts) else None
    # A part has its own spec only if the tree of that rank differs from that of the root.
    base = own if own is not None and own.spec is not None else manifests.root
    found: dict[str, list[Entry]] = {}
    for entry in manifests.iter_entries():
        if entry.chunks or not entry.size_bytes:
            found.setdefault(entry.name, []).append(entry)
    entries = [join_entry(entry, found.get(entry.name, ()), rank) for entry in base.iter_entries()]
    return Manifest(build_table(base.spec, entries), "the parts of a snapshot")


def join_entry(stated: Entry, found: Iterable[Entry], rank: int | None) -> Entry:
    """Return an entry with the chunks of all parts, in order; with those of `rank` if the entry differs by rank.

    Raises Corrupt if the chunks do not add up to the entry.
    """
    variants = {entry.rank: entry for entry in found if entry.rank != NO_RANK}
    if variants:
        own = variants.get(NO_RANK if rank is None else rank) or variants[min(variants)]
        return stated._replace(size_bytes=own.size_bytes, chunks=own.chunks, spec=own.spec, dims=0, rank=NO_RANK)
    chunks = {chunk.box: chunk for entry in found for chunk in _iter_with_boxes(entry)}
    in_order = [chunks[box] for box in sorted(chunks)]
    dims = {len(chunk.box) // 2 for chunk in in_order}
    if dims <= {SPAN_DIMS}:
        return stated._replace(chunks=_join_spans(stated, in_order), dims=0)
    if len(dims) > 1 or sum(chunk.size_bytes for chunk in in_order) != stated.size_bytes:
        raise _incomplete(stated)
    return _flatten_boxes(stated._replace(chunks=tuple(in_order), dims=dims.pop()))


def _flatten_boxes(entry: Entry) -> Entry:
    """Return an entry as a plain span of bytes if each of its boxes is contiguous in the tensor, else unchanged."""
    shape = find_shape(entry)
    item_bytes = entry.size_bytes // prod(shape)
    boxes = [Box(chunk.box[: entry.dims], chunk.box[entry.dims :]) for chunk in entry.chunks]
    if not all(is_span(box, shape) for box in boxes):
        return entry
    starts = [span_of(box, shape, item_bytes)[0] for box in boxes]
    spans = [chunk._replace(box=(start, chunk.size_bytes)) for chunk, start in zip(entry.chunks, starts, strict=True)]
    return entry._replace(chunks=_join_spans(entry, sorted(spans, key=lambda chunk: chunk.box)), dims=0)


def _iter_with_boxes(entry: Entry) -> Iterator[ChunkRef]:
    """Yield the chunks of an entry; those of a plain span get a box of start and size in bytes."""
    start = 0
    for chunk in entry.chunks:
        yield chunk if chunk.box else chunk._replace(box=(start, chunk.size_bytes))
        start += chunk.size_bytes


def _join_spans(stated: Entry, chunks: Sequence[ChunkRef]) -> tuple[ChunkRef, ...]:
    """Return sorted spans as chunks of a plain span; raises Corrupt for a gap or an overlap."""
    end = 0
    for chunk in chunks:
        if chunk.box[0] != end:
            raise _incomplete(stated)
        end += chunk.size_bytes
    if end != stated.size_bytes:
        raise _incomplete(stated)
    return tuple(chunk._replace(box=()) for chunk in chunks)


def _incomplete(stated: Entry) -> Corrupt:
    return Corrupt(
        f"{stated.name!r}: the parts of the snapshot do not add up to its {stated.size_bytes} bytes, each once;"
        " run `holdfast check`",
        key=stated.name,
    )


Part = TypeVar("Part")
Result = TypeVar("Result")


def iter_manifests(store: ObjectStore, refs: Sequence[ManifestRef]) -> Generator[Manifests | HoldfastError, None, None]:
    """Yield the manifests of each snapshot, or the error with which `read_manifests` would end."""
    return _iter_joined(store, refs, read_manifest, lambda root: root.parts, join_parts)


def iter_needs(store: ObjectStore, refs: Sequence[ManifestRef]) -> Generator[Needs | HoldfastError, None, None]:
    """Yield the files that each snapshot needs, or the error with which `read_needs` would end."""
    return _iter_joined(store, refs, read_head, lambda head: head[1], find_needs)


def take_read(found: Result | HoldfastError) -> Result:
    """Return what was read, or raise the error."""
    if isinstance(found, HoldfastError):
        raise found
    return found


def _iter_joined(
    store: ObjectStore,
    refs: Sequence[ManifestRef],
    read: Callable[[ObjectStore, ManifestRef], Part],
    find_parts: Callable[[Part], Sequence[PartRef]],
    join: Callable[[ManifestRef, Part, Iterable[Part]], Result],
) -> Generator[Result | HoldfastError, None, None]:
    """Read each root, then its parts, and join them; an error replaces the result."""
    roots: deque[tuple[ManifestRef, Part | HoldfastError, int]] = deque()

    def iter_parts() -> Iterator[tuple[Callable[[], Part | HoldfastError], int]]:
        works = ((partial(_attempt, read, store, ref), ref.size_bytes) for ref in refs)
        with closing(store.iter_together(works)) as found:
            for ref, root in zip(refs, found, strict=True):
                parts = () if isinstance(root, HoldfastError) else find_parts(root)
                roots.append((ref, root, len(parts)))
                for part in parts:
                    yield partial(_attempt, read, store, part.manifest), part.manifest.size_bytes
                if not parts:  # the root waits for its turn
                    yield partial(_return, root), ref.size_bytes

    with closing(store.iter_together(iter_parts())) as found:
        for first in found:
            ref, root, num_parts = roots.popleft()
            parts = [first, *islice(found, num_parts - 1)] if num_parts else []
            yield _join_read(partial(join, ref), root, parts)


def _join_read(
    join: Callable[[Part, Iterable[Part]], Result], root: Part | HoldfastError, parts: Sequence[Part | HoldfastError]
) -> Result | HoldfastError:
    if isinstance(root, HoldfastError):
        return root
    read = [part for part in parts if not isinstance(part, HoldfastError)]
    return join(root, read) if len(read) == len(parts) else next(e for e in parts if isinstance(e, HoldfastError))


def _attempt(
    read: Callable[[ObjectStore, ManifestRef], Part], store: ObjectStore, ref: ManifestRef
) -> Part | HoldfastError:
    try:
        return read(store, ref)
    except HoldfastError as error:
        return error


def _return(value: Result) -> Result:
    return value
