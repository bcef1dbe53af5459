"""Pickles written opcode by opcode, read by Python and by torch's weights-only reader."""

from __future__ import annotations

import pickle
import pickletools
from collections import OrderedDict
from typing import Any

import pytest
import torch

from holdfast.formats.writing.pickle_text import PickleText, TensorRef, call, encode_int, encode_text

VALUES: list[Any] = [
    None,
    True,
    False,
    *(0, 1, 255, 256, 65535, -1, 2**31 - 1, 2**31, -(2**31), -(2**31) - 1, 2**63, -(2**200)),
    *(0.0, -0.0, 1e300, float("-inf"), 3 + 4j),
    *("", "text", "é\u4e2d", "a\nb"),
    *(b"", b"\x00\xff\n", bytearray(b"xyz")),
    *([], [1, [2]], (), (1,), (1, 2, 3, 4), {1, 2}, {}, {"a": {"b": (None,)}}, {(1, 2): "key"}),
    OrderedDict([("b", 1), ("a", 2)]),
    *(torch.float32, torch.bfloat16, torch.Size([3, 4]), torch.device("cuda", 1)),
]


def _encode(value: Any) -> bytes:
    return PickleText(lambda ref: encode_int(ref.number)).encode(value)


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_python_reads_the_same_value_of_the_same_type(value: Any) -> None:
    found = pickle.loads(_encode(value))  # written here

    assert found == value
    assert type(found) is type(value)
    assert repr(found) == repr(value)


def test_attributes_of_ordered_dicts_are_kept() -> None:
    value = OrderedDict(a=1)
    value._metadata = {"": {"version": 2}}  # type: ignore[attr-defined]  # as torch sets it

    assert vars(pickle.loads(_encode(value))) == vars(value)  # written here


def test_a_tensor_is_what_the_caller_says() -> None:
    assert pickle.loads(_encode([TensorRef(7)])) == [7]  # written here


def test_the_result_names_only_what_is_asked_for() -> None:
    values = {"a": [1, (2.0, "x")], "b": None}

    names = {opcode.name for opcode, _, _ in pickletools.genops(_encode(values))}

    assert not names & {"GLOBAL", "STACK_GLOBAL", "REDUCE", "NEWOBJ", "BUILD", "INST", "OBJ"}


def test_an_object_of_another_class_cannot_be_encoded() -> None:
    with pytest.raises(KeyError):
        _encode([object()])


def test_a_call_is_a_function_with_arguments() -> None:
    data = b"\x80\x02" + call("builtins", "complex", [encode_text("1+2j")]) + b"."

    assert pickle.loads(data) == 1 + 2j  # written here
