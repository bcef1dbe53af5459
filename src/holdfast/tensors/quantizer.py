"""Quantizers of quantised tensors, which are not part of their bytes: encoded as JSON, and used to rebuild tensors."""

from __future__ import annotations

import warnings
from typing import Final

import torch

from holdfast.errors import Corrupt, Unsupported
from holdfast.json_text import Json
from holdfast.tensors.dtypes import dtype_name, find_dtype

_PER_TENSOR: Final = "per_tensor"
_PER_CHANNEL: Final = "per_channel"
_Parsed = tuple[float, int] | tuple[int, torch.Tensor, torch.Tensor]
_PARAMETER_DTYPES: Final = (torch.float64, torch.float32, torch.int64, torch.int32)


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
        _parse(value)
    except (ValueError, TypeError, OverflowError, RuntimeError, Corrupt) as error:
        raise Corrupt(f"{what} has an invalid quantizer", key=what) from error
    return value


def make_quantised(
    shape: tuple[int, ...], dtype: torch.dtype, quantizer: Json, *, device: torch.device, what: str
) -> torch.Tensor:
    """Return an empty tensor with that quantizer; the caller sets its memory."""
    if device.type == "meta":
        raise Unsupported(f"{what}: torch has no quantised tensors on the meta device; load it to the CPU")
    parsed = _parse(quantizer)
    with warnings.catch_warnings():
        # torch warns that these dtypes are deprecated, which does not help a user who loads an old snapshot.
        warnings.simplefilter("ignore", UserWarning)
        return _make_quantised(shape, dtype, parsed, device, what)


def _make_quantised(
    shape: tuple[int, ...], dtype: torch.dtype, parsed: _Parsed, device: torch.device, what: str
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


def _parse(value: Json) -> _Parsed:
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
