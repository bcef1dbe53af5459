"""Dtypes by name, and the spec of a tensor: dtype, shape, strides, flags, role, quantizer; encoded and checked."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal

import torch

from holdfast.errors import Corrupt, NewerFormat, Unsupported
from holdfast.json_text import Json

_NAME: Final = re.compile(r"[a-z][a-z0-9_]{0,63}")
_ITEMS_PER_BYTE: Final = MappingProxyType({torch.quint4x2: 2, torch.quint2x4: 4})
# From str(dtype), not the attribute: some dtypes have several attributes (`float`, `bit`), but one name of their own.
_BY_NAME: Final = MappingProxyType(
    {str(found).removeprefix("torch."): found for found in vars(torch).values() if isinstance(found, torch.dtype)}
)
_NAMES: Final = MappingProxyType({found: name for name, found in _BY_NAME.items()})


def dtype_name(dtype: torch.dtype) -> str:
    """Return torch's own name of a dtype: "float32", never "float"."""
    return _NAMES[dtype]


def find_dtype(name: Json) -> torch.dtype:
    """Return the dtype with that name; raises NewerFormat if this torch does not have it."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise Corrupt(f"{str(name)[:80]!r} is not the name of a dtype: run holdfast check")
    found = _BY_NAME.get(name)
    if found is None:
        raise NewerFormat(f"torch {torch.__version__} has no dtype {name!r}: upgrade torch")
    return found


def item_bytes(dtype: torch.dtype) -> int:
    """Return the bytes of one item; 1 for dtypes that pack several values into a byte."""
    return dtype.itemsize


def number_bytes(dtype: torch.dtype) -> int:
    """Return the bytes of one number: of an item, or of the real part of a complex one."""
    return dtype.itemsize // 2 if dtype.is_complex else dtype.itemsize


def items_per_byte(dtype: torch.dtype) -> int:
    """Return how many items share one byte of storage: 1, except for two quantised dtypes.

    Tensors of these two are laid out as if contiguous, in `ceil(items / items_per_byte)` bytes. torch allocates more,
    rounding up for each row, but never writes the bytes after the last item.
    """
    return _ITEMS_PER_BYTE.get(dtype, 1)


TENSOR: Final = "tensor"
MAX_DIMS: Final = 64
_MAX_ITEMS: Final = 1 << 60
_RNG_STATE_BYTES: Final = 5056
"""The size of the state of torch's generator on the CPU."""
_FLAGS: Final = ("packed", "conj", "neg", "requires_grad", "meta")
_PER_TENSOR: Final = "per_tensor"
_PER_CHANNEL: Final = "per_channel"
_Quantizer = tuple[float, int] | tuple[int, torch.Tensor, torch.Tensor]
_PARAMETER_DTYPES: Final = (torch.float64, torch.float32, torch.int64, torch.int32)
TensorRole = Literal["tensor", "parameter", "buffer", "passing buffer"]
"""A "passing buffer" is a buffer that is not persistent."""
ROLES: Final[Mapping[str, TensorRole]] = {
    "tensor": "tensor",
    "parameter": "parameter",
    "buffer": "buffer",
    "passing buffer": "passing buffer",
}


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Everything about a tensor but its bytes; part of the content of its entry."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    """In items, as in torch."""
    offset: int = 0
    """In items: the offset of the tensor in the entry's bytes."""
    at: int = 0
    """In bytes: the offset of the entry's bytes in the memory that its alias group shares."""
    packed: bool = False
    """The entry's bytes are the tensor's items in C order, without the gaps between them in memory."""
    conj: bool = False
    neg: bool = False
    requires_grad: bool = False
    meta: bool = False
    """The tensor was on the meta device and has no bytes."""
    role: TensorRole = "tensor"
    quantizer: Json = None

    @property
    def span_items(self) -> int:
        """The number of items in memory from the first to the last, both included."""
        return find_span(self.shape, self.stride)

    @property
    def span_bytes(self) -> int:
        """The number of bytes in memory from the first item to the last, both included."""
        return count_bytes(self.dtype, self.span_items)

    @property
    def packed_shape(self) -> tuple[int, ...]:
        """The shape without the dimensions of stride 0, in which every item is the same one."""
        return tuple(size for size, step in zip(self.shape, self.stride, strict=True) if step or size == 1)

    @property
    def has_gaps(self) -> bool:
        """Whether there are bytes in memory between the tensor's items that do not belong to it."""
        return self.span_items > math.prod(self.packed_shape)


def find_span(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Return the number of items in memory from the first to the last, both included."""
    if 0 in shape:
        return 0
    # A list, not a generator: most tensors have few dimensions, and there may be many tensors.
    return 1 + sum([(size - 1) * step for size, step in zip(shape, stride, strict=True)])


def count_bytes(dtype: torch.dtype, items: int) -> int:
    """Return the bytes that `items` items take; some quantised dtypes pack several items into one byte."""
    return -(-items // items_per_byte(dtype)) * item_bytes(dtype)


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides that torch gives a contiguous tensor of this shape."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def describe(tensor: torch.Tensor) -> TensorSpec:
    """Return the spec of an ordinary tensor; the caller sets `offset`, `at` and `packed`."""
    if tensor.dim() > MAX_DIMS:
        raise Unsupported(
            f"a tensor of {tensor.dim()} dimensions cannot be saved: the format allows {MAX_DIMS}; reshape it"
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
    """Return a spec as JSON; fields that have their default value are left out."""
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
    """Decode the spec of an entry of `size_bytes`; raises Corrupt if it is invalid or does not fit that size."""
    if not isinstance(value, dict) or value.get("type") != TENSOR or not isinstance(value.get("dtype"), str):
        raise Corrupt(f"{what} is not described as a tensor", key=what)
    shape = _parse_sizes(value.get("shape"), what)
    flags = {name: value.get(name, False) for name in _FLAGS}
    role = value.get("role", "tensor")
    if any(not isinstance(flag, bool) for flag in flags.values()) or not isinstance(role, str) or role not in ROLES:
        raise Corrupt(f"{what} has an invalid spec", key=what)
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
    _verify_consistent(spec, size_bytes, what)
    return spec


class SpecEncoder:
    """Encodes specs; equal specs become one object, which is written once."""

    def __init__(self) -> None:
        self._known: dict[str, Json] = {}

    def encode(self, spec: TensorSpec) -> Json:
        """Return a spec as JSON; the same object for an equal spec."""
        encoded = encode_spec(spec)
        return self._known.setdefault(repr(encoded), encoded)


class SpecDecoder:
    """Decodes the specs of one snapshot's entries; a spec that entries share is decoded once."""

    def __init__(self, snapshot_name: str) -> None:
        self._snapshot_name = snapshot_name
        # By identity. The value is kept beside its spec, so that its id is not reused.
        self._known: dict[tuple[int, int], tuple[Json, TensorSpec]] = {}

    def decode(self, value: Json, *, size_bytes: int, name: str) -> TensorSpec:
        """Decode the spec of an entry of `size_bytes`; raises Corrupt with the name of the leaf."""
        found = self._known.get((id(value), size_bytes))
        if found is None:
            found = value, decode_spec(value, size_bytes=size_bytes, what=f"{self._snapshot_name!r}, {name}")
            self._known[id(value), size_bytes] = found
        return found[1]


def _verify_consistent(spec: TensorSpec, size_bytes: int, what: str) -> None:
    """Raise Corrupt unless the numbers of a spec agree with each other and with the entry's size."""
    if len(spec.stride) != len(spec.shape) or spec.at % item_bytes(spec.dtype):
        raise Corrupt(f"{what} has strides that do not fit its shape", key=what)
    items = spec.span_items
    if max(items, math.prod(spec.shape)) > _MAX_ITEMS:
        raise Corrupt(f"{what} is larger than a tensor can be", key=what)
    if spec.dtype.is_complex < spec.conj or (spec.quantizer is not None) != is_quantised(spec.dtype):
        raise Corrupt(f"{what} has flags that are invalid for its dtype", key=what)
    if spec.meta:
        needed = 0
    elif spec.packed:
        needed = count_bytes(spec.dtype, math.prod(spec.packed_shape))
        # The gaps between items are not stored, so the entry's size does not bound the memory that is needed.
        if items > 1 << 40 or (spec.offset or spec.at):
            raise Corrupt(f"{what} is spread over more memory than a tensor can be", key=what)
    else:
        needed = count_bytes(spec.dtype, spec.offset + items if items else 0)
    if (needed > size_bytes) or (needed != size_bytes and (spec.packed or spec.meta)):
        raise Corrupt(f"{what} needs {needed} bytes, and its entry has {size_bytes}", key=what)


def is_quantised(dtype: torch.dtype) -> bool:
    """Return whether `dtype` is quantised: its values need a quantizer."""
    return dtype in _QUANTISED


def is_rng_state(name: str, spec: TensorSpec) -> bool:
    """Guess from name and spec whether a tensor is an RNG state, which stays on the CPU for every device."""
    is_bytes = spec.dtype == torch.uint8 and len(spec.shape) == 1
    return is_bytes and ("rng" in name.lower() or spec.shape[0] == _RNG_STATE_BYTES)


def can_convert(dtype: torch.dtype) -> bool:
    """Return whether torch can convert values of `dtype` to other dtypes; it cannot for some raw and packed ones."""
    if is_quantised(dtype):
        return False
    try:
        # To the widest dtype, because torch warns of a conversion that loses information.
        torch.empty(1, dtype=dtype).to(torch.complex128)
    except RuntimeError:
        return False
    return True


_QUANTISED: Final = frozenset({torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4})


def _parse_sizes(value: Json, what: str) -> tuple[int, ...]:
    if not isinstance(value, list) or len(value) > MAX_DIMS:
        raise Corrupt(f"{what} has an invalid shape or strides", key=what)
    return tuple(_parse_count(item, what) for item in value)


def _parse_count(value: Json, what: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _MAX_ITEMS:
        raise Corrupt(f"{what} has an invalid size, stride or offset", key=what)
    return value


def encode_quantizer(tensor: torch.Tensor) -> Json:
    """Return the quantizer of a tensor as JSON; floats are in hexadecimal, so that no bit is lost."""
    scheme = tensor.qscheme()
    if scheme == torch.per_tensor_affine:
        return [_PER_TENSOR, tensor.q_scale().hex(), tensor.q_zero_point()]
    if scheme in (torch.per_channel_affine, torch.per_channel_affine_float_qparams):
        scales, zeros = tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points()
        return [_PER_CHANNEL, tensor.q_per_channel_axis(), *_encode_vector(scales), *_encode_vector(zeros)]
    raise Unsupported(f"a tensor quantised by {scheme} cannot be saved; dequantize it")


def _encode_vector(vector: torch.Tensor) -> list[Json]:
    return [dtype_name(vector.dtype), bytes(vector.cpu().contiguous().view(torch.uint8).numpy()).hex()]


def decode_quantizer(value: Json, *, what: str) -> Json:
    """Return `value` if it is a valid quantizer or None; raises Corrupt otherwise."""
    if value is None:
        return None
    try:
        _parse_quantizer(value)
    except (ValueError, TypeError, OverflowError, RuntimeError, Corrupt) as error:
        raise Corrupt(f"{what} has an invalid quantizer", key=what) from error
    return value


def make_quantised(
    shape: tuple[int, ...], dtype: torch.dtype, quantizer: Json, *, device: torch.device, what: str
) -> torch.Tensor:
    """Return an empty tensor with that quantizer; the caller sets its memory."""
    if device.type == "meta":
        raise Unsupported(f"{what}: torch has no quantised tensors on the meta device; load it to the CPU")
    parsed = _parse_quantizer(quantizer)
    with warnings.catch_warnings():
        # torch warns that these dtypes are deprecated, which does not help a user who loads an old snapshot.
        warnings.simplefilter("ignore", UserWarning)
        return _make_quantised(shape, dtype, parsed, device, what)


def _make_quantised(
    shape: tuple[int, ...], dtype: torch.dtype, parsed: _Quantizer, device: torch.device, what: str
) -> torch.Tensor:
    try:
        if len(parsed) == 2:
            return torch._empty_affine_quantized([0], scale=parsed[0], zero_point=parsed[1], dtype=dtype, device=device)
        axis, scales, zeros = parsed[0], parsed[1].to(device), parsed[2].to(device)
        if not (axis < len(shape) and scales.numel() == zeros.numel() == shape[axis]):
            raise Corrupt(f"{what} has a quantizer for another shape", key=what)
        empty = list(shape)
        # torch accepts the quantizer only for the full number of channels; there need not be any items.
        if len(shape) > 1:
            empty[0 if axis else 1] = 0
        return torch._empty_per_channel_affine_quantized(
            empty, scales=scales, zero_points=zeros, axis=axis, dtype=dtype, device=device
        )
    except RuntimeError as error:
        raise Corrupt(f"{what} has a quantizer that torch refuses: {error}", key=what) from error


def _parse_quantizer(value: Json) -> _Quantizer:
    if not isinstance(value, list):
        raise TypeError("quantizer")
    if value[:1] == [_PER_TENSOR]:
        _, scale, zero = value
        if type(zero) is not int or abs(zero) >= 1 << 31:
            raise ValueError("zero point")
        return float.fromhex(scale), zero
    kind, axis, scale_dtype, scales, zero_dtype, zeros = value
    if kind != _PER_CHANNEL or type(axis) is not int or not 0 <= axis < 64:
        raise ValueError("kind or axis")
    return axis, _parse_vector(scale_dtype, scales), _parse_vector(zero_dtype, zeros)


def _parse_vector(dtype: Json, text: Json) -> torch.Tensor:
    found = find_dtype(str(dtype))
    if found not in _PARAMETER_DTYPES:
        raise ValueError("dtype")
    data = bytearray.fromhex(text)
    return torch.frombuffer(data, dtype=found) if data else torch.empty(0, dtype=found)


def find_role(tensor: torch.Tensor) -> TensorRole:
    """Return the role of a tensor."""
    # torch marks tensors by these attributes. Reading `__dict__` would create a dict for every tensor of the caller.
    if type(tensor) is torch.Tensor and not (hasattr(tensor, "_is_param") or hasattr(tensor, "_is_buffer")):
        return "tensor"
    if isinstance(tensor, torch.nn.Parameter):
        return "parameter"
    if isinstance(tensor, torch.nn.Buffer):
        return "buffer" if getattr(tensor, "persistent", True) else "passing buffer"
    return "tensor"


def give_role(tensor: torch.Tensor, role: TensorRole, *, requires_grad: bool) -> torch.Tensor:
    """Return `tensor` with that role; raises RuntimeError if its dtype cannot require a gradient."""
    if role == "parameter":
        return torch.nn.Parameter(tensor, requires_grad=requires_grad)
    if role != "tensor":
        tensor = torch.nn.Buffer(tensor, persistent=role == "buffer")
    return tensor.requires_grad_(requires_grad)
