"""Small training runs for tests: the same model, data and order of batches on any number of ranks."""

from __future__ import annotations

from typing import Any, Final, Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

Kind = Literal["plain", "ddp", "fsdp"]
BATCH: Final = 6
"""A multiple of 1, 2 and 3: each rank takes an equal share."""


def new_model(seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.nn.Sequential:
    """Return a model whose layers cannot be cut evenly: 7 rows, 5 rows, and one that no rank but the first has."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        layers = [torch.nn.Linear(4, 7), torch.nn.Tanh(), torch.nn.Linear(7, 5), torch.nn.Linear(5, 1)]
        return torch.nn.Sequential(*layers).to(dtype)


def wrap(model: torch.nn.Sequential, kind: Kind) -> torch.nn.Module:
    """Return a model as one kind of run has it."""
    if kind == "ddp":
        return torch.nn.parallel.DistributedDataParallel(model)
    if kind == "fsdp":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        fully_shard(model[0], mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model


def batch(step: int) -> torch.Tensor:
    """Return the batch of a step, of all ranks together."""
    return torch.randn(BATCH, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(step))


def train(model: torch.nn.Module, optimizer: Any, steps: range, kind: Kind) -> list[float]:
    """Train on this rank's share of each batch; return the loss of each batch as a whole, before its step."""
    size, rank = (dist.get_world_size(), dist.get_rank()) if kind != "plain" else (1, 0)
    losses = []
    for step in steps:
        share = batch(step).chunk(size)[rank]
        optimizer.zero_grad()
        loss = (model(share) - share.sum(1, keepdim=True)).square().mean()
        torch.autograd.backward(loss)
        optimizer.step()
        whole = loss.detach().clone()
        if size > 1:
            dist.all_reduce(whole)
        losses.append(float(whole) / size)
    return losses


def whole(value: Any) -> Any:
    """Return a state with every tensor in one piece, as plain numbers; all ranks must call it."""
    if isinstance(value, dict):
        return {key: whole(item) for key, item in value.items()}
    if isinstance(value, list):
        return [whole(item) for item in value]
    if isinstance(value, torch.Tensor):
        full: Any = value.full_tensor() if hasattr(value, "full_tensor") else value
        return (str(full.dtype), full.tolist())
    return value
