"""The comparer that other tests rely on notices every difference, and the zoo has what it promises."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.kit.capabilities import needs_ability
from tests.kit.tensors import COMPOSITES, TENSORS, assert_same_tensor, raw_bytes
from tests.tensor_zoo import DTYPES, NEEDS, Scaled, make_items, make_quantised

Change = Callable[[Any], Any]


def flip_a_bit(tensor: torch.Tensor) -> torch.Tensor:
    torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())[7] ^= 1
    return tensor


DIFFERENT: dict[str, tuple[str, Change]] = {
    "a bit": ("float32/whole", flip_a_bit),
    "a bit of a quantised one": ("quint4x2/whole", flip_a_bit),
    "dtype": ("float32/whole", lambda tensor: tensor.view(torch.int32)),
    "shape": ("float32/whole", lambda tensor: tensor.view(6, 4)),
    "stride": ("float32/transposed", lambda tensor: tensor.contiguous()),
    "stride of an empty one": ("float32/empty 2-d", lambda tensor: tensor.as_strided((0, 3), (3, 1))),
    "expanded": ("float32/expanded", lambda tensor: tensor.clone(memory_format=torch.contiguous_format)),
    "conj": ("complex64/conj", lambda tensor: tensor.conj()),
    "conj that was resolved": ("complex64/conj", lambda tensor: tensor.resolve_conj()),
    "neg": ("float32/neg", torch._neg_view),
    "meta": ("float32/whole", lambda tensor: tensor.to("meta")),
    "requires grad": ("float32/whole", lambda tensor: tensor.requires_grad_()),
    "parameter": ("float32/whole", lambda tensor: torch.nn.Parameter(tensor, requires_grad=False)),
    "buffer": ("float32/whole", torch.nn.Buffer),
    "persistence": ("role/buffer", lambda tensor: torch.nn.Buffer(tensor, persistent=False)),
    "grad": ("grad/parameter", lambda tensor: torch.nn.Parameter(tensor.detach())),
    "value of grad": ("grad/tensor", lambda tensor: (flip_a_bit(tensor.grad), tensor)[1]),
    "scale": ("qint8/whole", lambda tensor: torch._make_per_tensor_quantized_tensor(tensor.int_repr(), 0.2, 3)),
    "axis": ("qint8/per channel 0", lambda tensor: make_quantised(torch.qint8, axis=1)),
    "coalesced": ("sparse_coo/float32 coalesced", lambda tensor: tensor._coalesced_(False)),
    "index": ("sparse_coo/float32", lambda tensor: (flip_a_bit(tensor._indices()), tensor)[1]),
    "value": ("sparse_csr/whole", lambda tensor: (flip_a_bit(tensor.values()), tensor)[1]),
    "layout": ("sparse_csr/whole", lambda tensor: tensor.to_sparse_csc()),
    "row": ("nested/whole", lambda tensor: tensor.transpose(1, 2)),
    "known lengths": ("jagged/with known lengths", lambda tensor: COMPOSITES["jagged/whole"]()),
    "lengths": ("jagged/holes", lambda tensor: COMPOSITES["jagged/whole"]()),
    "context": ("subclass/whole", lambda tensor: Scaled(tensor.payload, tensor.scale, {})),
    "class": ("subclass/whole", lambda tensor: tensor.payload),
    "part": ("subclass/whole", lambda tensor: Scaled(tensor.payload.clone().neg_(), tensor.scale, tensor.context)),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("what", DIFFERENT)
def test_a_difference_is_noticed(what: str) -> None:
    name, change = DIFFERENT[what]
    assert_same_tensor(TENSORS[name](), TENSORS[name]())
    with pytest.raises(AssertionError):
        assert_same_tensor(change(TENSORS[name]()), TENSORS[name]())


def test_equal_tensors_apart_do_not_alias() -> None:
    for name in ("float32/whole", "sparse_coo/float32", "subclass/whole"):
        tensor = TENSORS[name]()
        assert_same_tensor(tensor, tensor.detach(), aliasing=True)
        with pytest.raises(AssertionError):
            assert_same_tensor(tensor, TENSORS[name](), aliasing=True)


@pytest.mark.parametrize("dtype", ["float32", "int16", "complex64", "bool"])
def test_raw_bytes_are_those_of_the_elements_in_c_order(dtype: str) -> None:
    for name in ("whole", "transposed", "channels last", "stepped columns", "overlapping", "expanded", "0-d"):
        tensor = TENSORS[f"{dtype}/{name}"]()
        assert raw_bytes(tensor) == tensor.numpy().tobytes()


def test_the_bytes_of_the_zoo_hold_what_is_easily_lost() -> None:
    items = make_items(torch.float32, 24).view(torch.int32).tolist()
    assert items[:3] == [-(1 << 31), -1, 0x7F800001]
    assert make_items(torch.bool, 3).view(torch.uint8).tolist() == [0, 1, 0]
    assert raw_bytes(TENSORS["float8_e4m3fn/every byte"]()) == bytes(range(256))


def test_the_zoo_has_every_dtype_in_every_geometry() -> None:
    assert len(TENSORS) > 1000
    for dtype in DTYPES:
        assert f"{dtype}/whole" in TENSORS


@pytest.mark.parametrize("name", [pytest.param(name, marks=needs_ability(ability)) for name, ability in NEEDS.items()])
def test_the_zoo_has_what_this_torch_can_make(name: str) -> None:
    assert isinstance(TENSORS[name](), torch.Tensor)
