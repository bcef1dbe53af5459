"""A device type of torch made of host memory and Python, for tests of what happens to tensors that are not on the CPU.

Its tensors have storages, views and aliases like those of any device; the host cannot look into them, but for copies.
A device cannot be unregistered: install it only in a process of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME: Final = "fake"
_KEY: Final = "PrivateUse1"
_POISON: Final = 0xA5
"""What new memory holds: nobody may rely on zeros."""
_VIEWS: Final = (
    "as_strided",
    "view",
    "view_as_real",
    "view_as_complex",
    "_reshape_alias",
    "unfold",
    "set_.source_Storage",
    "set_.source_Storage_storage_offset",
    "set_.source_Tensor",
)
"""What changes only how memory is looked at: torch's own kernels for the CPU do it for any device."""


class FakeAccelerator:
    """The device: its memory, its kernels, and what was asked of it."""

    def __init__(self) -> None:
        self.log: list[str] = []
        """Copies and streams, in order."""
        self.bytes_to_host = 0
        """The bytes of copies from the device to another one."""
        self.damaged_bytes = 0
        """The next copy of so many bytes from another device arrives with one bit flipped."""
        # For ever: a storage does not tell when it goes, and the process is a short one.
        self._memory: list[torch.Tensor] = []

    def new_storage(self, size_bytes: int) -> torch.UntypedStorage:
        """Take memory."""
        memory = torch.full((max(size_bytes, 1),), _POISON, dtype=torch.uint8)
        self._memory.append(memory)
        found: Any = torch._C._construct_storage_from_data_pointer(memory.data_ptr(), torch.device(NAME, 0), size_bytes)
        return found  # type: ignore[no-any-return]  # torch has two classes of one name

    def empty_strided(
        self, size: Sequence[int], stride: Sequence[int], *, dtype: torch.dtype | None = None, **_: object
    ) -> torch.Tensor:
        """Make a tensor."""
        found = dtype or torch.get_default_dtype()
        tensor: torch.Tensor = torch._C._acc.create_empty_tensor((0,), found)
        last = sum((count - 1) * step for count, step in zip(size, stride, strict=True))
        storage = self.new_storage(0 if 0 in size else (last + 1) * found.itemsize)
        return tensor.set_(storage, 0, tuple(size), tuple(stride))

    def empty(
        self,
        size: Sequence[int],
        *,
        dtype: torch.dtype | None = None,
        memory_format: torch.memory_format | None = None,
        **_: object,
    ) -> torch.Tensor:
        """Make a tensor that is contiguous in some order."""
        plan = torch.empty(size, device="meta", memory_format=memory_format or torch.contiguous_format)
        return self.empty_strided(size, plan.stride(), dtype=dtype)

    def resize(self, tensor: torch.Tensor, size: Sequence[int], **_: object) -> torch.Tensor:
        """Give a tensor another size, and other memory with it."""
        made = self.empty(size, dtype=tensor.dtype)
        return tensor if tensor.shape == made.shape else tensor.set_(made.untyped_storage(), 0, size, made.stride())

    def copy(self, source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        """Copy between devices, or between tensors of this one."""
        self.log.append(f"{source.device} to {target.device}")
        if target.device.type != NAME:
            self.bytes_to_host += source.numel() * source.element_size()
        look_into(target).copy_(look_into(source))
        is_damaged = source.device.type != NAME and source.numel() * source.element_size() == self.damaged_bytes > 0
        if is_damaged:
            self.damaged_bytes = 0
            self._flip_bit(target)
        return target

    def _flip_bit(self, tensor: torch.Tensor) -> None:
        """Flip the lowest bit of the last byte of a tensor without gaps."""
        storage = look_into(tensor).untyped_storage()
        end = (int(tensor.storage_offset()) + tensor.numel()) * tensor.element_size()
        storage[end - 1] ^= 1

    def record_stream(self, tensor: torch.Tensor, stream: object) -> None:
        """Note it; there is only one stream, really."""
        self.log.append(f"record {tuple(tensor.shape)}")

    def compute(self, operation: Any, *args: Any, **kwargs: Any) -> Any:
        """Do on the CPU, in this device's memory, what the device has no kernel for."""
        mirrors: dict[int, torch.Tensor] = {}
        originals: dict[int, torch.Tensor] = {}

        def enter(value: Any) -> Any:
            if isinstance(value, torch.Tensor) and value.device.type == NAME:
                mirror = mirrors.setdefault(id(value), look_into(value))
                originals[id(mirror)] = value
                return mirror
            if isinstance(value, list | tuple):
                return type(value)(map(enter, value))
            return torch.device("cpu") if isinstance(value, torch.device) and value.type == NAME else value

        def leave(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                return originals[id(value)] if id(value) in originals else value.to(NAME)
            return type(value)(map(leave, value)) if isinstance(value, list | tuple) else value

        # Torch gives a number that it had wrapped as a tensor as a number again.
        kinds = [str(each.type) for each in operation._schema.arguments]
        args = tuple(
            torch.tensor(value) if kind == "Tensor" and isinstance(value, int | float) else value
            for value, kind in zip(args, kinds, strict=False)
        )
        outs = {each.name for each in operation._schema.arguments if each.is_out} & kwargs.keys()
        results = {name: torch.empty(0, dtype=kwargs[name].dtype) for name in outs}
        inputs = {name: enter(value) for name, value in kwargs.items() if name not in outs}
        found = leave(operation(*enter(args), **inputs, **results))
        for name, result in results.items():
            # The host's kernels give these the size that they need, and cannot do so to memory that is not theirs.
            found = kwargs[name].resize_(result.shape).copy_(result)
        return found


def look_into(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor on the CPU over the same memory; only for as long as the tensor lives."""
    if tensor.device.type != NAME:
        return tensor
    storage = tensor.untyped_storage()
    found = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), torch.device("cpu"), storage.nbytes())
    mirror = torch.empty(0, dtype=tensor.dtype)
    mirror = mirror.set_(found, tensor.storage_offset(), tuple(tensor.shape), tensor.stride())
    mirror = mirror.conj() if tensor.is_conj() else mirror
    return torch._neg_view(mirror) if tensor.is_neg() else mirror


def _make_view_kernel(name: str) -> Any:
    packet, _, overload = name.partition(".")
    operation = getattr(getattr(torch.ops.aten, packet), overload or "default")
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
    return lambda *args, **kwargs: operation.redispatch(keys, *args, **kwargs)


def install() -> tuple[FakeAccelerator, Sequence[torch.library.Library]]:
    """Make it torch's accelerator in this process, as long as what is returned lives."""
    _setup_privateuseone_for_python_backend(NAME)
    device = FakeAccelerator()
    library: Any = torch.library.Library  # torch gives it no types
    aten, rest = library("aten", "IMPL"), library("_", "IMPL")
    aten.impl("empty.memory_format", device.empty, _KEY)
    aten.impl("empty_strided", device.empty_strided, _KEY)
    aten.impl("resize_", device.resize, _KEY)
    aten.impl("_copy_from", device.copy, _KEY)
    for bit in ("Conjugate", "Negative"):
        # Our copy looks at the bits itself; what torch does otherwise is to copy, and so for ever.
        aten.impl("_copy_from", torch.library.fallthrough_kernel, bit)
    aten.impl("record_stream", device.record_stream, _KEY)
    for name in _VIEWS:
        aten.impl(name, _make_view_kernel(name), _KEY)
    rest.fallback(device.compute, _KEY)
    return device, (aten, rest)
