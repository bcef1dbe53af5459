"""Splits tensors that are made of other tensors (sparse, nested, subclasses), and joins them again."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, NoReturn, Protocol

import torch
from torch.nested._internal.nested_tensor import NestedTensor
from torch.utils._python_dispatch import _disable_current_modes

from holdfast.errors import Corrupt, NewerFormat, Unsupported
from holdfast.json_text import Json
from holdfast.tensors.spec import ROLES, find_role, find_span, give_role, item_bytes, items_per_byte

ORDINARY_CLASSES: Final = (torch.Tensor, torch.nn.Parameter)
_MAX_ITEMS: Final = 1 << 60
_BY_ROW: Final = ("sparse_csr", "sparse_bsr")
_COMPRESSED: Final = MappingProxyType(
    {
        "sparse_csr": torch.sparse_csr,
        "sparse_csc": torch.sparse_csc,
        "sparse_bsr": torch.sparse_bsr,
        "sparse_bsc": torch.sparse_bsc,
    }
)
_SPARSE: Final = MappingProxyType(
    {torch.sparse_coo: "sparse_coo", **{layout: kind for kind, layout in _COMPRESSED.items()}}
)

Split = tuple[dict[str, Json], dict[str, torch.Tensor]]
"""The metadata of a tensor, and the tensors that it is made of."""


@dataclass(frozen=True, slots=True)
class Meta:
    """The metadata of a tensor as read from a store; each accessor checks the type of its field."""

    kind: str
    values: Json

    def take(self, field: str) -> Json:
        """Return a field of any type."""
        if not isinstance(self.values, dict) or field not in self.values:
            self.refuse(f"{field!r} is missing")
        return self.values[field]

    def flag(self, field: str) -> bool:
        """Return a boolean field."""
        value = self.take(field)
        return value if isinstance(value, bool) else self.refuse(f"{field!r} is not true or false")

    def text(self, field: str) -> str:
        """Return a string field."""
        value = self.take(field)
        return value if isinstance(value, str) else self.refuse(f"{field!r} is not a string")

    def count(self, field: str) -> int:
        """Return an integer field that is a valid size: from 0 to 2**60."""
        return self._verify_count(field, self.take(field))

    def counts(self, field: str) -> tuple[int, ...]:
        """Return a list of valid sizes."""
        value = self.take(field)
        if not isinstance(value, list):
            self.refuse(f"{field!r} is not a list")
        return tuple(self._verify_count(field, item) for item in value)

    def refuse(self, why: str, *, cause: Exception | None = None) -> NoReturn:
        """Raise Corrupt for this tensor, with the reason."""
        raise Corrupt(f"the parts of a {self.kind} tensor do not fit together: {why}") from cause

    def _verify_count(self, field: str, value: Json) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _MAX_ITEMS:
            self.refuse(f"{field!r} has the value {str(value)[:40]!r}, which is not a size")
        return value


@contextmanager
def refusals_as_corrupt(meta: Meta) -> Iterator[None]:
    """Turn the errors that torch raises for invalid parts into Corrupt."""
    try:
        yield
    except (RuntimeError, ValueError, TypeError, AssertionError) as error:
        meta.refuse(first_line(error), cause=error)


def first_line(error: Exception) -> str:
    """Return the first line of an error's text, without the C++ stack trace that torch may add."""
    return (str(error).splitlines() or [type(error).__name__])[0][:300]


def find_layout(tensor: torch.Tensor) -> str | None:
    """Return the kind of a sparse, nested or jagged tensor; None for any other tensor."""
    if type(tensor) is NestedTensor:
        return "jagged"
    if type(tensor) not in ORDINARY_CLASSES:
        return None
    return "nested" if tensor.is_nested else _SPARSE.get(tensor.layout)


def split_layout(kind: str, tensor: torch.Tensor) -> Split:
    """Split a tensor of that kind into its metadata and its parts, which share its memory."""
    return _SPLITTERS[kind](tensor.detach())


def is_host_part(kind: str, role: str) -> bool:
    """Return whether a part is always on the CPU, whichever device the tensor is on."""
    return kind == "nested" and role != "values"


def is_layout(kind: str) -> bool:
    """Return whether `kind` is a layout that this module can join."""
    return kind in _JOINERS


def join_layout(meta: Meta, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Build a tensor from its parts; raises Corrupt if they break the rules of the layout.

    Raises NewerFormat if this torch cannot create such a tensor.
    """
    for name, part in tensors.items():
        if not _is_ordinary(part):
            meta.refuse(f"{name!r} is not an ordinary tensor")
    with warnings.catch_warnings(), refusals_as_corrupt(meta):
        # torch warned that the layout is a beta when the tensor was made. Loading it need not warn again.
        warnings.filterwarnings("ignore", r"Sparse \w+ tensor support is in beta", UserWarning)
        warnings.filterwarnings("ignore", "The PyTorch API of nested tensors is in prototype", UserWarning)
        return _JOINERS[meta.kind](meta, tensors)


def _is_ordinary(tensor: object) -> bool:
    return (
        isinstance(tensor, torch.Tensor)
        and type(tensor) in ORDINARY_CLASSES
        and tensor.layout == torch.strided
        and not (tensor.is_nested or tensor.is_quantized)
    )


def _find_parts(meta: Meta, tensors: Mapping[str, torch.Tensor], *names: str, optional: str = "") -> list[torch.Tensor]:
    """Return the parts with these names; raise Corrupt if one is missing or there are others."""
    if not set(names) <= tensors.keys() <= {*names, optional}:
        meta.refuse(f"it has the parts {sorted(tensors)[:10]}, not {sorted(names)}")
    return [tensors[name] for name in names]


def _verify_index(
    meta: Meta, part: torch.Tensor, device: torch.device, *, dims: int, dtypes: tuple[torch.dtype, ...]
) -> None:
    """Raise Corrupt for index tensors of the wrong device, dtype or rank, which torch would use unchecked."""
    if part.device != device or part.dtype not in dtypes or part.dim() != dims or part.is_neg():
        meta.refuse(f"indices are {part.dim()}-dimensional {part.dtype} on {part.device}")


def _split_coo(tensor: torch.Tensor) -> Split:
    meta = {
        "shape": list(tensor.shape),
        "coalesced": tensor.is_coalesced(),
        "sparse_dim": tensor.sparse_dim(),
        "dense_dim": tensor.dense_dim(),
    }
    # The public accessors refuse an uncoalesced tensor.
    return meta, {"indices": tensor._indices(), "values": tensor._values()}


def _join_coo(meta: Meta, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    indices, values = _find_parts(meta, tensors, "indices", "values")
    _verify_index(meta, indices, values.device, dims=2, dtypes=(torch.int64,))
    tensor = torch.sparse_coo_tensor(
        indices,
        values.detach(),
        meta.counts("shape"),
        is_coalesced=meta.flag("coalesced"),
        device=values.device,  # otherwise torch moves it to the default device, if one is set
        check_invariants=not values.is_meta,
    )
    if (tensor.sparse_dim(), tensor.dense_dim()) != (meta.count("sparse_dim"), meta.count("dense_dim")):
        meta.refuse(f"it has {tensor.sparse_dim()} sparse and {tensor.dense_dim()} dense dimensions")
    return tensor


def _split_compressed(tensor: torch.Tensor) -> Split:
    by_row = _SPARSE[tensor.layout] in _BY_ROW
    tensors = {
        "compressed": tensor.crow_indices() if by_row else tensor.ccol_indices(),
        "plain": tensor.col_indices() if by_row else tensor.row_indices(),
        "values": tensor.values(),
    }
    return {"shape": list(tensor.shape)}, tensors


def _join_compressed(meta: Meta, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    compressed, plain, values = _find_parts(meta, tensors, "compressed", "plain", "values")
    for part in (compressed, plain):
        _verify_index(meta, part, values.device, dims=max(part.dim(), 1), dtypes=(torch.int64, torch.int32))
    if not values.is_meta:
        # Checked here first: torch's own check reads out of bounds before it has validated all of them.
        low, high = compressed[..., :-1], compressed[..., 1:]
        if bool(((compressed < 0) | (compressed > plain.size(-1))).any() | (low > high).any()):
            meta.refuse("the compressed indices are out of range or not in order")
    return torch.sparse_compressed_tensor(
        compressed,
        plain,
        values.detach(),
        meta.counts("shape"),
        layout=_COMPRESSED[meta.kind],
        device=values.device,
        check_invariants=not values.is_meta,
    )


def _split_nested(tensor: torch.Tensor) -> Split:
    # The whole storage in memory order: torch counts the offsets of the rows from its beginning.
    parts = {"values": tensor.values()}
    sizes = tensor._nested_tensor_size()
    # A nested tensor that never had a row has no number of dimensions, and its sizes are garbage.
    if sizes.dim() == 2:
        parts["sizes"] = sizes
        parts["strides"] = tensor._nested_tensor_strides()
        parts["offsets"] = tensor._nested_tensor_storage_offsets()
    return {}, parts


def _join_nested(meta: Meta, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    if tensors.keys() == {"values"} and tensors["values"].numel() == 0:
        return torch.nested.nested_tensor([], dtype=tensors["values"].dtype, device=tensors["values"].device)
    values, sizes, strides, offsets = _find_parts(meta, tensors, "values", "sizes", "strides", "offsets")
    for part in (sizes, strides, offsets):
        _verify_index(meta, part, torch.device("cpu"), dims=1 if part is offsets else 2, dtypes=(torch.int64,))
    if values.dim() != 1 or not values.is_contiguous() or values.is_conj() or values.is_neg():
        meta.refuse("the values are not contiguous memory")
    if sizes.shape != strides.shape or sizes.shape[:1] != offsets.shape:
        meta.refuse("the numbers of sizes, strides and offsets differ")
    _verify_rows(meta, values.numel(), sizes, strides, offsets)
    num_items = values.untyped_storage().nbytes() // values.itemsize
    if not len(sizes):
        # torch reads the first row to find the dimensions, even if there is none: make one of all items and drop it.
        row = sizes.new_ones(1, sizes.size(1))
        row[:, :1] = num_items
        begins = row.new_zeros(1)
        return torch._nested_view_from_buffer(values.detach(), row, torch.ones_like(row), begins).narrow(0, 0, 0)
    if num_items != int(sizes.prod(1).sum()) and not can_nest_a_part():
        raise NewerFormat(
            f"torch {torch.__version__} cannot create a nested tensor whose rows do not cover its memory: upgrade torch"
        )
    begins = offsets.add(values.storage_offset())
    return torch._nested_view_from_buffer(values.detach(), sizes.contiguous(), strides.contiguous(), begins)


@functools.cache
def can_nest_a_part() -> bool:
    """Return whether this torch can make a nested tensor of a part of a storage."""
    try:
        # A mode for fake tensors would answer for itself.
        with _disable_current_modes():
            row = torch.ones(1, 1, dtype=torch.int64, device="cpu")
            torch._nested_view_from_buffer(torch.ones(2, device="cpu"), row, row, torch.zeros_like(row[0]))
    except RuntimeError:
        return False
    return True


def _verify_rows(
    meta: Meta, num_values: int, sizes: torch.Tensor, strides: torch.Tensor, offsets: torch.Tensor
) -> None:
    """Raise Corrupt if a row reaches outside of the values."""
    if any(bool((part < 0).any()) for part in (sizes, strides, offsets)):
        meta.refuse("a size, stride or offset is negative")
    # Doubles do not overflow, and are exact for every size that could fit.
    is_empty = (sizes == 0).any(1)
    items = sizes.double().prod(1).masked_fill(is_empty, 0)
    spans = ((sizes - 1).double() * strides.double()).sum(1) + 1
    ends = offsets.double() + spans.masked_fill(is_empty, 0)
    if bool((ends > num_values).any()) or float(items.sum()) > _MAX_ITEMS:
        meta.refuse(f"a row reaches beyond the {num_values} values")


def _split_jagged(tensor: torch.Tensor) -> Split:
    jagged: Any = tensor  # torch's class has no types
    meta = {
        "ragged_dim": jagged._ragged_idx,
        "min_seqlen": jagged._maybe_min_seqlen,
        "max_seqlen": jagged._maybe_max_seqlen,
    }
    parts = {"values": jagged.values(), "offsets": jagged.offsets(), "lengths": jagged.lengths()}
    return meta, {name: part for name, part in parts.items() if part is not None}


def _join_jagged(meta: Meta, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    values, offsets = _find_parts(meta, tensors, "values", "offsets", optional="lengths")
    lengths = tensors.get("lengths")
    ragged_dim = meta.count("ragged_dim")
    for part in (offsets, lengths):
        if part is not None:
            _verify_index(meta, part, values.device, dims=1, dtypes=(torch.int64, torch.int32))
    if not 1 <= ragged_dim <= values.dim():
        meta.refuse(f"dimension {ragged_dim} of {values.dim() + 1} cannot be ragged")
    if len(offsets) < 1 or (lengths is not None and len(lengths) != len(offsets) - 1):
        meta.refuse("there are not as many lengths as offsets")
    if not values.is_meta:
        _verify_ragged(meta, values.size(ragged_dim - 1), offsets, lengths)
    # torch keeps the minimum and maximum length as the size of an empty tensor, for its compiler.
    known = {name: meta.count(name) for name in ("min_seqlen", "max_seqlen") if meta.take(name) is not None}
    cache = {name: torch.zeros(length, 0, device="cpu") for name, length in known.items()}
    # The same offsets and lengths, not copies: torch treats ragged sizes as equal only if they are the same object.
    return NestedTensor(values.detach(), offsets, lengths=lengths, _ragged_idx=ragged_dim, _metadata_cache=cache)


def _verify_ragged(meta: Meta, total: int, offsets: torch.Tensor, lengths: torch.Tensor | None) -> None:
    """Raise Corrupt if a row reaches outside of the ragged dimension."""
    begins, ends = offsets.long(), offsets.long()[1:]
    if lengths is not None:
        if bool(((lengths < 0) | (lengths > total)).any()):
            meta.refuse("a length is negative or too large")
        ends = begins[:-1].clamp(max=total) + lengths
    if bool(((begins < 0) | (begins > total)).any() | (ends < begins[:-1]).any() | (ends > total).any()):
        meta.refuse(f"a row reaches beyond the {total} items of the ragged dimension")


_SPLITTERS: Final[Mapping[str, Callable[[torch.Tensor], Split]]] = MappingProxyType(
    {
        "sparse_coo": _split_coo,
        **dict.fromkeys(_COMPRESSED, _split_compressed),
        "nested": _split_nested,
        "jagged": _split_jagged,
    }
)
_JOINERS: Final[Mapping[str, Callable[[Meta, Mapping[str, torch.Tensor]], torch.Tensor]]] = MappingProxyType(
    {
        "sparse_coo": _join_coo,
        **dict.fromkeys(_COMPRESSED, _join_compressed),
        "nested": _join_nested,
        "jagged": _join_jagged,
    }
)


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
