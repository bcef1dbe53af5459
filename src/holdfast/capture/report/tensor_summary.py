"""Summarize tensors: statistics and a histogram, computed in blocks to limit memory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

import numpy as np
import torch

from holdfast.capture.report.model import TensorSummary
from holdfast.capture.stored.events import Stats

BINS: Final = 40
_SHOWN: Final = 64
"""Tensors of up to this many values are shown in full; of larger ones, only the corners."""
_BLOCK_ITEMS: Final = 1 << 20
"""A block needs a few times 8 bytes per item."""


def summarize_tensor(
    tensor: torch.Tensor, *, ends: tuple[float, float] | None = None, bins: int = BINS
) -> TensorSummary:
    """Return statistics and histogram of a tensor; `ends` are the range of the histogram, by default the tensor's."""
    low, high = math.inf, -math.inf
    total, squares, zero, nan, inf, finite = 0.0, 0.0, 0, 0, 0, 0
    for block in _iter_blocks(tensor):
        is_nan, is_inf = torch.isnan(block), torch.isinf(block)
        nan += int(is_nan.sum())
        inf += int(is_inf.sum())
        held = block[~(is_nan | is_inf)]
        if held.numel():
            low, high = min(low, float(held.min())), max(high, float(held.max()))
            total, squares = total + float(held.sum()), squares + float(held.square().sum())
            zero += int((held == 0).sum())
            finite += held.numel()
    if not finite:
        return TensorSummary(math.nan, math.nan, math.nan, 0.0, 0, nan, inf, 0.0, 0.0)
    start, stop = ends or (low, high)
    counts = _count(tensor, start, stop, bins)
    return TensorSummary(low, high, total / finite, math.sqrt(squares), zero, nan, inf, start, stop, counts)


def find_ends(*tensors: torch.Tensor) -> tuple[float, float] | None:
    """Return the smallest and the largest finite value of all tensors; None if there is none."""
    low, high = math.inf, -math.inf
    for tensor in tensors:
        for block in _iter_blocks(tensor):
            held = block[torch.isfinite(block)]
            if held.numel():
                low, high = min(low, float(held.min())), max(high, float(held.max()))
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
    held = tensor.detach().cpu().resolve_conj().resolve_neg()
    if held.is_floating_point() and held.dtype.itemsize < 4:
        # Numpy has no bfloat16 or 8-bit floats.
        held = held.float()
    return np.array2string(held.numpy(), threshold=_SHOWN, edgeitems=2, precision=6, max_line_width=110).splitlines()


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
        held = block[torch.isfinite(block)]
        if width > 0:
            places = ((held / width) - low / width).to(torch.int64).clamp_(0, bins - 1)
        else:
            places = torch.full(held.shape, bins // 2, dtype=torch.int64)
        counts += torch.bincount(places, minlength=bins)
    return tuple(counts.tolist())
