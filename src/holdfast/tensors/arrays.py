"""Numpy arrays as entries: from an array to bytes and a spec, and back."""

from __future__ import annotations

import math
import re
from typing import Any, Final

import numpy as np

from holdfast.errors import Corrupt, Unsupported
from holdfast.json_text import Json
from holdfast.repo.format.source import BytesSource
from holdfast.tensors.spec import MAX_DIMS

ARRAY: Final = "array"
# Numbers, booleans, times, and text of a fixed width; no objects, records or padding.
_DTYPE: Final = re.compile(
    r"[<>|](?:b1|[iu][1248]|f[248]|c(?:8|16)|[mM]8(?:\[[0-9]{0,9}[A-Za-z]{1,2}\])?|[SU][1-9][0-9]{0,8})"
)


def make_source(name: str, array: np.ndarray[Any, Any]) -> BytesSource:
    """Return an array as a source: its own memory if it is contiguous in C or Fortran order, or a copy in C order."""
    if type(array) is not np.ndarray:
        raise Unsupported(f"a {type(array).__qualname__} is a subclass of ndarray; convert it with numpy.asarray")
    dtype = array.dtype.str
    if array.dtype.fields is not None or not _DTYPE.fullmatch(dtype):
        raise Unsupported(f"an array of dtype {array.dtype} cannot be saved; convert it to another dtype")
    spec: dict[str, Json] = {"type": ARRAY, "dtype": dtype, "shape": list(array.shape)}
    if array.flags.f_contiguous and not array.flags.c_contiguous:
        spec["order"] = "F"
        array = array.T
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data if array.size else memoryview(b"")
    return BytesSource(name, data, spec)


def build_array(value: Json, data: bytearray, *, what: str) -> np.ndarray[Any, Any]:
    """Return an array over `data` as the spec `value` describes it; raises Corrupt if they do not match."""
    if not isinstance(value, dict) or value.get("type") != ARRAY or value.get("order", "C") not in ("C", "F"):
        raise Corrupt(f"{what} is not described as an array", key=what)
    dtype, shape = value.get("dtype"), value.get("shape")
    if not isinstance(dtype, str) or not _DTYPE.fullmatch(dtype) or not isinstance(shape, list):
        raise Corrupt(f"{what} has an invalid dtype or shape", key=what)
    if len(shape) > MAX_DIMS or not all(type(size) is int and 0 <= size < 1 << 60 for size in shape):
        raise Corrupt(f"{what} has an invalid shape", key=what)
    try:
        found = np.dtype(dtype)
    except (TypeError, ValueError) as error:
        raise Corrupt(f"{what} has an invalid dtype: {error}", key=what) from error
    if math.prod(shape) * found.itemsize != len(data):
        raise Corrupt(f"{what} has {len(data)} bytes, which do not match its shape and dtype", key=what)
    order = value.get("order", "C")
    try:
        return np.frombuffer(data, dtype=found).reshape(shape, order=order) if data else np.zeros(shape, found, order)
    except ValueError as error:
        # An array without items may still have dimensions whose product is too large.
        raise Corrupt(f"{what} has an invalid shape: {error}", key=what) from error
