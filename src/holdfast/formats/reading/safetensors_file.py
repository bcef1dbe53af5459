"""Reads safetensors without a library: single files, shards with an index, and folders of `save_pretrained`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

import torch

from holdfast.errors import BadFile, Corrupt
from holdfast.files.safetensors_header import LENGTH_BYTES, TensorSlot, read_header
from holdfast.formats.reading.byte_ranges import FileBytes, open_file, open_file_in
from holdfast.formats.reading.found import FoundCheckpoint, Placeholders, TensorForm, make_tensor
from holdfast.formats.reading.torch_file import read_torch_object
from holdfast.json_text import Json, parse_json
from holdfast.repo.files import SourceFolder
from holdfast.tensors.spec import contiguous_stride, item_bytes
from holdfast.texts import list_some

INDEX_SUFFIX: Final = ".safetensors.index.json"
_MAX_HEADER_BYTES: Final = 100_000_000
"""The limit of the safetensors library."""
_MAX_INDEX_BYTES: Final = 1 << 28
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


class SafetensorsFile(NamedTuple):
    """The tensors of one file by their names, as placeholders, and its metadata."""

    tensors: dict[str, torch.Tensor]
    metadata: Mapping[str, str]


def is_safetensors(data: FileBytes) -> bool:
    """Return whether a file begins as a safetensors file does: a length that is possible, and a JSON object."""
    if data.size_bytes < LENGTH_BYTES + 2:
        return False
    start = bytes(data.read(0, LENGTH_BYTES + 1))
    return int.from_bytes(start[:LENGTH_BYTES], "little") <= _MAX_HEADER_BYTES and start[-1:] == b"{"


def read_tensors(data: FileBytes, placeholders: Placeholders, *, where: str) -> SafetensorsFile:
    """Read the header of a safetensors file, and make a placeholder for each tensor; raises BadFile."""
    header = read_header(data.read, data.size_bytes, where=where, max_header_bytes=_MAX_HEADER_BYTES)
    tensors = {}
    for slot in header.slots:
        form = TensorForm(_find_dtype(slot, where), slot.shape, contiguous_stride(slot.shape))
        stored = placeholders.add_storage(data.narrow(slot.start, slot.stop))
        tensors[slot.name] = make_tensor(stored, form, what=f"{data.file}: {slot.name}")
    return SafetensorsFile(tensors, header.metadata)


def _find_dtype(slot: TensorSlot, where: str) -> torch.dtype:
    """Return the dtype of a tensor; raises BadFile if this torch does not have it, or the tensor has another size."""
    what, dtype = f"{where}: tensor {slot.name[:80]!r}", DTYPES.get(slot.dtype)
    if dtype is None:
        raise BadFile(f"{what} has the dtype {slot.dtype[:40]!r}, which this torch does not have", path=where)
    size_bytes = slot.stop - slot.start
    if size_bytes != math.prod(slot.shape) * item_bytes(dtype):
        raise BadFile(f"{what} has {size_bytes} bytes, which do not fit {slot.dtype} {[*slot.shape]}", path=where)
    return dtype


def read_safetensors_file(path: str) -> FoundCheckpoint:
    """Open a single safetensors file."""
    placeholders = Placeholders()
    found = read_tensors(open_file(path), placeholders, where=path)
    metadata: dict[str, Json] = {"safetensors": dict(found.metadata)} if found.metadata else {}
    return FoundCheckpoint("safetensors", found.tensors, placeholders, metadata)


def read_shards(folder: SourceFolder, names: list[str], weight_map: Mapping[str, str] | None) -> FoundCheckpoint:
    """Open several safetensors files as one checkpoint; with an index, the files must have what it says."""
    placeholders = Placeholders()
    tensors: dict[str, torch.Tensor] = {}
    homes: dict[str, str] = {}
    metadata: dict[str, str] = {}
    for name in names:
        found = read_tensors(open_file_in(folder, name), placeholders, where=folder.join(name))
        twice = sorted(found.tensors.keys() & tensors.keys())
        if twice:
            raise BadFile(
                f"{folder.path}: {twice[0]!r} is in {homes[twice[0]]} and in {name}; remove the shard that is old"
            )
        tensors.update(found.tensors)
        homes.update(dict.fromkeys(found.tensors, name))
        metadata = {**found.metadata, **metadata}
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


SAFETENSORS_SUFFIX: Final = ".safetensors"
TORCH_INDEX: Final = "pytorch_model.bin.index.json"
TORCH_FILE: Final = "pytorch_model.bin"


def list_weights(names: Sequence[str]) -> dict[str, list[str]]:
    """Return the names of weight files in a folder by their kind, "safetensors" and "torch"; kinds may be absent."""
    safe = sorted(name for name in names if name.endswith((SAFETENSORS_SUFFIX, INDEX_SUFFIX)))
    torch_files = sorted(name for name in names if name in (TORCH_FILE, TORCH_INDEX))
    return {kind: found for kind, found in (("safetensors", safe), ("torch", torch_files)) if found}


def read_folder(folder: SourceFolder, kind: str) -> FoundCheckpoint:
    """Open a folder of weights of one kind; it is "hf" if there are other files, which are carried along."""
    found = _read_safetensors(folder) if kind == "safetensors" else _read_torch(folder)
    weights = {folder.join(name) for name in _list_weight_files(folder, kind)}
    carried = tuple(source for source in folder.iter_files() if source.path not in weights)
    return replace(found, format="hf" if carried else found.format, files=carried)


def _list_weight_files(folder: SourceFolder, kind: str) -> list[str]:
    names = folder.list_names()
    if kind == "safetensors":
        return [name for name in names if name.endswith((SAFETENSORS_SUFFIX, INDEX_SUFFIX))]
    indexed = read_weight_map(folder, TORCH_INDEX).values() if TORCH_INDEX in names else ()
    return [name for name in names if name in (TORCH_FILE, TORCH_INDEX, *indexed)]


def _read_safetensors(folder: SourceFolder) -> FoundCheckpoint:
    names = sorted(folder.list_names())
    indexes = [name for name in names if name.endswith(INDEX_SUFFIX)]
    files = [name for name in names if name.endswith(SAFETENSORS_SUFFIX)]
    if len(indexes) > 1:
        raise BadFile(f"{folder.path} has several indexes: {', '.join(indexes)}; import one folder for each")
    if not indexes:
        return read_shards(folder, files, None)
    weight_map = read_weight_map(folder, indexes[0])
    extra = sorted(set(files) - set(weight_map.values()))
    if extra:
        raise BadFile(f"{folder.path}: {extra[0]} is not in {indexes[0]}; remove it, or import it on its own")
    return read_shards(folder, sorted(set(weight_map.values())), weight_map)


def _read_torch(folder: SourceFolder) -> FoundCheckpoint:
    placeholders = Placeholders()
    index = folder.join(TORCH_INDEX)
    weight_map = read_weight_map(folder, TORCH_INDEX) if folder.has(TORCH_INDEX) else None
    names = sorted(set(weight_map.values())) if weight_map else [TORCH_FILE]
    tensors: dict[str, Any] = {}
    for name in names:
        path = folder.join(name)
        found = read_torch_object(open_file_in(folder, name), placeholders, where=path)
        if not isinstance(found, dict):
            raise BadFile(f"{path} is not a state dict", path=path)
        if twice := sorted(map(str, found.keys() & tensors.keys())):
            raise BadFile(f"{folder.path}: {twice[0]!r} is in two files; remove the shard that is old")
        tensors.update(found)
    if weight_map is not None and weight_map.keys() != tensors.keys():
        raise BadFile(f"{index} and its files have different tensors; fetch the folder again", path=index)
    return FoundCheckpoint("torch", tensors, placeholders)
