"""FSDP2 as Accelerate prepares it, on a CPU."""

from __future__ import annotations

from typing import Any

from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin


def choose_fsdp2(accelerator: Any) -> None:
    """Make an accelerator prepare its models by FSDP2; on a CPU, Accelerate itself would use DDP whatever is asked."""
    accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="NO_WRAP")


def is_sharded(model: Any) -> bool:
    """Return whether the parameters of a model are sharded."""
    return all(type(each).__name__ == "DTensor" for each in model.parameters())
