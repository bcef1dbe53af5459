"""Summarize tensors: statistics and a histogram, computed in blocks to limit memory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import torch

from holdfast.capture.stored.events import Stats
from holdfast.capture.stored.statistics import StatsTally

BINS: Final = 40
_SHOWN: Final = 64
"""Tensors of up to this many values are shown in full; of larger ones, only the corners."""
_BLOCK_ITEMS: Final = 1 << 20
"""A block needs a few times 8 bytes per item."""


@dataclass(frozen=True, slots=True)
class TensorSummary:
    """Statistics and histogram of a tensor's finite values."""

    minimum: float
    maximum: float
    mean: float
    norm: float
    zero: int
    nan: int
    inf: int
    low: float
    """Where the first bin begins."""
    high: float
    """Where the last bin ends."""
    histogram: tuple[int, ...] = ()
    """Counts in equal bins."""


def summarize_tensor(
    tensor: torch.Tensor, *, ends: tuple[float, float] | None = None, bins: int = BINS
) -> TensorSummary:
    """Return statistics and histogram of a tensor; `ends` are the range of the histogram, by default the tensor's."""
    tally = StatsTally()
    for block in _iter_blocks(tensor):
        finite = torch.from_numpy(tally.add(block.numpy()))
        tally.add_sums(float(finite.sum()), float(finite.square().sum()))
    stats = tally.finish()
    if not tally.finite:
        return replace(copy_summary(stats), norm=0.0, low=0.0, high=0.0)
    low, high = ends or (stats.minimum, stats.maximum)
    return replace(copy_summary(stats), low=low, high=high, histogram=_count(tensor, low, high, bins))


def find_ends(*tensors: torch.Tensor) -> tuple[float, float] | None:
    """Return the smallest and the largest finite value of all tensors; None if there is none."""
    low, high = math.inf, -math.inf
    for tensor in tensors:
        for block in _iter_blocks(tensor):
            finite = block[torch.isfinite(block)]
            if finite.numel():
                low, high = min(low, float(finite.min())), max(high, float(finite.max()))
    return (low, high) if low <= high else None


def copy_summary(stats: Stats) -> TensorSummary:
    """Return a summary made from recorded statistics."""
    return TensorSummary(
        minimum=stats.minimum,
        maximum=stats.maximum,
        mean=stats.mean,
        norm=stats.norm,
        zero=stats.zero,
        nan=stats.nan,
        inf=stats.inf,
        low=stats.minimum,
        high=stats.maximum,
        histogram=stats.histogram if math.isfinite(stats.minimum) and math.isfinite(stats.maximum) else (),
    )


def format_values(tensor: torch.Tensor) -> list[str]:
    """Return lines that show the values of a small tensor, or the corners of a large one."""
    host = tensor.detach().cpu().resolve_conj().resolve_neg()
    if host.is_floating_point() and host.dtype.itemsize < 4:
        # Numpy has no bfloat16 or 8-bit floats.
        host = host.float()
    return np.array2string(host.numpy(), threshold=_SHOWN, edgeitems=2, precision=6, max_line_width=110).splitlines()


def _iter_blocks(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the values as float64 blocks; for complex values, their magnitudes."""
    flat = tensor.detach().cpu().reshape(-1)
    for start in range(0, flat.numel(), _BLOCK_ITEMS):
        block = flat[start : start + _BLOCK_ITEMS]
        yield (block.abs() if block.is_complex() else block).to(torch.float64)


def _count(tensor: torch.Tensor, low: float, high: float, bins: int) -> tuple[int, ...]:
    counts = torch.zeros(bins, dtype=torch.int64)
    # Divide before subtracting: the difference of extreme float64 values would overflow.
    width = high / bins - low / bins
    for block in _iter_blocks(tensor):
        finite = block[torch.isfinite(block)]
        if width > 0:
            places = ((finite / width) - low / width).to(torch.int64).clamp_(0, bins - 1)
        else:
            places = torch.full(finite.shape, bins // 2, dtype=torch.int64)
        counts += torch.bincount(places, minlength=bins)
    return tuple(counts.tolist())
