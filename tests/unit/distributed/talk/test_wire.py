"""Plain values are decoded exactly as they were encoded; all others are refused by the sender."""

from __future__ import annotations

import math
from collections import OrderedDict, defaultdict
from enum import IntEnum
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.distributed.talk.wire import MAX_DEPTH, decode, encode
from holdfast.errors import Corrupt, Unsupported

SCALARS = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(), st.binary())
KEYS = st.one_of(SCALARS, st.tuples(SCALARS, SCALARS))
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner),
        st.lists(inner).map(tuple),
        st.lists(st.integers(0, 1 << 62)).map(torch.Size),
        st.dictionaries(KEYS, inner, max_size=4),
        st.dictionaries(KEYS, inner, max_size=4).map(OrderedDict),
    ),
    max_leaves=20,
)


def outline(value: Any) -> Any:
    """Return the value with every type spelled out: 1, 1.0 and True are equal, and order of keys is not compared."""
    if isinstance(value, list | tuple):
        return (type(value).__name__, [outline(item) for item in value])
    if isinstance(value, dict):
        return (type(value).__name__, [(outline(key), outline(item)) for key, item in value.items()])
    return (type(value).__name__, repr(value))


@given(VALUES)
def test_what_was_encoded_decodes_to_itself_types_included(value: Any) -> None:
    assert outline(decode(b"".join(encode(value)))) == outline(value)


@pytest.mark.parametrize("value", [2**63, -(2**63) - 1, 2**63 - 1, -(2**63), 255, -1, 1 << 5000, -(1 << 64)])
def test_integers_of_any_length_arrive(value: int) -> None:
    assert decode(b"".join(encode(value))) == value


def test_special_floats_and_odd_strings_arrive() -> None:
    received = decode(b"".join(encode([math.nan, math.inf, -0.0, "\ud800"])))

    assert math.isnan(received[0])
    assert (received[1], math.copysign(1, received[2]), received[3]) == (math.inf, -1, "\ud800")


class Colour(IntEnum):
    RED = 1


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (torch.ones(1), "torch.Tensor"),
        (np.float64(1), "numpy.float64"),
        (Colour.RED, "Colour"),
        (defaultdict(list), "collections.defaultdict"),
        (bytearray(), "a bytearray"),
        ({1}, "a set"),
        (object(), "a object"),
    ],
)
def test_what_would_arrive_as_something_else_is_refused_by_name(value: Any, name: str) -> None:
    with pytest.raises(Unsupported, match=rf"value\['key'\]\[1\] is .*{name}, which cannot be sent"):
        encode({"key": (0, value)})


def test_what_holds_itself_or_is_too_deep_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    deep: Any = 1
    for _ in range(MAX_DEPTH):
        deep = [deep]

    assert decode(b"".join(encode(deep))) == deep
    for value in (loop, [deep]):
        with pytest.raises(Unsupported, match="deep"):
            encode(value)


@pytest.mark.parametrize(
    "damage", [b"", b"?", b"s\xff", b"b" + b"\x05" + b"\0" * 7 + b"abc", b"NN", b"l\x01" + b"\0" * 7]
)
def test_bytes_that_hold_no_value_are_reported(damage: bytes) -> None:
    with pytest.raises(Corrupt, match="the same version"):
        decode(damage)
