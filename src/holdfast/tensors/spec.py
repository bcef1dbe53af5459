"""What a tensor is besides its bytes: dtype, geometry and flags, as the spec of its entry and back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from holdfast.errors import Corrupt, Unsupported
from holdfast.repo.format.record import Json
from holdfast.tensors.dtypes import dtype_name, find_dtype, item_bytes, items_per_byte
from holdfast.tensors.quantizer import decode_quantizer, encode_quantizer
from holdfast.tensors.roles import ROLES, Role, find_role

TENSOR: Final = "tensor"
MAX_DIMS: Final = 64
_MAX_ITEMS: Final = 1 << 60
_RNG_STATE_BYTES: Final = 5056
"""The size of the state of torch's generator on the CPU."""

_FLAGS: Final = ("packed", "conj", "neg", "requires_grad", "meta")


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What a tensor is; part of the content of its entry."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    """In items, like all strides of torch."""
    offset: int = 0
    """In items: where in the entry's bytes the tensor begins."""
    at: int = 0
    """In bytes: where in the memory that its alias group shares the entry's bytes lie."""
    packed: bool = False
    """The entry's bytes are the tensor's items in C order, without what lies between them in memory."""
    conj: bool = False
    neg: bool = False
    requires_grad: bool = False
    meta: bool = False
    """There are no bytes: the tensor was on the meta device."""
    role: Role = "tensor"
    quantizer: Json = None

    @property
    def span_items(self) -> int:
        """How many items lie between the first and the last in memory, both included."""
        return find_span(self.shape, self.stride)

    @property
    def span_bytes(self) -> int:
        """How many bytes of memory the tensor reaches over."""
        return count_bytes(self.dtype, self.span_items)

    @property
    def packed_shape(self) -> tuple[int, ...]:
        """The shape without the dimensions in which every item is the same one."""
        return tuple(size for size, step in zip(self.shape, self.stride, strict=True) if step or size == 1)


def find_span(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Return how many items lie between the first and the last, both included."""
    if 0 in shape:
        return 0
    # A list, not a generator: most tensors have few dimensions, and there may be many tensors.
    return 1 + sum([(size - 1) * step for size, step in zip(shape, stride, strict=True)])


def count_bytes(dtype: torch.dtype, items: int) -> int:
    """Return how many bytes that many items take; some quantised dtypes have several in one."""
    return -(-items // items_per_byte(dtype)) * item_bytes(dtype)


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a tensor of this shape that is contiguous, as torch numbers them."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def describe(tensor: torch.Tensor) -> TensorSpec:
    """Describe an ordinary tensor; where its bytes go is for the caller to say."""
    if tensor.dim() > MAX_DIMS:
        raise Unsupported(
            f"a tensor of {tensor.dim()} dimensions has more than the format holds, {MAX_DIMS}; reshape it"
        )
    return TensorSpec(
        dtype=tensor.dtype,
        shape=tuple(tensor.shape),
        stride=tensor.stride(),
        conj=tensor.is_conj(),
        neg=tensor.is_neg(),
        requires_grad=tensor.requires_grad,
        meta=tensor.device.type == "meta",
        role=find_role(tensor),
        quantizer=encode_quantizer(tensor) if tensor.is_quantized else None,
    )


def encode_spec(spec: TensorSpec) -> dict[str, Json]:
    """Return the JSON of a spec, with nothing in it that goes without saying."""
    fields: dict[str, Json] = {"type": TENSOR, "dtype": dtype_name(spec.dtype), "shape": list(spec.shape)}
    if spec.stride != contiguous_stride(spec.shape):
        fields["stride"] = list(spec.stride)
    for name in ("offset", "at"):
        if getattr(spec, name):
            fields[name] = getattr(spec, name)
    fields.update({name: True for name in _FLAGS if getattr(spec, name)})
    if spec.role != "tensor":
        fields["role"] = spec.role
    if spec.quantizer is not None:
        fields["quantizer"] = spec.quantizer
    return fields


def decode_spec(value: Json, *, size_bytes: int, what: str) -> TensorSpec:
    """Read a spec back for an entry of `size_bytes`; raises Corrupt unless the tensor fits in there."""
    if not isinstance(value, dict) or value.get("type") != TENSOR or not isinstance(value.get("dtype"), str):
        raise Corrupt(f"{what} is not described as a tensor", key=what)
    shape = _parse_sizes(value.get("shape"), what)
    flags = {name: value.get(name, False) for name in _FLAGS}
    role = value.get("role", "tensor")
    if any(not isinstance(flag, bool) for flag in flags.values()) or not isinstance(role, str) or role not in ROLES:
        raise Corrupt(f"{what} has a spec that makes no sense", key=what)
    spec = TensorSpec(
        dtype=find_dtype(value["dtype"]),
        shape=shape,
        stride=_parse_sizes(value["stride"], what) if "stride" in value else contiguous_stride(shape),
        offset=_parse_count(value.get("offset", 0), what),
        at=_parse_count(value.get("at", 0), what),
        role=ROLES[role],
        quantizer=decode_quantizer(value.get("quantizer"), what=what),
        **flags,
    )
    _verify_fits(spec, size_bytes, what)
    return spec


class Specs:
    """The specs of one snapshot's entries; what many of them share is decoded once."""

    def __init__(self, snapshot_name: str) -> None:
        """Begin with none."""
        self._snapshot_name = snapshot_name
        # By identity, which holds because the value is kept beside what it means.
        self._known: dict[tuple[int, int], tuple[Json, TensorSpec]] = {}

    def decode(self, value: Json, *, size_bytes: int, name: str) -> TensorSpec:
        """Read a spec for an entry of `size_bytes`; equal ones are one object. Raises Corrupt, naming the leaf."""
        found = self._known.get((id(value), size_bytes))
        if found is None:
            found = value, decode_spec(value, size_bytes=size_bytes, what=f"{self._snapshot_name!r}, {name}")
            self._known[id(value), size_bytes] = found
        return found[1]


def _verify_fits(spec: TensorSpec, size_bytes: int, what: str) -> None:
    """Check that the numbers agree with each other and with the bytes."""
    if len(spec.stride) != len(spec.shape) or spec.at % item_bytes(spec.dtype):
        raise Corrupt(f"{what} has strides that do not fit its shape", key=what)
    items = spec.span_items
    if max(items, math.prod(spec.shape)) > _MAX_ITEMS:
        raise Corrupt(f"{what} is larger than a tensor can be", key=what)
    if spec.dtype.is_complex < spec.conj or (spec.quantizer is not None) != is_quantised(spec.dtype):
        raise Corrupt(f"{what} has flags that its dtype cannot have", key=what)
    if spec.meta:
        needed = 0
    elif spec.packed:
        needed = count_bytes(spec.dtype, math.prod(spec.packed_shape))
        # What lies between the items is not stored, so the bytes do not bound the memory that is needed.
        if items > 1 << 40 or (spec.offset or spec.at):
            raise Corrupt(f"{what} is spread over more memory than a tensor can be", key=what)
    else:
        needed = count_bytes(spec.dtype, spec.offset + items if items else 0)
    if (needed > size_bytes) or (needed != size_bytes and (spec.packed or spec.meta)):
        raise Corrupt(f"{what} needs {needed} bytes, its entry holds {size_bytes}", key=what)


def is_quantised(dtype: torch.dtype) -> bool:
    """Tell whether values of `dtype` mean something only together with a quantizer."""
    return dtype in _QUANTISED


def is_rng_state(name: str, spec: TensorSpec) -> bool:
    """Tell whether a tensor is the state of a random generator: those live on the CPU, whatever they are for."""
    is_bytes = spec.dtype == torch.uint8 and len(spec.shape) == 1
    return is_bytes and ("rng" in name.lower() or spec.shape[0] == _RNG_STATE_BYTES)


def can_convert(dtype: torch.dtype) -> bool:
    """Tell whether torch converts values of `dtype` to other dtypes and back; some are mere bits to it."""
    if is_quantised(dtype):
        return False
    try:
        # To the widest: nothing is lost, of which torch would warn.
        torch.empty(1, dtype=dtype).to(torch.complex128)
    except RuntimeError:
        return False
    return True


_QUANTISED: Final = frozenset({torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4})


def _parse_sizes(value: Json, what: str) -> tuple[int, ...]:
    if not isinstance(value, list) or len(value) > MAX_DIMS:
        raise Corrupt(f"{what} has a shape or strides that cannot be", key=what)
    return tuple(_parse_count(item, what) for item in value)


def _parse_count(value: Json, what: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _MAX_ITEMS:
        raise Corrupt(f"{what} has a size, stride or offset that cannot be", key=what)
    return value
