"""State dicts for tests of torch.distributed.checkpoint in one process, and how they are saved and compared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException

from holdfast.dcp import StorageWriter
from tests.distributed.dcp_states import dcp
from tests.kit.tensors import raw_bytes


class Odd:
    """What no weights-only loader accepts."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Odd)


def make_state(seed: int = 0) -> dict[str, Any]:
    torch.manual_seed(seed)
    return {
        "model": {
            "weight": torch.randn(600, 500),
            "bias": torch.randn(5),
            "half": torch.randn(3, 4).bfloat16(),
            "scalar": torch.tensor(3.5),
            "empty": torch.empty(0, 4),
            "flags": torch.tensor([True, False]),
            "moved": torch.randn(6, 4).t(),
        },
        "groups": [{"lr": 0.1, "betas": (0.9, 0.99)}, {"lr": 0.2, "betas": (0.8, 0.88)}],
        "steps": [torch.ones(2), torch.zeros(3)],
        "names": ["a", "b"],
        "step": 7,
    }


def blank(value: Any) -> Any:
    """Return a state like this one, with other values in it."""
    if isinstance(value, dict):
        return {key: blank(item) for key, item in value.items()}
    if isinstance(value, torch.Tensor):
        return torch.full_like(value, 1)
    if isinstance(value, list) and not all(isinstance(item, str) for item in value):
        return [blank(item) for item in value]
    return None


def are_same(left: Any, right: Any) -> bool:
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(are_same(left[key], right[key]) for key in left)
    if isinstance(left, list):
        return len(left) == len(right) and all(map(are_same, left, right))
    if isinstance(left, torch.Tensor):
        return (
            left.dtype == right.dtype
            and left.shape == right.shape
            and raw_bytes(left.contiguous()) == raw_bytes(right.contiguous())
        )
    return type(left) is type(right) and bool(left == right)


def save(store: Any, name: str, state: dict[str, Any], **options: Any) -> StorageWriter:
    writer = StorageWriter(store, name, **options)
    dcp.save(state, storage_writer=writer)
    return writer


def failure(act: Callable[[], object]) -> BaseException:
    """Return what one rank raised in a checkpoint that failed."""
    with pytest.raises(CheckpointException) as caught:
        act()
    (error, _), *_ = caught.value.failures.values()
    return error
