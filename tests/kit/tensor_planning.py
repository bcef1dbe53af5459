"""Sources of tensors as a save makes them, for tests that need no tree."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from holdfast.errors import Unsupported
from holdfast.tensors.sources import SourcePlan, TensorSource


def plan_sources(tensors: Sequence[tuple[str, torch.Tensor]]) -> list[TensorSource]:
    """Return a source for each named ordinary tensor."""
    plan = SourcePlan()
    for name, tensor in tensors:
        try:
            plan.add(name, tensor)
        except Unsupported as error:
            raise Unsupported(f"{name}: {error}") from error
    return list(plan.make())
