"""A zoo with a maker for every kind of tensor that torch has; the bytes are the same each time.

Not in tests/kit: stores in tests/compat contain the name of this module, as that of the class `Scaled`.
"""

from __future__ import annotations

import functools
import math
import random
import warnings
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import torch

from tests.kit.capabilities import is_able

Maker = Callable[[], torch.Tensor]

DTYPES: Final = {str(found)[6:]: found for found in vars(torch).values() if isinstance(found, torch.dtype)}
QUANTISED: Final = {
    torch.qint8: 1,
    torch.quint8: 1,
    torch.qint32: 1,
    torch.quint4x2: 2,
    torch.quint2x4: 4,
}
"""Quantised dtypes, and how many items of each share a byte."""
NEEDS: Final = {
    "quint4x2/transposed": "view a part of a tensor with several items in a byte",
    "quint2x4/transposed": "view a part of a tensor with several items in a byte",
    "nested/columns": "make a nested tensor of a part of a storage",
    "nested/some rows": "make a nested tensor of a part of a storage",
}
"""What torch must be able to do for some tensors to be in the zoo."""
_SIGNALLING: Final = {"float16": "7c01", "bfloat16": "7f81", "float32": "7f800001", "float64": "7ff0000000000001"}


def make_bytes(dtype: torch.dtype, items: int) -> bytes:
    """Return bytes for that many items, always the same ones: -0.0, all ones, a signalling NaN, then a mix."""
    size = dtype.itemsize
    if dtype == torch.bool:
        return bytes(number % 3 % 2 for number in range(items))
    special = [bytes(size - 1) + b"\x80", b"\xff" * size, bytes.fromhex(_SIGNALLING.get(str(dtype)[6:], ""))[::-1]]
    return (b"".join(special) + random.Random(str(dtype)).randbytes(items * size))[: items * size]


def make_items(dtype: torch.dtype, items: int) -> torch.Tensor:
    """Return a tensor of one dimension with memory of its own and the bytes of `make_bytes`."""
    memory = torch.empty(items * dtype.itemsize, dtype=torch.uint8)
    _fill(memory.untyped_storage(), make_bytes(dtype, items))
    return memory.view(dtype) if items else torch.empty(0, dtype=dtype)


def _fill(storage: torch.UntypedStorage, data: bytes) -> None:
    memory = torch.empty(0, dtype=torch.uint8).set_(storage)
    memory.zero_()
    if data:
        memory[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)


GEOMETRIES: Final[dict[str, Callable[[torch.Tensor], torch.Tensor]]] = {
    # Each gets 24 items.
    "whole": lambda items: items.view(4, 6),
    "0-d": lambda items: items[7],
    "one": lambda items: items[:1],
    "empty": lambda items: items[:0],
    "empty 2-d": lambda items: items.as_strided((0, 3), (7, 2)),
    "expanded": lambda items: items[:6].expand(4, 6),
    "expanded inside": lambda items: items[:4, None].expand(4, 6),
    "expanded scalar": lambda items: items[3].expand(2, 3),
    "transposed": lambda items: items.view(4, 6).t(),
    "permuted": lambda items: items.view(2, 3, 4).permute(1, 2, 0),
    "channels last": lambda items: items.as_strided((2, 3, 2, 2), (12, 1, 6, 3)),
    "channels last 3d": lambda items: items.as_strided((1, 3, 2, 2, 2), (24, 1, 12, 6, 3)),
    "rows": lambda items: items.view(4, 6)[1:3],
    "columns": lambda items: items.view(4, 6)[:, 2:5],
    "stepped": lambda items: items[::2],
    "stepped columns": lambda items: items.view(4, 6)[:, ::3],
    "overlapping": lambda items: items.unfold(0, 4, 2),
    "odd strides": lambda items: items.as_strided((1, 4, 1), (99, 1, 77)),
}
_QUANTISED_GEOMETRIES: Final = ("whole", "0-d", "empty", "expanded", "transposed", "channels last", "rows", "stepped")
_PACKED_GEOMETRIES: Final = ("whole", "transposed", "empty")
_COMPLEX_VIEWS: Final[dict[str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "conj": lambda items: items.view(4, 6).conj(),
    "conj transposed": lambda items: items.view(4, 6).mH,
    "neg": lambda items: torch._neg_view(items.view(4, 6)),
    "conj neg": lambda items: torch._neg_view(items[::2].conj()),
    "imag of conj": lambda items: items.view(4, 6).conj().imag,
}


class Scaled(torch.Tensor):
    """Values with a scale, as libraries for quantisation write them: all it has lies in its parts."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # torch's own idiom

    @staticmethod
    def __new__(cls, payload: torch.Tensor, scale: torch.Tensor, context: dict[str, Any]) -> Scaled:
        return torch.Tensor._make_wrapper_subclass(
            cls, payload.shape, strides=payload.stride(), dtype=torch.float32, device=payload.device
        )

    def __init__(self, payload: torch.Tensor, scale: torch.Tensor, context: dict[str, Any]) -> None:
        self.payload = payload
        self.scale = scale
        self.context = context

    def __repr__(self) -> str:  # type: ignore[override]  # torch's has an argument
        return f"Scaled({self.payload}, {self.scale}, {self.context})"

    def __tensor_flatten__(self) -> tuple[list[str], dict[str, Any]]:
        return ["payload", "scale"], self.context

    @staticmethod
    def __tensor_unflatten__(parts: dict[str, torch.Tensor], context: dict[str, Any], size: Any, stride: Any) -> Scaled:
        return Scaled(parts["payload"], parts["scale"], context)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # the stub lacks a parameter that torch passes
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is torch.ops.aten.detach.default:
            return Scaled(args[0].payload, args[0].scale, args[0].context)
        raise NotImplementedError(function)


SUBCLASSES: Final = (Scaled,)
"""The classes that have to be registered for the zoo."""


def _scaled(payload: torch.Tensor) -> Scaled:
    return Scaled(payload, make_items(torch.bfloat16, 4), {"bits": 8, "axis": None, "name": "sc\u00e4led"})


def _plain() -> dict[str, Maker]:
    makers: dict[str, Maker] = {}
    for name, dtype in DTYPES.items():
        if dtype in QUANTISED:
            continue
        views = {**GEOMETRIES, **(_COMPLEX_VIEWS if dtype.is_complex else {})}
        if dtype.is_floating_point:
            views["neg"] = _COMPLEX_VIEWS["neg"]
        for shape, view in views.items():
            makers[f"{name}/{shape}"] = functools.partial(lambda view, dtype: view(make_items(dtype, 24)), view, dtype)
        if dtype.itemsize == 1 and dtype != torch.bool:
            makers[f"{name}/every byte"] = functools.partial(torch.arange(256, dtype=torch.uint8).view, dtype)
        makers[f"{name}/0-d alone"] = functools.partial(lambda dtype: make_items(dtype, 1).view(()), dtype)
        makers[f"{name}/meta"] = functools.partial(torch.empty_strided, (4, 6), (1, 4), dtype=dtype, device="meta")
    return makers


def make_quantised(dtype: torch.dtype, *, axis: int | None = None, floating: bool = False) -> torch.Tensor:
    """Return 24 quantised items, per tensor or per channel of (4, 6)."""
    if axis is None:
        tensor = torch._empty_affine_quantized((24,), scale=0.1, zero_point=3, dtype=dtype)
    else:
        channels = (4, 6)[axis]
        zeros = torch.arange(channels, dtype=torch.float32 if floating else torch.int64)
        scales = torch.arange(1, channels + 1) / 10
        tensor = torch._empty_per_channel_affine_quantized(
            (4, 6), scales=scales, zero_points=zeros, axis=axis, dtype=dtype
        )
    _fill(tensor.untyped_storage(), make_bytes(dtype, 24 // QUANTISED[dtype]))
    return tensor


def _quantised() -> dict[str, Maker]:
    makers: dict[str, Maker] = {}
    for dtype, per_byte in QUANTISED.items():
        name = str(dtype)[6:]
        for shape in _PACKED_GEOMETRIES if per_byte > 1 else _QUANTISED_GEOMETRIES:
            makers[f"{name}/{shape}"] = functools.partial(
                lambda view, dtype: view(make_quantised(dtype)), GEOMETRIES[shape], dtype
            )
        for axis in (0, 1):
            makers[f"{name}/per channel {axis}"] = functools.partial(make_quantised, dtype, axis=axis)
            # torch itself crashes for qint32.
            if dtype != torch.qint32:
                makers[f"{name}/per channel {axis} of floats"] = functools.partial(
                    make_quantised, dtype, axis=axis, floating=True
                )
        makers[f"{name}/parameter"] = functools.partial(
            lambda dtype: torch.nn.Parameter(make_quantised(dtype), requires_grad=False), dtype
        )
    makers["quint8/rows of channels"] = lambda: make_quantised(torch.quint8, axis=0)[1:]
    makers["quint8/columns of channels"] = lambda: make_quantised(torch.quint8, axis=0)[:, ::3]
    return makers


def _floats(*shape: int) -> torch.Tensor:
    return make_items(torch.float32, math.prod(shape)).view(shape)


def with_grad(tensor: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """Return `tensor` with that gradient."""
    tensor.grad = grad
    return tensor


_ROLES: Final[dict[str, Maker]] = {
    "role/parameter": lambda: torch.nn.Parameter(_floats(2, 3)),
    "role/parameter without grad": lambda: torch.nn.Parameter(_floats(2, 3).t(), requires_grad=False),
    "role/parameter of ints": lambda: torch.nn.Parameter(make_items(torch.int8, 3), requires_grad=False),
    "role/parameter on meta": lambda: torch.nn.Parameter(torch.empty(2, 3, device="meta")),
    "role/parameter of a slice": lambda: torch.nn.Parameter(_floats(64)[5:9]),
    "role/requires grad": lambda: _floats(2, 3).requires_grad_(),
    "role/not a leaf": lambda: _floats(2, 3).requires_grad_().view(3, 2),
    "role/buffer": lambda: torch.nn.Buffer(_floats(3)),
    "role/passing buffer": lambda: torch.nn.Buffer(_floats(3), persistent=False),
    "role/from numpy": lambda: torch.from_numpy(np.arange(6, dtype=np.int16).reshape(2, 3)[:, ::2]),
    "role/slice of a large storage": lambda: make_items(torch.int16, 1 << 15)[77:99],
    "role/end of a large storage": lambda: make_items(torch.int16, 1 << 15)[-3:],
    "grad/parameter": lambda: with_grad(torch.nn.Parameter(_floats(2, 3)), _floats(2, 3) + 1),
    "grad/transposed": lambda: with_grad(torch.nn.Parameter(_floats(2, 3)), _floats(3, 2).t()),
    "grad/tensor": lambda: with_grad(_floats(2, 3).requires_grad_(), _floats(2, 3)),
    "grad/sparse": lambda: with_grad(torch.nn.Parameter(_floats(3, 4)), _make_coo(torch.float32)),
}


def _make_coo(dtype: torch.dtype, *, coalesced: bool = False, dense: tuple[int, ...] = ()) -> torch.Tensor:
    indices = torch.tensor([[0, 1, 1, 2], [1, 0, 3, 3]] if coalesced else [[0, 2, 1, 1], [1, 0, 3, 3]])
    values = make_items(dtype, 4 * math.prod(dense)).view(4, *dense)
    return torch.sparse_coo_tensor(indices, values, (3, 4, *dense), is_coalesced=coalesced, check_invariants=True)


def _make_empty_coo(*, device: str) -> torch.Tensor:
    return torch.empty((3, 4), layout=torch.sparse_coo, device=device)


_COO: Final[dict[str, Maker]] = {
    "sparse_coo/hybrid": lambda: _make_coo(torch.float32, dense=(2,)),
    "sparse_coo/hybrid coalesced": lambda: _make_coo(torch.float32, dense=(2, 3), coalesced=True),
    "sparse_coo/none": lambda: _make_empty_coo(device="cpu"),
    "sparse_coo/none coalesced": lambda: torch.zeros(3, 4).to_sparse(),
    "sparse_coo/0-d": lambda: torch.tensor(3.0).to_sparse(),
    "sparse_coo/no rows": lambda: torch.empty(0, 4).to_sparse(),
    "sparse_coo/transposed indices": lambda: torch.sparse_coo_tensor(
        torch.tensor([[0, 1], [2, 3], [1, 1]]).t(), make_items(torch.float32, 6)[::2], (3, 4)
    ),
    "sparse_coo/requires grad": lambda: _make_coo(torch.float32).requires_grad_(),
    "sparse_coo/requires grad coalesced": lambda: _make_coo(torch.float64, coalesced=True).requires_grad_(),
    "sparse_coo/parameter": lambda: torch.nn.Parameter(_make_coo(torch.float32)),
    "sparse_coo/parameter without grad": lambda: torch.nn.Parameter(_make_coo(torch.int8), requires_grad=False),
    "sparse_coo/buffer": lambda: torch.nn.Buffer(_make_coo(torch.float32, coalesced=True)),
    "sparse_coo/passing buffer": lambda: torch.nn.Buffer(_make_coo(torch.float32), persistent=False),
    "sparse_coo/meta": lambda: _make_empty_coo(device="meta"),
    "sparse_coo/meta with items": lambda: torch.sparse_coo_tensor(
        torch.empty((1, 2), dtype=torch.int64, device="meta"), torch.empty(2, 5, device="meta"), (9, 5)
    ),
}


def _make_compressed(layout: torch.layout, dtype: torch.dtype, index: torch.dtype = torch.int64) -> torch.Tensor:
    block = (2, 3) if layout in (torch.sparse_bsr, torch.sparse_bsc) else ()
    shape = (4, 9) if block else (2, 3)
    by_row = layout in (torch.sparse_csr, torch.sparse_bsr)
    compressed = torch.tensor([0, 1, 3] if by_row else [0, 1, 2, 3], dtype=index)
    plain = torch.tensor([1, 0, 2] if by_row else [0, 1, 1], dtype=index)
    values = make_items(dtype, 18).view(3, 2, 3) if block else make_items(dtype, 3)
    return torch.sparse_compressed_tensor(compressed, plain, values, shape, layout=layout, check_invariants=True)


def _dense(*shape: int) -> torch.Tensor:
    return torch.arange(float(torch.Size(shape).numel())).view(shape) % 5 % 3


def _sparse() -> dict[str, Maker]:
    makers = dict(_COO)
    for name, dtype in DTYPES.items():
        if dtype in QUANTISED:
            continue
        makers[f"sparse_coo/{name}"] = functools.partial(_make_coo, dtype)
        makers[f"sparse_coo/{name} coalesced"] = functools.partial(_make_coo, dtype, coalesced=True)
        makers[f"sparse_csr/{name}"] = functools.partial(_make_compressed, torch.sparse_csr, dtype)
        makers[f"sparse_bsc/{name}"] = functools.partial(_make_compressed, torch.sparse_bsc, dtype)
    for layout in (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc):
        make = functools.partial(_make_compressed, layout, torch.float32)
        size = (2, 2) if layout in (torch.sparse_bsr, torch.sparse_bsc) else None
        convert = functools.partial(torch.Tensor.to_sparse, layout=layout, blocksize=size)
        more: dict[str, Callable[..., torch.Tensor]] = {
            "whole": lambda make, convert: make(),
            "int32": lambda make, convert: make(torch.int32),
            "requires grad": lambda make, convert: make().requires_grad_(),
            "parameter": lambda make, convert: torch.nn.Parameter(make()),
            "buffer": lambda make, convert: torch.nn.Buffer(make()),
            "batch": lambda make, convert: convert(_dense(4, 4).expand(3, 4, 4)),
            "hybrid": lambda make, convert: convert(_dense(4, 4, 3), dense_dim=1),
            "none": lambda make, convert: convert(torch.zeros(4, 6)),
            "meta": lambda make, convert: make().to("meta"),
        }
        for what, maker in more.items():
            makers[f"{str(layout)[6:]}/{what}"] = functools.partial(maker, make, convert)
    return makers


def _make_nested(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.nested.nested_tensor([make_items(dtype, math.prod(shape)).view(shape) for shape in shapes])


def _make_jagged(**more: Any) -> torch.Tensor:
    values = more.pop("values", None)
    offsets = more.pop("offsets", torch.tensor([0, 2, 2, 6]))
    return torch.nested.nested_tensor_from_jagged(_floats(6, 3) if values is None else values, offsets, **more)


_NESTED: Final[dict[str, Maker]] = {
    "nested/whole": lambda: _make_nested((2, 3), (4, 3)),
    "nested/ragged in all dimensions": lambda: _make_nested((2, 3), (4, 1), (0, 5)),
    "nested/transposed": lambda: _make_nested((2, 3), (4, 3)).transpose(1, 2),
    "nested/columns": lambda: _make_nested((2, 6), (4, 6)).chunk(3, -1)[1],
    "nested/some rows": lambda: _make_nested((2, 3), (4, 3), (1, 3)).narrow(0, 1, 1),
    "nested/no rows": lambda: _make_nested((2, 3)).narrow(0, 0, 0),
    "nested/nothing": lambda: torch.nested.nested_tensor([], dtype=torch.int16),
    "nested/scalars": lambda: _make_nested((), ()),
    "nested/bfloat16": lambda: _make_nested((3,), (5,), dtype=torch.bfloat16),
    "nested/bool": lambda: _make_nested((3,), (5,), dtype=torch.bool),
    "nested/requires grad": lambda: _make_nested((2, 3), (4, 3)).requires_grad_(),
    "nested/parameter": lambda: torch.nn.Parameter(_make_nested((2, 3), (4, 3))),
    "nested/buffer": lambda: torch.nn.Buffer(_make_nested((2, 3), (4, 3))),
    "jagged/whole": _make_jagged,
    "jagged/with known lengths": lambda: _make_jagged(min_seqlen=0, max_seqlen=4),
    "jagged/holes": lambda: _make_jagged(lengths=torch.tensor([1, 0, 3])),
    "jagged/holes in any order": lambda: _make_jagged(offsets=torch.tensor([4, 0, 2]), lengths=torch.tensor([2, 1])),
    "jagged/transposed": lambda: _make_jagged().transpose(1, 2),
    "jagged/inner dimension": lambda: _make_jagged(values=_floats(3, 6, 2), jagged_dim=2),
    "jagged/columns": lambda: _make_jagged(values=_floats(6, 5)[:, ::2]),
    "jagged/narrowed": lambda: torch.nested.narrow(
        _floats(3, 5), 1, torch.tensor([0, 1, 2]), torch.tensor([2, 3, 0]), layout=torch.jagged
    ),
    "jagged/int32": lambda: _make_jagged(offsets=torch.tensor([0, 6], dtype=torch.int32)),
    "jagged/no pieces": lambda: _make_jagged(values=_floats(0, 3), offsets=torch.tensor([0])),
    "jagged/uint4": lambda: _make_jagged(values=make_items(DTYPES["uint4"], 6)),
    "jagged/neg": lambda: _make_jagged(values=make_items(torch.complex64, 6).conj().imag),
    "jagged/requires grad": lambda: _make_jagged().requires_grad_(),
    "jagged/parameter": lambda: torch.nn.Parameter(_make_jagged()),
    "jagged/buffer": lambda: torch.nn.Buffer(_make_jagged()),
    "jagged/meta": lambda: _make_jagged(values=_floats(6, 3).to("meta"), offsets=torch.tensor([0, 6]).to("meta")),
    "subclass/whole": lambda: _scaled(make_items(torch.int8, 6).view(2, 3)),
    "subclass/transposed": lambda: _scaled(make_items(torch.int8, 6).view(2, 3).t()),
    "subclass/of a subclass": lambda: _scaled(_scaled(_floats(2, 3))),
    "subclass/of a sparse one": lambda: Scaled(_floats(2), _make_coo(torch.float32), {}),
    "subclass/of parameters": lambda: Scaled(torch.nn.Parameter(_floats(2)), _floats(1).requires_grad_(), {}),
    "subclass/requires grad": lambda: _scaled(_floats(2, 3)).requires_grad_(),
    "subclass/parameter": lambda: torch.nn.Parameter(_scaled(_floats(2, 3))),
    "subclass/parameter without grad": lambda: torch.nn.Parameter(_scaled(_floats(2, 3)), requires_grad=False),
    "subclass/buffer": lambda: torch.nn.Buffer(_scaled(_floats(2, 3))),
}


def _make_quietly(make: Maker) -> torch.Tensor:
    with warnings.catch_warnings():
        # torch warns of layouts that are young and of dtypes that are old.
        warnings.simplefilter("ignore")
        return make()


def _keep_possible(makers: dict[str, Maker]) -> dict[str, Maker]:
    possible = {name: make for name, make in makers.items() if name not in NEEDS or is_able(NEEDS[name])}
    return {name: functools.partial(_make_quietly, make) for name, make in possible.items()}


COMPOSITES: Final = _keep_possible({**_sparse(), **_NESTED})
"""Tensors that are made of other tensors."""
ORDINARY: Final = _keep_possible({**_plain(), **_quantised(), **_ROLES})
"""Tensors that have their bytes in one storage."""
TENSORS: Final[dict[str, Maker]] = {**ORDINARY, **COMPOSITES}
"""All tensors that this torch has."""
