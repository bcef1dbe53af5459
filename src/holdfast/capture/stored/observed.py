"""Observe tensors: their bytes, digest and statistics, without drawing random numbers or changing them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

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
_ROW: Final = 1 << 10
"""Number of values whose sum is rounded to their dtype; the sums of rows are added in float64."""
_SAMPLE: Final = 1 << 12
"""Number of values that a histogram counts at most; of larger tensors, an even sample."""
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
    # Complex items are two numbers each.
    torch.complex128: np.float64,
    torch.complex64: np.float32,
    torch.complex32: np.float16,
}
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


class ObservedTensor(NamedTuple):
    """The bytes of a tensor as they are now; valid until the tensor changes. A tuple, because each tensor has one."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    data: memoryview
    """Its bytes in C order; the tensor's own memory if possible."""
    keep: object
    """Keeps the memory of `data` alive."""

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

    def measure(self, bins: int) -> Stats | None:
        """Return the statistics of the tensor; None if its dtype has no numbers."""
        values = find_values(np.frombuffer(self.data, dtype=np.uint8), self.dtype)
        return None if values is None else measure_values(values, bins)


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
    if not has_own_bytes(tensor) or tensor.is_meta or _is_functional(tensor) or _is_transformed(tensor):
        raise Unsupported(f"a {type(tensor).__qualname__} of layout {tensor.layout} has no bytes of its own")
    dtype, shape = tensor.dtype, tuple(tensor.shape)
    if tensor.is_quantized or items_per_byte(dtype) != 1:
        raise Unsupported(f"a tensor of {dtype} is not described by its bytes alone")
    if not tensor.numel():
        return ObservedTensor(dtype, shape, _EMPTY, None)
    if not tensor.is_cpu or not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        tensor = _pack(tensor)
    storage = tensor.untyped_storage()
    start = int(tensor.storage_offset()) * tensor.itemsize
    return ObservedTensor(dtype, shape, view_memory(storage, start, start + tensor.nbytes), storage)


def _pack(tensor: torch.Tensor) -> torch.Tensor:
    """Return the items of a tensor in C order in host memory."""
    with _disable_current_modes(), torch.no_grad():
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


def find_values(data: Array, dtype: torch.dtype) -> Array | None:
    """Return bytes as numbers for numpy, which uses one thread and no torch operations that dispatch modes see."""
    if dtype in _NUMPY:
        return data.view(_NUMPY[dtype])
    if dtype == torch.bfloat16:
        return (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    try:
        with _disable_current_modes(), torch.no_grad():
            return build_copy(data, dtype, (-1,)).to(torch.float32).numpy()
    except (NotImplementedError, RuntimeError):
        return None


class StatsTally:
    """Accumulates the statistics of values, block by block; NaN and infinities are only counted."""

    def __init__(self) -> None:
        self.minimum, self.maximum = math.inf, -math.inf
        self.nan = self.inf = self.zero = self.finite = 0
        self._sum = self._squares = 0.0

    def add(self, values: Array) -> Array:
        """Add values, and return those that are finite."""
        total = values.size
        if not total:
            return values
        if values.dtype.kind not in "fiu":
            values = values.astype(np.float64)
        low, high = float(values.min()), float(values.max())
        # A comparison with NaN is false: then the zeros are counted too.
        if not (low > 0 or high < 0):
            self.zero += int(np.count_nonzero(values == 0))
        if not (math.isfinite(low) and math.isfinite(high)):
            nan = int(np.count_nonzero(np.isnan(values)))
            values = values[np.isfinite(values)]
            self.nan += nan
            self.inf += total - nan - values.size
            if not values.size:
                return values
            low, high = float(values.min()), float(values.max())
        self.minimum, self.maximum = min(self.minimum, low), max(self.maximum, high)
        self.finite += values.size
        return values

    def add_sums(self, total: float, squares: float) -> None:
        """Add the sums of the finite values and of their squares; the caller knows the fastest way to compute them."""
        self._sum += total
        self._squares += squares

    def finish(self, histogram: tuple[int, ...] = ()) -> Stats:
        """Return the statistics; minimum, maximum, mean and norm are NaN if no value is finite."""
        if not self.finite:
            return Stats(math.nan, math.nan, math.nan, math.nan, self.nan, self.inf, self.zero)
        mean, norm = self._sum / self.finite, math.sqrt(self._squares)
        return Stats(self.minimum, self.maximum, mean, norm, self.nan, self.inf, self.zero, histogram)


def measure_values(values: Array, bins: int) -> Stats:
    """Return the statistics of values, with a histogram of `bins` bins."""
    tally = StatsTally()
    values = tally.add(values)
    tally.add_sums(*_add_up(values))
    low, high = tally.minimum, tally.maximum
    return tally.finish(_count(values, bins, low, high) if bins and low < high and math.isfinite(high - low) else ())


def _add_up(values: Array) -> tuple[float, float]:
    """Return the sums of values and of their squares: of each row in the dtype of floats, of all rows in float64."""
    if values.dtype not in (np.float32, np.float64):
        blocks = (values[start : start + _BLOCK] for start in range(0, values.size, _BLOCK))
        sums = [_add_up(block.astype(np.float64)) for block in blocks]
        return math.fsum(added for added, _ in sums), math.fsum(squared for _, squared in sums)
    rows, rest = _split_rows(values)
    with np.errstate(over="ignore", invalid="ignore"):
        added, squared = float(np.add.reduce(rest)), float(np.vecdot(rest, rest))
        if rows.size:
            added += float(np.add.reduce(rows, axis=1).sum(dtype=np.float64))
            # Not one product of all values: for long vectors the library would start threads.
            squared += float(np.vecdot(rows, rows).sum(dtype=np.float64))
    if values.dtype == np.float32 and not math.isfinite(added + squared):
        return _add_up(values.astype(np.float64))
    return added, squared


def _split_rows(values: Array) -> tuple[Array, Array]:
    """Return values as rows of equal length, and those that do not fill a row."""
    end = values.size - values.size % _ROW
    return values[:end].reshape(-1, _ROW), values[end:]


def _count(values: Array, bins: int, low: float, high: float) -> tuple[int, ...]:
    """Return the number of values in each of `bins` equal bins; of many values, an even sample."""
    places = values[:: -(-values.size // _SAMPLE)].astype(np.float64)
    places -= low
    places *= bins / (high - low)
    indices = places.astype(np.intp)
    return tuple(np.bincount(np.minimum(indices, bins - 1, out=indices), minlength=bins).tolist())
