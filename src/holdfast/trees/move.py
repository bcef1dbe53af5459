"""Moves the tensors of a tree to another device, or casts them to another floating dtype."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, TypeAlias, TypeVar

import torch

from holdfast.errors import Unsupported
from holdfast.trees.apply import apply_to_tensors

Device: TypeAlias = torch.device | str | int
Tree = TypeVar("Tree")

PACKED_FLOAT: Final[torch.dtype | None] = getattr(torch, "float4_e2m1fn_x2", None)
"""Has two values in each element. Torch calls it a floating dtype, and cannot convert it. None: torch lacks it."""


def move_to_device(tree: Tree, device: Device, *, non_blocking: bool = False) -> Tree:
    """Return `tree` with its tensors on `device`; a tensor that is there already is the same object.

    Copies to an accelerator run on a side stream; the current stream waits for it. With `non_blocking` they may still
    be running on return: do not change pinned sources until they are done. Copies to the host are always complete.
    """
    target = resolve_device(device)
    if _is_accelerator(target):
        return _move_on_side_stream(tree, target, non_blocking=non_blocking)
    return _move_and_wait(tree, target, non_blocking=non_blocking)


def to_kwargs(
    args: tuple[Any, ...], kwargs: Mapping[str, Any] | None, device: Device, *, non_blocking: bool = False
) -> tuple[tuple[tuple[Any, ...], ...], tuple[dict[str, Any], ...]]:
    """Return the arguments of a call on `device`, as a tuple of one args and a tuple of one kwargs.

    Without positional arguments the args are `()`, without keyword arguments the kwargs are `{}`. Without any
    arguments both tuples are empty, as in torch.
    """
    if not args and not kwargs:
        return (), ()
    moved_args, moved_kwargs = move_to_device((args, dict(kwargs or {})), device, non_blocking=non_blocking)
    return (moved_args,), (moved_kwargs,)


def cast_floating(tree: Tree, dtype: torch.dtype | None) -> Tree:
    """Return `tree` with its floating tensors as `dtype`; with None, return it unchanged.

    `requires_grad` is kept, and gradients flow through the cast to the original tensor. Where no graph is recorded,
    as under no_grad, the cast tensor is a new leaf.
    """
    if dtype is None:
        return tree
    if not dtype.is_floating_point:
        raise Unsupported(f"floating tensors cannot be cast to {dtype}; choose a floating dtype such as torch.float64")

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return _cast(tensor, dtype)

    return apply_to_tensors(cast, tree)


def _cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if not tensor.is_floating_point() or tensor.dtype == dtype:
        return tensor
    if PACKED_FLOAT is not None and PACKED_FLOAT in (tensor.dtype, dtype):
        raise Unsupported(f"a tensor of {tensor.dtype} cannot be cast to {dtype}; convert it by hand")
    cast = tensor.to(dtype)
    return cast if cast.requires_grad == tensor.requires_grad else cast.requires_grad_(tensor.requires_grad)


def _move_on_side_stream(tree: Tree, target: torch.device, *, non_blocking: bool) -> Tree:
    current = torch.accelerator.current_stream(target)
    side = torch.Stream(device=target)
    copies: list[torch.Tensor] = []

    def move(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device == target:
            return tensor
        _verify_data(tensor, target)
        if not _has_one_storage(tensor):
            return tensor.to(target, non_blocking=non_blocking)
        with side:
            copies.append(tensor.to(target, non_blocking=non_blocking))
        return copies[-1]

    moved = apply_to_tensors(move, tree)
    if copies:
        current.wait_stream(side)
    for tensor in copies:
        # Allocated on the side stream, used on the current one: the memory must not be reused before that use ends.
        tensor.record_stream(current)
    return moved


def _move_and_wait(tree: Tree, target: torch.device, *, non_blocking: bool) -> Tree:
    sources: set[torch.device] = set()

    def move(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device == target:
            return tensor
        _verify_data(tensor, target)
        sources.add(tensor.device)
        return tensor.to(target, non_blocking=non_blocking)

    moved = apply_to_tensors(move, tree)
    for source in sources:
        # One wait for all copies; without it the host could read memory before a copy is complete.
        if non_blocking and _is_accelerator(source):
            torch.accelerator.current_stream(source).synchronize()
    return moved


def resolve_device(device: Device) -> torch.device:
    """Return the device in the form that tensors report ("cuda:0", not "cuda"), so that the two can be compared."""
    return torch.empty(0, device=device).device


def find_accelerator() -> torch.device | None:
    """Return the kind of accelerator that torch is built for; None if there is none."""
    try:
        return torch.accelerator.current_accelerator()
    except RuntimeError:  # what torch 2.6 does if there is none
        return None


def _is_accelerator(device: torch.device) -> bool:
    accelerator = find_accelerator()
    return accelerator is not None and device.type == accelerator.type


def _has_one_storage(tensor: torch.Tensor) -> bool:
    """Return whether record_stream covers all memory of a tensor: False if it is made of other tensors."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout == torch.strided and not tensor.is_nested
    )


def _verify_data(tensor: torch.Tensor, target: torch.device) -> None:
    if tensor.is_meta and target.type != "meta":
        raise Unsupported(
            f"a meta tensor of shape {tuple(tensor.shape)} has no data to move to {target}; "
            "load into it with assign=True, or make one with torch.empty_like"
        )
