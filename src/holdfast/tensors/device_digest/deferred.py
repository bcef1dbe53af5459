"""Digests of tensors that are queued where the tensors are, and copied to the host later, many at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch.utils._python_dispatch import _disable_current_modes

from holdfast.digest import Digest
from holdfast.errors import Unsupported
from holdfast.tensors.device_digest.choice import find_kernels
from holdfast.tensors.device_digest.pieces import DeviceBytes, DevicePiece, Kernels, QueuedDigests, queue_digests
from holdfast.tensors.device_digest.side_stream import CallerStream

SLAB_BYTES: Final = 16 << 20
"""Memory on each device for copies of small tensors, which are hashed together."""
SMALL_BYTES: Final = 1 << 20
"""Tensors up to this size are copied within the device; larger ones are hashed where they are."""
_ALIGNMENT: Final = 16
_MAX_PIECES: Final = 4096
_count_modes: Final[Callable[[], int]] = torch._C._len_torch_dispatch_stack


def can_defer(device: torch.device) -> bool:
    """Return whether digests of a device's tensors are computed there; the first call for a device checks it."""
    if device.type == "cpu":
        return False
    with _without_modes():
        return find_kernels(device) is not None


def _without_modes() -> AbstractContextManager[object]:
    """Keep dispatch modes, such as that of a recording, from seeing what is done here."""
    # Disabling modes takes longer than to queue a small tensor, and mostly there are none.
    return _disable_current_modes() if _count_modes() else nullcontext()


class DeferredDigests:
    """Queues BLAKE3-256 digests of tensors on devices; the host waits for none of them until they are read.

    The digest is that of the bytes at the time of the call, in the order of the current stream: the tensor may be
    changed or freed at once. On each device it takes 16 MiB of memory besides that of one batch. Not thread-safe.
    """

    def __init__(self) -> None:
        self._queues: dict[torch.device, _DeviceQueue] = {}
        self._count = 0

    def queue(self, tensor: torch.Tensor) -> int:
        """Queue the digest of a tensor on a device for which `can_defer`; returns its index in what `collect` returns.

        Raises Unsupported if the tensor has no memory of its own, and while a CUDA graph is captured.
        """
        with _without_modes():
            data = DeviceBytes.from_tensor(tensor)
            if data.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                raise Unsupported(
                    "a CUDA graph is being captured, and a digest would become a part of it: replays would overwrite"
                    " the memory of later digests. Record without CUDA graphs"
                )
            queue = self._queues.get(data.device)
            if queue is None:
                kernels = find_kernels(data.device)
                assert kernels is not None, "can_defer says so"
                queue = self._queues[data.device] = _DeviceQueue(kernels, CallerStream(data.device))
            queue.add(data, self._count)
        self._count += 1
        return self._count - 1

    def collect(self) -> CollectedDigests:
        """Queue one copy to the host for each device, of all digests since the last call; does not wait for it.

        After an error, none of these digests can be collected any more.
        """
        count, self._count = self._count, 0
        try:
            with _without_modes():
                copies = [queue.collect() for queue in self._queues.values() if queue.has_any]
        except BaseException:
            self._queues.clear()
            raise
        return CollectedDigests(count, copies)


@dataclass(frozen=True, slots=True)
class _Copy:
    """Digests of one device on their way to the host."""

    host: torch.Tensor
    event: Any
    """Reached when the copy is done; None if it is done already."""
    launches: Sequence[tuple[QueuedDigests, Sequence[int]]]
    """What was hashed together, without its nodes; and the number of each piece."""


@dataclass(frozen=True, slots=True)
class CollectedDigests:
    """Digests on their way to the host."""

    count: int
    copies: Sequence[_Copy] = ()

    def wait(self) -> list[Digest]:
        """Wait for the devices, and return all digests in the order in which they were queued.

        Any thread may call it. Raises DeviceFault if a device has returned a wrong one.
        """
        found: dict[int, Digest] = {}
        for copy in self.copies:
            if copy.event is not None:
                copy.event.synchronize()
            data, at = copy.host.numpy().tobytes(), 0
            for queued, numbers in copy.launches:
                size = queued.nodes.nbytes
                found.update(zip(numbers, queued.read(data[at : at + size]), strict=True))
                at += size
        return [found[number] for number in range(self.count)]


@dataclass(slots=True)
class _DeviceQueue:
    """What is queued on one device."""

    kernels: Kernels
    stream: CallerStream
    slab: torch.Tensor | None = None
    used_bytes: int = 0
    waiting: list[tuple[int, int, int]] = field(default_factory=list)
    """The number, start and stop of each tensor in the slab."""
    launches: list[tuple[QueuedDigests, Sequence[int]]] = field(default_factory=list)

    @property
    def has_any(self) -> bool:
        """Whether a digest was queued since they were collected."""
        return bool(self.waiting or self.launches)

    def add(self, data: DeviceBytes, number: int) -> None:
        """Queue a digest."""
        with self.stream as link:
            if data.size_bytes > SMALL_BYTES:
                piece = DevicePiece(data, 0, data.size_bytes)
                self._keep(queue_digests([piece], self.kernels, link), [number])
                return
            if self.used_bytes + data.size_bytes > SLAB_BYTES or len(self.waiting) >= _MAX_PIECES:
                self._hash_slab()
            if self.slab is None:
                self.slab = torch.empty(SLAB_BYTES, dtype=torch.uint8, device=link.device)
                self.stream.kept.append(self.slab)
            start, stop = self.used_bytes, self.used_bytes + data.size_bytes
            self.slab[start:stop].copy_(data.read(0, data.size_bytes))
            self.waiting.append((number, start, stop))
            self.used_bytes = -(-stop // _ALIGNMENT) * _ALIGNMENT

    def _hash_slab(self) -> None:
        """Hash what is in the slab. Later copies into it come after that, because they are queued later."""
        if not self.waiting:
            return
        assert self.slab is not None, "something waits in it"
        data = DeviceBytes.from_memory(self.slab)
        pieces = [DevicePiece(data, start, stop) for _, start, stop in self.waiting]
        self._keep(queue_digests(pieces, self.kernels, self.stream.link), [number for number, *_ in self.waiting])
        self.waiting, self.used_bytes = [], 0

    def _keep(self, queued: QueuedDigests, numbers: Sequence[int]) -> None:
        self.launches.append((queued, numbers))
        self.stream.kept.append(queued.nodes)

    def collect(self) -> _Copy:
        """Queue the copy of all digests to the host."""
        with self.stream as link:
            self._hash_slab()
            launches, self.launches = self.launches, []
            self.stream.kept = [] if self.slab is None else [self.slab]
            host = link.download(torch.cat([queued.nodes for queued, _ in launches]))
            return _Copy(host, self.stream.mark(), launches)
