"""Portraits of tensors: their values in numbers and as a histogram, taken in blocks so that large ones fit."""

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
"""How many values are shown rather than only those in the corners."""
_BLOCK_ITEMS: Final = 1 << 20
"""A block takes 8 bytes an item, a few times over."""


def summarize_tensor(
    tensor: torch.Tensor, *, ends: tuple[float, float] | None = None, bins: int = BINS
) -> TensorSummary:
    """Return the portrait of a tensor; `ends` are where its histogram begins and ends, else its own."""
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
    """Return the least and the largest finite value of all; None if there is none."""
    low, high = math.inf, -math.inf
    for tensor in tensors:
        for block in _iter_blocks(tensor):
            held = block[torch.isfinite(block)]
            if held.numel():
                low, high = min(low, float(held.min())), max(high, float(held.max()))
    return (low, high) if low <= high else None


def copy_summary(stats: Stats) -> TensorSummary:
    """Return the portrait that was taken when a tensor was recorded."""
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
    """Return lines that show a tensor: all of a small one, the corners of a large one."""
    held = tensor.detach().cpu().resolve_conj().resolve_neg()
    if held.is_floating_point() and held.dtype.itemsize < 4:
        # Numpy has no floats so short.
        held = held.float()
    return np.array2string(held.numpy(), threshold=_SHOWN, edgeitems=2, precision=6, max_line_width=110).splitlines()


def _iter_blocks(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the values as float64, of complex ones their magnitudes."""
    flat = tensor.detach().cpu().reshape(-1)
    for start in range(0, flat.numel(), _BLOCK_ITEMS):
        block = flat[start : start + _BLOCK_ITEMS]
        yield (block.abs() if block.is_complex() else block).to(torch.float64)


def _count(tensor: torch.Tensor, low: float, high: float, bins: int) -> tuple[int, ...]:
    counts = torch.zeros(bins, dtype=torch.int64)
    # Divided before it is subtracted: the whole range of float64 does not fit into one.
    width = high / bins - low / bins
    for block in _iter_blocks(tensor):
        held = block[torch.isfinite(block)]
        if width > 0:
            places = ((held / width) - low / width).to(torch.int64).clamp_(0, bins - 1)
        else:
            places = torch.full(held.shape, bins // 2, dtype=torch.int64)
        counts += torch.bincount(places, minlength=bins)
    return tuple(counts.tolist())
