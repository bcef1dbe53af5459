"""Keeps files as a snapshot, cut at their tensors, and restores them: what `put` and `get` do."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import BinaryIO, Final, NamedTuple

from holdfast.errors import BadName, Corrupt, NameInUse, NotFound
from holdfast.files.safetensors_header import LENGTH_BYTES, MAX_HEADER_BYTES, read_safetensors
from holdfast.objects.protocol import ObjectStore
from holdfast.objects.url import find_path, verify_path
from holdfast.progress import Progress
from holdfast.repo.files import FILE, FileSource, Restored, is_below, plan_files, restore
from holdfast.repo.format.chunk import cut
from holdfast.repo.format.grid import Extent, cut_extents
from holdfast.repo.format.layout import verify_user_name
from holdfast.repo.format.manifest import read_manifest
from holdfast.repo.format.source import Source
from holdfast.repo.handle.repository import Repository
from holdfast.repo.names.snapshots import read_name, read_tag
from holdfast.repo.read.reader import SnapshotReader
from holdfast.repo.write.writer import Request, SaveResult, WriteOptions, save

MIN_FILE_BYTES: Final = 256 << 10
"""A smaller file is not looked into: to open each of very many small files once more takes time and gains little."""
MIN_TENSOR_BYTES: Final = 4 << 10
"""A smaller tensor is not cut out: a chunk takes some 200 bytes beside its own."""
_ZIP_MAGIC: Final = b"PK\x03\x04"


class FileCuts(NamedTuple):
    """Where a file is cut into chunks."""

    ends: Sequence[int] = ()
    """The offsets at which chunks end; () for the ordinary grid."""
    runs: Container[int] = ()
    """The offsets at which tensors begin. These are aligned in a pack, as tensors saved from memory are."""
    item_bytes: int = 1
    """The size of an item in most of the bytes."""


def read_cuts(source: FileSource) -> FileCuts:
    """Return where a file is cut: on the ordinary grid, if it has no tensors or is malformed.

    What the file says about its tensors decides only where it is cut: any file is saved as it is.
    """
    if source.size_bytes < MIN_FILE_BYTES:
        return FileCuts()
    reader = _choose_reader(bytes(source.read(0, LENGTH_BYTES + 1)))
    if reader is None:
        return FileCuts()
    with source.opened() as file:
        return plan_cuts(reader(file, source.size_bytes), source.size_bytes)


def plan_cuts(extents: Iterable[Extent], size_bytes: int) -> FileCuts:
    """Return where a file with these tensors is cut."""
    worth = [extent for extent in extents if extent.stop - extent.start >= MIN_TENSOR_BYTES]
    if not worth:
        return FileCuts()
    ends = cut_extents([Extent(0, 0), *worth, Extent(size_bytes, size_bytes)])
    sizes: Counter[int] = Counter()
    for extent in worth:
        sizes[extent.item_bytes] += extent.stop - extent.start
    return FileCuts(ends, frozenset(extent.start for extent in worth), sizes.most_common(1)[0][0])


def _choose_reader(first: bytes) -> Callable[[BinaryIO, int], list[Extent]] | None:
    """Return what finds the tensors of a file that begins with these bytes; None if it has none."""
    if first.startswith(_ZIP_MAGIC):
        from holdfast.files.torch_archive import read_torch_archive

        return read_torch_archive
    is_header = first.endswith(b"{") and int.from_bytes(first[:LENGTH_BYTES], "little") <= MAX_HEADER_BYTES
    return read_safetensors if is_header else None


Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
"""A file or directory, or several."""


def plan_sources(repo: Repository, paths: Paths, *, follow_links: bool = False) -> list[FileSource]:
    """Return a source for each file at and below `paths`, as `plan_files` does; raises NotFound if there are none."""
    each = [paths] if isinstance(paths, str | os.PathLike) else paths
    texts = [os.fspath(path) for path in each]
    sources = plan_files(texts, outside=_find_directory(repo.store), follow_links=follow_links)
    if not sources:
        raise NotFound(f"there are no files in {', '.join(texts) or 'an empty list of paths'}; nothing was saved")
    return sources


def keep_files(
    repo: Repository, name: str, sources: Sequence[FileSource], options: WriteOptions, *, progress: Progress | None
) -> SaveResult:
    """Save files as one snapshot, each as it is.

    Files with tensors are cut where the tensors are, so that they share chunks with the same tensors saved from memory.
    """
    verify_user_name(name)
    _verify_no_tag(repo.store, name)
    request = _make_request(name, sources, options)
    try:
        return save(repo, request, progress=progress)
    except NameInUse:
        stored = None if options.overwrite else _cut_as_stored(repo, request, sources)
        if stored is None:
            raise
        return save(repo, replace(request, sources=stored, runs={}), progress=progress)


def _make_request(name: str, sources: Sequence[FileSource], options: WriteOptions) -> Request:
    found = {number: cuts for number, source in enumerate(sources) if (cuts := read_cuts(source)).ends}
    pieces = list(sources)
    for number, cuts in found.items():
        pieces[number] = replace(pieces[number], cuts=cuts.ends, item_bytes=cuts.item_bytes)
    runs = {number: cuts.runs for number, cuts in found.items()}
    return Request(name, pieces, runs=runs, options=options)


def _find_directory(store: ObjectStore) -> str | None:
    """Return the directory of a store; None if it is in memory."""
    return None if "://" in store.url else store.url


def _verify_no_tag(store: ObjectStore, name: str) -> None:
    """Raise NameInUse if a new name would hide a tag: names are looked up before tags."""
    tag = read_tag(store, name) if read_name(store, name).snapshot is None else None
    if tag:
        raise NameInUse(
            f"{name!r} is a tag for {tag.snapshot_name!r}, which a snapshot of that name would hide;"
            " choose another name, or delete the tag",
            name=name,
        )


def _cut_as_stored(repo: Repository, request: Request, sources: Sequence[FileSource]) -> list[FileSource] | None:
    """Return the files, cut as those of the name's snapshot; None if it has other files or the same cuts.

    Content digests depend on the cuts. If a version with other rules has saved the same files, they are still found
    to be the same.
    """
    current = read_name(repo.store, request.name).snapshot
    if current is None:
        return None
    try:
        manifest = read_manifest(repo.store, current.manifest)
    except (NotFound, Corrupt):
        return None
    stored = [(entry, manifest.find_facts(position)[1]) for position, entry in enumerate(manifest.names)]
    if stored != [(source.name, source.size_bytes) for source in sources]:
        return None
    cuts = [[*accumulate(chunk.size_bytes for chunk in entry.chunks)] for entry in manifest.iter_entries()]
    if cuts == [_list_cuts(source) for source in request.sources]:
        return None
    return [replace(source, cuts=own) for source, own in zip(sources, cuts, strict=True)]


def _list_cuts(source: Source) -> list[int]:
    return [*source.cuts] or [stop for _, stop in cut(source.size_bytes)]


def restore_files(
    repo: Repository,
    reader: SnapshotReader,
    folder: str | os.PathLike[str],
    *,
    raw: bool = False,
    only: str | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Restored:
    """Write the files of a snapshot below `folder`; with `raw`, any entries, as bytes without a header. See `restore`.

    Raises NotFound if the snapshot has no files and `raw` is False, and BadName if the folder is inside the store.
    """
    verify_target(repo, folder)
    if not raw:
        _verify_files(reader)
    return restore(reader, os.fspath(folder), only=only, overwrite=overwrite, progress=progress)


def verify_target(repo: Repository, place: str | os.PathLike[str]) -> None:
    """Raise BadName if a place that the user wants to write to is a URL, or inside the store."""
    path, directory = verify_path(os.fspath(place)), _find_directory(repo.store)
    # The name itself, and what it leads to if it is a link: either may be in the store.
    around = (path, os.path.dirname(os.path.abspath(path)))
    if directory is not None and any(is_below(each, directory) for each in around):
        raise BadName(f"{path} is inside the store {directory}; choose a place outside of it")


def verify_other_store(repo: Repository, url: str) -> None:
    """Raise BadName if another store would be inside this one; a URL of a bucket, or the same store, is allowed."""
    path = find_path(url)
    if path is not None and path != find_path(repo.store.url):
        verify_target(repo, path)


def _verify_files(reader: SnapshotReader) -> None:
    """Raise NotFound if an entry is not a file: then the snapshot is a saved tree, which `load` loads."""
    manifest, name = reader.manifest, reader.snapshot.name
    specs = (manifest.find_facts(position)[0] for position in range(len(manifest)))
    if any(not isinstance(spec, dict) or spec.get("type") != FILE for spec in specs) or not len(manifest):
        raise NotFound(
            f"{name!r} has no files but a saved tree; store.load({name!r}) loads it, and raw=True writes its tensors"
            " as raw bytes",
            name=name,
        )
