"""Reads content stores of PyTorch (`torch.utils._content_store`): storages by hash, tensors by name."""

from __future__ import annotations

import re
from typing import Any, Final

import torch

from holdfast.errors import BadFile
from holdfast.formats.reading.byte_ranges import FileBytes, open_file_in
from holdfast.formats.reading.found import FoundCheckpoint
from holdfast.formats.reading.placeholders import Placeholders, StoredStorage, TensorForm, make_tensor
from holdfast.formats.reading.torch_file import read_torch_object
from holdfast.formats.reading.torch_objects import PickledStorage
from holdfast.repo.files import SourceFolder

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
