"""Trains a tiny FSDP2 model with the parts of TorchTitan that its checkpoint manager saves; a script to be killed.

TorchTitan's own trainer needs CUDA and Triton. Everything that it passes to the manager is real here: optimizers,
schedules, loader; the trainer itself is replaced by `Training`.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw

from holdfast.integrations.torchtitan import HoldfastCheckpointManager

STEPS = 8


class Numbers(torch.utils.data.IterableDataset[torch.Tensor]):
    """Random numbers that depend on the rank and the position only; the position is part of its state."""

    def __init__(self, rank: int) -> None:
        self._rank, self._position = rank, 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            self._position += 1
            generator = torch.Generator().manual_seed(1000 * self._rank + self._position)
            yield torch.randn(4, generator=generator)

    def state_dict(self) -> dict[str, int]:
        return {"position": self._position}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self._position = state_dict["position"]


class Training:
    """What TorchTitan's trainer has and does: it is a state itself."""

    def __init__(self, folder: Path, *, sd_adapter: Any = None, **options: Any) -> None:
        torch.manual_seed(0)
        self.step = 0
        net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
        self.model: Any = fully_shard(net) if dist.is_initialized() else net
        rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        optimizer = default_adamw(lr=0.01)
        optimizer.implementation = "for-loop"
        self.optimizers = optimizer.build(model_parts=[self.model])
        schedule = LRSchedulersContainer.Config(warmup_steps=2, decay_ratio=0.8)
        self.schedules = schedule.build(optimizers=self.optimizers, training_steps=STEPS)
        self.loader = ParallelAwareDataloader(Numbers(rank), rank, world_size, batch_size=2)
        chosen = {"enable": True, "interval": 2, "last_save_model_only": False, **options}
        self.checkpointer = HoldfastCheckpointManager.Config(**chosen).build(
            dataloader=self.loader,
            model_parts=[self.model],
            optimizers=self.optimizers,
            lr_schedulers=self.schedules,
            states={"train_state": self},
            sd_adapter=sd_adapter,
            base_folder=str(folder),
        )

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.step = state_dict["step"]

    def train(self, steps: int = STEPS, *, kill_at: int = -1) -> None:
        """Do what the trainer does: load, then train, and save after each step."""
        self.checkpointer.load()
        batches = iter(self.loader)
        while self.step < steps:
            if self.step == kill_at and (not dist.is_initialized() or dist.get_rank() == dist.get_world_size() - 1):
                os.kill(os.getpid(), signal.SIGKILL)
            self.step += 1
            self.optimizers.zero_grad()
            self.model(next(batches)).square().mean().backward()
            self.checkpointer.maybe_wait_for_staging()
            self.optimizers.step()
            self.schedules.step()
            self.checkpointer.save(self.step, last_step=self.step == steps)
        self.checkpointer.close()

    def digest(self) -> str:
        """Return a digest of this rank's weights and optimizer."""
        found = hashlib.sha256(repr(self.schedules.state_dict()).encode())
        for name, value in sorted({**self.model.state_dict(), **self.optimizers.state_dict()}.items()):
            local = value.to_local() if hasattr(value, "to_local") else value
            found.update(name.encode() + (local.numpy().tobytes() if torch.is_tensor(local) else repr(local).encode()))
        return found.hexdigest()


def main() -> None:
    """Train, resume or be killed, as the command line says; write the digest of each rank's result to a file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kill-at", type=int, default=-1)
    parser.add_argument("--exclude", nargs="*", default=[])
    options = parser.parse_args()
    dist.init_process_group("gloo")
    training = Training(options.folder, exclude_from_loading=options.exclude)
    training.train(kill_at=options.kill_at)
    (options.folder / f"result-{dist.get_rank()}").write_text(training.digest())
    sys.stdout.write(f"trained {training.step} steps\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
