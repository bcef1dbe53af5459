"""A stream beside the caller's: work there starts after what the caller has queued, and delays nothing queued later."""

from __future__ import annotations

from contextlib import ExitStack
from functools import cache
from types import TracebackType
from typing import Any, Final

import numpy as np
import torch

Integers = np.ndarray[Any, np.dtype[np.int64]]
WITH_STREAMS: Final = frozenset({"cuda", "xpu"})
"""Device types with streams and pinned memory. ROCm calls itself cuda."""


class SideStream:
    """Runs the work of a `with` block on a stream of its own; leaving it waits for that stream alone.

    On devices without streams the work runs in order, and copies wait.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._has_streams = device.type in WITH_STREAMS
        self._exits = ExitStack()
        self._stream: Any = None

    def __enter__(self) -> SideStream:
        """Make the stream current; it waits for what is queued on the one that was current."""
        self._exits.enter_context(torch.no_grad())
        if self._has_streams:
            module = torch.get_device_module(self._device)
            self._stream = _find_stream(self._device)
            self._stream.wait_stream(module.current_stream(self._device))
            self._exits.enter_context(module.stream(self._stream))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Wait for the stream, also after an error: the caller may free what it reads."""
        try:
            if self._stream is not None:
                self._stream.synchronize()
        finally:
            self._exits.close()

    def upload(self, values: np.ndarray[Any, Any]) -> torch.Tensor:
        """Return integers of the host as a tensor on the device, without waiting if it has streams."""
        host = torch.from_numpy(values)
        if not self._has_streams:
            return host.to(self._device)
        return host.pin_memory().to(self._device, non_blocking=True)

    def download(self, values: torch.Tensor) -> torch.Tensor:
        """Return a tensor on the host; its values are there when the `with` block has been left."""
        if not self._has_streams:
            return values.cpu()
        host = torch.empty(values.shape, dtype=values.dtype, device="cpu", pin_memory=True)
        return host.copy_(values, non_blocking=True)


@cache
def _find_stream(device: torch.device) -> Any:
    """Return the side stream of a device: always the same, because torch keeps free memory for each stream."""
    return torch.get_device_module(device).Stream(device=device)
