"""Copies state dicts for asynchronous saves, including what torch's blocking stager does not copy."""

from __future__ import annotations

import copy
import io
from typing import Any

import torch
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.tensor import DTensor

from holdfast.trees.apply import apply_to_tensors


def stage_state(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of a state dict on the CPU; training may continue to change the original."""
    staged: dict[str, Any] = BlockingAsyncStager().stage(apply_to_tensors(_copy_if_shared, state_dict))
    copied: dict[str, Any] = _copy_streams(staged)
    return copied


def _copy_streams(staged: Any) -> Any:
    """Return a staged state dict with its BytesIO objects copied, because torch's stager does not copy them."""
    if type(staged) is io.BytesIO:
        return copy.copy(staged)
    if isinstance(staged, dict):
        return {key: _copy_streams(value) for key, value in staged.items()}
    if type(staged) in (list, tuple):
        return type(staged)(_copy_streams(value) for value in staged)
    return staged


def _copy_if_shared(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of a DTensor without dims, because torch's stager does not copy it; else the tensor itself."""
    return copy.deepcopy(tensor) if isinstance(tensor, DTensor) and tensor.dim() == 0 else tensor
