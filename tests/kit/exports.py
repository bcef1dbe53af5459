"""States to export, and comparisons of what other libraries read back."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from holdfast.formats.receipt import Receipt
from holdfast.repo.format.layout import PACKS
from tests.kit.cells import digest_tensor


def make_state(seed: int = 0) -> dict[str, Any]:
    """Return a training state: a model with tied and strided tensors, an optimizer, plain values."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(24, 40), torch.nn.Linear(40, 8))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 24)).sum().backward()
    optimizer.step()
    embedding = torch.randn(50, 16)
    weights: dict[str, Any] = dict(model.state_dict())
    weights |= {"embed.weight": embedding, "head.weight": embedding, "mask": torch.tensor([True, False])}
    weights |= {"half": torch.randn(33).half(), "turned": torch.randn(12, 7).t(), "scale": torch.tensor(2.5)}
    weights |= {"empty": torch.empty(0, 3), "count": torch.arange(9), "spread": torch.randn(5, 1).expand(5, 4)}
    return {"model": weights, "optimizer": optimizer.state_dict(), "step": 7, "note": "a note", "rates": [0.1, 0.2]}


def read_bytes(tensor: torch.Tensor) -> bytes:
    """Return the items of a tensor in C order."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return bytes(flat.view(torch.uint8).numpy().tobytes()) if flat.numel() else b""


def assert_same(found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Assert that two flat mappings have the same tensors, bit for bit."""
    assert sorted(found) == sorted(expected)
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert read_bytes(found[name]) == read_bytes(tensor), name


def assert_proved(receipt: Receipt, found: Mapping[str, Any]) -> None:
    """Assert that the digests of a receipt are those of the tensors that were read back, by their names in files."""
    assert {tensor.name_in_files for tensor in receipt.tensors} == set(found)
    for tensor in receipt.tensors:
        read = found[tensor.name_in_files]
        assert tensor.result.digest == digest_tensor(read), tensor.name
        assert tensor.result.shape == tuple(read.shape)
        assert f"torch.{tensor.result.dtype}" == str(read.dtype)


def damage_packs(store: Path) -> None:
    """Flip a bit in the middle of every pack of the store at a path."""
    for path in (store / PACKS).rglob("*"):
        if path.is_file():
            path.chmod(0o600)
            data = bytearray(path.read_bytes())
            data[len(data) // 2] ^= 1
            path.write_bytes(data)
