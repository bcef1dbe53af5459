"""Looking at tensors where they lie: their bytes, digest and numbers; nothing is drawn, changed or kept alive."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from torch.utils._python_dispatch import _disable_current_modes

from holdfast.capture.stored.events import Stats
from holdfast.digest import fingerprint
from holdfast.errors import HoldfastError, Unsupported
from holdfast.tensors.composite import has_own_bytes
from holdfast.tensors.dtypes import dtype_name, items_per_byte
from holdfast.tensors.memory import RAW_DTYPES, view_memory
from holdfast.tensors.sharding.meshes import Layouts

Array = np.ndarray[Any, Any]
_EMPTY: Final = memoryview(b"")
_BLOCK: Final = 1 << 14
_SAMPLE: Final = 1 << 14
"""How many values of a tensor a histogram counts."""
_is_functional: Final = torch._is_functional_tensor
_is_transformed: Final = torch._C._functorch.is_functorch_wrapped_tensor
_NUMPY: Final = {
    torch.float64: np.float64,
    torch.float32: np.float32,
    torch.float16: np.float16,
    torch.bool: np.bool_,
    torch.int8: np.int8,
    torch.int16: np.int16,
    torch.int32: np.int32,
    torch.int64: np.int64,
    torch.uint8: np.uint8,
    torch.uint16: np.uint16,
    torch.uint32: np.uint32,
    torch.uint64: np.uint64,
    # Two numbers to an item.
    torch.complex128: np.float64,
    torch.complex64: np.float32,
    torch.complex32: np.float16,
}
# By name: most processes never import what defines them.
_DTENSOR: Final = "DTensor"
_UNFINISHED: Final = "AsyncCollectiveTensor"


@dataclass(frozen=True, slots=True)
class ShardPlacement:
    """How the part of a sharded tensor lies in the whole."""

    placement: str = ""
    global_shape: tuple[int, ...] = ()
    offsets: tuple[int, ...] = ()


WHOLE: Final = ShardPlacement()


@dataclass(frozen=True, slots=True)
class ObservedTensor:
    """A tensor as it is now; good until it changes."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    data: memoryview
    """Its bytes in C order: its own memory where that is possible."""
    keep: object
    """Holds the memory."""

    @property
    def dtype_name(self) -> str:
        """As torch says it."""
        return dtype_name(self.dtype)

    def digest(self) -> bytes:
        """Return the XXH3-128 of the bytes."""
        return fingerprint(self.data)

    def copy(self, memory: Array) -> None:
        """Copy the bytes to memory of their size; by no operation of torch, which modes would see."""
        memory[:] = np.frombuffer(self.data, dtype=np.uint8)

    def measure(self, bins: int) -> Stats | None:
        """Return the tensor in numbers; None for a dtype that has none."""
        values = find_values(np.frombuffer(self.data, dtype=np.uint8), self.dtype)
        return None if values is None else measure_values(values, bins)


def build_copy(memory: Array, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Return bytes as the tensor that they are of; no copy."""
    if not memory.nbytes:
        return torch.empty(shape, dtype=dtype)
    if not memory.flags.writeable:
        # Torch warns of memory that must not be written to; nobody writes.
        memory = np.frombuffer(memory.data.cast("B"), dtype=np.uint8)
    return torch.from_numpy(memory).view(dtype).reshape(shape)


def observe(tensor: torch.Tensor) -> ObservedTensor:
    """Look at a tensor of this process; raises Unsupported for one that has no bytes."""
    if not has_own_bytes(tensor) or tensor.is_meta or _is_functional(tensor) or _is_transformed(tensor):
        raise Unsupported(f"a {type(tensor).__qualname__} of layout {tensor.layout} has no bytes of its own")
    dtype, shape = tensor.dtype, tuple(tensor.shape)
    if tensor.is_quantized or items_per_byte(dtype) != 1:
        raise Unsupported(f"a tensor of {dtype} is more than its bytes")
    if not math.prod(shape):
        return ObservedTensor(dtype, shape, _EMPTY, None)
    if tensor.device.type != "cpu" or not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        tensor = _pack(tensor)
    storage = tensor.untyped_storage()
    start = int(tensor.storage_offset()) * tensor.element_size()
    return ObservedTensor(
        dtype, shape, view_memory(storage, start, start + tensor.numel() * tensor.element_size()), storage
    )


def _pack(tensor: torch.Tensor) -> torch.Tensor:
    """Return the items of a tensor in C order in the memory of the host."""
    with _disable_current_modes(), torch.no_grad():
        tensor = tensor.detach().resolve_conj().resolve_neg()
        if tensor.element_size() in RAW_DTYPES and tensor.dtype != torch.complex128:
            # Some dtypes cannot be copied as what they are.
            tensor = tensor.view(RAW_DTYPES[tensor.element_size()])
        return tensor.cpu().contiguous()


def find_part(tensor: torch.Tensor, layouts: Layouts) -> tuple[torch.Tensor, ShardPlacement]:
    """Return what this rank holds of a tensor, and where that lies in the whole if it is sharded."""
    if has_own_bytes(tensor):
        return tensor, WHOLE
    found: Any = tensor
    if type(tensor).__name__ == _UNFINISHED:
        return found.wait(), WHOLE
    if type(tensor).__name__ != _DTENSOR:
        return tensor, WHOLE
    # Not to_local(): that makes a new tensor with a history.
    local, _ = find_part(found._local_tensor, layouts)
    placement, global_shape = ", ".join(map(repr, found.placements)), tuple(found.shape)
    try:
        placed = layouts.find(found).placed
    except HoldfastError:
        # What is yet to be reduced lies nowhere; its placement says so.
        return local, ShardPlacement(placement, global_shape)
    return local, ShardPlacement(placement, global_shape, tuple(placed[0].box.starts) if len(placed) == 1 else ())


def find_values(data: Array, dtype: torch.dtype) -> Array | None:
    """Return bytes as numbers that numpy can add up: one thread, and no operation of torch that modes would see."""
    if dtype in _NUMPY:
        return data.view(_NUMPY[dtype])
    if dtype == torch.bfloat16:
        return (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    try:
        with _disable_current_modes(), torch.no_grad():
            return build_copy(data, dtype, (-1,)).to(torch.float32).numpy()
    except (NotImplementedError, RuntimeError):
        return None


def measure_values(values: Array, bins: int) -> Stats:
    """Return numbers in numbers."""
    total = values.size
    if values.dtype.kind not in "fiu":
        values = values.astype(np.float64)
    zero = int(np.count_nonzero(values == 0))
    nan = inf = 0
    low, high = _find_ends(values)
    if not (math.isfinite(low) and math.isfinite(high)):
        nan = int(np.count_nonzero(np.isnan(values)))
        values = values[np.isfinite(values)]
        inf = total - nan - values.size
        low, high = _find_ends(values)
    if not values.size:
        return Stats(math.nan, math.nan, math.nan, math.nan, nan, inf, zero)
    added, squared = _add_up(values)
    histogram = _count(values, bins, low, high) if bins and math.isfinite(high - low) and low < high else ()
    return Stats(low, high, added / values.size, math.sqrt(squared), nan, inf, zero, histogram)


def _find_ends(values: Array) -> tuple[float, float]:
    return (float(values.min()), float(values.max())) if values.size else (math.nan, math.nan)


def _add_up(values: Array) -> tuple[float, float]:
    """Return the sums of values and of their squares, in blocks that stay near the processor."""
    added = squared = 0.0
    dtype = np.float32 if values.dtype == np.float32 else np.float64
    with np.errstate(over="ignore"):
        for start in range(0, values.size, _BLOCK):
            block = values[start : start + _BLOCK].astype(dtype)
            added += float(block.sum())
            squared += float(np.square(block, out=block).sum())
    if dtype is np.float32 and not math.isfinite(added + squared):
        return _add_up(values.astype(np.float64))
    return added, squared


def _count(values: Array, bins: int, low: float, high: float) -> tuple[int, ...]:
    """Return how many values lie in each of so many equal bins; of many values, an even sample."""
    sample = values[:: -(-values.size // _SAMPLE)].astype(np.float64)
    places = ((sample - low) * (bins / (high - low))).astype(np.intp)
    return tuple(np.bincount(places.clip(0, bins - 1), minlength=bins).tolist())
