"""Reads safetensors: single files, and folders of shards with an index. Needs no library."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch

from holdfast.errors import BadFile, Corrupt
from holdfast.formats.reading.byte_ranges import FileBytes, open_file, open_file_in
from holdfast.formats.reading.found import FoundCheckpoint
from holdfast.formats.reading.placeholders import Placeholders, TensorForm, make_tensor
from holdfast.json_text import Json, iter_fields, parse_json
from holdfast.repo.files import SourceFolder
from holdfast.tensors.dtypes import item_bytes
from holdfast.tensors.spec import contiguous_stride
from holdfast.texts import list_some

INDEX_SUFFIX: Final = ".safetensors.index.json"
_LENGTH: Final = struct.Struct("<Q")
_MAX_HEADER_BYTES: Final = 100_000_000
"""The limit of the safetensors library."""
_MAX_INDEX_BYTES: Final = 1 << 28
_METADATA: Final = "__metadata__"
_MAX_DIMS: Final = 64
# By name of torch's dtype, because older versions of torch do not have all of them.
_DTYPE_NAMES: Final = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
    "C64": "complex64",
}
DTYPES: Final[Mapping[str, torch.dtype]] = {
    code: getattr(torch, name) for code, name in _DTYPE_NAMES.items() if hasattr(torch, name)
}
"""The dtypes of safetensors that this torch has, by their code in a header."""


@dataclass(frozen=True, slots=True)
class TensorSlot:
    """One tensor of a safetensors file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    data: FileBytes


@dataclass(frozen=True, slots=True)
class SafetensorsHeader:
    """The header of a safetensors file, checked: the tensors cover its data exactly once."""

    slots: tuple[TensorSlot, ...]
    metadata: Mapping[str, str]


def read_header(data: FileBytes, *, where: str) -> SafetensorsHeader:
    """Read and check the header of a safetensors file; raises BadFile with what is wrong."""
    if data.size_bytes < _LENGTH.size:
        raise BadFile(f"{where} is no safetensors file: it has only {data.size_bytes} bytes", path=where)
    (length,) = _LENGTH.unpack(data.read(0, _LENGTH.size))
    start = _LENGTH.size + length
    if length > _MAX_HEADER_BYTES or start > data.size_bytes:
        raise BadFile(f"{where} is cut off or no safetensors file: its header would end at byte {start}", path=where)
    body = data.narrow(start, data.size_bytes)
    slots: dict[str, TensorSlot] = {}
    metadata: Json = {}
    try:
        for name, value in iter_fields(bytes(data.read(_LENGTH.size, start)), where="its header"):
            if name in slots or (name == _METADATA and metadata):
                raise BadFile(f"{where} has {name[:80]!r} twice in its header", path=where)
            if name == _METADATA:
                metadata = _verify_metadata(value, where)
            else:
                slots[name] = _parse_slot(name, value, body, where)
    except Corrupt as error:
        raise BadFile(f"{where} is damaged: {error}", path=where) from error
    _verify_cover(slots, body, where)
    return SafetensorsHeader(tuple(slots.values()), metadata)


def _parse_slot(name: str, value: Json, body: FileBytes, where: str) -> TensorSlot:
    what = f"{where}: tensor {name[:80]!r}"
    if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
        raise BadFile(f"{what} has a malformed header", path=where)
    dtype = DTYPES.get(str(value["dtype"]))
    if dtype is None:
        raise BadFile(f"{what} has the dtype {str(value['dtype'])[:40]!r}, which this torch does not have", path=where)
    shape, offsets = value["shape"], value["data_offsets"]
    if not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2 or len(shape) > _MAX_DIMS:
        raise BadFile(f"{what} has a malformed shape or offset", path=where)
    begin, end = offsets
    if not begin <= end <= body.size_bytes:
        raise BadFile(
            f"{what} ends at byte {end} of {body.size_bytes}: the file is cut off or damaged; fetch it again",
            path=where,
        )
    if end - begin != math.prod(shape) * item_bytes(dtype):
        raise BadFile(f"{what} has {end - begin} bytes, which do not fit {value['dtype']} {shape}", path=where)
    return TensorSlot(name, dtype, tuple(shape), body.narrow(begin, end))


def _are_sizes(value: Json) -> bool:
    return isinstance(value, list) and all(type(each) is int and 0 <= each < 1 << 60 for each in value)


def _verify_metadata(value: Json, where: str) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(each, str) for each in value.values()):
        raise BadFile(f"{where} has malformed metadata: it must be texts by name", path=where)
    return value


def _verify_cover(slots: Mapping[str, TensorSlot], body: FileBytes, where: str) -> None:
    """Raise BadFile if tensors overlap, or bytes belong to none: the safetensors library refuses both."""
    end = body.offset
    for slot in sorted(slots.values(), key=lambda slot: (slot.data.offset, slot.data.size_bytes)):
        if slot.data.offset != end:
            raise BadFile(f"{where}: tensor {slot.name[:80]!r} overlaps another one, or follows a gap", path=where)
        end += slot.data.size_bytes
    if end != body.offset + body.size_bytes:
        raise BadFile(f"{where} has {body.offset + body.size_bytes - end} bytes after its last tensor", path=where)


def is_safetensors(data: FileBytes) -> bool:
    """Return whether a file begins as a safetensors file does: a length that is possible, and a JSON object."""
    if data.size_bytes < _LENGTH.size + 2:
        return False
    start = bytes(data.read(0, _LENGTH.size + 1))
    return _LENGTH.unpack_from(start)[0] <= _MAX_HEADER_BYTES and start[-1:] == b"{"


def add_tensors(header: SafetensorsHeader, placeholders: Placeholders) -> dict[str, torch.Tensor]:
    """Return a placeholder for each tensor of a file."""
    tensors = {}
    for slot in header.slots:
        stored = placeholders.add_storage(slot.data)
        form = TensorForm(slot.dtype, slot.shape, contiguous_stride(slot.shape))
        tensors[slot.name] = make_tensor(stored, form, what=f"{slot.data.file}: {slot.name}")
    return tensors


def read_safetensors_file(path: str) -> FoundCheckpoint:
    """Open a single safetensors file."""
    header = read_header(open_file(path), where=path)
    placeholders = Placeholders()
    metadata: dict[str, Json] = {"safetensors": dict(header.metadata)} if header.metadata else {}
    return FoundCheckpoint("safetensors", add_tensors(header, placeholders), placeholders, metadata)


def read_shards(folder: SourceFolder, names: list[str], weight_map: Mapping[str, str] | None) -> FoundCheckpoint:
    """Open several safetensors files as one checkpoint; with an index, the files must have what it says."""
    placeholders = Placeholders()
    tensors: dict[str, torch.Tensor] = {}
    homes: dict[str, str] = {}
    metadata: dict[str, str] = {}
    for name in names:
        header = read_header(open_file_in(folder, name), where=folder.join(name))
        found = add_tensors(header, placeholders)
        twice = sorted(found.keys() & tensors.keys())
        if twice:
            raise BadFile(
                f"{folder.path}: {twice[0]!r} is in {homes[twice[0]]} and in {name}; remove the shard that is old"
            )
        tensors.update(found)
        homes.update(dict.fromkeys(found, name))
        metadata = {**header.metadata, **metadata}
    if weight_map is not None:
        _verify_weight_map(folder, weight_map, homes)
        tensors = {name: tensors[name] for name in weight_map}
    return FoundCheckpoint("safetensors", tensors, placeholders, {"safetensors": metadata} if metadata else {})


def _verify_weight_map(folder: SourceFolder, weight_map: Mapping[str, str], homes: Mapping[str, str]) -> None:
    wrong = sorted(name for name in weight_map.keys() | homes.keys() if weight_map.get(name) != homes.get(name))
    if wrong:
        first = wrong[0]
        there, stated = homes.get(first, "no file"), weight_map.get(first, "no file")
        raise BadFile(
            f"{folder.path}: the index says that {first!r} is in {stated}, and it is in {there}"
            f" ({len(wrong)} tensors differ: {list_some(wrong, 3)}); fetch the folder again"
        )


def read_weight_map(folder: SourceFolder, index_name: str) -> dict[str, str]:
    """Return which file has each tensor, by an index; raises BadFile if it is malformed or names missing files."""
    data, path = open_file_in(folder, index_name), folder.join(index_name)
    if data.size_bytes > _MAX_INDEX_BYTES:
        raise BadFile(f"{path} has {data.size_bytes} bytes, more than any index", path=path)
    try:
        index: Any = parse_json(data.read(0, data.size_bytes), where="it")
    except Corrupt as error:
        raise BadFile(f"{path} is no index of shards: {error}", path=path) from error
    found = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(found, dict) or not found or not all(_is_file_name(each) for each in found.values()):
        raise BadFile(f"{path} is no index of shards: it has no valid weight_map", path=path)
    missing = sorted({name for name in found.values() if not folder.has(name)})
    if missing:
        raise BadFile(f"{path} names files that are missing: {list_some(missing, 3)}; fetch them", path=path)
    return found


def _is_file_name(value: Json) -> bool:
    return isinstance(value, str) and value not in ("", ".", "..") and "/" not in value and "\0" not in value
