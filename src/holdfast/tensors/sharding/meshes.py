"""Where the parts of DTensors lie: from meshes and placements to boxes, and to the ranks that hold the same one.

Nothing here imports torch.distributed.tensor: that takes longer than to save a small model, and whoever has a DTensor
has paid for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Final, NamedTuple

import torch

from holdfast.errors import Unsupported
from holdfast.repo.format.boxes import Box, Coordinates
from holdfast.tensors.composite import has_own_bytes

_placements: Final = torch._C._distributed  # the classes that those of torch.distributed.tensor are made from
_KNOWN: Final = (_placements.Replicate, _placements.Shard, _placements.StridedShard)


class Cut(NamedTuple):
    """How one axis of a mesh cuts a dim, and which part this rank has."""

    dim: int
    parts: int
    position: int
    """The coordinate of this rank on the axis."""
    stripes: int = 1
    """How many equal parts the dim is taken for, each of them cut by itself: the split factor of a strided shard."""


class Run(NamedTuple):
    """Neighbouring rows of a dim that a rank holds: where they are in the global and in its local tensor."""

    start: int
    local_start: int
    size: int


def plan_runs(length: int, cuts: Sequence[Cut]) -> list[Run]:
    """Return what is left of a dim of that length after cuts one by one, in local order; neighbours are one run."""
    spans = [(0, length)]
    for cut in cuts:
        size = sum(stop - start for start, stop in spans)
        spans = [span for low, high in _iter_parts(size, cut) for span in _take(spans, low, high)]
    runs: list[Run] = []
    for start, stop in spans:
        if runs and runs[-1].start + runs[-1].size == start:
            last = runs.pop()
            runs.append(last._replace(size=last.size + stop - start))
        else:
            runs.append(Run(start, runs[-1].local_start + runs[-1].size if runs else 0, stop - start))
    return runs


def _iter_parts(size: int, cut: Cut) -> Iterator[tuple[int, int]]:
    for stripe in range(cut.stripes):
        low, high = _find_part(size, cut.stripes, stripe)
        start, stop = _find_part(high - low, cut.parts, cut.position)
        yield low + start, low + stop


def _find_part(size: int, parts: int, index: int) -> tuple[int, int]:
    """Return where a part begins and ends: all are as large as the first, but for the last ones."""
    step = -(-size // parts)
    return min(index * step, size), min((index + 1) * step, size)


def _take(spans: Sequence[tuple[int, int]], low: int, high: int) -> Iterator[tuple[int, int]]:
    """Yield the global spans of the local rows from `low` to `high`."""
    at = 0
    for start, stop in spans:
        first, last = max(low, at), min(high, at + stop - start)
        if first < last:
            yield start + first - at, start + last - at
        at += stop - start


class Placed(NamedTuple):
    """A box of a global tensor, and which box of the local tensor it is."""

    box: Box
    local: Box


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the local part of a DTensor lies, and who else has it."""

    local_shape: Coordinates
    placed: tuple[Placed, ...]
    """One box if the local part is one; several for some strided shards; none if it is empty."""
    ranks: tuple[int, ...]
    """The global ranks that hold the very same, this one among them."""
    mesh_ranks: tuple[int, ...]
    """All global ranks of the mesh."""
    is_cut: bool
    """Whether any axis of the mesh cuts the tensor; if not, all ranks of the mesh have all of it."""


class Layouts:
    """Finds the layouts of DTensors; each is worked out, and compared with what torch says, once for all who have it.

    It keeps meshes alive: make one for each save or load.
    """

    def __init__(self) -> None:
        """Know nothing yet."""
        self._known: dict[tuple[object, ...], Layout] = {}

    def find(self, tensor: Any) -> Layout:
        """Return the layout of a DTensor; raises Unsupported for one that is not made of its ranks' parts."""
        mesh, placements = tensor.device_mesh, tuple(tensor.placements)
        verify_placements(mesh, placements)
        coordinate = mesh.get_coordinate()
        key = (mesh, tuple(coordinate or ()), placements, tuple(tensor.shape))
        layout = self._known.get(key)
        if layout is None:
            layout = self._known[key] = _plan_layout(tensor, mesh, coordinate, placements)
        return layout


def verify_placements(mesh: Any, placements: Sequence[object]) -> None:
    """Raise Unsupported unless every axis of the mesh cuts the tensor or repeats it."""
    for axis, placement in enumerate(placements):
        if isinstance(placement, _KNOWN):
            continue
        label = repr(mesh.mesh_dim_names[axis]) if mesh.mesh_dim_names else str(axis)
        is_partial = isinstance(placement, _placements.Partial)
        raise Unsupported(
            f"a DTensor that is {placement!r} over mesh axis {label}"
            f" {'holds what is yet to be reduced' if is_partial else 'is cut in a way that is not known here'}:"
            " redistribute it to Replicate() or Shard(dim) there"
        )


def _plan_layout(tensor: Any, mesh: Any, coordinate: Sequence[int] | None, placements: Sequence[Any]) -> Layout:
    mesh_ranks = tuple(mesh.mesh.flatten().tolist())
    is_cut = not all(isinstance(placement, _placements.Replicate) for placement in placements)
    if coordinate is None:
        return Layout((0,), (), (), mesh_ranks, is_cut)
    cuts: dict[int, list[Cut]] = {dim: [] for dim in range(tensor.dim())}
    index: list[int | slice] = list(coordinate)
    for axis, placement in enumerate(placements):
        if isinstance(placement, _placements.Replicate):
            index[axis] = slice(None)
        else:
            stripes = placement.split_factor if isinstance(placement, _placements.StridedShard) else 1
            cuts[placement.dim].append(Cut(placement.dim, mesh.shape[axis], coordinate[axis], stripes))
    runs = [plan_runs(length, cuts[dim]) for dim, length in enumerate(tensor.shape)]
    layout = Layout(
        local_shape=tuple(sum(run.size for run in of_dim) for of_dim in runs),
        placed=tuple(_join(chosen) for chosen in product(*runs)),
        ranks=tuple(mesh.mesh[tuple(index)].flatten().tolist()),
        mesh_ranks=mesh_ranks,
        is_cut=is_cut,
    )
    _verify_as_torch(tensor, layout)
    return layout


def _join(runs: Sequence[Run]) -> Placed:
    sizes = tuple(run.size for run in runs)
    return Placed(Box(tuple(run.start for run in runs), sizes), Box(tuple(run.local_start for run in runs), sizes))


def _verify_as_torch(tensor: Any, layout: Layout) -> None:
    """Raise Unsupported if torch, as it is installed, puts the local part elsewhere or gives it another shape."""
    if not has_own_bytes(tensor._local_tensor):
        return
    (chunk,) = tensor.__create_chunk_list__()
    starts = [placed.box.starts for placed in layout.placed]
    if tuple(chunk.sizes) != layout.local_shape or (starts and tuple(chunk.offsets) != starts[0]):
        raise Unsupported(
            f"torch {torch.__version__} cuts a DTensor of shape {tuple(tensor.shape)}, placed as"
            f" {tuple(tensor.placements)}, in a way that is not known here: update holdfast, or save its full_tensor()"
        )
