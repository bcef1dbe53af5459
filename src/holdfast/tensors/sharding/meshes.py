"""Computes the layout of DTensors: from mesh and placements to boxes, and to the ranks that have the same box.

Nothing here imports torch.distributed.tensor: the import takes longer than saving a small model, and a program that
has a DTensor has imported it already.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Final, NamedTuple

import torch

from holdfast.errors import Unsupported
from holdfast.repo.format.boxes import Box, Coordinates
from holdfast.tensors.composite import has_own_bytes

_PLACEMENTS: Final = "torch.distributed.tensor.placement_types"


class Cut(NamedTuple):
    """How one axis of a mesh cuts a dim, and which part belongs to this rank."""

    dim: int
    parts: int
    position: int
    """The coordinate of this rank on the axis."""
    stripes: int = 1
    """The split factor of a strided shard: the dim is first split into so many parts, each of which is then cut."""


class RowRun(NamedTuple):
    """Neighbouring rows of a dim that a rank has: their start in the global tensor and in the local one."""

    start: int
    local_start: int
    size: int


def plan_runs(length: int, cuts: Sequence[Cut]) -> list[RowRun]:
    """Return the rows of a dim of that length that remain after all cuts, in local order; neighbours are one run."""
    spans = [(0, length)]
    for cut in cuts:
        size = sum(stop - start for start, stop in spans)
        spans = [span for low, high in _iter_parts(size, cut) for span in _iter_global_spans(spans, low, high)]
    runs: list[RowRun] = []
    for start, stop in spans:
        if runs and runs[-1].start + runs[-1].size == start:
            last = runs.pop()
            runs.append(last._replace(size=last.size + stop - start))
        else:
            runs.append(RowRun(start, runs[-1].local_start + runs[-1].size if runs else 0, stop - start))
    return runs


def _iter_parts(size: int, cut: Cut) -> Iterator[tuple[int, int]]:
    for stripe in range(cut.stripes):
        low, high = _find_part(size, cut.stripes, stripe)
        start, stop = _find_part(high - low, cut.parts, cut.position)
        yield low + start, low + stop


def _find_part(size: int, parts: int, index: int) -> tuple[int, int]:
    """Return the start and stop of a part: all are as large as the first, except the last ones."""
    step = -(-size // parts)
    return min(index * step, size), min((index + 1) * step, size)


def _iter_global_spans(spans: Sequence[tuple[int, int]], low: int, high: int) -> Iterator[tuple[int, int]]:
    """Yield the global spans of the local rows from `low` to `high`."""
    at = 0
    for start, stop in spans:
        first, last = max(low, at), min(high, at + stop - start)
        if first < last:
            yield start + first - at, start + last - at
        at += stop - start


class PlacedBox(NamedTuple):
    """A box of a global tensor, and the same box in the coordinates of the local tensor."""

    box: Box
    local: Box


@dataclass(frozen=True, slots=True)
class ShardLayout:
    """The boxes of a DTensor's local part in the global tensor, and the ranks that have the same part."""

    local_shape: Coordinates
    placed: tuple[PlacedBox, ...]
    """One box in most cases; several for some strided shards; none if the local part is empty."""
    ranks: tuple[int, ...]
    """The global ranks that have the same part, including this one."""
    mesh_ranks: tuple[int, ...]
    """All global ranks of the mesh."""
    is_cut: bool
    """Whether any axis of the mesh cuts the tensor; if none does, every rank of the mesh has all of it."""


class Layouts:
    """Computes the layouts of DTensors; each is computed, and compared with torch's own, once for equal tensors.

    It keeps meshes alive, so create one for each save or load.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], ShardLayout] = {}

    def find(self, tensor: Any) -> ShardLayout:
        """Return the layout of a DTensor; raises Unsupported for placements other than Replicate and Shard."""
        mesh, placements = tensor.device_mesh, tuple(tensor.placements)
        verify_placements(mesh, placements)
        coordinate = mesh.get_coordinate()
        key = (mesh, tuple(coordinate or ()), placements, tuple(tensor.shape))
        layout = self._known.get(key)
        if layout is None:
            layout = self._known[key] = _plan_layout(tensor, mesh, coordinate, placements)
        return layout


def verify_placements(mesh: Any, placements: Sequence[object]) -> None:
    """Raise Unsupported unless every axis of the mesh shards the tensor or replicates it."""
    known = _find_classes()
    for axis, placement in enumerate(placements):
        if isinstance(placement, (known.Replicate, known.Shard, known._StridedShard)):
            continue
        label = repr(mesh.mesh_dim_names[axis]) if mesh.mesh_dim_names else str(axis)
        is_partial = isinstance(placement, known.Partial)
        raise Unsupported(
            f"a DTensor that is {placement!r} over mesh axis {label}"
            f" {'has values that are not reduced yet' if is_partial else 'has a placement that is not supported'}:"
            " redistribute it to Replicate() or Shard(dim) there"
        )


def _find_classes() -> Any:
    """Return torch's module of placements, which a program with a DTensor has imported."""
    return sys.modules[_PLACEMENTS]


def _plan_layout(tensor: Any, mesh: Any, coordinate: Sequence[int] | None, placements: Sequence[Any]) -> ShardLayout:
    mesh_ranks = tuple(mesh.mesh.flatten().tolist())
    known = _find_classes()
    is_cut = not all(isinstance(placement, known.Replicate) for placement in placements)
    if coordinate is None:
        return ShardLayout((0,), (), (), mesh_ranks, is_cut)
    cuts: dict[int, list[Cut]] = {dim: [] for dim in range(tensor.dim())}
    index: list[int | slice] = list(coordinate)
    for axis, placement in enumerate(placements):
        if isinstance(placement, known.Replicate):
            index[axis] = slice(None)
        else:
            stripes = placement.split_factor if isinstance(placement, known._StridedShard) else 1
            cuts[placement.dim].append(Cut(placement.dim, mesh.shape[axis], coordinate[axis], stripes))
    runs = [plan_runs(length, cuts[dim]) for dim, length in enumerate(tensor.shape)]
    layout = ShardLayout(
        local_shape=tuple(sum(run.size for run in of_dim) for of_dim in runs),
        placed=tuple(_join(chosen) for chosen in product(*runs)),
        ranks=tuple(mesh.mesh[tuple(index)].flatten().tolist()),
        mesh_ranks=mesh_ranks,
        is_cut=is_cut,
    )
    _verify_as_torch(tensor, layout)
    return layout


def _join(runs: Sequence[RowRun]) -> PlacedBox:
    sizes = tuple(run.size for run in runs)
    return PlacedBox(Box(tuple(run.start for run in runs), sizes), Box(tuple(run.local_start for run in runs), sizes))


def _verify_as_torch(tensor: Any, layout: ShardLayout) -> None:
    """Raise Unsupported if the installed torch computes another offset or shape for the local part."""
    if not has_own_bytes(tensor._local_tensor):
        return
    (chunk,) = tensor.__create_chunk_list__()
    starts = [placed.box.starts for placed in layout.placed]
    if tuple(chunk.sizes) != layout.local_shape or (starts and tuple(chunk.offsets) != starts[0]):
        raise Unsupported(
            f"torch {torch.__version__} cuts a DTensor of shape {tuple(tensor.shape)}, placed as"
            f" {tuple(tensor.placements)}, in a way that is not supported: update holdfast, or save its full_tensor()"
        )
