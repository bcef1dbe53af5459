"""The only place that pickles: values that nothing else can hold, and only where the user allows it on both sides."""

from __future__ import annotations

import io
import pickle
import re
import threading
import zipfile
from typing import Final

import torch

from holdfast.errors import Corrupt, Unsupported

_ALLOWING: Final = threading.Lock()
"""Held while more is allowed than torch does by itself: torch keeps what it allows for the whole process."""
_BYTES: Final = frozenset({"_io.BytesIO", "builtins.bytes"})
"""Plain data that torch refuses: streams of bytes, and empty bytes, which a pickle writes as a call."""
_GLOBAL: Final = re.compile(rb"c[^\x00-\x20]+\n[^\x00-\x20]+\n")
"""How a pickle names a class or function; other bytes may look the same."""


def pickle_value(value: object, *, name: str) -> bytes:
    """Pickle a value that was to be saved with `allow_pickle=True`."""
    try:
        return pickle.dumps(value, protocol=5)
    except Exception as error:  # pickling runs the value's own code, which may raise anything
        raise Unsupported(f"{name or 'the tree'}: it cannot be pickled either: {error}") from error


def unpickle_value(data: bytearray, *, what: str) -> object:
    """Unpickle a value, which may run any code: the caller has been told so and allows it."""
    try:
        return pickle.loads(data)  # noqa: S301  # allow_pickle=True was passed
    except Exception as error:  # as above
        raise Corrupt(f"{what} was pickled and cannot be unpickled here: {error}", key=what) from error


def load_payload(data: bytes | bytearray, *, what: str, weights_only: bool) -> object:
    """Load what torch.save wrote for somebody else; unless `weights_only`, that may run any code."""
    try:
        return _load_plain(data) if weights_only else _load(data, weights_only=False)
    except Exception as error:  # a foreign format, which may fail in any way
        if weights_only:
            raise Unsupported(
                f"{what} was saved by torch.save and holds more than plain values and tensors: to load it may run any"
                f" code. Pass allow_pickle=True (or weights_only=False to holdfast.dcp.StorageReader) to allow it."
                f" Refused: {_name_cause(data, error)}"
            ) from error
        raise Corrupt(f"{what} was saved by torch.save and cannot be loaded here: {error}", key=what) from error


def find_refusal(data: bytes) -> str:
    """Return what of a payload that torch.save wrote `load_payload` refuses by default; empty if it loads."""
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
    """Load plain values, tensors, bytes and streams of them; raises what torch raises for anything else."""
    try:
        return _load(data, weights_only=True)
    except pickle.UnpicklingError:
        # Another thread may just have allowed these, and forbidden them again while this one was loading.
        if not _find_unsafe(data) <= _BYTES:
            raise
    with _ALLOWING, torch.serialization.safe_globals([io.BytesIO, (_make_empty_bytes, "builtins.bytes")]):
        return _load(data, weights_only=True)


def _make_empty_bytes() -> bytes:
    """Stand for the class `bytes`, which could be called with a size and take any amount of memory."""
    return b""


def _find_unsafe(data: bytes | bytearray) -> set[str]:
    return set(torch.serialization.get_unsafe_globals_in_checkpoint(io.BytesIO(data)))


def _name_cause(data: bytes | bytearray, error: Exception) -> str:
    """Return the classes and functions that were refused, else what torch says."""
    try:
        names = sorted(_find_unsafe(data) - _BYTES)
    except Exception:  # noqa: BLE001  # what could not be loaded may not be looked through either
        names = []
    return ", ".join(names)[:300] or str(error).strip().partition("\n")[0][:300]


def _names_globals(data: bytes) -> bool:
    """Tell whether the pickle in a payload may name a class or function; plain numbers and texts do not.

    A look at the bytes: torch's weights-only loader is written in Python, and slow for long lists.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            pickles = [name for name in archive.namelist() if name.endswith("data.pkl")]
            return any(_GLOBAL.search(archive.read(name)) for name in pickles)
    except zipfile.BadZipFile:
        # An older form of torch.save, or bytes of somebody else: only a load can tell.
        return True


def dump_payload(value: object) -> bytes:
    """Return a value as torch.save writes it, for those who load nothing else."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()
