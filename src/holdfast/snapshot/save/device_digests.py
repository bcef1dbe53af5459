"""Digests of the chunks that are on devices, computed there, so that a save copies only what the store lacks."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

import torch

from holdfast.digest import Digest
from holdfast.errors import DeviceFault
from holdfast.repo.format.chunk import INLINE_BYTES
from holdfast.repo.format.source import Source
from holdfast.repo.write.writer import Request
from holdfast.tensors.device_copy import WITH_STREAMS
from holdfast.tensors.device_digest.choice import choose_backend
from holdfast.tensors.device_digest.digests import digest_pieces
from holdfast.tensors.device_digest.pieces import DeviceBytes, DevicePiece
from holdfast.tensors.memory import view_storage
from holdfast.tensors.sharding.shard_source import PartialSource, ShardSource
from holdfast.tensors.sources import TensorSource

Digests = Mapping[int, Sequence[Digest | None]]
"""By position of a source: the digest of each chunk; None for one that has to be read."""


def add_digests(request: Request) -> Request:
    """Return a request with the digests of all chunks that are on devices; waits until these have been computed."""
    known = request.digests
    others = ((number, source) for number, source in enumerate(request.sources) if number not in known)
    found = digest_sources(others)
    return replace(request, digests={**known, **found}) if found else request


def drop_digests(request: Request) -> Request:
    """Return a request without digests; waits for the devices, as `add_digests` does."""
    if torch.accelerator.is_available():
        _wait_for({device for source in request.sources for device in _find_devices(source)})
    return replace(request, digests={})


def digest_sources(sources: Iterable[tuple[int, Source]]) -> Digests:
    """Return the digests of those sources that are on devices, each given with its position.

    Empty chunks and those whose bytes are stored in the manifest have to be read. So has everything if a device cannot
    compute digests, returns a wrong one (with a warning), or has no memory left for it. When this returns, the work
    that was queued on the current streams of the devices is done: other threads may read the sources.
    """
    if not torch.accelerator.is_available():
        return {}
    devices: set[torch.device] = set()
    on_devices: list[tuple[int, Source]] = []
    for number, source in sources:
        if found := _find_devices(source):
            devices |= found
            on_devices.append((number, source))
    try:
        spans = _list_spans(on_devices)
        wanted = [piece for pieces in spans.values() for piece in pieces if _is_looked_up(piece)]
        digests = iter(digest_pieces(wanted))
    except torch.OutOfMemoryError:
        _wait_for(devices)
        return {}
    except DeviceFault as error:
        _wait_for(devices)
        # The state can be saved all the same, and should be: a device that begins to fail may not do so again.
        warnings.warn(f"saved from copies in host memory, without digests of the device: {error}", stacklevel=2)
        return {}
    # Those that have hashed something have been waited for.
    _wait_for(devices - {piece.data.device for piece in wanted})
    return {
        number: [next(digests) if _is_looked_up(piece) else None for piece in pieces]
        for number, pieces in spans.items()
    }


def _list_spans(sources: Iterable[tuple[int, Source]]) -> dict[int, list[DevicePiece]]:
    """Return the chunks of those sources that are on devices which compute digests, by position of the source."""
    spans = {number: list(_iter_pieces(source)) for number, source in sources}
    devices = {pieces[0].data.device for pieces in spans.values() if pieces}
    able = {device for device in devices if choose_backend(device).backend != "cpu"}
    return {number: pieces for number, pieces in spans.items() if pieces and pieces[0].data.device in able}


def _wait_for(devices: Iterable[torch.device]) -> None:
    """Wait for what is queued on the current streams; a copy of another thread waits for the stream of that thread."""
    for device in devices:
        if device.type in WITH_STREAMS:
            torch.get_device_module(device).current_stream(device).synchronize()


def _find_devices(source: Source) -> set[torch.device]:
    """Return the devices that have bytes of a source."""
    if isinstance(source, PartialSource):
        return _find_devices(source.inner)
    tensors: Iterable[torch.Tensor] = ()
    if isinstance(source, TensorSource):
        tensors = (source.tensor,)
    elif isinstance(source, ShardSource):
        tensors = (piece.tensor for piece in source.pieces)
    return {tensor.device for tensor in tensors if is_on_device(tensor)}


def _is_looked_up(piece: DevicePiece) -> bool:
    return piece.stop - piece.start > INLINE_BYTES


def _iter_pieces(source: Source) -> Iterator[DevicePiece]:
    """Yield the chunks of a source as pieces of a device's memory; nothing if it is not on a device."""
    if isinstance(source, TensorSource):
        if is_on_device(source.tensor) and source.size_bytes:
            data = _find_bytes(source)
            yield from (DevicePiece(data, start, stop) for start, stop in pairwise((0, *source.cuts)))
    elif isinstance(source, ShardSource):
        if all(is_on_device(piece.tensor) for piece in source.pieces):
            for number in range(len(source.boxes)):
                data = DeviceBytes.from_tensor(source.view_chunk(number))
                yield DevicePiece(data, 0, data.size_bytes)
    elif isinstance(source, PartialSource):
        inner = dict(zip((0, *source.inner.cuts), _iter_pieces(source.inner), strict=False))
        yield from (inner[start] for start, _ in source.spans if inner)


def is_on_device(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has bytes that are not in the memory of the host."""
    return not (tensor.is_cpu or tensor.is_meta)


def _find_bytes(source: TensorSource) -> DeviceBytes:
    if source.tensor_spec.packed:
        return DeviceBytes(source.view_packed_items(), source.size_bytes, is_gappy=True)
    storage = source.tensor.untyped_storage()
    return DeviceBytes.from_memory(
        view_storage(storage, source.start, source.start + source.size_bytes, source.tensor.device)
    )
