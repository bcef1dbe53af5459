"""Imports a checkpoint of another library as a snapshot, in pieces, and returns a receipt for every tensor."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, Final, NamedTuple

import torch
from blake3 import blake3

from holdfast import __version__
from holdfast.digest import Digest, parse_digest
from holdfast.errors import BadName, Corrupt, Mismatch, NotFound, Unsupported
from holdfast.formats.digests import (
    CellDigest,
    StreamDigest,
    WaitingRoom,
    add_cast_errors,
    cut_cells,
    find_stored_digest,
)
from holdfast.formats.reading.byte_ranges import ByteReader, Geometry, gather, iter_gathered, view_items
from holdfast.formats.reading.detect import open_checkpoint
from holdfast.formats.reading.found import (
    FoundCheckpoint,
    Placeholders,
    StoredStorage,
    TensorForm,
    iter_named_tensors,
    make_tensor,
    map_tree,
)
from holdfast.formats.receipt import CarriedFile, CastErrors, LeftOut, Receipt, ReceiptTensor, TensorDigest
from holdfast.json_text import Json
from holdfast.objects.url import verify_path
from holdfast.progress import Progress
from holdfast.repo.files import FileSource, is_below
from holdfast.repo.format.boxes import cut_rows, volume, whole
from holdfast.repo.format.entry import Entry
from holdfast.repo.format.source import Source
from holdfast.repo.handle.repository import Repository
from holdfast.repo.names.snapshots import CommittedSnapshot
from holdfast.repo.read.reader import open_snapshot
from holdfast.repo.write.writer import Request, SaveResult, save
from holdfast.snapshot.pickled import load_trusted_file
from holdfast.snapshot.save import SaveOptions, make_request
from holdfast.tensors.memory import view_bytes, view_raw, wrap_memory
from holdfast.tensors.sources import SourceForm, TensorSource
from holdfast.tensors.spec import (
    TensorSpec,
    contiguous_stride,
    count_bytes,
    decode_spec,
    dtype_name,
    find_role,
    item_bytes,
    number_bytes,
)
from holdfast.trees.pick import plan_names
from holdfast.trees.registered import Types

NOTE: Final = "import"
"""The key, in the note of an entry, of what its receipt says. Notes are no part of a snapshot's digest."""
Read = Callable[[int, int], memoryview]


class Cast:
    """Casts the items of one tensor, and measures by how much that changes them."""

    def __init__(self, dtype: torch.dtype, cast_to: torch.dtype) -> None:
        self.dtype, self.cast_to = dtype, cast_to
        self._lock = threading.Lock()
        self._max_abs = self._max_rel = 0.0
        self._overflowed: dict[int, int] = {}

    @property
    def errors(self) -> CastErrors:
        """The errors of all items that were cast so far."""
        return CastErrors(self._max_abs, self._max_rel, sum(self._overflowed.values()))

    def apply(self, data: memoryview, start: int) -> memoryview:
        """Return items in the new dtype; `start` is the position of the first one, in bytes of the source."""
        before = wrap_memory(data).view(self.dtype)
        after = before.to(self.cast_to)
        self._add_errors(add_cast_errors(CastErrors(0.0, 0.0), before, after), start)
        return view_bytes(after.view(torch.uint8))

    def _add_errors(self, errors: CastErrors, start: int) -> None:
        with self._lock:
            # By position, because a piece may be read more than once.
            self._overflowed[start] = errors.num_overflowed
            self._max_abs = max(self._max_abs, errors.max_abs)
            self._max_rel = max(self._max_rel, errors.max_rel)


@dataclass(frozen=True, slots=True)
class FileOrigin:
    """Where a tensor of an import comes from."""

    name_in_files: str
    file: str


class ImportedTensor:
    """A tensor of an import: a source that the save reads, and the facts for the receipt, which reading collects."""

    def __init__(
        self, planned: TensorSource, stored: StoredStorage | None, origin: FileOrigin, room: WaitingRoom
    ) -> None:
        """Read `planned` from files if `stored` is given, otherwise from memory."""
        self.name, self.alias = planned.name, planned.alias
        self.form: SourceForm = planned.form
        self._origin = origin
        self._cast = Cast(stored.dtype, stored.cast_to) if stored and stored.dtype and stored.cast_to else None
        self._read = planned.read if stored is None else _make_read(planned, stored.reader, self._cast)
        self._note: Json = None
        self._streams = _Streams(self.form, self._cast, room) if _is_c_order(self.form) else None
        self._apart = None if self._streams else _digest_apart(planned, stored, self._cast)

    def rename(self, planned: TensorSource, origin: FileOrigin) -> ImportedTensor:
        """Return the same tensor under another name; what is read of the one is known of the other."""
        other = copy(self)
        other.name, other.alias, other.form, other._origin = planned.name, planned.alias, planned.form, origin
        return other

    @property
    def size_bytes(self) -> int:
        """The number of bytes."""
        return self.form.size_bytes

    @property
    def spec(self) -> Json:
        """The spec of the tensor, as JSON."""
        return self.form.spec

    @property
    def cuts(self) -> Sequence[int]:
        """The offsets at which chunks end."""
        return self.form.cuts

    @property
    def item_bytes(self) -> int:
        """The size of one number of the tensor."""
        return number_bytes(self.form.tensor_spec.dtype)

    @property
    def note(self) -> Json:
        """What the receipt says of this tensor; None until every byte has been read."""
        if self._note is None:
            digests = self._streams.finish() if self._streams else self._apart
            self._note = None if digests is None else {NOTE: self._encode_note(digests)}
        return self._note

    def read(self, start: int, stop: int) -> memoryview:
        """Return the bytes from `start` to `stop`, and digest them if the digests of chunks will not do."""
        if self._cast is None:
            data = self._read(start, stop)
        else:
            data = self._read_cast(self._cast, start, stop)
        if self._streams and self._streams.result:
            self._streams.result.add(start, data)
        return data

    def _read_cast(self, cast: Cast, start: int, stop: int) -> memoryview:
        before, after = item_bytes(cast.dtype), item_bytes(cast.cast_to)
        low, high = start // after, -(-stop // after)
        original = self._read(low * before, high * before)
        if self._streams and self._streams.source:
            self._streams.source.add(low * before, original)
        return cast.apply(original, low * before)[start - low * after : stop - low * after]

    def _encode_note(self, digests: _Digests) -> Json:
        note: dict[str, Json] = {"name": self._origin.name_in_files, "file": self._origin.file}
        if digests.result is not None:
            note["digest"] = digests.result.hex()
        if self._cast:
            assert digests.source is not None, "the source of a cast has a digest of its own"
            errors = self._cast.errors
            note["cast"] = {
                "dtype": dtype_name(self._cast.dtype),
                "digest": digests.source.hex(),
                "max_abs": errors.max_abs,
                "max_rel": errors.max_rel,
                "num_overflowed": errors.num_overflowed,
            }
        return note


class _Digests(NamedTuple):
    """The digests of a tensor that the digests of its chunks do not tell."""

    source: Digest | None
    """None if it is that of the result."""
    result: Digest | None
    """None if it follows from the chunks."""


class _Streams:
    """The digests of a tensor whose entry has its items in C order."""

    def __init__(self, form: SourceForm, cast: Cast | None, room: WaitingRoom) -> None:
        spec = form.tensor_spec
        self.result: StreamDigest | None = None
        self.source: StreamDigest | None = None
        if not spec.meta and list(form.cuts) != cut_cells(spec.dtype, spec.shape):
            # It overlaps with other tensors, whose edges cut it as well.
            self.result = StreamDigest(form.size_bytes, room, CellDigest(spec.dtype, spec.shape))
        if cast:
            size_bytes = form.size_bytes // item_bytes(cast.cast_to) * item_bytes(cast.dtype)
            self.source = StreamDigest(size_bytes, room, CellDigest(cast.dtype, spec.shape))

    def finish(self) -> _Digests | None:
        """Return the digests, once every byte has been read."""
        streams = (self.source, self.result)
        found = _Digests(*(stream.finish() if stream else None for stream in streams))
        is_done = all(digest or not stream for stream, digest in zip(streams, found, strict=True))
        return found if is_done else None


def _is_c_order(form: SourceForm) -> bool:
    """Return whether the bytes of an entry are exactly the items of its tensor, in C order."""
    spec = form.tensor_spec
    if spec.meta:
        return True
    if form.size_bytes != count_bytes(spec.dtype, math.prod(spec.shape)):
        return False
    return spec.packed or spec.stride == contiguous_stride(spec.shape)


def _find_geometry(spec: TensorSpec, dtype: torch.dtype, offset: int) -> Geometry:
    return Geometry(item_bytes(dtype), spec.shape, spec.stride, offset)


def _make_read(planned: TensorSource, reader: ByteReader, cast: Cast | None) -> Read:
    """Return how to read bytes of the entry, before the cast, from a storage in files."""
    spec = planned.form.tensor_spec
    dtype = cast.dtype if cast else spec.dtype
    if spec.packed:
        return _make_packed_read(planned, reader, dtype)
    # The plan counts in bytes of the dtype that is saved.
    start = planned.start // item_bytes(spec.dtype) * item_bytes(dtype)
    return lambda low, high: reader.read(start + low, start + high)


def _make_packed_read(planned: TensorSource, reader: ByteReader, dtype: torch.dtype) -> Read:
    """Return how to read a tensor with gaps between its items: the items in C order, a block of rows at a time."""
    spec, tensor = planned.form.tensor_spec, planned.tensor
    size = item_bytes(dtype)
    kept = [dim for dim, (length, step) in enumerate(zip(spec.shape, spec.stride, strict=True)) if step or length == 1]
    shape, stride = tuple(spec.shape[dim] for dim in kept), tuple(spec.stride[dim] for dim in kept)
    geometry = Geometry(size, shape, stride, int(tensor.storage_offset()))
    boxes = cut_rows(whole(shape), shape, item_bytes(spec.dtype))
    counts = [volume(box) for box in boxes]
    ends = list(accumulate(counts))

    def read(start: int, stop: int) -> memoryview:
        first, last = start // size, -(-stop // size)
        found = [
            view_items(gather(reader, geometry, box))[
                max(0, (first - end + count) * size) : (last - end + count) * size
            ]
            for box, count, end in zip(boxes, counts, ends, strict=True)
            if end > first and end - count < last
        ]
        data = found[0] if len(found) == 1 else memoryview(bytearray().join(found))
        return data[start - first * size : stop - first * size]

    return read


def _digest_apart(planned: TensorSource, stored: StoredStorage | None, cast: Cast | None) -> _Digests:
    """Return the digests of a tensor whose entry has other bytes than its items in C order; reads it now."""
    spec = planned.form.tensor_spec
    source = CellDigest(cast.dtype, spec.shape) if cast else None
    result = CellDigest(spec.dtype, spec.shape)
    for piece, start in _iter_c_order(planned, stored, cast):
        if source:
            source.update(piece)
        result.update(cast.apply(piece, start) if cast else piece)
    return _Digests(source.digest() if source else None, result.digest())


def _iter_c_order(
    planned: TensorSource, stored: StoredStorage | None, cast: Cast | None
) -> Iterator[tuple[memoryview, int]]:
    """Yield the items in C order, in pieces, each with its position in bytes."""
    spec, tensor = planned.form.tensor_spec, planned.tensor
    at = 0
    if stored is None:
        yield view_bytes(view_raw(tensor.detach()).contiguous().view(-1).view(torch.uint8)), 0
        return
    dtype = cast.dtype if cast else spec.dtype
    for piece in iter_gathered(stored.reader, _find_geometry(spec, dtype, int(tensor.storage_offset()))):
        yield piece, at
        at += len(piece)


class ImportedFile:
    """A file that is carried along, digested while the save reads it."""

    def __init__(self, inner: FileSource, room: WaitingRoom) -> None:
        self._inner = inner
        self._stream = StreamDigest(inner.size_bytes, room, blake3())
        self._note: Json = None
        self.name, self.size_bytes, self.spec = inner.name, inner.size_bytes, inner.spec
        self.alias, self.cuts, self.item_bytes = inner.alias, inner.cuts, inner.item_bytes

    @property
    def note(self) -> Json:
        """The modification time, and the digest once every byte has been read."""
        if self._note is None:
            digest = self._stream.finish()
            if digest is None:
                return self._inner.note
            self._note = {**self._inner.note, NOTE: {"digest": digest.hex()}}
        return self._note

    def read(self, start: int, stop: int) -> memoryview:
        """Return the bytes from `start` to `stop`, and digest them."""
        data = self._inner.read(start, stop)
        self._stream.add(start, data)
        return data


def decode_tensor(entry: Entry) -> ReceiptTensor | None:
    """Return what the receipt says of an entry; None if it was not imported as a tensor."""
    name, note = entry.name, entry.note
    found = note.get(NOTE) if isinstance(note, dict) else None
    if not isinstance(found, dict) or "name" not in found:
        return None
    spec = decode_spec(entry.spec, size_bytes=entry.size_bytes, what=name)
    digest = _parse(found["digest"], name) if "digest" in found else _find_digest(entry, spec)
    result = TensorDigest(dtype_name(spec.dtype), spec.shape, digest)
    cast = found.get("cast")
    if cast is None:
        return ReceiptTensor(name, found["name"], found["file"], result, result)
    source = TensorDigest(cast["dtype"], spec.shape, _parse(cast["digest"], name))
    errors = CastErrors(cast["max_abs"], cast["max_rel"], cast["num_overflowed"])
    return ReceiptTensor(name, found["name"], found["file"], source, result, errors)


def _find_digest(entry: Entry, spec: TensorSpec) -> Digest:
    shape = (0,) if spec.meta else spec.shape
    digest = find_stored_digest(entry, spec.dtype, shape)
    if digest is None:
        raise Corrupt(f"{entry.name!r}: its note has no digest for the receipt of the import; run `holdfast check`")
    return digest


def _parse(text: Json, name: str) -> Digest:
    return parse_digest(text, where=name)


def decode_file(entry: Entry) -> CarriedFile | None:
    """Return what the receipt says of a carried file; None if the entry is none."""
    found = entry.note.get(NOTE) if isinstance(entry.note, dict) else None
    if not isinstance(found, dict) or "name" in found or "digest" not in found:
        return None
    return CarriedFile(entry.name, entry.size_bytes, _parse(found["digest"], entry.name))


IMPORT: Final = "import"
"""The key of the facts about an import in the environment of its snapshot."""
_SAFE_DTYPES: Final = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportOptions(SaveOptions):
    """How a checkpoint is read, and then saved as a tree."""

    format: str | None = None
    """Which one, if a folder has several."""
    rename: Mapping[str, str] = field(default_factory=dict)
    """Prefixes of keys to replace."""
    dtype: torch.dtype | None = None
    """Cast floating-point tensors to this dtype; the receipt states the largest error."""
    unpickle: bool = False
    """Load a file of torch.save that contains other objects. This can run arbitrary code."""
    follow_links: bool = False
    """Follow symbolic links in the folder that lead outside of it, or to directories; otherwise they are refused."""


@dataclass(frozen=True, slots=True)
class ImportResult:
    """What an import did: the save of its snapshot, and the receipt."""

    saved: SaveResult
    receipt: Receipt


def import_checkpoint(
    repo: Repository,
    source: str | os.PathLike[str],
    name: str,
    options: ImportOptions,
    *,
    types: Types,
    progress: Progress | None = None,
) -> ImportResult:
    """Save a checkpoint of another library under a name; memory stays within the budget of the repository.

    Raises BadFile or Untrusted if the source is no checkpoint, is damaged, or could run code; nothing is written then.
    """
    path = os.fspath(source)
    if is_below(path, repo.store.url) or is_below(repo.store.url, path):
        raise BadName(f"{path} is inside the store {repo.store.url}, or contains it; import files outside of it")
    found = plan_import(path, options)
    lines: list[_Lines] = []
    request = _make_request(name, found, path, options, types)
    saved = save(repo, replace(request, watch=lambda entries: lines.append(_decode(entries))), progress=progress)
    receipt = _make_receipt(saved.name, saved.digest, time.time(), request.options.environment[IMPORT], lines[-1])
    return ImportResult(saved, receipt)


def plan_import(path: str, options: ImportOptions) -> FoundCheckpoint:
    """Open a checkpoint, cast and rename it; reads headers and plain values, and no tensor."""
    found = open_source(path, format=options.format, unpickle=options.unpickle, follow_links=options.follow_links)
    if options.dtype is not None:
        found = replace(found, tree=_cast(found, options.dtype))
    return found


def open_source(path: str, *, format: str | None, unpickle: bool, follow_links: bool) -> FoundCheckpoint:
    """Open a checkpoint; with `unpickle`, load it as a file of torch.save, which can run any code."""
    verify_path(path)
    if unpickle:
        return FoundCheckpoint("torch", load_trusted_file(path), Placeholders())
    return open_checkpoint(path, format, follow_links=follow_links)


def _cast(found: FoundCheckpoint, dtype: torch.dtype) -> Any:
    """Return the tree with placeholders of the new dtype; tensors that share a storage still share one."""
    if dtype not in _SAFE_DTYPES:
        names = ", ".join(str(each).removeprefix("torch.") for each in _SAFE_DTYPES)
        raise Unsupported(f"{dtype} is no dtype to cast to; choose one of {names}")
    placeholders = found.placeholders
    casts: dict[int, StoredStorage] = {}
    done: dict[int, torch.Tensor] = {}
    originals: dict[int, torch.dtype] = {}

    def change(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not value.is_floating_point() or value.dtype == dtype:
            return value
        stored = placeholders.find(value)
        if stored is None:
            raise Unsupported("a file that is unpickled cannot be cast while it is imported; cast it when you load it")
        key = stored.storage._cdata
        if originals.setdefault(key, value.dtype) != value.dtype:
            raise Unsupported("two tensors of different dtypes share memory, so that neither can be cast")
        if id(value) not in done:
            casts.setdefault(key, placeholders.add_cast(stored, value.dtype, dtype) if key not in casts else casts[key])
            form = TensorForm(
                dtype,
                tuple(value.shape),
                value.stride(),
                int(value.storage_offset()),
                find_role(value),
                value.requires_grad,
            )
            done[id(value)] = make_tensor(casts[key], form, what="a tensor that is cast")
        return done[id(value)]

    return map_tree(found.tree, change)


def _make_request(name: str, found: FoundCheckpoint, path: str, options: ImportOptions, types: Types) -> Request:
    names = [tensor_name for tensor_name, _ in iter_named_tensors(found.tree)]
    tree = _rename(found.tree, options.rename)
    facts = {
        "format": found.format,
        "place": path,
        "holdfast": __version__,
        "left_out": [[each.name, each.reason] for each in found.left_out],
    }
    metadata, environment = {**found.metadata, **options.metadata}, {**options.environment, IMPORT: facts}
    request = make_request(name, tree, replace(options, metadata=metadata, environment=environment), types)
    repeats = _find_repeats(request.sources)
    sources = list(_iter_sources(request.sources, found, names, repeats))
    return replace(request, sources=sources, repeats=repeats)


def _find_repeats(planned: Sequence[Source]) -> dict[int, int]:
    """Return, by position, the first position of each tensor that has several names."""
    repeats: dict[int, int] = {}
    known: dict[Hashable, int] = {}
    for position, source in enumerate(planned):
        if isinstance(source, TensorSource) and source.alias and source.size_bytes:
            spec = source.tensor_spec
            key = (source.alias, source.start, tuple(source.cuts), spec.dtype, spec.shape, spec.stride, spec.packed)
            first = known.setdefault(key, position)
            if first != position:
                repeats[position] = first
    return repeats


def _rename(tree: Any, renames: Mapping[str, str]) -> Any:
    if not renames:
        return tree

    def rename(found: Mapping[Any, Any]) -> dict[str, str]:
        return plan_names([key for key in found if isinstance(key, str)], renames)

    return map_tree(tree, lambda leaf: leaf, rename=rename)


def _iter_sources(
    planned: Sequence[Source], found: FoundCheckpoint, names: Sequence[str], repeats: Mapping[int, int]
) -> Iterator[Source]:
    """Yield the sources of the save: tensors and carried files are digested while they are read."""
    room = WaitingRoom()
    rest = iter(names)
    taken = set()
    tensors: dict[int, ImportedTensor] = {}
    for position, source in enumerate(planned):
        taken.add(source.name)
        if isinstance(source, TensorSource):
            stored = found.placeholders.find(source.tensor)
            origin = FileOrigin(next(rest), stored.reader.file if stored else "")
            first = tensors.get(repeats.get(position, -1))
            tensor = first.rename(source, origin) if first else ImportedTensor(source, stored, origin, room)
            if source.alias:
                tensors[position] = tensor
            yield tensor
        else:
            yield source
    for file in found.files:
        if file.name in taken:
            raise Mismatch(f"the file {file.name!r} has the name of a tensor; rename the tensor (--rename, rename=)")
        yield ImportedFile(file, room)


_Lines = tuple[tuple[ReceiptTensor, ...], tuple[CarriedFile, ...]]


def _decode(entries: Iterable[Entry]) -> _Lines:
    tensors, files = [], []
    for entry in entries:
        tensor, file = decode_tensor(entry), decode_file(entry)
        if tensor:
            tensors.append(tensor)
        if file:
            files.append(file)
    return tuple(tensors), tuple(files)


def _make_receipt(name: str, root: Digest, time_s: float, facts: Any, lines: _Lines) -> Receipt:
    return Receipt(
        kind="import",
        format=facts["format"],
        snapshot=name,
        root=root,
        time=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time_s)),
        holdfast=facts["holdfast"],
        place=facts["place"],
        tensors=lines[0],
        files=lines[1],
        left_out=tuple(LeftOut(*each) for each in facts["left_out"]),
    )


def read_import_receipt(repo: Repository, snapshot: CommittedSnapshot) -> Receipt:
    """Return the receipt of an import, which its snapshot keeps; raises NotFound if it was not imported."""
    facts = snapshot.environment.get(IMPORT)
    if not isinstance(facts, dict):
        raise NotFound(
            f"{snapshot.name!r} was not imported, so the store has no receipt for it; give one with --receipt",
            name=snapshot.name,
        )
    with open_snapshot(repo, snapshot) as reader:
        lines = _decode(reader.manifest.iter_entries())
    return _make_receipt(snapshot.name, snapshot.digest, snapshot.time_s, facts, lines)
