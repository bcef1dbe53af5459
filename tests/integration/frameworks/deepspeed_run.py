"""Trains a tiny model with DeepSpeed on the CPU; a script, so that tests can kill it."""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
import sys
from pathlib import Path
from typing import Any

import deepspeed
import deepspeed.ops
import torch

import holdfast
from holdfast.integrations.deepspeed import HoldfastCheckpointEngine

STEPS = 8


def make_engine(stage: int) -> Any:
    """Return an engine for a tiny model, with a schedule.

    Two ranks divide each parameter evenly: what DeepSpeed adds to others is not initialised, and differs between runs.
    """
    # Otherwise DeepSpeed compiles an operator in C++, which takes minutes.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage},
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": stage > 0},
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    return deepspeed.initialize(model=model, optimizer=optimizer, lr_scheduler=schedule, config=config)[0]


def train_step(engine: Any, step: int) -> None:
    """Train on data that depends on the step and the rank only."""
    generator = torch.Generator().manual_seed(1000 * engine.global_rank + step)
    data = torch.randn(2, 6, generator=generator).to(next(engine.module.parameters()).dtype)
    engine.backward(engine(data).float().square().mean())
    engine.step()


def digest(engine: Any) -> str:
    """Return a digest of weights, optimizer and schedule of this rank."""
    found = hashlib.sha256()

    def add(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            found.update(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(value, dict):
            for key, item in value.items():
                found.update(str(key).encode())
                add(item)
        elif isinstance(value, list | tuple):
            for item in value:
                add(item)
        elif isinstance(value, int | float | str | None):
            found.update(repr(value).encode())

    add([engine.module.state_dict(), engine.optimizer.state_dict(), engine.lr_scheduler.state_dict()])
    return found.hexdigest()


def main() -> None:
    """Train, resume or be killed, as the command line says; write the digest of each rank's result to a file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--stage", type=int, default=1)
    parser.add_argument("--kill", choices=["in training", "in a save"])
    options = parser.parse_args()
    engine = make_engine(options.stage)
    engine.checkpoint_engine = HoldfastCheckpointEngine(holdfast.open(options.folder / "store"), "run/")
    engine.load_checkpoint(options.folder / "out")
    is_victim = engine.global_rank == engine.world_size - 1
    for step in range(engine.global_steps, STEPS):
        if options.kill == "in training" and step == 5 and is_victim:
            os.kill(os.getpid(), signal.SIGKILL)
        train_step(engine, step)
        if options.kill == "in a save" and step == 3 and is_victim:
            engine.checkpoint_engine.commit = lambda info: os.kill(os.getpid(), signal.SIGKILL)
        if step % 2:
            engine.save_checkpoint(options.folder / "out")
    (options.folder / f"result-{engine.global_rank}").write_text(digest(engine))
    sys.stdout.write(f"trained {engine.global_steps} steps\n")


if __name__ == "__main__":
    main()
