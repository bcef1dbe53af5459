"""Plain values of torch and numpy keep their type and every bit, in one form each."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from holdfast.errors import Unsupported
from holdfast.json_text import Json, canonical_json, parse_json
from holdfast.trees import plain
from holdfast.trees.plain_torch_numpy import DECODERS, ENCODERS


def encode(value: object) -> Json:
    return ENCODERS[type(value)](value)


def decode(node: Json) -> object:
    return plain.decode_checked(node, DECODERS[node[0]], ENCODERS)


@pytest.mark.parametrize(
    ("value", "node"),
    [
        (torch.bfloat16, ["dtype", "bfloat16"]),
        (torch.double, ["dtype", "float64"]),
        (torch.sparse_csr, ["layout", "sparse_csr"]),
        (torch.channels_last, ["memory_format", "channels_last"]),
        (torch.device("cuda", 3), ["device", "cuda", 3]),
        (torch.device("cpu"), ["device", "cpu", None]),
        (torch.Size([2, 0]), ["size", 2, 0]),
        (np.bool_(True), ["numpy", "bool", "01"]),
        (np.float32(1), ["numpy", "float32", "0000803f"]),
        (np.float64(1), ["numpy", "float64", "000000000000f03f"]),
        (np.longlong(-2), ["numpy", "longlong", "feffffffffffffff"]),
        (np.complex64(1), ["numpy", "complex64", "0000803f00000000"]),
        (np.datetime64(5, ("s", 25)), ["numpy", "datetime64[25s]", "0500000000000000"]),
        (np.timedelta64("NaT"), ["numpy", "timedelta64", "0000000000000080"]),
        (np.str_("é\0"), ["numpy", "str", "é\0"]),
        (np.bytes_(b"a\0"), ["numpy", "bytes", "YQA="]),
    ],
)
def test_each_value_has_one_form_and_is_decoded_from_it(value: object, node: Json) -> None:
    assert encode(value) == node
    found = decode(parse_json(canonical_json(node), where="x"))
    assert type(found) is type(value)
    assert repr(found) == repr(value)


def test_every_dtype_layout_and_memory_format_of_torch_comes_back() -> None:
    wanted = [v for v in vars(torch).values() if isinstance(v, torch.dtype | torch.layout | torch.memory_format)]
    assert len(wanted) > 50
    assert all(decode(encode(value)) is value for value in wanted)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (np.longdouble(1), "its layout differs between machines; convert it to float64"),
        (np.clongdouble(1), "convert it to float64 or complex128"),
        (np.zeros(1, "M8[0s]")[0], r"a datetime64\[0s\] cannot be saved"),
        (torch.device("cuda", 200), "a device with the index -56 cannot be saved"),
    ],
)
def test_a_value_without_an_exact_form_is_refused_with_the_next_step(value: object, text: str) -> None:
    with pytest.raises(Unsupported, match=text):
        encode(value)


@pytest.mark.parametrize(
    "node",
    [
        ["device", "cuda", 128],
        ["device", "cuda", -1],
        ["device", "cuda:1", None],
        ["device", "cuda", True],
        ["device", "cuda"],
        ["size", 1.0],
        ["size", 1 << 63],
        ["numpy", "bool", "02"],
        ["numpy", "float32", "00"],
        ["numpy", "float128", "00" * 16],
        ["numpy", "object", "00" * 8],
        ["numpy", "datetime64[1s]", "00" * 8],
        ["numpy", "datetime64[2147483648s]", "00" * 8],
        ["numpy", "int8", "0 0"],
        ["numpy", "str", 5],
        ["numpy", "str"],
        ["numpy", "bytes", "a"],
    ],
    ids=lambda node: str(node)[:40],
)
def test_a_malformed_or_second_form_is_refused(node: Json) -> None:
    with pytest.raises((ValueError, ArithmeticError)):
        decode(node)


@pytest.mark.parametrize(
    ("node", "text"),
    [
        (["dtype", "float3"], "has no dtype 'float3'; use the torch that saved it"),
        (["layout", "load"], "has no layout 'load'"),
        (["memory_format", "float32"], "has no memory_format 'float32'"),
        (["device", "toaster", 0], "has no device of type 'toaster'; import the package that adds it first"),
    ],
)
def test_what_this_torch_does_not_have_is_named(node: Json, text: str) -> None:
    with pytest.raises(Unsupported, match=text):
        decode(node)
