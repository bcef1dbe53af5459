"""Saving a tree: leaves become entries, its shape the snapshot's spec; digests of chunks on devices come from there."""

from __future__ import annotations

import platform
import socket
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import torch

from holdfast.digest import Digest
from holdfast.errors import DeviceFault, Unsupported
from holdfast.json_text import EncodedJson, Json
from holdfast.progress import Progress
from holdfast.repo.format.chunk import INLINE_BYTES
from holdfast.repo.format.source import Source
from holdfast.repo.handle.repository import Repository
from holdfast.repo.write.writer import Request, SaveResult, WriteOptions, save
from holdfast.snapshot.gc_pause import is_small, pause_gc
from holdfast.snapshot.leaves import LeafWriter
from holdfast.snapshot.stateful import expand
from holdfast.tensors.device_copy import WITH_STREAMS
from holdfast.tensors.device_digest.choice import choose_backend, digest_pieces
from holdfast.tensors.device_digest.pieces import DeviceBytes, DevicePiece
from holdfast.tensors.memory import view_storage
from holdfast.tensors.shard_source import PartialSource, ShardSource
from holdfast.tensors.sharding import LocalLeaf
from holdfast.tensors.sources import TensorSource
from holdfast.trees.encoding import encode_tree
from holdfast.trees.outline import TREE, join_name
from holdfast.trees.registered import Types

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


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveOptions(WriteOptions):
    """How a tree is saved."""

    allow_pickle: bool = False
    """Pickle values that the format cannot store. Loading them can run any code, and must be allowed, too."""
    grads: bool = False
    """Save the gradients of tensors as well."""


class Leaves(NamedTuple):
    """A tree that is ready to be saved: its encoded shape, and its leaves as sources of bytes."""

    spec: EncodedJson
    """The shape, as the spec of a snapshot. Decoded, it would take several times the memory."""
    sources: Sequence[Source]
    local_leaves: dict[int, LocalLeaf]
    """Entries, by number, that are shards or replicas of other ranks' tensors."""
    per_rank_entries: set[int]
    """Entries that are declared per rank."""
    per_rank_names: set[str]
    """Paths of plain values that are declared per rank."""


def make_leaves(tree: object, options: SaveOptions, types: Types) -> Leaves:
    """Split a tree into its shape and its leaves; reads no tensor yet."""
    leaves = LeafWriter(types, allow_pickle=options.allow_pickle, grads=options.grads)
    per_rank_names: set[str] = set()
    state = expand(tree, note_per_rank=lambda path: per_rank_names.add(join_name(path)))
    spec = leaves.encode_nodes({TREE: encode_tree(state, types=types, encode_leaf=leaves.encode)})
    return Leaves(spec, leaves.make_sources(), leaves.local_leaves, leaves.per_rank_entries, per_rank_names)


def verify_whole(leaves: Leaves, advice: str) -> None:
    """Raise Unsupported if this process has only a part of a tensor."""
    for number in leaves.local_leaves:
        source = leaves.sources[number]
        if isinstance(source, ShardSource) and not source.is_whole:
            has = f"this process has {source.size_bytes} of {source.whole_bytes} bytes of it"
            raise Unsupported(f"{source.name}: {has}; {advice}")


def make_request(name: str, tree: object, options: SaveOptions, types: Types) -> Request:
    """Return the request that saves a tree from one process; reads no tensor yet."""
    leaves = make_leaves(tree, options, types)
    verify_whole(leaves, "save on all ranks together, with torch.distributed initialised and without collective=False")
    return Request(name, leaves.sources, spec=leaves.spec, options=options)


def save_tree(
    repo: Repository,
    name: str,
    tree: object,
    options: SaveOptions,
    *,
    types: Types,
    progress: Progress | None = None,
) -> SaveResult:
    """Save a tree under a name; the tensors must not change until this returns."""
    with ExitStack() as pause:
        # One pause for everything, and the request is not bound to a name, so it is freed before the pause ends. A
        # collection before that would traverse all of it.
        pause.enter_context(pause_gc())
        return _save_request(repo, make_request(name, tree, options, types), pause, progress)


def _save_request(repo: Repository, request: Request, pause: ExitStack, progress: Progress | None) -> SaveResult:
    if not is_small(sum([source.size_bytes for source in request.sources]), len(request.sources)):
        pause.close()
    return save(repo, add_digests(request), progress=progress)


def describe_environment() -> dict[str, Json]:
    """Return host, versions and world size, which are stored with a snapshot for people who inspect it later."""
    is_distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    return {
        "host": socket.gethostname(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "platform": f"{sys.platform}-{platform.machine()}",
        "world_size": torch.distributed.get_world_size() if is_distributed else 1,
    }
