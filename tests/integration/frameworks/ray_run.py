"""Trains a tiny model with Ray Train on two CPU workers; a script, because a Ray cluster belongs to its process."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path
from typing import Any

import ray
import ray.train
import ray.train.torch
import torch

import holdfast
from holdfast.integrations.ray import RayCheckpoints

STEPS = 8


def train(config: dict[str, Any]) -> None:
    """Train on data that depends on the step and the worker only; report each second step."""
    rank = ray.train.get_context().get_world_rank()
    torch.manual_seed(rank)
    net = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 3))
    model = ray.train.torch.prepare_model(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    state: dict[str, Any] = {"run": holdfast.training_state(model, optimizer), "step": 0}
    checkpoints = RayCheckpoints(state, async_=config["async_"])
    resumed = checkpoints.is_resumed
    while state["step"] < STEPS:
        if config["kill"] and not resumed and state["step"] == 5:
            ray.train.get_all_reported_checkpoints()  # returns when Ray knows the last one
            if rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        model(torch.randn(4, 6)).square().mean().backward()
        optimizer.step()
        state["step"] += 1
        if state["step"] % 2 == 0:
            checkpoints.report({"step": state["step"], "resumed": resumed})


def main() -> None:
    """Train as the command line says; print the last step, whether the run was resumed, and a digest."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kill", action="store_true")
    parser.add_argument("--foreground", action="store_true")
    options = parser.parse_args()
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    trainer = ray.train.torch.TorchTrainer(
        train,
        train_loop_config={"kill": options.kill, "async_": not options.foreground},
        scaling_config=ray.train.ScalingConfig(num_workers=2),
        run_config=ray.train.RunConfig(
            name="run",
            storage_path=str(options.folder),
            failure_config=ray.train.FailureConfig(max_failures=1),
            checkpoint_config=ray.train.CheckpointConfig(num_to_keep=2),
        ),
    )
    result = trainer.fit()
    loaded = torch.load(Path(result.checkpoint.path) / "state.pt")
    trained = {name: loaded["run"][name] for name in ("model", "optimizer")}
    digest = holdfast.open("memory://").save("result", trained).digest.hex()
    sys.stdout.write(f"{loaded['step']} {result.metrics['resumed']} {digest}\n")


if __name__ == "__main__":
    main()
