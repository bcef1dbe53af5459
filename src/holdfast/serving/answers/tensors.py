"""Answers about the values of one tensor: statistics, a heat map, values by index; read in blocks of a few MiB."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Final

import numpy as np
import torch

from holdfast.capture.stored.events import Stats
from holdfast.capture.stored.statistics import GrowingHistogram, SpreadTally, StatsTally
from holdfast.errors import BadName, NotFound, TooLarge
from holdfast.json_text import Json, describe_number
from holdfast.snapshot.lazy import LazyTensor, Snapshot

_BLOCK_ITEMS: Final = 1 << 20
"""Values that are read and measured at a time; each intermediate result takes 8 bytes per value."""
_WHOLE_BYTES: Final = 256 << 20
"""Larger tensors are not read if they cannot be read in slices."""
_REPORT_S: Final = 0.25
MAX_VALUES: Final = 4096
MAX_CELLS: Final = 160
"""Rows, and columns, of a heat map."""
_HEAT_ITEMS: Final = 1 << 25
"""Values that a heat map reads at most; of a larger slice, it reads rows at equal distances."""

Index = tuple[int | slice, ...]


@dataclass(frozen=True, slots=True)
class OpenTensor:
    """A tensor of a snapshot that is read slice by slice; one that cannot be sliced is in memory."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    size_bytes: int
    source: LazyTensor | torch.Tensor

    def read(self, index: Index) -> np.ndarray[Any, Any]:
        """Read a slice as numbers for numpy; complex numbers as their magnitudes."""
        found = self.source[index] if index or isinstance(self.source, LazyTensor) else self.source
        return convert(found)


def convert(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """Return values as integers or float64 for numpy; raises BadName for a dtype that torch cannot convert."""
    tensor = tensor.detach()
    if tensor.is_quantized:
        tensor = tensor.dequantize()
    if tensor.is_complex():
        tensor = tensor.abs()
    try:
        if not tensor.dtype.is_floating_point:
            return tensor.resolve_neg().numpy()
        return tensor.resolve_neg().to(torch.float64).numpy()
    except (RuntimeError, NotImplementedError, TypeError) as error:
        raise BadName(f"values of dtype {tensor.dtype} cannot be shown as numbers") from error


def open_tensor(snapshot: Snapshot, leaf: str) -> OpenTensor:
    """Find a tensor by its name; reads only the manifest, unless it cannot be read in slices."""
    found = snapshot[leaf]
    if isinstance(found, np.ndarray):
        found = _convert_array(found, leaf)
    if isinstance(found, torch.Tensor):
        return _make_open(leaf, found.dtype, found.nbytes, found)
    if not isinstance(found, LazyTensor):
        raise NotFound(f"{leaf!r} is not a tensor", name=leaf)
    if found.is_sliceable:
        return OpenTensor(leaf, tuple(found.shape), str(found.dtype).removeprefix("torch."), found.size_bytes, found)
    if found.size_bytes > _WHOLE_BYTES:
        raise TooLarge(f"{leaf!r} cannot be read in slices, and is too large to be read as a whole for this page")
    whole = _make_dense(found.read(), leaf)
    return _make_open(leaf, whole.dtype, found.size_bytes, whole)


def _make_open(leaf: str, dtype: torch.dtype, size_bytes: int, tensor: torch.Tensor) -> OpenTensor:
    return OpenTensor(leaf, tuple(tensor.shape), str(dtype).removeprefix("torch."), size_bytes, tensor)


def _convert_array(array: np.ndarray[Any, Any], leaf: str) -> torch.Tensor:
    try:
        return torch.from_numpy(np.ascontiguousarray(array))
    except TypeError as error:
        raise BadName(f"{leaf!r} is an array of dtype {array.dtype}, which cannot be shown as numbers") from error


def _make_dense(tensor: torch.Tensor, leaf: str) -> torch.Tensor:
    """Return an ordinary tensor with the values of any other kind; raises BadName if there is no way to get them."""
    try:
        if tensor.layout != torch.strided:
            tensor = tensor.to_dense()
        return tensor.detach().as_subclass(torch.Tensor)
    except (RuntimeError, NotImplementedError, TypeError) as error:
        raise BadName(f"the values of {leaf!r}, a {type(tensor).__name__}, cannot be shown as numbers") from error


def iter_boxes(shape: Sequence[int], limit: int) -> Iterator[Index]:
    """Yield indices that together cover a tensor once, in order, each of at most `limit` values where rows allow it."""
    if 0 in shape:
        return
    dim, inner = len(shape), 1
    while dim and inner * shape[dim - 1] <= limit:
        dim -= 1
        inner *= shape[dim]
    if not dim:
        yield ()
        return
    step = max(1, limit // inner)
    for outer in product(*map(range, shape[: dim - 1])):
        for start in range(0, shape[dim - 1], step):
            yield (*outer, slice(start, min(start + step, shape[dim - 1])))


def iter_summary(tensor: OpenTensor) -> Iterator[Json]:
    """Yield the statistics of a tensor several times a second while it is read; the last one is complete."""
    tally, spread, histogram = StatsTally(), SpreadTally(), GrowingHistogram()
    total, done, reported_s = math.prod(tensor.shape), 0, time.monotonic()
    for box in iter_boxes(tensor.shape, _BLOCK_ITEMS):
        block = tensor.read(box)
        finite = tally.add(block.reshape(-1)).astype(np.float64, copy=False)
        with np.errstate(over="ignore", invalid="ignore"):  # sums of values such as 1e308 become infinite
            tally.add_sums(float(finite.sum()), float(np.dot(finite, finite)))
            spread.add(finite)
        histogram.add(finite)
        done += block.size
        if done < total and time.monotonic() - reported_s > _REPORT_S:
            reported_s = time.monotonic()
            yield _describe_summary(tensor, tally.finish(), spread, histogram, done)
    yield _describe_summary(tensor, tally.finish(), spread, histogram, total)


def _describe_summary(
    tensor: OpenTensor, stats: Stats, spread: SpreadTally, histogram: GrowingHistogram, done: int
) -> dict[str, Json]:
    low, high, counts = histogram.read()
    numbers = {"min": stats.minimum, "max": stats.maximum, "mean": stats.mean, "norm": stats.norm}
    numbers["std"] = 0.0 if stats.minimum == stats.maximum else spread.finish()
    known = {name: None if math.isnan(value) else describe_number(value) for name, value in numbers.items()}
    return {
        **known,
        "name": tensor.name,
        "dtype": tensor.dtype,
        "shape": list(tensor.shape),
        "bytes": tensor.size_bytes,
        "items": math.prod(tensor.shape),
        "done": done,
        "zero": stats.zero,
        "nan": stats.nan,
        "inf": stats.inf,
        "histogram": {"low": low, "high": high, "counts": counts},
    }


def read_values(tensor: OpenTensor, text: str) -> dict[str, Json]:
    """Read the values that an index selects, such as `3, 0:8`; raises BadName for a bad index or too many values."""
    index = parse_index(text, tensor.shape)
    sizes = [1 if isinstance(part, int) else len(range(*part.indices(size))) for part, size in _pair(index, tensor)]
    if math.prod(sizes) > MAX_VALUES:
        raise BadName(f"[{text}] selects {math.prod(sizes)} values; ask for at most {MAX_VALUES}")
    found = tensor.read(index)
    return {
        "index": [part if isinstance(part, int) else [part.start, part.stop] for part in index],
        "shape": list(found.shape),
        "values": [describe_number(value) for value in found.reshape(-1).tolist()],
    }


def _pair(index: Index, tensor: OpenTensor) -> Iterator[tuple[int | slice, int]]:
    return zip(index, tensor.shape, strict=True)


def parse_index(text: str, shape: Sequence[int]) -> Index:
    """Parse an index such as `3, 0:8, :` into a part for each dim; raises BadName."""
    texts = [part.strip() for part in text.split(",")] if text.strip() else []
    if len(texts) > len(shape):
        raise BadName(f"[{text}] has {len(texts)} parts, and the tensor has {len(shape)} dims")
    texts += [":"] * (len(shape) - len(texts))
    return tuple(_parse_part(part, size) for part, size in zip(texts, shape, strict=True))


def _parse_part(text: str, size: int) -> int | slice:
    try:
        if ":" not in text:
            number = int(text)
            if not -size <= number < size:
                raise BadName(f"index {number} is outside of a dim of size {size}")
            return number % size
        first, _, last = text.partition(":")
        start, stop, _ = slice(int(first) if first else None, int(last) if last else None).indices(size)
        return slice(start, max(start, stop))
    except ValueError as error:
        if isinstance(error, BadName):
            raise
        raise BadName(f"{text[:40]!r} is neither a number nor a range such as 0:8") from error


def read_heat(tensor: OpenTensor, text: str) -> dict[str, Json]:
    """Read a 2-D slice as a grid of at most 160 x 160 cells, each the mean of its finite values, or None.

    `text` is an index that leaves one or two dims; the last two, if there are more. Of a slice with more than 32 Mi
    values, rows at equal distances are read. The grid of a tensor without values has no cells.
    """
    if 0 in tensor.shape and not text.strip():
        whole = [[0, size] for size in tensor.shape]
        return {"index": whole, "rows": [0, 0], "columns": [0, 0], "stride": 1, "cells": []}
    index = _keep_two(parse_index(text, tensor.shape), tensor.shape)
    spans = [range(*part.indices(size)) for part, size in _pair(index, tensor) if isinstance(part, slice)]
    rows, columns = spans if len(spans) == 2 else [range(1), *spans] if spans else [range(1), range(1)]
    if not rows or not columns:
        raise BadName(f"[{text}] selects nothing")
    stride = max(1, math.ceil(len(rows) * len(columns) / _HEAT_ITEMS))
    tall, wide = _count_cells(math.ceil(len(rows) / stride)), _count_cells(len(columns))
    sums, counts = np.zeros((tall, wide)), np.zeros((tall, wide))
    places = np.arange(len(columns)) * wide // len(columns)
    picked = rows[::stride]
    step = max(1, _BLOCK_ITEMS // len(columns))
    for start in range(0, len(picked), step):
        part = picked[start : start + step]
        block = _read_rows(tensor, index, part, has_rows=len(spans) == 2).reshape(len(part), len(columns))
        finite = np.isfinite(block)
        added = np.arange(start, start + len(part)) * tall // len(picked)
        flat = (added[:, None] * wide + places[None, :]).ravel()
        weights = np.where(finite, block, 0.0).astype(np.float64).ravel()
        sums += np.bincount(flat, weights=weights, minlength=tall * wide).reshape(tall, wide)
        counts += np.bincount(flat, weights=finite.ravel(), minlength=tall * wide).reshape(tall, wide)
    cells = np.divide(sums, counts, out=np.full((tall, wide), np.nan), where=counts > 0)
    return {
        "index": [part if isinstance(part, int) else [part.start, part.stop] for part in index],
        "rows": [rows.start, rows.stop],
        "columns": [columns.start, columns.stop],
        "stride": stride,
        "cells": [[cell if math.isfinite(cell) else None for cell in line] for line in cells.tolist()],
    }


def _count_cells(size: int) -> int:
    return min(size, MAX_CELLS)


def _keep_two(index: Index, shape: Sequence[int]) -> Index:
    """Return the index with the first item of all but the last two dims that it leaves."""
    left = [dim for dim, part in enumerate(index) if isinstance(part, slice)][:-2]
    for dim in left:
        if not range(*index[dim].indices(shape[dim])):  # type: ignore[union-attr]  # a slice, see above
            raise BadName("the slice is empty")
    return tuple(part.start if dim in left and isinstance(part, slice) else part for dim, part in enumerate(index))


def _read_rows(tensor: OpenTensor, index: Index, rows: range, *, has_rows: bool) -> np.ndarray[Any, Any]:
    if not has_rows:
        return tensor.read(index)
    dim = next(dim for dim, part in enumerate(index) if isinstance(part, slice))
    return tensor.read((*index[:dim], slice(rows.start, rows.stop, rows.step), *index[dim + 1 :]))
