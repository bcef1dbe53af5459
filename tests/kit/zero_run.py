"""Trains a tiny model by DeepSpeed's ZeRO on the CPU and saves it; one process for each rank, started by a test."""

from __future__ import annotations

import os
import sys
from typing import Any


def run(folder: str, stage: int, rank: int, ranks: int, port: str) -> None:
    """Save a ZeRO checkpoint to `folder`, and on rank 0 the weights that DeepSpeed itself restores from it."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank), DS_ACCELERATOR="cpu")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    import deepspeed
    import deepspeed.ops
    import torch
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    # Otherwise DeepSpeed compiles an operator in C++, which takes minutes.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo")
    torch.manual_seed(0)
    model: Any = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.ReLU(), torch.nn.Linear(5, 3))
    model.register_buffer("count", torch.arange(3.0))
    model[2].bias.requires_grad = False
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=0.01)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage},
        "zero_force_ds_cpu_optimizer": False,
    }
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
    for _ in range(2):
        engine.backward(engine(torch.randn(2, 7).bfloat16()).float().sum())
        engine.step()
    engine.save_checkpoint(folder)
    if rank == 0:
        torch.save(dict(get_fp32_state_dict_from_zero_checkpoint(folder)), f"{folder}.pt")


if __name__ == "__main__":
    run(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
