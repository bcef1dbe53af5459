"""How to tell whether two tensors of any kind are the same, bit for bit; and the zoo to try it on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from tests.tensor_zoo import COMPOSITES, ORDINARY, QUANTISED, SUBCLASSES, TENSORS

__all__ = [
    "COMPOSITES", "ORDINARY", "SUBCLASSES", "TENSORS", "Maker", "assert_same_tensor", "find_facts", "group_by_kind",
    "raw_bytes",
]  # fmt: skip

Facts = dict[str, Any]
Maker = Callable[[], torch.Tensor]


def group_by_kind(makers: Mapping[str, Maker]) -> dict[str, list[Maker]]:
    """Return the functions that make tensors by what their names begin with, the kind or dtype."""
    found: dict[str, list[Maker]] = {}
    for name, make in makers.items():
        found.setdefault(name.partition("/")[0], []).append(make)
    return found


def assert_same_tensor(found: torch.Tensor, wanted: torch.Tensor, *, aliasing: bool = False) -> None:
    """Fail unless both are the same in all that can be asked; with `aliasing`, they must share their memory too."""
    assert find_facts(found) == find_facts(wanted)
    if aliasing:
        assert _find_memory(found) == _find_memory(wanted)


def raw_bytes(tensor: torch.Tensor) -> bytes:
    """Return the items of an ordinary tensor on the CPU in C order, as they lie there: no conjugation, no quantizer."""
    if tensor.numel() == 0:
        return b""
    memory = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).numpy()
    if QUANTISED.get(tensor.dtype, 1) > 1:
        return memory.tobytes()[: -(-tensor.numel() // QUANTISED[tensor.dtype])]
    size = tensor.element_size()
    items = memory[tensor.storage_offset() * size :]
    items = items[: len(items) // size * size].view(f"V{size}")
    steps = [step * size for step in tensor.stride()]
    return np.lib.stride_tricks.as_strided(items, tuple(tensor.shape), steps).tobytes()


def find_facts(tensor: torch.Tensor) -> Facts:
    """Return all that makes a tensor what it is; a difference shows by its name."""
    grad = tensor.grad if tensor.is_leaf else None
    facts: Facts = {
        "class": type(tensor),
        "dtype": tensor.dtype,
        "layout": tensor.layout,
        "meta": tensor.is_meta,
        "parameter": isinstance(tensor, torch.nn.Parameter),
        "buffer": isinstance(tensor, torch.nn.Buffer) and ("persistent" if tensor.persistent else "passing"),
        "requires_grad": tensor.requires_grad,
        "grad": None if grad is None else find_facts(grad),
    }
    parts, about = _take_apart(tensor)
    return {**facts, **(about if parts else _describe(tensor)), **{name: find_facts(part) for name, part in parts}}


Taken = tuple[list[tuple[str, torch.Tensor]], Facts]


def _take_apart(tensor: Any) -> Taken:
    """Return the tensors that a tensor is made of, by name, and what else it knows; nothing for an ordinary one."""
    if tensor.layout == torch.jagged:
        about = {"ragged": tensor._ragged_idx, "known": (tensor._maybe_min_seqlen, tensor._maybe_max_seqlen)}
        parts = [("values", tensor._values), ("offsets", tensor._offsets)]
        return parts + ([] if tensor._lengths is None else [("lengths", tensor._lengths)]), about
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        names, context = tensor.__tensor_flatten__()
        about = {"context": context, "shape": tensor.shape, "stride": tensor.stride()}
        return [(name, getattr(tensor, name)) for name in names], about
    if tensor.is_nested:
        plain = tensor.detach()
        rows = [(f"row {number}", row) for number, row in enumerate(plain.unbind())]
        return [("values", plain.values()), *rows], {"dim": tensor.dim(), "rows": tensor.size(0)}
    return _take_sparse(tensor.detach()) if tensor.layout != torch.strided else ([], {})


def _take_sparse(tensor: torch.Tensor) -> Taken:
    about: Facts = {"shape": tensor.shape, "sparse_dim": tensor.sparse_dim(), "dense_dim": tensor.dense_dim()}
    if tensor.layout == torch.sparse_coo:
        about["coalesced"] = tensor.is_coalesced()
        return [("indices", tensor._indices()), ("values", tensor._values())], about
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        indices = [("crow", tensor.crow_indices()), ("col", tensor.col_indices())]
    else:
        indices = [("ccol", tensor.ccol_indices()), ("row", tensor.row_indices())]
    return [*indices, ("values", tensor.values())], about


def _describe(tensor: torch.Tensor) -> Facts:
    quantizer: list[Any] = []
    if tensor.is_quantized and tensor.qscheme() == torch.per_tensor_affine:
        quantizer = [tensor.qscheme(), tensor.q_scale(), tensor.q_zero_point()]
    elif tensor.is_quantized:
        vectors = tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points()
        quantizer = [tensor.qscheme(), tensor.q_per_channel_axis(), *(find_facts(vector) for vector in vectors)]
    return {
        "shape": tensor.shape,
        "stride": tensor.stride(),
        "conj, neg": (tensor.is_conj(), tensor.is_neg()),
        "quantizer": quantizer,
        "bytes": None if tensor.is_meta else raw_bytes(tensor),
    }


def _find_memory(tensor: torch.Tensor) -> list[tuple[str, int, int]]:
    """Return where the storages of a tensor lie, and where in them it begins."""
    parts, _ = _take_apart(tensor)
    if not parts:
        return [(str(tensor.device), tensor.untyped_storage().data_ptr(), int(tensor.storage_offset()))]
    return [place for _, part in parts for place in _find_memory(part)]
