"""Finds the format of a file or folder by its content, and opens it; reads PyTorch's content stores."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch

from holdfast.errors import BadFile, BadName
from holdfast.formats.reading.byte_ranges import FileBytes, open_file, open_file_in
from holdfast.formats.reading.dcp_folder import METADATA_NAME, read_dcp_folder
from holdfast.formats.reading.deepspeed_folder import is_zero_folder, read_zero_folder
from holdfast.formats.reading.found import (
    SOURCE_FORMATS,
    FoundCheckpoint,
    Placeholders,
    SourceFormat,
    StoredStorage,
    TensorForm,
    make_tensor,
)
from holdfast.formats.reading.safetensors_file import is_safetensors, list_weights, read_folder, read_safetensors_file
from holdfast.formats.reading.torch_file import PickledStorage, is_torch_file, read_torch_object
from holdfast.repo.files import SourceFolder, open_source_folder

STORAGES: Final = "storages"
TENSORS: Final = "tensors"
_HASH: Final = re.compile(r"[0-9a-f]{8,128}")


def read_content_folder(folder: SourceFolder) -> FoundCheckpoint:
    """Open a content store; the tree is a dict of tensors by name, and tensors of one storage share it."""
    placeholders = Placeholders()
    storages: dict[str, StoredStorage] = {}
    tensors: dict[str, torch.Tensor] = {}
    for source in folder.enter(TENSORS).iter_files():
        name, path = source.name, source.path
        payload = read_torch_object(FileBytes(name, source, 0, source.size_bytes), placeholders, where=path)
        digest, form, flags = _parse(payload, path)
        if digest not in storages:
            storages[digest] = _read_storage(folder, digest, placeholders, path)
        tensor = make_tensor(storages[digest], form, what=path)
        tensor = tensor.conj() if flags.get("conj") else tensor
        tensors[name] = torch._neg_view(tensor) if flags.get("neg") else tensor
    if not tensors:
        raise BadFile(f"{folder.path} is a content store without tensors", path=folder.path)
    return FoundCheckpoint("content-store", tensors, placeholders)


def _parse(payload: Any, path: str) -> tuple[str, TensorForm, dict[str, Any]]:
    match payload:
        case (torch.dtype() as dtype, str(digest), int(offset), tuple(shape), tuple(stride), dict(flags)) if (
            _HASH.fullmatch(digest) and all(type(size) is int for size in (*shape, *stride))
        ):
            return digest, TensorForm(dtype, shape, stride, offset), flags
    raise BadFile(f"{path} is not the metadata of a tensor in a content store", path=path)


def _read_storage(folder: SourceFolder, digest: str, placeholders: Placeholders, tensor: str) -> StoredStorage:
    storages = folder.enter(STORAGES)
    path = storages.join(digest)
    if not storages.has(digest):
        raise BadFile(f"{tensor} needs the storage {digest}, which is missing; copy the whole folder", path=path)
    found = read_torch_object(open_file_in(storages, digest), placeholders, where=path)
    if not isinstance(found, PickledStorage):
        raise BadFile(f"{path} is not a storage", path=path)
    return found.stored


_MAGIC_BYTES: Final = 32
_FOREIGN: Final = {b"GGUF": "a GGUF file", b"\x89HDF": "an HDF5 file", b"\x93NUM": "a file of numpy"}
Open = Callable[[], FoundCheckpoint]


def open_checkpoint(path: str, format: str | None = None, *, follow_links: bool = False) -> FoundCheckpoint:
    """Open a checkpoint of another library; raises BadFile if it is none, or if it could be of two formats.

    `format` decides where a folder has several formats; the content must still be of that format. Links in a folder
    are followed as `SourceFolder` says; with `follow_links`, all of them are.
    """
    if format is not None and format not in SOURCE_FORMATS:
        raise BadName(f"{format!r} is no format to import; choose one of {', '.join(SOURCE_FORMATS)}")
    if not os.path.exists(path):
        raise BadFile(f"{path} does not exist", path=path)
    if os.path.isdir(path):
        candidates = _find_in_folder(open_source_folder(path, follow_links=follow_links))
    else:
        candidates = _find_in_file(path)
    if format is not None:
        candidates = {kind: reader for kind, reader in candidates.items() if _is_wanted(kind, format)}
    if len(candidates) > 1:
        raise BadFile(
            f"{path} is of several formats: {' and '.join(candidates)};"
            f" choose one with --format (format=), such as {next(iter(candidates)).split()[0]}",
            path=path,
        )
    if not candidates:
        wanted = "a checkpoint of a known format" if format is None else f"of the format {format}"
        raise BadFile(f"{path} is not {wanted}; known formats are {', '.join(SOURCE_FORMATS)}", path=path)
    return next(iter(candidates.values()))()


def _is_wanted(kind: str, format: str) -> bool:
    return kind == format or (format == "hf" and kind in ("safetensors", "torch"))


def _find_in_file(path: str) -> dict[str, Open]:
    data = open_file(path)
    start = bytes(data.read(0, min(_MAGIC_BYTES, data.size_bytes)))
    if is_torch_file(start):
        return {"torch": partial(read_torch_file, path)}
    if is_safetensors(data):
        return {"safetensors": partial(read_safetensors_file, path)}
    foreign = _FOREIGN.get(start[:4])
    if foreign:
        raise BadFile(f"{path} is {foreign}, which cannot be imported; convert it to safetensors first", path=path)
    return {}


def _find_in_folder(folder: SourceFolder) -> dict[str, Open]:
    names = set(folder.list_names())
    found: dict[str, Open] = {}
    for kind in list_weights(sorted(names)):
        found[kind] = partial(read_folder, folder, kind)
    if METADATA_NAME in names:
        found["dcp"] = partial(read_dcp_folder, folder)
    if {STORAGES, TENSORS} <= names:
        found["content-store"] = partial(read_content_folder, folder)
    if is_zero_folder(folder):
        found["deepspeed"] = partial(read_zero_folder, folder)
    return found


def read_torch_file(path: str) -> FoundCheckpoint:
    """Open a file of torch.save."""
    placeholders = Placeholders()
    tree = read_torch_object(open_file(path), placeholders, where=path)
    kind: SourceFormat = "torch"
    return FoundCheckpoint(kind, tree, placeholders)
