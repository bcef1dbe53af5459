"""What each rank of a test with several runs; in a module of its own, for other processes import it."""

from __future__ import annotations

import torch
from torch.nn.parallel import DistributedDataParallel

from holdfast.capture.record.recorder import record
from holdfast.objects.local.local_store import LocalStore
from holdfast.repo.handle.repository import open_repository
from tests.kit.recorded_training import Block


def train_together(rank: int, root: str, steps: int) -> int:
    """Record a few steps of data-parallel training, each rank with a batch of its own."""
    torch.manual_seed(0)
    model = DistributedDataParallel(Block())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(rank)
    with record(open_repository(LocalStore(root), create=True), "run", model, optimizer):
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.randn(2, 4)).square().mean().backward()
            optimizer.step()
    return len(optimizer.param_groups)
