"""The only module that pickles: for values with no other form, if the user allows it both on save and on load."""

from __future__ import annotations

import io
import pickle
import re
import threading
import zipfile
from typing import Final

import torch

from holdfast.errors import BadFile, Corrupt, Unsupported

_ALLOWING: Final = threading.Lock()
"""Locked while torch's list of allowed classes is extended: torch keeps one list for the whole process."""
_BYTES: Final = frozenset({"_io.BytesIO", "builtins.bytes"})
"""Plain data that torch refuses by default: byte streams, and empty bytes, which are pickled as a call."""
_GLOBAL: Final = re.compile(rb"c[^\x00-\x20]+\n[^\x00-\x20]+\n")
"""How a pickle names a class or function; other bytes can match it by accident."""


def pickle_value(value: object, *, name: str) -> bytes:
    """Pickle a value; only called with `allow_pickle=True`."""
    try:
        return pickle.dumps(value, protocol=5)
    except Exception as error:  # pickling runs the value's own code, which may raise anything
        raise Unsupported(f"{name or 'the tree'}: it cannot be pickled either: {error}") from error


def unpickle_value(data: bytearray, *, what: str) -> object:
    """Unpickle a value. This may run any code; the caller must have passed `allow_pickle=True`."""
    try:
        return pickle.loads(data)  # noqa: S301  # allow_pickle=True was passed
    except Exception as error:  # as above
        raise Corrupt(f"{what} was pickled and cannot be unpickled here: {error}", key=what) from error


def load_payload(data: bytes | bytearray, *, what: str, weights_only: bool) -> object:
    """Load bytes that torch.save wrote; unless `weights_only`, this may run any code."""
    try:
        return _load_plain(data) if weights_only else _load(data, weights_only=False)
    except Exception as error:  # a foreign format, which may fail in any way
        if weights_only:
            raise Unsupported(
                f"{what} was saved by torch.save and contains more than plain values and tensors: loading it may run"
                f" any code. Pass allow_pickle=True (or weights_only=False to holdfast.dcp.StorageReader) to allow it."
                f" Refused: {_name_cause(data, error)}"
            ) from error
        raise Corrupt(f"{what} was saved by torch.save and cannot be loaded here: {error}", key=what) from error


def find_refusal(data: bytes) -> str:
    """Return why `load_payload` refuses these bytes by default; empty if it loads them."""
    if not _names_globals(data):
        return ""
    try:
        _load_plain(data)
    except Exception as error:  # noqa: BLE001  # a foreign format, which may fail in any way
        return _name_cause(data, error)
    return ""


def _load(data: bytes | bytearray, *, weights_only: bool) -> object:
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=weights_only)


def _load_plain(data: bytes | bytearray) -> object:
    """Load plain values, tensors, bytes and byte streams; raises torch's own error for anything else."""
    try:
        return _load(data, weights_only=True)
    except (pickle.UnpicklingError, KeyError):
        # KeyError: another thread extended the list of allowed classes, and restored it after torch had found the
        # class in it and before torch read it from it.
        if not _find_unsafe(data) <= _BYTES:
            raise
    with _ALLOWING, torch.serialization.safe_globals([io.BytesIO, (_make_empty_bytes, "builtins.bytes")]):
        return _load(data, weights_only=True)


def _make_empty_bytes() -> bytes:
    """Replaces the class `bytes`, which a pickle could call with a size to allocate any amount of memory."""
    return b""


def _find_unsafe(data: bytes | bytearray) -> set[str]:
    return set(torch.serialization.get_unsafe_globals_in_checkpoint(io.BytesIO(data)))


def _name_cause(data: bytes | bytearray, error: Exception) -> str:
    """Return the classes and functions that were refused, or torch's own message."""
    try:
        names = sorted(_find_unsafe(data) - _BYTES)
    except Exception:  # noqa: BLE001  # bytes that cannot be loaded may not be readable here either
        names = []
    return ", ".join(names)[:300] or str(error).strip().partition("\n")[0][:300]


def _names_globals(data: bytes) -> bool:
    """Return whether the pickle in a payload may name a class or function.

    This searches the bytes, because torch's weights-only loader is written in Python and slow for long lists.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            pickles = [name for name in archive.namelist() if name.endswith("data.pkl")]
            return any(_GLOBAL.search(archive.read(name)) for name in pickles)
    except zipfile.BadZipFile:
        # An older form of torch.save, or other bytes: unknown until they are loaded.
        return True


def dump_payload(value: object) -> bytes:
    """Return a value as torch.save writes it."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def load_trusted_file(path: str) -> object:
    """Load a file of torch.save. This may run any code; the caller must have been told to trust the file."""
    try:
        return torch.load(path, map_location="cpu", weights_only=False)
    except Exception as error:  # a foreign format, which may fail in any way
        raise BadFile(f"{path} cannot be unpickled here: {str(error)[:300]}", path=path) from error
