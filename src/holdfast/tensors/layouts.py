"""Splits sparse, nested and jagged tensors into ordinary tensors, and joins them again after checking every part."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, NoReturn

import torch
from torch.nested._internal.nested_tensor import NestedTensor
from torch.utils._python_dispatch import _disable_current_modes

from holdfast.errors import Corrupt, NewerFormat
from holdfast.json_text import Json

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
