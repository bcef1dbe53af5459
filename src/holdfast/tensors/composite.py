"""Tensors made of other tensors: taken apart and put together again; and what can be neither read nor taken apart."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Protocol

import torch

from holdfast.errors import Corrupt, NewerFormat, Unsupported
from holdfast.repo.format.record import Json
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
from holdfast.tensors.roles import ROLES, find_role, give_role
from holdfast.tensors.spec import find_span

SUBCLASS: Final = "subclass"
_is_functional: Final = torch._is_functional_tensor
_is_transformed: Final = torch._C._functorch.is_functorch_wrapped_tensor
# By name: most of them live in modules that nobody should have to import in order to meet none of them.
_REFUSED: Final = MappingProxyType(
    {
        "torch._subclasses.fake_tensor.FakeTensor": "a fake tensor holds no values: save the tensor it stands for",
        "torch._subclasses.functional_tensor.FunctionalTensor": (
            "a functional tensor lives only while a function is traced: save it outside of the trace"
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
            "an AsyncCollectiveTensor is still on its way: save what its wait() returns"
        ),
    }
)


class TensorTypes(Protocol):
    """The tensor classes that a store was told about."""

    def id_of(self, cls: type, /) -> str:
        """Return the name under which a class is saved; MUST raise Unsupported for one that is not known."""
        ...

    def find(self, type_id: str, /) -> type:
        """Return the class of that name; MUST raise Unsupported for one that is not known, and import nothing."""
        ...


@dataclass(frozen=True, slots=True)
class Parts:
    """What a tensor is made of."""

    kind: str
    meta: dict[str, Json]
    tensors: Mapping[str, torch.Tensor]
    """By role. Those of a subclass may be made of others in turn; the others are ordinary."""


def has_own_bytes(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor is an ordinary one, strided items in memory, and not made of others."""
    return type(tensor) in ORDINARY_CLASSES and tensor.layout == torch.strided and not tensor.is_nested


def split(tensor: torch.Tensor, *, types: TensorTypes, encode_value: Callable[[object], Json]) -> Parts | None:
    """Take a tensor apart; None for an ordinary one, whose bytes are its own.

    A part may be an object that other tensors hold too: the offsets of jagged tensors are what makes their ragged
    sizes equal. Who gives such tensors the same object when joining keeps that.
    """
    _verify_kind(tensor)
    if has_own_bytes(tensor):
        return None
    kind = find_layout(tensor)
    if kind is not None:
        meta, tensors = split_layout(kind, tensor)
        try:
            # What loading would refuse must not be saved; torch itself lets such tensors be made.
            join_layout(Meta(kind, meta), tensors)
        except Corrupt as error:
            raise Unsupported(f"{error}. It could not be loaded again: build it anew from parts that fit") from error
    elif type(tensor) not in ORDINARY_CLASSES:
        kind = SUBCLASS
        meta, tensors = _split_subclass(tensor, types, encode_value)
    else:
        raise Unsupported(f"a tensor of layout {tensor.layout} has no form in the format: save its to_dense()")
    return Parts(kind, {**meta, "role": find_role(tensor), "requires_grad": tensor.requires_grad}, tensors)


def join(
    kind: Json,
    meta: Json,
    tensors: Mapping[str, torch.Tensor],
    *,
    types: TensorTypes,
    decode_value: Callable[[Json], object],
) -> torch.Tensor:
    """Put a tensor together from parts that are not trusted; raises Corrupt if they do not fit.

    Of a subclass, `types` has the class, and its own `__tensor_unflatten__` runs.
    """
    fields = Meta(str(kind)[:80], meta)
    if kind == SUBCLASS:
        tensor = _join_subclass(fields, tensors, types, decode_value)
    elif kind == "nested" and "values" in tensors and tensors["values"].is_meta:
        raise Unsupported("torch has no nested tensors on the meta device, but for jagged ones: load it to the CPU")
    elif is_layout(fields.kind):
        tensor = join_layout(fields, tensors)
    else:
        raise NewerFormat(f"tensors of kind {fields.kind!r} are not known to this Holdfast: upgrade")
    return _dress(tensor, fields)


def verify_readable(tensor: torch.Tensor) -> None:
    """Raise Unsupported unless the bytes of an ordinary tensor are there; on the meta device none are missed."""
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
    held = storage.nbytes() if storage.data_ptr() else 0
    if held < needed:
        raise Unsupported(
            f"the memory of this tensor was freed: it needs {needed} bytes, and its storage has {held};"
            " save it while it is allocated, or leave it out"
        )


def _verify_kind(tensor: torch.Tensor) -> None:
    """Refuse what has neither bytes nor parts."""
    if type(tensor) not in ORDINARY_CLASSES:
        _verify_class(type(tensor))
    verify_unwrapped(tensor)
    if tensor.is_mkldnn:
        raise Unsupported("an mkldnn tensor keeps its bytes in a form of its own: save its to_dense()")


def verify_unwrapped(tensor: torch.Tensor) -> None:
    """Raise Unsupported for what only looks like an ordinary tensor, while a function is traced or transformed."""
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
    """Refuse what torch lets be made, and what has no values or others than it seems."""
    try:
        scheme = tensor.qscheme()
    except RuntimeError as error:
        raise Unsupported("a quantised tensor without scale and zero point has no values: quantize it anew") from error
    if items_per_byte(tensor.dtype) > 1 and tensor.storage_offset():
        # torch takes the offset for bytes there, and so begins at another item than was asked for.
        raise Unsupported(f"a slice of a {tensor.dtype} tensor does not begin where it should: save the whole")
    if scheme != torch.per_tensor_affine:
        axis, num_scales = tensor.q_per_channel_axis(), tensor.q_per_channel_scales().numel()
        if not 0 <= axis < tensor.dim() or tensor.size(axis) != num_scales:
            raise Unsupported(
                f"a view of a tensor quantised per channel has {num_scales} scales for axis {axis} of shape"
                f" {tuple(tensor.shape)}: save the tensor that it is a view of, or dequantize it"
            )


def _dress(tensor: torch.Tensor, meta: Meta) -> torch.Tensor:
    """Return `tensor` with the role and the flag that `meta` states."""
    role, requires_grad = meta.text("role"), meta.flag("requires_grad")
    if role not in ROLES:
        meta.refuse(f"{role[:80]!r} is no role of a tensor")
    with refusals_as_corrupt(meta):
        return give_role(tensor, ROLES[role], requires_grad=requires_grad)


def _split_subclass(tensor: torch.Tensor, types: TensorTypes, encode_value: Callable[[object], Json]) -> Split:
    cls = type(tensor)
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None or getattr(cls, "__tensor_unflatten__", None) is None:
        raise Unsupported(
            f"class {cls.__qualname__} does not say what its tensors are made of (it has no __tensor_flatten__ and"
            " __tensor_unflatten__): save tensor.as_subclass(torch.Tensor)"
        )
    type_id = types.id_of(cls)
    names, context = flatten()
    tensors = {name: getattr(tensor, name) for name in names}
    for name, part in tensors.items():
        if not isinstance(part, torch.Tensor):
            raise Unsupported(f"class {cls.__qualname__} is made of more than tensors: {name!r} is a {type(part)}")
    shape, stride = list(tensor.shape), list(tensor.stride()) if tensor.layout == torch.strided else []
    if not all(isinstance(number, int) for number in (*shape, *stride)):
        raise Unsupported(f"a {cls.__qualname__} of a shape that is not all numbers cannot be saved: save its parts")
    meta = {"type": type_id, "parts": list(names), "context": encode_value(context), "shape": shape, "stride": stride}
    return meta, tensors


def _join_subclass(
    meta: Meta, tensors: Mapping[str, torch.Tensor], types: TensorTypes, decode_value: Callable[[Json], object]
) -> torch.Tensor:
    names = meta.take("parts")
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names) or set(names) != tensors.keys():
        meta.refuse(f"there are {sorted(tensors)[:10]}")
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
        raise Unsupported(f"class {cls.__qualname__} made something else of its saved parts: has it changed?")
    return tensor
