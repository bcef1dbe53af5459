"""Imports a checkpoint of another library as a snapshot, in pieces, and returns a receipt for every tensor."""

from __future__ import annotations

import os
import time
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch

from holdfast import __version__
from holdfast.digest import Digest
from holdfast.errors import BadName, Mismatch, NotFound, Unsupported
from holdfast.formats.imported import FileOrigin, ImportedFile, ImportedTensor, decode_file, decode_tensor
from holdfast.formats.reading.detect import open_checkpoint
from holdfast.formats.reading.found import FoundCheckpoint, iter_named_tensors, map_tree
from holdfast.formats.reading.placeholders import Placeholders, StoredStorage, TensorForm, make_tensor
from holdfast.formats.receipt import CarriedFile, LeftOut, Receipt, ReceiptTensor
from holdfast.formats.stream_digest import WaitingRoom
from holdfast.objects.url import verify_path
from holdfast.progress import Progress
from holdfast.repo.files import is_below
from holdfast.repo.format.entry import Entry
from holdfast.repo.format.source import Source
from holdfast.repo.handle.repository import Repository
from holdfast.repo.names.snapshots import CommittedSnapshot
from holdfast.repo.read.reader import open_snapshot
from holdfast.repo.write.writer import Request, SaveResult, save
from holdfast.snapshot.pickled import load_trusted_file
from holdfast.snapshot.save.save import SaveOptions, make_request
from holdfast.tensors.sources import TensorSource
from holdfast.tensors.spec import find_role
from holdfast.trees.registered import Types
from holdfast.trees.rename import plan_names

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
