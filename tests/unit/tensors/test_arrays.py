"""Numpy arrays of every dtype and order are loaded the same and writable; others are refused by name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from holdfast.errors import Corrupt, Unsupported
from holdfast.tensors.sources import build_array, make_source

ARRAYS: dict[str, np.ndarray[Any, Any]] = {
    "bool": np.array([True, False]),
    "big-endian": np.arange(6, dtype=">i4").reshape(2, 3),
    "half": np.array([-0.0, np.nan, np.inf], np.float16),
    "complex": np.array([1 + 2j], np.complex64),
    "fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    "0-d": np.array(7, np.uint16),
    "empty": np.empty((0, 3), np.int8),
    "empty fortran": np.empty((3, 0, 2), np.int8, order="F"),
    "stepped": np.arange(10)[::3],
    "backwards": np.arange(10)[::-1],
    "broadcast": np.broadcast_to(np.arange(3), (4, 3)),
    "times": np.array(["2001-01-01", "NaT"], "M8[D]"),
    "spans": np.array([3], "m8[15m]"),
    "text": np.array(["a", "b\u00e9d"]),
    "bytes": np.array([b"ab", b"c"]),
    "read-only": np.frombuffer(b"abcd", np.uint8),
}


def round_trip(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    source = make_source("x", array)
    return build_array(source.spec, bytearray(source.data), what="x")


@pytest.mark.parametrize("name", ARRAYS)
def test_an_array_comes_back_the_same_and_writable(name: str) -> None:
    array = ARRAYS[name]
    found = round_trip(array)
    assert (found.dtype.str, found.shape) == (array.dtype.str, array.shape)
    assert found.tobytes() == array.tobytes()
    assert found.flags.writeable


def test_the_order_of_memory_is_kept_where_there_is_one() -> None:
    assert round_trip(ARRAYS["fortran"]).flags.f_contiguous
    assert round_trip(ARRAYS["stepped"]).flags.c_contiguous


@pytest.mark.parametrize(
    ("array", "words"),
    [
        (np.array([None], object), "an array of dtype object cannot be saved; convert it"),
        (np.zeros(2, [("a", "i4")]), "cannot be saved"),
        (np.zeros(2, np.longdouble), "an array of dtype float128 cannot be saved"),
        (np.zeros(2, "V4"), "cannot be saved"),
        (np.ma.masked_array([1, 2], [True, False]), "a MaskedArray is a subclass of ndarray"),
        (np.array(["x"], np.dtypes.StringDType()), "cannot be saved"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_has_no_form_is_refused(array: np.ndarray[Any, Any], words: str) -> None:
    with pytest.raises(Unsupported, match=words):
        make_source("x", array)


PLAIN: dict[str, Any] = {"type": "array", "dtype": "<i4", "shape": [2]}


@pytest.mark.parametrize(
    "changes",
    [
        {"type": "tensor"},
        {"dtype": "object"},
        {"dtype": "|O"},
        {"dtype": "<i3"},
        {"dtype": "<m8[9zz]"},
        {"dtype": ["<i4"]},
        {"dtype": "<S999999999"},
        {"shape": 2},
        {"shape": [-2]},
        {"shape": [True, 2]},
        {"shape": [3]},
        {"shape": [1 << 60]},
        {"shape": [1] * 65},
        {"order": "K"},
        {"order": ["C"]},
    ],
    ids=str,
)
def test_what_cannot_be_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(Corrupt, match=r"^'run', a "):
        build_array({**PLAIN, **changes}, bytearray(8), what="'run', a")


def test_dimensions_beyond_all_measure_are_refused_even_of_nothing() -> None:
    with pytest.raises(Corrupt, match="an invalid shape"):
        build_array({**PLAIN, "shape": [1 << 59, 1 << 59, 0]}, bytearray(), what="x")
