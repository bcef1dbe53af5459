"""Every dtype has one name, and a name from a store finds a dtype or nothing."""

from __future__ import annotations

import pytest
import torch

from holdfast.errors import Corrupt, NewerFormat
from holdfast.json_text import Json
from holdfast.tensors.spec import dtype_name, find_dtype, item_bytes, items_per_byte
from tests.kit.capabilities import needs_torch
from tests.tensor_zoo import DTYPES, QUANTISED, TENSORS, make_quantised

LOOKED_AT = (
    *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
    *("float16", "bfloat16", "float32", "float64", "complex32", "bcomplex32", "complex64", "complex128"),
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"),
    *("uint1", "uint2", "uint3", "uint4", "uint5", "uint6", "uint7"),
    *("int1", "int2", "int3", "int4", "int5", "int6", "int7"),
    *("bits1x8", "bits2x4", "bits4x2", "bits8", "bits16"),
    *("qint8", "quint8", "qint32", "quint4x2", "quint2x4"),
)


@pytest.mark.parametrize("name", [pytest.param(name, marks=needs_torch(name)) for name in LOOKED_AT])
def test_every_dtype_of_torch_is_found_by_its_name(name: str) -> None:
    assert dtype_name(DTYPES[name]) == name
    assert find_dtype(name) is DTYPES[name]


@pytest.mark.parametrize("name", DTYPES)
def test_the_size_of_an_item_is_that_of_an_element(name: str) -> None:
    assert item_bytes(DTYPES[name]) == torch.empty(0, dtype=DTYPES[name], device="meta").element_size()


def test_no_dtype_is_missing() -> None:
    """A new torch brings new dtypes, and each of them wants a look."""
    assert DTYPES.keys() - LOOKED_AT == set()
    assert {name.partition("/")[0] for name in TENSORS} > DTYPES.keys()


@pytest.mark.parametrize("alias", ["float", "half", "double", "int", "bit", "cfloat"])
def test_a_second_name_of_torch_is_not_a_name(alias: str) -> None:
    assert isinstance(getattr(torch, alias), torch.dtype)
    with pytest.raises(NewerFormat):
        find_dtype(alias)


def test_a_dtype_that_this_torch_does_not_have_asks_for_a_newer_one() -> None:
    with pytest.raises(NewerFormat, match=r"^torch 2\.\S+ has no dtype 'float3_e1m1': upgrade torch$"):
        find_dtype("float3_e1m1")


@pytest.mark.parametrize("name", ["nn", "load", "manual_seed", "device", "uint8_", "strided"])
def test_what_else_torch_has_under_a_name_is_no_dtype(name: str) -> None:
    with pytest.raises(NewerFormat):
        find_dtype(name)


@pytest.mark.parametrize(
    "name", ["", "__class__", "Tensor", "float32\n", " float32", "torch.float32", "fl\u00f6at", "x" * 9999, 5, None, []]
)
def test_what_cannot_be_a_name_is_damage(name: Json) -> None:
    with pytest.raises(Corrupt, match="is not the name of a dtype") as caught:
        find_dtype(name)
    assert len(str(caught.value)) < 200


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize("dtype", QUANTISED)
def test_the_items_of_some_dtypes_share_a_byte(dtype: torch.dtype) -> None:
    storage = make_quantised(dtype).untyped_storage()
    assert storage.nbytes() == 24 * item_bytes(dtype) // items_per_byte(dtype)
    assert items_per_byte(torch.float32) == 1
