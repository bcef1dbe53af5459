"""The only place that pickles: values that nothing else can hold, and only where the user allows it on both sides."""

from __future__ import annotations

import io
import pickle

import torch

from holdfast.errors import Corrupt, Unsupported


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
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=weights_only)
    except Exception as error:  # a foreign format, which may fail in any way
        if weights_only:
            reason = str(error).strip().partition("\n")[0][:300]
            raise Unsupported(
                f"{what} was saved by torch.save and holds more than plain values and tensors: to load it may run any"
                f" code. Pass allow_pickle=True (or weights_only=False to holdfast.dcp.StorageReader) to allow it."
                f" Torch says: {reason}"
            ) from error
        raise Corrupt(f"{what} was saved by torch.save and cannot be loaded here: {error}", key=what) from error


def dump_payload(value: object) -> bytes:
    """Return a value as torch.save writes it, for those who load nothing else."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()
