"""Writes safetensors files, and folders as `save_pretrained` does: shards with an index, other files beside them."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from blake3 import blake3

from holdfast.digest import Digest
from holdfast.errors import TooLarge, Unsupported
from holdfast.formats.receipt import CarriedFile
from holdfast.formats.writing.copying import (
    Copied,
    CopyJob,
    ExportWork,
    TensorCopier,
    WrittenExport,
    make_receipt_tensor,
)
from holdfast.formats.writing.plan import PlannedTensor, leave_out_others
from holdfast.formats.writing.target import RECEIPT_NAME, ExportFile
from holdfast.json_text import Json
from holdfast.objects.blocks import PAGE_BYTES
from holdfast.repo.format.layout import verify_name
from holdfast.snapshot.leaves import BLOBS, decode_plain
from holdfast.snapshot.opened import Opened
from holdfast.tensors.spec import dtype_name
from holdfast.trees.registered import Types

FORMAT_METADATA: Final = {"format": "pt"}
"""Readers want to know the library that wrote a file."""
_METADATA: Final = "__metadata__"
_LENGTH: Final = struct.Struct("<Q")
_ALIGNMENT: Final = 8
_LARGE_BYTES: Final = 1 << 20
_MAX_HEADER_BYTES: Final = 100_000_000
"""Readers of safetensors refuse a longer header."""
_DTYPES: Final = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "int16": "I16",
    "uint16": "U16",
    "int32": "I32",
    "uint32": "U32",
    "int64": "I64",
    "uint64": "U64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "complex64": "C64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
}


@dataclass(frozen=True, slots=True)
class SafetensorsLayout:
    """One safetensors file before its bytes are written: its header, and where each tensor begins."""

    header: bytes
    """The first bytes of the file, with the length of the JSON."""
    jobs: tuple[CopyJob, ...]
    size_bytes: int


def verify_tensors(tensors: Sequence[PlannedTensor], copier: TensorCopier) -> None:
    """Raise Unsupported if safetensors cannot contain a tensor, for its dtype or its name."""
    for each in tensors:
        if each.name_in_files == _METADATA or not _is_unicode(each.name_in_files):
            raise Unsupported(f"safetensors has no tensors with the name {each.name_in_files!r}; rename or exclude it")
        name = dtype_name(copier.find_dtype(each.tensor))
        if name not in _DTYPES:
            raise Unsupported(
                f"{each.tensor.name} is {name}, which safetensors cannot contain; leave it out (--exclude, exclude=),"
                " cast it (--dtype, dtype=), or export with --format torch"
            )


def _is_unicode(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def plan_safetensors(
    tensors: Sequence[PlannedTensor], copier: TensorCopier, metadata: Mapping[str, str]
) -> SafetensorsLayout:
    """Lay out a file; raises TooLarge if its header would be longer than readers accept."""
    # Larger items first, so that every tensor is aligned to its items.
    ordered = sorted(tensors, key=lambda each: -copier.find_dtype(each.tensor).itemsize)
    fields: dict[str, Json] = {_METADATA: dict(sorted(metadata.items()))}
    starts, at = [], 0
    for each in ordered:
        dtype, shape = copier.find_dtype(each.tensor), each.tensor.spec.shape
        end = at + math.prod(shape) * dtype.itemsize
        fields[each.name_in_files] = {
            "dtype": _DTYPES[dtype_name(dtype)],
            "shape": list(shape),
            "data_offsets": [at, end],
        }
        starts.append(at)
        at = end
    text = json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode()
    # Spaces at the end belong to the format. Tensors that begin with a page of the file can be written without a copy.
    text += b" " * (-(_LENGTH.size + len(text)) % (PAGE_BYTES if at >= _LARGE_BYTES else _ALIGNMENT))
    if len(text) > _MAX_HEADER_BYTES:
        raise TooLarge(
            f"the names of {len(tensors)} tensors do not fit into the header of one safetensors file;"
            " export with --format hf and a smaller --max-shard-size, or with --format torch"
        )
    header = _LENGTH.pack(len(text)) + text
    jobs = tuple(CopyJob(each.tensor, len(header) + start) for each, start in zip(ordered, starts, strict=True))
    return SafetensorsLayout(header, jobs, len(header) + at)


def write_safetensors(file: ExportFile, layout: SafetensorsLayout, copier: TensorCopier) -> dict[str, Copied]:
    """Write a file, and return what was copied, by the name in the snapshot."""
    file.write_at(0, memoryview(layout.header))
    copied = copier.copy(layout.jobs, file)
    return {job.tensor.name: each for job, each in zip(layout.jobs, copied, strict=True)}


def export_safetensors(work: ExportWork, file_name: str) -> WrittenExport:
    """Write all tensors into one file; tensors that share memory are written each on its own."""
    tensors = list(work.plan.tensors.values())
    verify_tensors(tensors, work.copier)
    layout = plan_safetensors(tensors, work.copier, FORMAT_METADATA)
    work.target.verify_room(layout.size_bytes)
    with work.target.create() as file:
        copied = write_safetensors(file, layout, work.copier)
    written = [make_receipt_tensor(each, copied[each.tensor.name], file_name) for each in tensors]
    return WrittenExport(written, leave_out_others(work.plan, work.tree, "a safetensors file"))


_PATTERN: Final = "model{suffix}.safetensors"
_SINGLE: Final = _PATTERN.format(suffix="")
_INDEX: Final = "model.safetensors.index.json"
_FILE: Final = "file"
"""The type in the spec of an entry that is a file."""
_SUFFIXES: Final = (".json", ".txt", ".model", ".jinja", ".md", ".py", ".tiktoken")
"""Texts and bytes at the top of a tree are files if their names end in one of these."""


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file to be written beside the weights."""

    path: str
    size_bytes: int
    iter_pieces: Callable[[], Iterable[memoryview]]
    leaf_name: str = ""
    """The leaf of the tree that it is; empty for a file beside the tree."""


def export_hf(work: ExportWork, _: str) -> WrittenExport:
    """Write shards of at most `max_shard_bytes`, their index, and the files of the snapshot.

    Of tensors that are the same memory, the first one is written, as transformers expects; the metadata of its file
    names the others.
    """
    tensors = list(work.plan.tensors.values())
    verify_tensors(tensors, work.copier)
    kept = _find_kept(tensors)
    shards = plan_shards([each for each in tensors if kept[each.name_in_files] is each], work)
    carried = _list_files(work, shards)
    copied = _write_shards(work, shards, _find_aliases(kept), sum(file.size_bytes for file in carried))
    file_of = {each.name_in_files: name for name, shard in shards.items() for each in shard}
    if len(shards) > 1:
        _write_index(work, file_of)
    files = [_write_file(work, file) for file in carried]
    lines = []
    for each in tensors:
        first = kept[each.name_in_files]
        name = first.name_in_files
        lines.append(make_receipt_tensor(each, copied[first.tensor.name], file_of[name], name))
    in_files = {file.leaf_name for file in carried}
    left_out = leave_out_others(work.plan, work.tree, "a folder of weights")
    return WrittenExport(lines, [each for each in left_out if each.name not in in_files], files)


def _find_kept(tensors: Sequence[PlannedTensor]) -> dict[str, PlannedTensor]:
    """Return, by name, the tensor that is written for each: the first of those that are the same memory."""
    first: dict[Hashable, PlannedTensor] = {}
    return {each.name_in_files: first.setdefault(each.tie, each) for each in tensors}


def _find_aliases(kept: Mapping[str, PlannedTensor]) -> dict[str, str]:
    return {name: each.name_in_files for name, each in kept.items() if each.name_in_files != name}


def plan_shards(tensors: Sequence[PlannedTensor], work: ExportWork) -> dict[str, list[PlannedTensor]]:
    """Divide tensors among files, by name, in their order; huggingface_hub does it if they need several files."""
    sizes = {each.name_in_files: _find_size(each, work) for each in tensors}
    if sum(sizes.values()) <= work.max_shard_bytes:
        return {_SINGLE: list(tensors)}
    try:
        from huggingface_hub import split_state_dict_into_shards_factory
    except ImportError as error:
        raise Unsupported(
            f"weights in several files need huggingface_hub, which cannot be imported ({error});"
            " install it with: pip install 'holdfast[hf]', or raise --max-shard-size (max_shard_size=)"
        ) from error
    by_name = {each.name_in_files: each for each in tensors}
    split = split_state_dict_into_shards_factory(
        by_name,
        get_storage_size=lambda each: sizes[each.name_in_files],
        filename_pattern=_PATTERN,
        max_shard_size=work.max_shard_bytes,
    )
    return {name: [by_name[each] for each in names] for name, names in split.filename_to_tensors.items() if names}


def _find_size(each: PlannedTensor, work: ExportWork) -> int:
    return math.prod(each.tensor.spec.shape) * work.copier.find_dtype(each.tensor).itemsize


def _write_shards(
    work: ExportWork, shards: Mapping[str, Sequence[PlannedTensor]], aliases: Mapping[str, str], other_bytes: int
) -> dict[str, Copied]:
    layouts = {}
    for name, shard in shards.items():
        own = {each.name_in_files for each in shard}
        metadata = FORMAT_METADATA | {alias: kept for alias, kept in aliases.items() if kept in own}
        layouts[name] = plan_safetensors(shard, work.copier, metadata)
    work.target.verify_room(other_bytes + sum(layout.size_bytes for layout in layouts.values()))
    copied: dict[str, Copied] = {}
    for name, layout in layouts.items():
        with work.target.create(name) as file:
            copied |= write_safetensors(file, layout, work.copier)
    return copied


def _write_index(work: ExportWork, file_of: Mapping[str, str]) -> None:
    total = sum(_find_size(work.plan.tensors[name], work) for name in file_of)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(file_of.items()))}
    with work.target.create(_INDEX) as file:
        file.write_at(0, memoryview((json.dumps(index, indent=2) + "\n").encode()))


def _list_files(work: ExportWork, shards: Mapping[str, object]) -> list[SourceFile]:
    """Return the files beside the tree, and texts and bytes at its top that are named like files."""
    found: dict[str, SourceFile] = {}
    for file in (*_iter_entries(work.opened), *_iter_leaves(work.opened)):
        name = verify_name(file.path, what="file")
        if name in (*shards, _INDEX):
            raise Unsupported(f"the snapshot has a file {name!r}, which is the name of a file of weights; rename it")
        if name != RECEIPT_NAME:
            found.setdefault(name, file)
    return list(found.values())


def _iter_entries(opened: Opened) -> Iterator[SourceFile]:
    for entry in opened.reader.manifest.iter_entries():
        if isinstance(entry.spec, dict) and entry.spec.get("type") == _FILE:
            yield SourceFile(entry.name, entry.size_bytes, partial(opened.reader.iter_entry, entry))


def _iter_leaves(opened: Opened) -> Iterator[SourceFile]:
    for leaf in opened.leaves:
        if len(leaf.path_json) != 1 or not leaf.name.endswith(_SUFFIXES):
            continue
        if leaf.tag in BLOBS:
            entry = opened.entry(leaf.node[1])
            yield SourceFile(leaf.name, entry.size_bytes, partial(opened.reader.iter_entry, entry), leaf.name)
        elif leaf.tag in ("str", "bytes"):
            value = decode_plain(leaf.node, Types(()))
            data = value.encode() if isinstance(value, str) else bytes(value)
            yield SourceFile(leaf.name, len(data), partial(iter, [memoryview(data)]), leaf.name)


def _write_file(work: ExportWork, source: SourceFile) -> CarriedFile:
    hasher, at = blake3(), 0
    with work.target.create(source.path) as file:
        for piece in source.iter_pieces():
            hasher.update(piece)
            file.write_at(at, piece)
            at += piece.nbytes
    return CarriedFile(source.path, at, Digest(hasher.digest()))
