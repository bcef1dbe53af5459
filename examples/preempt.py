"""Train on a preemptible machine: on SIGTERM, finish the step, save and exit; started again, resume.

python examples/preempt.py STORE --steps 500 --save-every 50 &
kill %1
python examples/preempt.py STORE --steps 500 --save-every 50
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import holdfast
from holdfast.checkpointing import CheckpointManager

RUN: Final = "run/"


class Training:
    """Model, optimizer and data; `state` contains everything that a resumed run needs."""

    def __init__(self, *, num_steps: int) -> None:
        """Create everything from scratch, with the same values each time."""
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)
        inputs = torch.randn(1000, 32)
        data = TensorDataset(inputs, inputs.square().sum(dim=1, keepdim=True).sqrt())
        self.model = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=num_steps)
        self.sampler = holdfast.ResumableSampler(len(data), batch_size=32, drop_last=True)
        # A loader draws a random number when it starts; its own generator keeps that from advancing the global RNG.
        self.loader = DataLoader(data, batch_sampler=self.sampler, generator=torch.Generator())
        self.state = {
            "model": self.model,
            "optimizer": self.optimizer,
            "schedule": self.schedule,
            "sampler": self.sampler,
            "rng": holdfast.RngState(),
        }

    @property
    def step(self) -> int:
        """The number of completed steps, as counted by the sampler."""
        return self.sampler.epoch * len(self.sampler) + self.sampler.position

    def learn(self, inputs: Tensor, wanted: Tensor) -> float:
        """Do one step and return its loss."""
        loss = nn.functional.mse_loss(self.model(inputs), wanted)
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self.optimizer.step()
        self.schedule.step()
        self.sampler.advance()
        return float(loss.item())


def train(training: Training, manager: CheckpointManager, *, num_steps: int) -> None:
    """Train until all steps are done or the process was told to stop; the last step is saved before this returns."""
    while training.step < num_steps:
        for inputs, wanted in training.loader:
            loss = training.learn(inputs, wanted)
            print(f"step {training.step} loss {loss!r}", flush=True)
            manager.step(training.step, training.state, force=training.step == num_steps)
            if manager.should_stop or training.step == num_steps:
                return


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, or resume training."""
    parser = argparse.ArgumentParser(description="Train; on SIGTERM save and exit; started again, resume.")
    parser.add_argument("store", help="path or URL of the store")
    parser.add_argument("--steps", type=int, default=500, help="train up to this step")
    parser.add_argument("--save-every", type=int, default=50, help="save in the background every this many steps")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    training = Training(num_steps=options.steps)
    with holdfast.open(options.store) as store, store.manager(RUN, every=options.save_every) as manager:
        resumed = manager.resume(training.state)
        if resumed is not None:
            print(f"resumed from {RUN}step-{resumed}", flush=True)
        train(training, manager, num_steps=options.steps)
        manager.wait()
        if manager.last is not None:
            print(f"saved {manager.last.name}", flush=True)


if __name__ == "__main__":
    main()
