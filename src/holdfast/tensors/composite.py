"""Splits tensors that are made of other tensors and joins them again; refuses tensors that cannot be saved."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Protocol

import torch

from holdfast.errors import Corrupt, NewerFormat, Unsupported
from holdfast.json_text import Json
from holdfast.tensors.dtypes import item_bytes, items_per_byte
from holdfast.tensors.layouts import (
    ORDINARY_CLASSES,
    Meta,
    Split,
    find_layout,
    first_line,
    is_layout,
    join_layout,
    refusals_as_corrupt,
    split_layout,
)
from holdfast.tensors.spec import ROLES, find_role, find_span, give_role

SUBCLASS: Final = "subclass"
_is_functional: Final = torch._is_functional_tensor
_is_transformed: Final = torch._C._functorch.is_functorch_wrapped_tensor
# By name, so that the modules that define them, which few programs use, need not be imported.
_REFUSED: Final = MappingProxyType(
    {
        "torch._subclasses.fake_tensor.FakeTensor": "a fake tensor has no values: save a real one",
        "torch._subclasses.functional_tensor.FunctionalTensor": (
            "a functional tensor exists only while a function is traced: save it outside of the trace"
        ),
        "torch.nn.parameter.UninitializedTensorMixin": (
            "an uninitialized parameter or buffer has no shape yet: run its module once"
        ),
        "torch.distributed.tensor.DTensor": (
            "a DTensor is one rank's part of a tensor: save its full_tensor() or its to_local()"
        ),
        "torch.distributed._shard.sharded_tensor.api.ShardedTensor": (
            "a ShardedTensor is one rank's part of a tensor: save its local_tensor()"
        ),
        "torch.distributed._functional_collectives.AsyncCollectiveTensor": (
            "an AsyncCollectiveTensor may not have arrived yet: save what its wait() returns"
        ),
    }
)


class TensorTypes(Protocol):
    """The tensor classes that are registered with a store."""

    def id_of(self, cls: type, /) -> str:
        """Return the name under which a class is saved; MUST raise Unsupported if it is not registered."""
        ...

    def find(self, type_id: str, /) -> type:
        """Return the class with that name; MUST raise Unsupported if it is neither registered nor on an allow-list."""
        ...


@dataclass(frozen=True, slots=True)
class TensorParts:
    """The parts of a tensor that is made of others."""

    kind: str
    meta: dict[str, Json]
    tensors: Mapping[str, torch.Tensor]
    """By name. The parts of a subclass may themselves be made of others; those of a layout are ordinary."""


def has_own_bytes(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is ordinary: strided items in memory, not made of other tensors."""
    return type(tensor) in ORDINARY_CLASSES and tensor.layout == torch.strided and not tensor.is_nested


def split(tensor: torch.Tensor, *, types: TensorTypes, encode_value: Callable[[object], Json]) -> TensorParts | None:
    """Split a tensor into its parts; return None for an ordinary tensor.

    Several tensors may share a part: jagged tensors have equal ragged sizes only if their offsets are the same object.
    A caller that passes the same object to `join` for all of them preserves that.
    """
    _verify_kind(tensor)
    if has_own_bytes(tensor):
        return None
    kind = find_layout(tensor)
    if kind is not None:
        meta, tensors = split_layout(kind, tensor)
        try:
            # A tensor that could not be loaded must not be saved; torch allows invalid ones to be made.
            join_layout(Meta(kind, meta), tensors)
        except Corrupt as error:
            raise Unsupported(f"{error}. It could not be loaded again: rebuild it from valid parts") from error
        except NewerFormat as error:
            raise Unsupported(f"{error}, or save a copy of it (tensor.contiguous())") from error
    elif type(tensor) not in ORDINARY_CLASSES:
        kind = SUBCLASS
        meta, tensors = _split_subclass(tensor, types, encode_value)
    else:
        raise Unsupported(f"a tensor of layout {tensor.layout} cannot be saved: save its to_dense()")
    return TensorParts(kind, {**meta, "role": find_role(tensor), "requires_grad": tensor.requires_grad}, tensors)


def join(
    kind: Json,
    meta: Json,
    tensors: Mapping[str, torch.Tensor],
    *,
    types: TensorTypes,
    decode_value: Callable[[Json], object],
) -> torch.Tensor:
    """Build a tensor from parts that are not trusted; raises Corrupt if they do not fit together.

    For a subclass, its class is found in `types`, and its `__tensor_unflatten__` runs.
    """
    fields = Meta(str(kind)[:80], meta)
    if kind == SUBCLASS:
        tensor = _join_subclass(fields, tensors, types, decode_value)
    elif kind == "nested" and "values" in tensors and tensors["values"].is_meta:
        raise Unsupported("torch has no nested tensors on the meta device, except jagged ones: load it to the CPU")
    elif is_layout(fields.kind):
        tensor = join_layout(fields, tensors)
    else:
        raise NewerFormat(f"tensors of kind {fields.kind!r} are not known to this Holdfast: upgrade")
    return _apply_role(tensor, fields)


def verify_readable(tensor: torch.Tensor) -> None:
    """Raise Unsupported unless the memory of an ordinary tensor can be read; a meta tensor needs none."""
    _verify_kind(tensor)
    if tensor.is_quantized:
        _verify_quantizer(tensor)
    items = tensor.numel()
    if items == 0 or tensor.is_meta:
        return
    if not tensor.is_contiguous():
        items = find_span(tensor.shape, tensor.stride())
    dtype = tensor.dtype
    needed = -(-int(tensor.storage_offset() + items) * item_bytes(dtype) // items_per_byte(dtype))
    storage = tensor.untyped_storage()
    present = storage.nbytes() if storage.data_ptr() else 0
    if present < needed:
        raise Unsupported(
            f"the memory of this tensor was freed: it needs {needed} bytes, and its storage has {present};"
            " save it while it is allocated, or leave it out"
        )


def _verify_kind(tensor: torch.Tensor) -> None:
    """Raise Unsupported for a tensor that has neither readable bytes nor parts."""
    if type(tensor) not in ORDINARY_CLASSES:
        _verify_class(type(tensor))
    verify_unwrapped(tensor)
    if tensor.is_mkldnn:
        raise Unsupported("an mkldnn tensor keeps its bytes in an opaque layout: save its to_dense()")


def verify_unwrapped(tensor: torch.Tensor) -> None:
    """Raise Unsupported for a wrapper that exists only while a function is traced or transformed."""
    if _is_functional(tensor):
        raise Unsupported(_REFUSED["torch._subclasses.functional_tensor.FunctionalTensor"])
    if _is_transformed(tensor):
        raise Unsupported("a tensor inside of vmap, grad or another transform has no bytes: save it outside of that")


def _verify_class(cls: type) -> None:
    for base in cls.__mro__:
        reason = _REFUSED.get(f"{base.__module__}.{base.__qualname__}")
        if reason:
            raise Unsupported(reason)


def _verify_quantizer(tensor: torch.Tensor) -> None:
    """Raise Unsupported for quantised tensors that torch allows, but whose values are undefined or not as they seem."""
    try:
        scheme = tensor.qscheme()
    except RuntimeError as error:
        raise Unsupported("a quantised tensor without scale and zero point has no values: quantize it again") from error
    if items_per_byte(tensor.dtype) > 1 and tensor.storage_offset():
        # torch reads the offset of these dtypes as bytes, so the slice starts at the wrong item.
        raise Unsupported(f"torch starts a slice of a {tensor.dtype} tensor at the wrong item: save the whole tensor")
    if scheme != torch.per_tensor_affine:
        axis, num_scales = tensor.q_per_channel_axis(), tensor.q_per_channel_scales().numel()
        if not 0 <= axis < tensor.dim() or tensor.size(axis) != num_scales:
            raise Unsupported(
                f"a view of a tensor quantised per channel has {num_scales} scales for axis {axis} of shape"
                f" {tuple(tensor.shape)}: save the tensor that it is a view of, or dequantize it"
            )


def _apply_role(tensor: torch.Tensor, meta: Meta) -> torch.Tensor:
    """Return `tensor` with the role and the gradient flag in `meta`."""
    role, requires_grad = meta.text("role"), meta.flag("requires_grad")
    if role not in ROLES:
        meta.refuse(f"{role[:80]!r} is not a role of a tensor")
    with refusals_as_corrupt(meta):
        return give_role(tensor, ROLES[role], requires_grad=requires_grad)


def _split_subclass(tensor: torch.Tensor, types: TensorTypes, encode_value: Callable[[object], Json]) -> Split:
    cls = type(tensor)
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None or getattr(cls, "__tensor_unflatten__", None) is None:
        raise Unsupported(
            f"class {cls.__qualname__} has no __tensor_flatten__ and __tensor_unflatten__, so its tensors cannot be"
            " split into parts: save tensor.as_subclass(torch.Tensor)"
        )
    type_id = types.id_of(cls)
    names, context = flatten()
    tensors = {name: getattr(tensor, name) for name in names}
    for name, part in tensors.items():
        if not isinstance(part, torch.Tensor):
            raise Unsupported(f"class {cls.__qualname__} has a part that is not a tensor: {name!r} is a {type(part)}")
    shape, stride = list(tensor.shape), list(tensor.stride()) if tensor.layout == torch.strided else []
    if not all(isinstance(number, int) for number in (*shape, *stride)):
        raise Unsupported(f"a {cls.__qualname__} with a symbolic or ragged size cannot be saved: save its parts")
    meta = {"type": type_id, "parts": list(names), "context": encode_value(context), "shape": shape, "stride": stride}
    return meta, tensors


def _join_subclass(
    meta: Meta, tensors: Mapping[str, torch.Tensor], types: TensorTypes, decode_value: Callable[[Json], object]
) -> torch.Tensor:
    names = meta.take("parts")
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names) or set(names) != tensors.keys():
        meta.refuse(f"it has the parts {sorted(tensors)[:10]}")
    shape, stride = torch.Size(meta.counts("shape")), meta.counts("stride")
    cls = types.find(meta.text("type"))
    unflatten = getattr(cls, "__tensor_unflatten__", None)
    if unflatten is None:
        meta.refuse(f"{cls.__qualname__} is not the class of a tensor")
    context = decode_value(meta.take("context"))
    try:
        with torch.no_grad():
            tensor: object = unflatten({name: tensors[name] for name in names}, context, shape, stride)
    except Exception as error:
        text = f"class {cls.__qualname__} did not accept its saved parts: {first_line(error)}; has it changed?"
        raise Unsupported(text) from error
    if not isinstance(tensor, torch.Tensor) or type(tensor) is not cls or tensor.shape != shape:
        raise Unsupported(f"class {cls.__qualname__} built a different tensor from its saved parts: has it changed?")
    return tensor
