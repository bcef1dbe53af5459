"""A store in memory, tensors and a way to compare whole trees, for the tests of loading into what is there."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from holdfast.errors import Mismatch
from holdfast.store import Store
from tests.kit.tensors import raw_bytes


def noise(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def problems_of(store: Store, saved: object, target: object, **options: Any) -> list[str]:
    """Return what does not fit, having made sure that the target was left alone."""
    store.save("x", saved, overwrite=True)
    before = repr(bytes_of(target))
    with pytest.raises(Mismatch, match="'x' does not fit; nothing was changed:") as caught:
        store.load_into("x", target, **options)
    assert repr(bytes_of(target)) == before
    return list(caught.value.problems)


def bytes_of(value: Any) -> Any:
    """Return a tree with bytes in the place of tensors."""
    if isinstance(value, torch.Tensor):
        return "meta" if value.is_meta else raw_bytes(value) if value.layout == torch.strided else str(value)
    if isinstance(value, torch.nn.Module | torch.optim.Optimizer):
        return bytes_of(value.state_dict())
    if isinstance(value, dict):
        return {key: bytes_of(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [bytes_of(item) for item in value]
    return value
