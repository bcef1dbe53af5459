"""Reads folders of `save_pretrained`: weights in one file or in shards, and the other files beside them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from holdfast.errors import BadFile
from holdfast.formats.reading.byte_ranges import open_file_in
from holdfast.formats.reading.found import FoundCheckpoint
from holdfast.formats.reading.placeholders import Placeholders
from holdfast.formats.reading.safetensors_file import INDEX_SUFFIX, read_shards, read_weight_map
from holdfast.formats.reading.torch_file import read_torch_object
from holdfast.repo.files import SourceFolder

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
