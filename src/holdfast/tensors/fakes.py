"""Support for loading under FakeTensorMode and on the meta device, where tensors have no values and no byte is read."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily

from holdfast.errors import Unsupported

FakeMode = FakeTensorMode | None


def find_fake_mode() -> FakeMode:
    """Return the FakeTensorMode that is active in this thread, or None."""
    return active_fake_mode()


def leave_fake_mode(mode: FakeMode) -> AbstractContextManager[object]:
    """Return a context that disables the active fake mode; it does nothing if `mode` is None."""
    return nullcontext() if mode is None else unset_fake_temporarily()


def enter_fake_mode(mode: FakeMode) -> AbstractContextManager[object]:
    """Return a context that enables `mode`; it does nothing if `mode` is None."""
    return nullcontext() if mode is None else mode


def has_values(tensor: torch.Tensor) -> bool:
    """Return whether an allocated strided tensor has bytes: False if it is fake or on the meta device."""
    return not isinstance(tensor, FakeTensor) and not tensor.is_meta


def make_fake(tensor: torch.Tensor, mode: FakeTensorMode, *, what: str) -> torch.Tensor:
    """Convert a real tensor to a fake one of `mode`; raises Unsupported if torch has no fake tensors of its kind."""
    if isinstance(tensor, FakeTensor):
        return tensor
    try:
        return mode.from_tensor(tensor)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise Unsupported(
            f"{what}: torch has no fake tensors of this kind ({error}); load it outside of the FakeTensorMode"
        ) from error


def find_fake_problem(target: torch.Tensor) -> str:
    """Return why a load into `target` would mix real and fake tensors; an empty text if it would not."""
    is_fake, is_active = isinstance(target, FakeTensor), find_fake_mode() is not None
    if is_fake and not is_active:
        return "the target is a fake tensor, which has no memory; load inside of its FakeTensorMode"
    if is_active and not is_fake:
        return "the target is a real tensor, and a FakeTensorMode is active; leave it, or make the target inside of it"
    return ""
