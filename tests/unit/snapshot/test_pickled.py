"""Pickles: bytes of torch.save are loaded weights-only unless more is allowed, and refusals name their cause."""

from __future__ import annotations

import io
from collections import OrderedDict
from typing import Any

import pytest
import torch

from holdfast.errors import Corrupt, Unsupported
from holdfast.snapshot.pickled import dump_payload, find_refusal, load_payload, pickle_value, unpickle_value
from tests.kit.hooking import Hook


class Custom:
    """A class that a weights-only load does not know."""


class Unpicklable:
    def __reduce__(self) -> Any:
        raise RuntimeError("not me")


@pytest.mark.parametrize("value", [5, "text", b"", b"bytes", [1, {"a": 2.5}], OrderedDict(a=1), torch.ones(2)], ids=str)
def test_plain_values_are_loaded_weights_only(value: object) -> None:
    data = dump_payload(value)

    assert find_refusal(data) == ""
    assert str(load_payload(data, what="x", weights_only=True)) == str(value)


def test_a_byte_stream_is_plain() -> None:
    found = load_payload(dump_payload(io.BytesIO(b"abc")), what="x", weights_only=True)

    assert isinstance(found, io.BytesIO)
    assert found.getvalue() == b"abc"


def test_a_list_of_classes_that_another_thread_shortens_is_no_reason_to_refuse(hook: Hook) -> None:
    original, calls = torch.load, list[int]()

    def load(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:  # what torch raises if the class is removed between its two looks at the list
            raise KeyError("_io.BytesIO")
        return original(*args, **kwargs)

    hook(torch, "load", load)

    found = load_payload(dump_payload(io.BytesIO(b"abc")), what="x", weights_only=True)

    assert isinstance(found, io.BytesIO)
    assert len(calls) == 2


def test_another_class_is_refused_by_name_and_loaded_if_allowed() -> None:
    data = dump_payload(Custom())

    assert "Custom" in find_refusal(data)
    with pytest.raises(Unsupported, match=r"^x was saved by torch\.save and contains more .* Refused: .*Custom"):
        load_payload(data, what="x", weights_only=True)
    assert isinstance(load_payload(data, what="x", weights_only=False), Custom)


def test_damaged_bytes_are_corrupt_if_anything_may_be_loaded() -> None:
    with pytest.raises(Corrupt, match=r"^x was saved by torch.save and cannot be loaded here"):
        load_payload(b"damaged", what="x", weights_only=False)
    with pytest.raises(Corrupt, match=r"^x was pickled and cannot be unpickled here"):
        unpickle_value(bytearray(b"damaged"), what="x")


def test_a_pickled_value_is_restored_and_one_that_cannot_be_pickled_is_named() -> None:
    assert unpickle_value(bytearray(pickle_value({1, 2}, name="x")), what="x") == {1, 2}
    with pytest.raises(Unsupported, match=r"^x: it cannot be pickled either: not me"):
        pickle_value(Unpicklable(), name="x")
