"""The generated state that benchmarks save and load: tensors of random bytes, and how a part of them changes."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import cycle
from random import Random
from typing import Final

import torch

from bench.kit.measure import Sizes, WrongResult, random_bytes

State = Mapping[str, torch.Tensor]

_KIB, _MIB, _GIB = 1 << 10, 1 << 20, 1 << 30
_LARGE_BYTES: Final = 16 * _MIB
_MIXED_BYTES: Final = (4 * _KIB, 32 * _MIB)
_SMALL_BYTES: Final = (4, 64, 1 * _KIB, 4 * _KIB)
_MIXED_DTYPES: Final = (torch.bfloat16, torch.float32, torch.int8)
_ROW_BYTES: Final = 8 * _KIB
_MEMCMP: Final = ctypes.CDLL(None).memcmp
_MEMCMP.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


@dataclass(frozen=True, slots=True)
class Shape:
    """The size of each tensor of a state in bytes, and the dtypes that are assigned in turn."""

    name: str
    sizes: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...] = (torch.float32,)

    @property
    def size_bytes(self) -> int:
        """The bytes of all tensors."""
        return sum(self.sizes)


def plan_large(sizes: Sizes) -> Shape:
    """Plan 128 fp32 tensors of 16 MiB, or fewer and smaller ones for a smaller run."""
    total = 2 * sizes.save_bytes
    count = max(4, total // _LARGE_BYTES)
    return Shape(f"{count} x {total // count / _MIB:g} MiB", (total // count,) * count)


def plan_mixed(sizes: Sizes) -> Shape:
    """Plan 2,000 tensors of 4 KiB to 32 MiB, 1 GiB in all, of three dtypes; fewer for a smaller run."""
    total = sizes.save_bytes
    count = max(8, 2000 * total // _GIB)
    found = _spread(count, total)
    Random(2).shuffle(found)
    return Shape(f"{count} mixed", tuple(found), _MIXED_DTYPES)


def plan_small(sizes: Sizes) -> Shape:
    """Plan 20,000 tensors of 4 bytes to 4 KiB; fewer for a smaller run."""
    count = max(16, 20_000 * sizes.save_bytes // _GIB)
    kinds = cycle(_SMALL_BYTES)
    return Shape(f"{count} small", tuple(next(kinds) for _ in range(count)))


def _spread(count: int, total_bytes: int) -> list[int]:
    """Return sizes from the smallest to the largest, most of them small, that add up to about `total_bytes`."""
    low, high = _MIXED_BYTES[0], min(_MIXED_BYTES[1], total_bytes // 2)
    steps = [(i + 0.5) / count for i in range(count)]
    bend = next(
        bend / 10
        for bend in range(1, 1000)
        if sum(low * (high / low) ** step ** (bend / 10) for step in steps) <= total_bytes
    )
    return [int(low * (high / low) ** step**bend) // 8 * 8 for step in steps]


def make_state(shape: Shape, *, seed: int) -> dict[str, torch.Tensor]:
    """Return tensors of random bytes, each with its own storage; large ones have rows of 8 KiB."""
    dtypes = cycle(shape.dtypes)
    return {f"layers.{i}.weight": _make_tensor(size, next(dtypes), seed=seed + i) for i, size in enumerate(shape.sizes)}


def _make_tensor(size_bytes: int, dtype: torch.dtype, *, seed: int) -> torch.Tensor:
    flat = torch.frombuffer(random_bytes(size_bytes, seed=seed), dtype=dtype)
    return flat.view(-1, _ROW_BYTES // flat.itemsize) if size_bytes % _ROW_BYTES == 0 else flat


def make_empty(like: State) -> dict[str, torch.Tensor]:
    """Return new tensors of the same shapes, whose memory was never touched."""
    return {name: torch.empty_like(tensor) for name, tensor in like.items()}


def copy_state(state: State) -> dict[str, torch.Tensor]:
    """Return a copy that shares no memory with the state."""
    return {name: tensor.clone() for name, tensor in state.items()}


def count_state(state: State) -> int:
    """Return the bytes of all tensors."""
    return sum(tensor.nbytes for tensor in state.values())


def change_state(state: State, fraction: float) -> None:
    """Change every byte of one range, `fraction` of the state long, to a value that does not repeat for 255 rounds."""
    left = round(fraction * count_state(state))
    for tensor in state.values():
        flat = tensor.view(-1).view(torch.uint8)[:left]
        flat.add_(1)
        left -= flat.numel()
        if not left:
            return


def clear_state(state: State) -> None:
    """Set every byte to zero, so that old values cannot be mistaken for loaded ones."""
    for tensor in state.values():
        tensor.zero_()


def verify_tensor(found: object, expected: torch.Tensor, *, what: str) -> None:
    """Raise unless `found` is a tensor that equals `expected` bit for bit."""
    if not isinstance(found, torch.Tensor):
        raise WrongResult(f"{what} is no tensor: {str(found)[:200]}")
    if (found.dtype, found.shape) != (expected.dtype, expected.shape):
        raise WrongResult(f"{what} is {found.dtype} {tuple(found.shape)}, saved {expected.dtype} {expected.shape}")
    ours, theirs = found.contiguous(), expected.contiguous()
    # By memcmp: torch.equal takes ten times as long, and would dominate the run.
    if _MEMCMP(ours.data_ptr(), theirs.data_ptr(), ours.nbytes):
        raise WrongResult(f"the bytes of {what} are not those that were saved")


def verify_state(found: object, expected: State, *, who: str) -> None:
    """Raise unless exactly these tensors were loaded."""
    if not isinstance(found, Mapping) or sorted(found) != sorted(expected):
        raise WrongResult(f"{who}: the names that were loaded are not those that were saved")
    for name, tensor in expected.items():
        verify_tensor(found[name], tensor, what=f"{who}: {name}")


def pick_name(state: State) -> str:
    """Return the name of a large tensor from the middle."""
    names = list(state)
    largest = max(tensor.nbytes for tensor in state.values())
    return next(name for name in names[len(names) // 2 :] + names if state[name].nbytes == largest)
