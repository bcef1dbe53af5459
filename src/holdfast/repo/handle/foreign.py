"""Describes what is at a path that is not a store: files and folders of other tools, and what to do with them."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from holdfast.objects.url import find_path, holds_config, locate_store_root
from holdfast.repo.format.layout import PREFIXES

_HEAD_BYTES: Final = 512
_MAX_NAMES: Final = 10_000
"""How many names of a folder are read; a folder of a million files can be described without listing them all."""

_ZIP: Final = b"PK\x03\x04"
_ZIP_NAME_SIZE_AT: Final = 26
_ZIP_NAME_AT: Final = 30
_LEGACY_TORCH: Final = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
"""What torch.save wrote before version 1.6: a pickled magic number."""
_MAX_SAFETENSORS_HEADER: Final = 100_000_000

_KEEP_FILE: Final = "to keep the file as it is, use `holdfast -s STORE put NAME {path}`"
_KEEP_FOLDER: Final = "to keep the files as they are, use `holdfast -s STORE put NAME {path}/`"
_SAVE: Final = "and save what that returns with holdfast.open(STORE).save(NAME, ...)"


@dataclass(frozen=True, slots=True)
class _Kind:
    """A kind of file or folder that another tool writes, and what to do with it."""

    what: str
    advice: str


_TORCH_SAVE: Final = _Kind("a file that torch.save wrote", f"load it with torch.load, {_SAVE}; {_KEEP_FILE}")
_SAFETENSORS: Final = _Kind("a safetensors file", f"load it with safetensors.torch.load_file, {_SAVE}; {_KEEP_FILE}")
_DCP: Final = _Kind(
    "a checkpoint that torch.distributed.checkpoint wrote",
    f"load it with torch.distributed.checkpoint.load, and save the state dict with holdfast.open(STORE).save(NAME, ...)"
    f"; {_KEEP_FOLDER}",
)
_HUGGING_FACE: Final = _Kind(
    "a model folder as Hugging Face writes it", f"load it with from_pretrained, {_SAVE}; {_KEEP_FOLDER}"
)
_SAFETENSORS_FOLDER: Final = _Kind(
    "a folder of safetensors files", f"load them with safetensors.torch.load_file, {_SAVE}; {_KEEP_FOLDER}"
)
_MAGIC: Final[Sequence[tuple[bytes, str]]] = (
    (b"\x93NUMPY", "a numpy array file"),
    (b"\x89HDF\r\n\x1a\n", "an HDF5 file"),
    (b"GGUF", "a GGUF file"),
    (b"\x1f\x8b", "a gzip file"),
    (b"(\xb5/\xfd", "a zstd file"),
)


def describe_foreign(url: str) -> str:
    """Return a sentence that describes what is at a path or URL that is not a store, and what to do.

    Returns an empty string if nothing is there, or it is unknown or unreadable. Only names and the first bytes of a
    file are read.
    """
    path = find_path(url)
    if path is None:
        return ""
    try:
        status = os.stat(path)
        if stat.S_ISDIR(status.st_mode):
            return _describe_folder(path)
        kind = _find_file_kind(path, status)
    except OSError:
        return ""
    return _describe_kind(path, kind)


def _describe_kind(path: str, kind: _Kind) -> str:
    return f"{path} is {kind.what}, not a store; {kind.advice.format(path=path)}"


def _find_file_kind(path: str, status: os.stat_result) -> _Kind:
    if not stat.S_ISREG(status.st_mode):
        return _Kind("neither a file nor a directory", "give the path of a directory")
    with open(path, "rb") as file:
        head = file.read(_HEAD_BYTES)
    if head.startswith(_ZIP):
        return _find_zip_kind(head)
    if head.startswith(_LEGACY_TORCH):
        return _TORCH_SAVE
    if _is_safetensors(head, status.st_size):
        return _SAFETENSORS
    if len(head) > 1 and head[0] == 0x80 and 2 <= head[1] <= 5:
        return _Kind("a pickle file", _KEEP_FILE)
    what = next((what for magic, what in _MAGIC if head.startswith(magic)), "a file")
    return _Kind(what, f"a store is a directory; {_KEEP_FILE}")


def _find_zip_kind(head: bytes) -> _Kind:
    """Recognize an archive by the name of its first member."""
    size = int.from_bytes(head[_ZIP_NAME_SIZE_AT : _ZIP_NAME_SIZE_AT + 2], "little")
    name = head[_ZIP_NAME_AT : _ZIP_NAME_AT + size]
    if name.endswith(b"/data.pkl"):
        return _TORCH_SAVE
    if name.endswith(b".npy"):
        return _Kind("a numpy archive", f"load it with numpy.load, {_SAVE}; {_KEEP_FILE}")
    if b"/data/" in name or b"/code/" in name:
        return _Kind("an archive that torch.jit.save wrote", _KEEP_FILE)
    return _Kind("a zip archive", _KEEP_FILE)


def _is_safetensors(head: bytes, size_bytes: int) -> bool:
    header_bytes = int.from_bytes(head[:8], "little")
    return head[8:9] == b"{" and 2 <= header_bytes <= min(_MAX_SAFETENSORS_HEADER, size_bytes - 8)


def _describe_folder(path: str) -> str:
    with os.scandir(path) as entries:
        names = sorted(entry.name for entry, _ in zip(entries, range(_MAX_NAMES), strict=False))
    if not names:
        return ""  # a store can be created here, even inside the directory of another one
    root = locate_store_root(os.path.dirname(path))
    # Only the format's own directories are part of a store. Others below it belong to the user.
    if root is not None and os.path.relpath(path, root).split(os.sep)[0] + "/" in PREFIXES:
        return f"{path} is a part of the store {root}, not a store; use {root}"
    for applies, kind in _FOLDERS:
        if applies(names):
            return _describe_kind(path, kind)
    inner = next((name for name in names if holds_config(os.path.join(path, name))), None)
    if inner is not None:
        return f"{path} is not a store, but {inner} in it is; use {os.path.join(path, inner)}"
    return ""


def _has(names: Sequence[str], ending: str, start: str = "") -> bool:
    return any(name.endswith(ending) and name.startswith(start) for name in names)


_FOLDERS: Final[Sequence[tuple[Callable[[Sequence[str]], bool], _Kind]]] = (
    (lambda names: ".metadata" in names and _has(names, ".distcp"), _DCP),
    (
        lambda names: (
            "config.json" in names
            and (_has(names, ".safetensors") or _has(names, ".bin", "pytorch_model") or _has(names, ".index.json"))
        ),
        _HUGGING_FACE,
    ),
    (lambda names: _has(names, ".safetensors"), _SAFETENSORS_FOLDER),
)
