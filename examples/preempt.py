"""Train on a preemptible machine: on SIGTERM, finish the step, save and exit; started again, resume.

python examples/preempt.py STORE --steps 500 --save-every 50 &
kill %1
python examples/preempt.py STORE --steps 500 --save-every 50
"""

from __future__ import annotations

import argparse
import random
import signal
from collections.abc import Sequence
from types import FrameType
from typing import Final

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import holdfast

RUN: Final = "run/"


class Notice:
    """The notice of preemption, which the training loop checks between steps."""

    def __init__(self) -> None:
        """Install a handler for SIGTERM, which schedulers send some seconds before SIGKILL."""
        self.is_given = False
        signal.signal(signal.SIGTERM, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        # Nothing else: a signal may come in the middle of a step, when the state is neither old nor new.
        self.is_given = True


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


def train(training: Training, store: holdfast.Store, notice: Notice, *, num_steps: int, save_every: int) -> None:
    """Train until all steps are done or the notice is given, then save the state."""
    while training.step < num_steps:
        for inputs, wanted in training.loader:
            loss = training.learn(inputs, wanted)
            print(f"step {training.step} loss {loss!r}", flush=True)
            name = f"{RUN}step-{training.step}"
            if notice.is_given or training.step == num_steps:
                # Not in the background: once this returns, the machine may be taken away.
                store.save(name, training.state)
                print(f"saved {name}", flush=True)
                return
            if training.step % save_every == 0:
                store.save_async(name, training.state)


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, or resume training."""
    notice = Notice()
    parser = argparse.ArgumentParser(description="Train; on SIGTERM save and exit; started again, resume.")
    parser.add_argument("store", help="path or URL of the store")
    parser.add_argument("--steps", type=int, default=500, help="train up to this step")
    parser.add_argument("--save-every", type=int, default=50, help="save in the background every this many steps")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    training = Training(num_steps=options.steps)
    with holdfast.open(options.store) as store:
        latest = store.latest(RUN)
        if latest is not None:
            store.load_into(latest, training.state)
            print(f"resumed from {latest.name}", flush=True)
        train(training, store, notice, num_steps=options.steps, save_every=options.save_every)


if __name__ == "__main__":
    main()
