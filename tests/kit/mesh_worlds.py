"""Worlds of ranks that are only claimed to exist: one process is one rank after the other, and nobody answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch._dynamo  # torch does so when it first cuts a DTensor, and no test should pay for it
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore


@contextmanager
def be_rank(rank: int, world_size: int) -> Iterator[None]:
    """Be one rank of a world in which collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def make_mesh(shape: tuple[int, ...], *, names: tuple[str, ...] | None = None, first_rank: int = 0) -> DeviceMesh:
    """Return a mesh of ranks in order, without the groups that collectives would need."""
    ranks = torch.arange(first_rank, first_rank + int(torch.Size(shape).numel())).reshape(shape)
    return DeviceMesh("cpu", ranks, mesh_dim_names=names, _init_backend=False)


def cut_local(full: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Any]) -> torch.Tensor:
    """Return what this rank gets of a tensor, cut as torch cuts it: axis by axis, with its own placements."""
    local = full
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    for axis, placement in enumerate(placements):
        if not placement.is_replicate():
            parts, _ = placement._split_tensor(local, mesh.size(axis), with_padding=False)
            local = parts[coordinate[axis]]
    return local.clone()


def distribute(full: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Any]) -> DTensor:
    """Return this rank's DTensor of a tensor that it has all of."""
    local = cut_local(full, mesh, placements)
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=full.shape, stride=full.stride())
