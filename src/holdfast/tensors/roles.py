"""What a tensor was to its module, which its bytes do not tell: a parameter, a buffer, or neither."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal

import torch

Role = Literal["tensor", "parameter", "buffer", "passing buffer"]
"""The last is a buffer that is not persistent."""

ROLES: Final[Mapping[str, Role]] = {
    "tensor": "tensor",
    "parameter": "parameter",
    "buffer": "buffer",
    "passing buffer": "passing buffer",
}


def find_role(tensor: torch.Tensor) -> Role:
    """Tell what a tensor is to its module."""
    # Torch marks tensors by these attributes. Asking for `__dict__` would give every tensor of the caller a dict.
    if type(tensor) is torch.Tensor and not (hasattr(tensor, "_is_param") or hasattr(tensor, "_is_buffer")):
        return "tensor"
    if isinstance(tensor, torch.nn.Parameter):
        return "parameter"
    if isinstance(tensor, torch.nn.Buffer):
        return "buffer" if getattr(tensor, "persistent", True) else "passing buffer"
    return "tensor"


def give_role(tensor: torch.Tensor, role: Role, *, requires_grad: bool) -> torch.Tensor:
    """Return `tensor` in that role; raises RuntimeError if its dtype cannot require a gradient."""
    if role == "parameter":
        return torch.nn.Parameter(tensor, requires_grad=requires_grad)
    if role != "tensor":
        tensor = torch.nn.Buffer(tensor, persistent=role == "buffer")
    return tensor.requires_grad_(requires_grad)
