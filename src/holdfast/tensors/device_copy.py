"""Copies bytes from a device to the host: through pinned memory and on a stream of their own, if it has streams."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Final

import torch

from holdfast.objects.blocks import copy_bytes
from holdfast.tensors.memory import new_memory, view_bytes, wrap_memory

WITH_STREAMS: Final = frozenset({"cuda", "xpu"})
"""Device types with streams and pinned memory. ROCm calls itself cuda."""
PINNED_BYTES: Final = 4 << 20
_KEPT_PAIRS: Final = 4
_HOST: Final = torch.device("cpu")


def copy_to_host(memory: torch.Tensor) -> memoryview:
    """Return a copy of a contiguous tensor of bytes of any device; returns when it is complete."""
    target = view_bytes(new_memory(memory.numel(), _HOST))
    copy_into(target, memory)
    return target


def copy_into(target: memoryview, memory: torch.Tensor) -> None:
    """Copy a contiguous tensor of bytes of any device into host memory of the same size; safe in any thread."""
    if not memory.numel():
        return
    if memory.device.type not in WITH_STREAMS:
        wrap_memory(target).copy_(memory)
        return
    _find_copier(memory.device).copy(target, memory)


@cache
def _find_copier(device: torch.device) -> StreamCopier:
    return StreamCopier(device, torch.get_device_module(device))


class StreamCopier:
    """Copies from one device, on a stream of its own. While a pinned buffer is emptied, the other one is filled.

    Copies from pageable memory would wait for everything on the caller's stream, and pass through the driver's buffers.
    """

    def __init__(self, device: torch.device, streams: Any) -> None:
        """Use `streams`, the module of torch for the type of this device."""
        self._device = device
        self._streams = streams
        self._stream = streams.Stream(device=device)
        self._pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._lock = threading.Lock()

    def copy(self, target: memoryview, memory: torch.Tensor) -> None:
        """Copy bytes after all that is queued on the current stream of this thread; returns when they are there."""
        streams, stream = self._streams, self._stream
        with self._lend_pair() as pair:
            stream.wait_stream(streams.current_stream(self._device))
            filled: tuple[Any, memoryview, memoryview] | None = None
            try:
                for number, start in enumerate(range(0, memory.numel(), PINNED_BYTES)):
                    part = memory[start : start + PINNED_BYTES]
                    buffer = pair[number % 2][: part.numel()]
                    with streams.stream(stream):
                        buffer.copy_(part, non_blocking=True)
                        event = stream.record_event()
                    if filled:
                        _empty(*filled)
                    filled = event, view_bytes(buffer), target[start : start + part.numel()]
                if filled:
                    _empty(*filled)
            except BaseException:
                stream.synchronize()  # before the buffers are lent again, and the memory is freed
                raise

    @contextmanager
    def _lend_pair(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        with self._lock:
            pair = self._pairs.pop() if self._pairs else None
        if pair is None:
            # The next copy may be outside of inference mode, where memory that was allocated in it cannot be written.
            with torch.inference_mode(mode=False):
                pair = _new_pinned(), _new_pinned()
        yield pair
        with self._lock:
            if len(self._pairs) < _KEPT_PAIRS:
                self._pairs.append(pair)


def _new_pinned() -> torch.Tensor:
    return torch.empty(PINNED_BYTES, dtype=torch.uint8, pin_memory=True)


def _empty(event: Any, buffer: memoryview, target: memoryview) -> None:
    event.synchronize()
    copy_bytes(target, buffer)
