"""Trees of tensors in every placement over the ranks of a world; each rank makes its part without communication."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from tests.kit.capabilities import is_able


@dataclass(frozen=True, slots=True)
class Layout:
    """How a tensor is placed: over the axes of a mesh, or not at all."""

    name: str
    placements: tuple[Placement, ...] = ()

    def fits(self, tensor: torch.Tensor) -> bool:
        """Tell whether a tensor has the dims that this cuts."""
        cuts = (placement for placement in self.placements if isinstance(placement, Shard | _StridedShard))
        return all(tensor.dim() > placement.dim for placement in cuts)


def _strided(dim: int) -> Placement:
    # A torch that cannot place all of these tensors like this places none of them like this.
    can_cut = is_able("locate a part that _StridedShard cuts without Shard")
    return _StridedShard(dim, split_factor=2) if can_cut else Shard(dim)


LAYOUTS: Final = (
    Layout("plain"),
    Layout("replicate", (Replicate(),)),
    Layout("rows", (Shard(0),)),
    Layout("columns", (Shard(1),)),
    Layout("depth", (Shard(2),)),
    Layout("rows and columns", (Shard(0), Shard(1))),
    Layout("columns and rows", (Shard(1), Shard(0))),
    Layout("hybrid", (Replicate(), Shard(0))),
    Layout("hybrid columns", (Shard(1), Replicate())),
    Layout("rows of rows", (Shard(0), Shard(0))),
    Layout("strided", (_strided(0), Shard(0))),
    Layout("strided columns", (_strided(1), Shard(1))),
)


def make_full() -> dict[str, torch.Tensor]:
    """Return the tensors that are placed: the same in every process."""
    random = torch.Generator().manual_seed(7)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random)

    return {
        "uneven": noise(7, 5),
        "few rows": noise(2, 6),
        "line": noise(11),
        "short line": noise(2),
        "cube": noise(5, 3, 4),
        "scalar": noise(),
        "nothing": noise(4, 0),
        "bfloat16": noise(9, 4).to(torch.bfloat16),
        "float8": noise(6, 3).to(torch.float8_e4m3fn),
        "bool": noise(5, 5) > 0,
        "complex": torch.view_as_complex(noise(4, 4, 2)),
        # More than a chunk, whose edges are no edges of rows that ranks have.
        "large": noise(1300, 257),
    }


class Meshes:
    """The meshes of a world: one for each number of axes. All ranks make them in the same order."""

    def __init__(self) -> None:
        # The ranks of a test share the cores; threads of each would only be in the way of those of the others.
        torch.set_num_threads(1)
        size = dist.get_world_size()
        inner = 2 if size % 2 == 0 else 1
        self._by_axes = {
            1: DeviceMesh("cpu", torch.arange(size)),
            2: DeviceMesh("cpu", torch.arange(size).reshape(size // inner, inner)),
        }

    def place(self, full: torch.Tensor, layout: Layout) -> torch.Tensor:
        """Return a rank's view of a tensor, cut as torch cuts it."""
        if not layout.placements:
            return full.clone()
        mesh = self._by_axes[len(layout.placements)]
        return place(full, mesh, layout.placements)


def place(full: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """Return a DTensor whose local part is cut out of `full`, here and without asking anybody."""
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, "this rank belongs to the mesh"
    local = full
    for axis, placement in enumerate(placements):
        if isinstance(placement, Shard | _StridedShard):
            parts, _ = placement._split_tensor(local, mesh.size(axis), with_padding=False, contiguous=True)
            local = parts[coordinate[axis]]
    return DTensor.from_local(local.clone(), mesh, placements, run_check=False, shape=full.shape, stride=full.stride())


def list_cases() -> dict[str, tuple[str, Layout]]:
    """Return every tensor in every layout that it can have, by name."""
    return {
        f"{name}, {layout.name}": (name, layout)
        for name, full in make_full().items()
        for layout in LAYOUTS
        if layout.fits(full)
    }


def make_tree(meshes: Meshes, *, shift: int = 0, zero: bool = False) -> dict[str, torch.Tensor]:
    """Return all cases as this rank sees them; with a shift, each in the layout of another case of its tensor."""
    full = make_full()
    ways = {name: [layout for layout in LAYOUTS if layout.fits(tensor)] for name, tensor in full.items()}
    tree = {}
    for case, (name, layout) in list_cases().items():
        own = ways[name]
        other = own[(own.index(layout) + shift) % len(own)]
        tree[case] = meshes.place(torch.zeros_like(full[name]) if zero else full[name], other)
    return tree


def read_bytes(tensor: torch.Tensor) -> bytes:
    """Return the bytes of what this rank holds."""
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return bytes(local.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)


def find_differences(tree: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> list[str]:
    """Return the names of the leaves whose bytes, dtype or shape differ."""

    def look(tensor: Any) -> tuple[object, ...]:
        return tensor.dtype, tuple(tensor.shape), read_bytes(tensor)

    return [name for name in expected if look(tree[name]) != look(expected[name])]
