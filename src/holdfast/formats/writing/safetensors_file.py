"""Writes safetensors files: the length of a JSON header, the header, and the bytes of each tensor in C order."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from holdfast.errors import TooLarge, Unsupported
from holdfast.formats.writing.copying import Copied, CopyJob, TensorCopier
from holdfast.formats.writing.plan import PlannedTensor, leave_out_others
from holdfast.formats.writing.target import ExportFile
from holdfast.formats.writing.work import ExportWork, WrittenExport, make_receipt_tensor
from holdfast.json_text import Json
from holdfast.objects.blocks import PAGE_BYTES
from holdfast.tensors.dtypes import dtype_name

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
