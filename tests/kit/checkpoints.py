"""Checkpoints of other libraries, written by those libraries, and how tests compare what comes back."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from holdfast.formats.receipt import Receipt
from tests.kit.cells import digest_tensor
from tests.kit.dcp_calls import ALONE


def make_state() -> dict[str, torch.Tensor]:
    """Return a flat state dict: several dtypes, an empty tensor, a scalar, and one of several chunks."""
    generator = torch.Generator().manual_seed(3)
    return {
        "encoder.weight": torch.randn(700, 900, generator=generator),
        "encoder.bias": torch.randn(900, generator=generator).to(torch.bfloat16),
        "head.scale": torch.tensor(2.5, dtype=torch.float64),
        "head.codes": torch.arange(37, dtype=torch.uint8),
        "head.empty": torch.empty(0, 4),
        "head.mask": torch.tensor([True, False]),
    }


def save_dcp(state: dict[str, Any], folder: Path) -> None:
    """Save by torch.distributed.checkpoint from one process, which it warns of."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save(state, checkpoint_id=str(folder), **ALONE)


def read_raw(tensor: torch.Tensor) -> bytes:
    """Return the items of a tensor in C order."""
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def digest_raw(tensor: torch.Tensor) -> bytes:
    """Return what a receipt must state for a tensor."""
    return digest_tensor(tensor)


def assert_same(found: Any, expected: Any) -> None:
    """Assert that two trees are equal: classes, keys, dtypes, shapes, strides and bits."""
    assert type(found) is type(expected)
    if isinstance(expected, dict):
        assert list(found) == list(expected)
        for key in expected:
            assert_same(found[key], expected[key])
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    elif isinstance(expected, torch.Tensor):
        assert (found.dtype, found.shape, found.stride()) == (expected.dtype, expected.shape, expected.stride())
        assert found.requires_grad == expected.requires_grad
        assert read_raw(found) == read_raw(expected)
    else:
        assert found == expected


def assert_receipt_fits(receipt: Receipt, tensors: dict[str, torch.Tensor]) -> None:
    """Assert that a receipt has exactly these tensors, by name in the snapshot, with their digests."""
    assert {each.name for each in receipt.tensors} == set(tensors)
    for each in receipt.tensors:
        tensor = tensors[each.name]
        assert each.result.digest == digest_raw(tensor), each.name
        assert each.result.shape == tuple(tensor.shape)
        assert f"torch.{each.result.dtype}" == str(tensor.dtype)


def save_sharded_dcp(rank: int, folder: str) -> None:
    """Save DTensors by torch.distributed.checkpoint, on each of the ranks that call this together."""
    ranks = torch.distributed.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,))
    whole = torch.arange(1000 * 601, dtype=torch.float32).view(1000, 601)
    state = {
        "rows": distribute_tensor(whole, mesh, [Shard(0)]),
        "columns": distribute_tensor(whole, mesh, [Shard(1)]),
        "replica": distribute_tensor(whole[:3], mesh, [Replicate()]),
    }
    save({"model": state, "rank": rank // ranks}, checkpoint_id=folder)
