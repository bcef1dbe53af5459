"""Where work on a device is queued: on a stream beside the caller's, or on the caller's own."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from types import TracebackType
from typing import Any

import numpy as np
import torch

from holdfast.tensors.device_copy import WITH_STREAMS

Integers = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, slots=True)
class HostLink:
    """Copies between the host and a device on the current stream; waits only if the device has no streams."""

    device: torch.device

    @property
    def has_streams(self) -> bool:
        """Whether the device has streams and pinned memory."""
        return self.device.type in WITH_STREAMS

    def upload(self, values: np.ndarray[Any, Any]) -> torch.Tensor:
        """Return numbers of the host as a tensor on the device."""
        host = torch.from_numpy(values)
        if not self.has_streams:
            return host.to(self.device)
        return host.pin_memory().to(self.device, non_blocking=True)

    def download(self, values: torch.Tensor) -> torch.Tensor:
        """Return a tensor on the host; its values are there when the stream has been waited for."""
        if not self.has_streams:
            return values.cpu()
        host = torch.empty(values.shape, dtype=values.dtype, device="cpu", pin_memory=True)
        return host.copy_(values, non_blocking=True)


class SideStream:
    """Runs the work of a `with` block on a stream of its own; leaving it waits for that stream alone.

    The work starts after what the caller has queued, and delays nothing queued later. On devices without streams it
    runs in order, and copies wait.
    """

    def __init__(self, device: torch.device) -> None:
        self._link = HostLink(device)
        self._exits = ExitStack()
        self._stream: Any = None

    def __enter__(self) -> HostLink:
        """Make the stream current; it waits for what is queued on the one that was current."""
        # After an error in here, the caller's mode is restored: `__exit__` is not called then.
        with ExitStack() as exits:
            exits.enter_context(torch.no_grad())
            if self._link.has_streams:
                device = self._link.device
                module = torch.get_device_module(device)
                self._stream = _find_stream(device)
                self._stream.wait_stream(module.current_stream(device))
                exits.enter_context(module.stream(self._stream))
            self._exits = exits.pop_all()
        return self._link

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Wait for the stream, also after an error: the caller may free what it reads."""
        try:
            if self._stream is not None:
                self._stream.synchronize()
        finally:
            self._exits.close()


class CallerStream:
    """Queues the work of `with` blocks on the stream that is current there; never waits for the device.

    Work of a later block comes after that of an earlier one, also if another stream is current by then.
    """

    def __init__(self, device: torch.device) -> None:
        self.link = HostLink(device)
        self._exits = ExitStack()
        self._stream: Any = None
        self.kept: list[torch.Tensor] = []
        """Memory of earlier blocks that later ones use."""

    def __enter__(self) -> HostLink:
        """Make the device current, and order the work after that of earlier blocks."""
        with ExitStack() as exits:
            # Memory that is allocated in inference mode could not be written outside of it.
            exits.enter_context(torch.inference_mode(mode=False))
            exits.enter_context(torch.no_grad())
            if self.link.has_streams:
                module = torch.get_device_module(self.link.device)
                exits.enter_context(module.device(self.link.device))
                self._follow(module.current_stream(self.link.device))
            self._exits = exits.pop_all()
        return self.link

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Restore what was current."""
        self._exits.close()

    def _follow(self, current: Any) -> None:
        if self._stream is not None and self._stream != current:
            current.wait_stream(self._stream)
            for memory in self.kept:
                # Torch must not give it to another tensor of the old stream while this one uses it.
                memory.record_stream(current)
        self._stream = current

    def mark(self) -> Any:
        """Return an event that a host thread can wait for; None on a device without streams, where copies wait."""
        if not self.link.has_streams:
            return None
        event = torch.get_device_module(self.link.device).Event()
        event.record(self._stream)
        return event


@cache
def _find_stream(device: torch.device) -> Any:
    """Return the side stream of a device: always the same, because torch keeps free memory for each stream."""
    return torch.get_device_module(device).Stream(device=device)
