"""The spec of a tensor: complete, without defaults, decoded the same, and refused if it is invalid."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from holdfast.errors import Corrupt, NewerFormat
from holdfast.tensors.spec import (
    MAX_DIMS,
    SpecEncoder,
    TensorSpec,
    contiguous_stride,
    count_bytes,
    decode_spec,
    describe,
    encode_spec,
    find_span,
)
from tests.kit.tensors import ORDINARY

PLAIN: dict[str, Any] = {"type": "tensor", "dtype": "float32", "shape": [2, 3]}


@pytest.mark.parametrize(
    "name", [name for name in ORDINARY if name.startswith(("float32/", "complex64/", "role/", "q"))]
)
def test_a_spec_comes_back_the_same(name: str) -> None:
    spec = describe(ORDINARY[name]())
    size = 0 if spec.meta else spec.span_bytes
    assert decode_spec(encode_spec(spec), size_bytes=size, what="x") == spec


def test_nothing_is_written_that_goes_without_saying() -> None:
    assert encode_spec(describe(torch.ones(2, 3))) == PLAIN
    assert encode_spec(describe(torch.ones(3, 2).t())) == {**PLAIN, "stride": [1, 2]}


@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (3, 0, 2), (1,), (2, 3, 4), (1, 1, 5)])
def test_contiguous_strides_are_those_of_torch(shape: tuple[int, ...]) -> None:
    assert contiguous_stride(shape) == torch.empty(shape).stride()


def test_a_span_reaches_from_the_first_item_to_the_last() -> None:
    assert find_span((4, 6), (6, 1)) == 24
    assert find_span((4, 6), (0, 2)) == 11
    assert find_span((4, 0), (9, 9)) == 0
    assert find_span((), ()) == 1
    assert count_bytes(torch.quint4x2, 5) == 3


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"type": "array"}, "is not described as a tensor"),
        ({"dtype": 3}, "is not described as a tensor"),
        ({"dtype": "Float32"}, "is not the name of a dtype"),
        ({"shape": None}, "an invalid shape or strides"),
        ({"shape": [1] * (MAX_DIMS + 1)}, "an invalid shape or strides"),
        ({"shape": [2, -3]}, "an invalid size, stride or offset"),
        ({"shape": [2, True]}, "an invalid size, stride or offset"),
        ({"shape": [2, 1.5]}, "an invalid size, stride or offset"),
        ({"shape": [1 << 61]}, "an invalid size, stride or offset"),
        ({"shape": [1 << 40, 1 << 40], "stride": [0, 0]}, "larger than a tensor can be"),
        ({"stride": [1]}, "strides that do not fit its shape"),
        ({"stride": [4, 1]}, "needs 28 bytes, and its entry has 24"),
        ({"shape": [2, 4]}, "needs 32 bytes, and its entry has 24"),
        ({"offset": 1}, "needs 28 bytes, and its entry has 24"),
        ({"at": 2}, "strides that do not fit its shape"),
        ({"at": -4}, "an invalid size, stride or offset"),
        ({"conj": True}, "flags that are invalid for its dtype"),
        ({"conj": 1}, "an invalid spec"),
        ({"role": "boss"}, "an invalid spec"),
        ({"role": []}, "an invalid spec"),
        ({"meta": True}, "needs 0 bytes, and its entry has 24"),
        ({"packed": True, "shape": [2, 2]}, "needs 16 bytes, and its entry has 24"),
        ({"packed": True, "offset": 1}, "is spread over more memory than a tensor can be"),
        ({"packed": True, "stride": [1 << 50, 1]}, "is spread over more memory than a tensor can be"),
        ({"quantizer": ["per_tensor", "0x1p0", 0]}, "flags that are invalid for its dtype"),
        ({"dtype": "quint8"}, "flags that are invalid for its dtype"),
        ({"quantizer": ["per_tensor", "one", 0]}, "an invalid quantizer"),
        ({"quantizer": ["per_channel", 70, "float64", "", "int64", ""]}, "an invalid quantizer"),
        ({"quantizer": 7}, "an invalid quantizer"),
        ({"quantizer": {}}, "an invalid quantizer"),
        ({"quantizer": ""}, "an invalid quantizer"),
        ({"quantizer": []}, "an invalid quantizer"),
        ({"quantizer": ["per_tensor", "0x1p99999", 0]}, "an invalid quantizer"),
        ({"quantizer": ["per_tensor", "0x1p0", 1 << 31]}, "an invalid quantizer"),
        ({"quantizer": ["per_tensor", "0x1p0", True]}, "an invalid quantizer"),
        ({"quantizer": ["per_channel", 0, "float64", "00", "int64", ""]}, "an invalid quantizer"),
        ({"quantizer": ["per_channel", 0, "bits8", "00", "int64", ""]}, "an invalid quantizer"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_by_name(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(Corrupt, match=words):
        decode_spec({**PLAIN, **changes}, size_bytes=24, what="'run', w")


def test_a_dtype_of_a_later_torch_asks_for_it() -> None:
    with pytest.raises(NewerFormat, match="has no dtype 'float3'"):
        decode_spec({**PLAIN, "dtype": "float3"}, size_bytes=24, what="x")


def test_strides_of_dimensions_without_items_do_not_matter() -> None:
    spec = decode_spec({**PLAIN, "shape": [0, 3], "stride": [1 << 60, 1 << 60]}, size_bytes=0, what="x")
    assert spec.span_bytes == 0


def test_packed_shapes_leave_repeats_out() -> None:
    assert TensorSpec(torch.int8, (4, 5, 1), (0, 3, 0)).packed_shape == (5, 1)


def test_equal_specs_are_encoded_as_one_object() -> None:
    encoder = SpecEncoder()
    first, second = encoder.encode(describe(torch.ones(2, 3))), encoder.encode(describe(torch.zeros(2, 3)))

    assert first == PLAIN
    assert first is second
    assert encoder.encode(describe(torch.ones(3, 2))) != first


@pytest.mark.parametrize(
    ("tensor", "has_gaps"),
    [
        (torch.ones(2, 3), False),
        (torch.ones(2, 3).t(), False),
        (torch.ones(3).expand(5, 3), False),
        (torch.ones(0), False),
        (torch.ones(4, 4)[:, :2], True),
        (torch.ones(9)[::2], True),
    ],
)
def test_gaps_are_bytes_between_items_that_belong_to_no_item(tensor: torch.Tensor, has_gaps: bool) -> None:
    assert describe(tensor).has_gaps == has_gaps
