"""Training by one process, and by ranks that share the parameters; in a module of its own, for ranks import it."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import holdfast

STEPS = 2


def make_model(*, fault: float = 0.0) -> nn.Sequential:
    """Return a small model, the same each time but for one weight."""
    torch.manual_seed(0)
    last = nn.Linear(9, 5)
    model = nn.Sequential(nn.Linear(6, 9), nn.GELU(), last)
    with torch.no_grad():
        last.weight[3, 4] += fault
    return model


def train(store: holdfast.Store, name: str, model: nn.Module) -> None:
    """Record a few steps; every rank has the same batches."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batches = torch.randn(STEPS, 4, 6, generator=torch.Generator().manual_seed(1))
    with store.record(name, model, optimizer, level="full"):
        for batch in batches:
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()


def train_sharded(rank: int, path: str, name: str, fault: float) -> None:
    """Train with parameters that all ranks share by rows."""
    torch.set_num_threads(1)
    model = make_model(fault=fault)
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    train(holdfast.open(path), name, model)
