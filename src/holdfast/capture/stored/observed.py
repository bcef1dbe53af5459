"""Observe tensors: their bytes and digest, without drawing random numbers or changing them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch.utils._python_dispatch import _disable_current_modes

from holdfast.digest import fingerprint
from holdfast.errors import HoldfastError, Unsupported
from holdfast.tensors.composite import ORDINARY_CLASSES, has_own_bytes
from holdfast.tensors.memory import RAW_DTYPES, view_memory
from holdfast.tensors.sharding import Layouts
from holdfast.tensors.spec import dtype_name, items_per_byte

Array = np.ndarray[Any, Any]
_EMPTY: Final = memoryview(b"")
_find_keys: Final[Callable[[torch.Tensor], Any]] = torch._C._dispatch_keys
_count_modes: Final[Callable[[], int]] = torch._C._len_torch_dispatch_stack
_is_functional: Final = torch._is_functional_tensor
_is_transformed: Final = torch._C._functorch.is_functorch_wrapped_tensor
# Compared by class name, so that the modules that define them need not be imported.
_DTENSOR: Final = "DTensor"
_UNFINISHED: Final = "AsyncCollectiveTensor"


@dataclass(frozen=True, slots=True)
class ShardPlacement:
    """Where a shard is in the whole tensor."""

    placement: str = ""
    global_shape: tuple[int, ...] = ()
    offsets: tuple[int, ...] = ()


WHOLE: Final = ShardPlacement()


class KnownMemory(NamedTuple):
    """The memory of a tensor that was observed. It may be freed by now; a later tensor may have the same."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    keys: int
    """The set of dispatch keys, which tells whether a tensor is on the host, dense and not transformed."""
    address: int
    storage_bytes: int
    data: memoryview


class ObservedTensor(NamedTuple):
    """The bytes of a tensor as they are now; valid until the tensor changes. A tuple, because each tensor has one."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    data: memoryview
    """Its bytes in C order; the tensor's own memory if possible."""
    keep: torch.UntypedStorage | None
    """The storage of `data`, which keeps its memory alive."""

    @property
    def dtype_name(self) -> str:
        """The name of the dtype in torch, without `torch.`."""
        return dtype_name(self.dtype)

    def digest(self) -> bytes:
        """Return the XXH3-128 of the bytes."""
        return fingerprint(self.data)

    def copy(self, memory: Array) -> None:
        """Copy the bytes to memory of the same size, without torch operations, which dispatch modes would see."""
        memory[:] = np.frombuffer(self.data, dtype=np.uint8)


def build_copy(memory: Array, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor over the bytes, without a copy."""
    if not memory.nbytes:
        return torch.empty(shape, dtype=dtype)
    if not memory.flags.writeable:
        # Torch warns about read-only memory; a view without that flag avoids the warning, and nothing writes to it.
        memory = np.frombuffer(memory.data.cast("B"), dtype=np.uint8)
    return torch.from_numpy(memory).view(dtype).reshape(shape)


def observe(tensor: torch.Tensor) -> ObservedTensor:
    """Observe a local tensor; raises Unsupported if it has no bytes of its own."""
    return TensorInspector().observe(tensor)


def observe_remote(tensor: torch.Tensor) -> ObservedTensor:
    """Observe a local tensor without its bytes, which stay on its device."""
    verify_kind(tensor)
    return ObservedTensor(tensor.dtype, tuple(tensor.shape), _EMPTY, None)


class TensorInspector:
    """Observes tensors; a kind of tensor that was found to be ordinary is not inspected again."""

    def __init__(self) -> None:
        self._ordinary: set[tuple[torch.dtype, int]] = set()
        """Dtypes and sets of dispatch keys."""

    def observe(self, tensor: torch.Tensor) -> ObservedTensor:
        """Observe a local tensor; raises Unsupported if it has no bytes of its own."""
        dtype = tensor.dtype
        kind = (dtype, _find_keys(tensor).raw_repr())
        if kind not in self._ordinary or type(tensor) not in ORDINARY_CLASSES:
            verify_kind(tensor)
            if tensor.is_cpu and not tensor.is_conj() and not tensor.is_neg():
                self._ordinary.add(kind)
        shape, size_bytes = tuple(tensor.shape), tensor.nbytes
        if not size_bytes:
            return ObservedTensor(dtype, shape, _EMPTY, None)
        if kind not in self._ordinary or not tensor.is_contiguous():
            tensor = _pack(tensor)
        storage = tensor.untyped_storage()
        start = int(tensor.storage_offset()) * dtype.itemsize
        return ObservedTensor(dtype, shape, view_memory(storage, start, start + size_bytes), storage)

    def observe_lasting(
        self, tensor: torch.Tensor, known: KnownMemory | None
    ) -> tuple[ObservedTensor, KnownMemory | None]:
        """Observe a tensor that is probably still in the memory in which it was before; also return that memory."""
        if (
            known is not None
            and type(tensor) in ORDINARY_CLASSES
            and tensor.dtype is known.dtype
            and _find_keys(tensor).raw_repr() == known.keys
            and tensor.data_ptr() == known.address
            and tensor.shape == known.shape
            and tensor.is_contiguous()
        ):
            storage = tensor.untyped_storage()
            # A storage may have been resized.
            if storage.nbytes() == known.storage_bytes:
                return ObservedTensor(known.dtype, known.shape, known.data, storage), known
        observed = self.observe(tensor)
        if (
            observed.keep is None
            or not tensor.is_cpu
            or not tensor.is_contiguous()
            or tensor.is_conj()
            or tensor.is_neg()
        ):
            return observed, None
        keys, storage_bytes = _find_keys(tensor).raw_repr(), observed.keep.nbytes()
        return observed, KnownMemory(
            *(observed.dtype, observed.shape, keys, tensor.data_ptr(), storage_bytes, observed.data)
        )


def verify_kind(tensor: torch.Tensor) -> None:
    """Raise Unsupported if a tensor has no bytes of its own, or its bytes alone do not describe it."""
    if not has_own_bytes(tensor) or tensor.is_meta or _is_functional(tensor) or _is_transformed(tensor):
        raise Unsupported(f"a {type(tensor).__qualname__} of layout {tensor.layout} has no bytes of its own")
    if tensor.is_quantized or items_per_byte(tensor.dtype) != 1:
        raise Unsupported(f"a tensor of {tensor.dtype} is not described by its bytes alone")


def _pack(tensor: torch.Tensor) -> torch.Tensor:
    """Return the items of a tensor in C order in host memory."""
    # Disabling modes takes longer than a small copy, and mostly there are none.
    with _disable_current_modes() if _count_modes() else nullcontext(), torch.no_grad():
        tensor = tensor.detach().resolve_conj().resolve_neg()
        if tensor.element_size() in RAW_DTYPES and tensor.dtype != torch.complex128:
            # Torch cannot copy some dtypes; integers of the same size can always be copied.
            tensor = tensor.view(RAW_DTYPES[tensor.element_size()])
        return tensor.cpu().contiguous()


def find_part(tensor: torch.Tensor, layouts: Layouts) -> tuple[torch.Tensor, ShardPlacement]:
    """Return this rank's part of a tensor, and where it is in the whole if it is sharded."""
    if has_own_bytes(tensor):
        return tensor, WHOLE
    found: Any = tensor
    if type(tensor).__name__ == _UNFINISHED:
        return found.wait(), WHOLE
    if type(tensor).__name__ != _DTENSOR:
        return tensor, WHOLE
    # Not to_local(): that creates a new tensor with autograd history.
    local, _ = find_part(found._local_tensor, layouts)
    placement, global_shape = ", ".join(map(repr, found.placements)), tuple(found.shape)
    try:
        placed = layouts.find(found).placed
    except HoldfastError:
        # A partial tensor has no offsets in the whole; its placement says that it is partial.
        return local, ShardPlacement(placement, global_shape)
    return local, ShardPlacement(placement, global_shape, tuple(placed[0].box.starts) if len(placed) == 1 else ())
