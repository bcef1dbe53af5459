"""The role of a tensor in its module: a parameter, a buffer, or neither."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal

import torch

TensorRole = Literal["tensor", "parameter", "buffer", "passing buffer"]
"""A "passing buffer" is a buffer that is not persistent."""

ROLES: Final[Mapping[str, TensorRole]] = {
    "tensor": "tensor",
    "parameter": "parameter",
    "buffer": "buffer",
    "passing buffer": "passing buffer",
}


def find_role(tensor: torch.Tensor) -> TensorRole:
    """Return the role of a tensor."""
    # torch marks tensors by these attributes. Reading `__dict__` would create a dict for every tensor of the caller.
    if type(tensor) is torch.Tensor and not (hasattr(tensor, "_is_param") or hasattr(tensor, "_is_buffer")):
        return "tensor"
    if isinstance(tensor, torch.nn.Parameter):
        return "parameter"
    if isinstance(tensor, torch.nn.Buffer):
        return "buffer" if getattr(tensor, "persistent", True) else "passing buffer"
    return "tensor"


def give_role(tensor: torch.Tensor, role: TensorRole, *, requires_grad: bool) -> torch.Tensor:
    """Return `tensor` with that role; raises RuntimeError if its dtype cannot require a gradient."""
    if role == "parameter":
        return torch.nn.Parameter(tensor, requires_grad=requires_grad)
    if role != "tensor":
        tensor = torch.nn.Buffer(tensor, persistent=role == "buffer")
    return tensor.requires_grad_(requires_grad)
