"""A tree with tensors of all kinds on a device, and how to tell whether another holds the same."""

from __future__ import annotations

from typing import Any, Final

import torch

from holdfast.trees.apply import iter_tensors
from tests.kit.tensors import assert_same_tensor

CPU: Final = torch.device("cpu")
OTHERS: Final = ("mixed.host", "rng.torch")
"""What is on the CPU, and stays there when it is loaded to where it was."""


def make_tree(device: torch.device) -> dict[str, Any]:
    """Make a tree with tensors of all kinds on the device, some on the CPU, and some values."""
    base = torch.arange(24, dtype=torch.float32).to(device)
    tied = torch.randn(3, 5).to(device)
    apart = torch.arange(64, dtype=torch.int16).reshape(8, 8).to(device)
    return {
        "contiguous": torch.randn(4, 6).to(device),
        "transposed": torch.randn(4, 6).to(device).t(),
        "channels_last": torch.randn(2, 3, 4, 5).to(device).to(memory_format=torch.channels_last),
        "views": {"base": base, "head": base[:7], "rows": base.view(4, 6)[1:3], "columns": base.view(4, 6)[:, 2]},
        "apart": apart[::2, 1:3],
        "tied": [tied, tied],
        "twins": [tied.view(5, 3), tied[1]],
        "expanded": torch.randn(3, 1).to(device).expand(3, 4),
        "parameter": torch.nn.Parameter(torch.randn(3).to(device)),
        "frozen": torch.nn.Parameter(torch.randn(3).to(device), requires_grad=False),
        "bf16": torch.randn(5, 3).bfloat16().to(device),
        "int8": torch.randint(-128, 127, (7,), dtype=torch.int8).to(device),
        "bool": torch.tensor([True, False]).to(device),
        "conj": torch.randn(3, dtype=torch.complex64).to(device).conj(),
        "fp8": torch.randn(4).to(torch.float8_e4m3fn).to(device),
        "scalar": torch.tensor(2.5).to(device),
        "empty": torch.empty(0, 3).to(device),
        "large": torch.randn(700, 1000).to(device),
        "mixed": {"host": torch.randn(3), "step": 7, "name": "run"},
        "rng": {"torch": torch.get_rng_state()},
    }


def tensors_of(tree: object) -> dict[str, torch.Tensor]:
    return {".".join(map(str, path)): tensor for path, tensor in iter_tensors(tree)}


def assert_same_tree(found: object, wanted: object) -> None:
    """Fail unless all tensors are the same, wherever they are, and share their memory in the same way."""
    held, meant = tensors_of(found), tensors_of(wanted)
    assert held.keys() == meant.keys()
    for name, tensor in held.items():
        assert_same_tensor(to_host(tensor), to_host(meant[name]))
    assert sharing_of(held) == sharing_of(meant)


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor that is all that this one is, but on the CPU."""
    if tensor.device == CPU:
        return tensor
    span = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    memory = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    count = span if tensor.numel() else 0
    memory = memory.set_(tensor.untyped_storage(), tensor.storage_offset(), (count,), (1,)).cpu()
    found = torch.empty(0, dtype=tensor.dtype).set_(memory.untyped_storage(), 0, tuple(tensor.shape), tensor.stride())
    found = found.conj() if tensor.is_conj() else found
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(found, requires_grad=tensor.requires_grad)
    return found.requires_grad_(tensor.requires_grad)


def sharing_of(tensors: dict[str, torch.Tensor]) -> dict[str, list[str]]:
    """Return with whom each tensor shares its storage, if it has any bytes."""
    groups: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        if tensor.numel():
            groups.setdefault(tensor.untyped_storage()._cdata, []).append(name)
    return {name: names for names in groups.values() for name in names}


def devices_of(tree: object) -> dict[torch.device, list[str]]:
    found: dict[torch.device, list[str]] = {}
    for name, tensor in tensors_of(tree).items():
        found.setdefault(tensor.device, []).append(name)
    return found
