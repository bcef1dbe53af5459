"""Reads tensors and storages of batches into memory; tensors that shared memory when written share it again."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Final

import torch

from holdfast.content.catalog import Catalog, StorageEntry, StorageSpan, StoredTensor, parse_storage_note
from holdfast.errors import Corrupt, HoldfastError, Unsupported
from holdfast.json_text import Json
from holdfast.repo.format.entry import Entry
from holdfast.snapshot.leaves import GRAD, TENSOR, iter_entry_numbers
from holdfast.snapshot.load.batches import read_to_memory
from holdfast.snapshot.load.load import load_node
from holdfast.snapshot.load.opened import Opened
from holdfast.snapshot.load.options import SAVED, LoadOptions
from holdfast.tensors.build import CPU, build_tensor, spread_items
from holdfast.tensors.dtypes import item_bytes
from holdfast.tensors.fakes import find_fake_mode, has_values, leave_fake_mode, make_fake
from holdfast.tensors.layouts import first_line
from holdfast.tensors.memory import ALIGNMENT, new_memory, view_bytes, view_storage
from holdfast.tensors.spec import TensorSpec, decode_spec
from holdfast.tensors.storage_cache import ByteSpan, FilledBytes, StorageCache, iter_gaps, join_span
from holdfast.trees.move import resolve_device
from holdfast.trees.registered import Types

_META: Final = torch.device("meta")


@dataclass(frozen=True, slots=True)
class DescribedEntry:
    """An entry, with its decoded spec and note."""

    entry: Entry
    spec: TensorSpec
    span: StorageSpan | None
    device: torch.device
    """The device of the tensor when it was written."""


def describe_entry(opened: Opened, number: int) -> DescribedEntry:
    """Decode spec and note of an entry of an open batch; raise Corrupt if they are malformed."""
    entry = opened.entry(number)
    what = f"{opened.name!r}, {entry.name!r}"
    spec = decode_spec(entry.spec, size_bytes=entry.size_bytes, what=what)
    saved = entry.note.get("device", "cpu") if isinstance(entry.note, dict) else "cpu"
    try:
        device = torch.device("meta" if spec.meta else saved)
    except (RuntimeError, TypeError) as error:
        raise Corrupt(
            f"{what} was on {str(saved)[:40]!r}, which is not a device; run `holdfast check`", key=what
        ) from error
    return DescribedEntry(entry, spec, parse_storage_note(entry.note, what=what), device)


@dataclass(frozen=True, slots=True)
class _Memory:
    """Memory for the bytes of a storage from offset `base` on."""

    data: torch.Tensor
    base: int
    filled: FilledBytes

    @property
    def is_unread(self) -> bool:
        """Whether values need not be read, because the memory is fake or on the meta device."""
        return not has_values(self.data)

    def view(self, start: int, stop: int) -> torch.Tensor:
        return self.data[start - self.base : stop - self.base]


class Rebuilder:
    """Reads the tensors and storages of a catalog. Not thread-safe."""

    def __init__(self, catalog: Catalog, types: Types, *, cache: bool) -> None:
        """With `cache`, reuse storages that are in use; without it, every read returns new memory.

        `types` are the tensor subclasses that may be read.
        """
        self._catalog = catalog
        self._types = types
        self._cache = StorageCache() if cache else None

    def read_tensor(self, stored: StoredTensor, device: torch.device | None) -> torch.Tensor:
        """Read a tensor to `device`, or to its original device."""
        return self._read_node(self._catalog.open(stored.batch), stored.node, device)

    def read_storage(self, stored: StorageEntry, device: torch.device | None) -> torch.UntypedStorage:
        """Read a storage to `device`, or to its original device."""
        found = describe_entry(self._catalog.open(stored.batch), stored.number)
        span = found.span
        assert span is not None  # a StorageEntry has one
        target = _resolve(found, device)
        if not span.size_bytes:
            return new_memory(0, target).untyped_storage()
        memory = self._find_shared(span, target)
        if found.spec.packed or (memory.base, memory.data.numel()) != (span.start, span.size_bytes):
            # The shared memory is larger than this storage, so a storage of the right size gets separate memory.
            memory = self._find_memory(("storage", span.digest), span.start, span.stop, target)
        self._fill(memory, span)
        return memory.data.untyped_storage()

    def _read_node(self, opened: Opened, node: list[Json], device: torch.device | None) -> torch.Tensor:
        if node[0] == GRAD:
            tensor = self._read_node(opened, node[1], device)
            try:
                tensor.grad = self._read_node(opened, node[2], device)
            except HoldfastError:
                raise
            except (RuntimeError, TypeError) as error:
                raise Corrupt(
                    f"{opened.name!r}: a gradient does not fit its tensor: {error}; run `holdfast check`",
                    key=opened.name,
                ) from error
            return tensor
        if node[0] != TENSOR:
            # Tensors made of other tensors do not share memory across names.
            options = LoadOptions(device=SAVED if device is None else device, aliases="fresh")
            joined: torch.Tensor = load_node(opened, node, options, self._types)
            return joined
        found = describe_entry(opened, next(iter_entry_numbers(node, what=opened.name)))
        mode = find_fake_mode()
        if mode is not None and found.spec.quantizer is not None:
            with leave_fake_mode(mode):
                return make_fake(self._read_node(opened, node, device), mode, what=found.entry.name)
        if found.span is None or not found.span.size_bytes:
            return build_tensor(found.spec, self._read_without_storage(opened, found, device), what=found.entry.name)
        memory = self._find_shared(found.span, _resolve(found, device))
        _verify_reach(found, found.span, memory)
        if found.spec.packed:
            self._spread(opened, found, memory)
        else:
            self._fill(memory, found.span)
        spec = replace(found.spec, packed=False, at=found.span.at - memory.base)
        return build_tensor(spec, memory.data, what=found.entry.name)

    def _read_without_storage(self, opened: Opened, found: DescribedEntry, device: torch.device | None) -> torch.Tensor:
        """Read an entry without a storage: it has no bytes, or another program has written it."""
        target = _resolve(found, device)
        memory = new_memory(found.entry.size_bytes, target)
        if not has_values(memory):
            return memory
        memory = new_memory(found.entry.size_bytes, CPU)
        opened.reader.read_all([(found.entry, view_bytes(memory))])
        return memory if found.spec.meta else memory.to(_resolve(found, device))

    def _find_shared(self, span: StorageSpan, device: torch.device) -> _Memory:
        """Return the memory that a storage shares with all storages that overlapped it."""
        shared = self._catalog.find_span(span)
        # Tensors of several dtypes may begin at different offsets. All are aligned if the new memory has the same
        # alignment as the original.
        pad = shared.start % ALIGNMENT if shared.is_joined else 0
        return self._find_memory((span.group, shared.start, shared.stop), shared.start - pad, shared.stop, device)

    def _find_memory(self, key: Hashable, start: int, stop: int, device: torch.device) -> _Memory:
        """Return the cached memory for `key` if it is still in use, else new memory filled with zeros."""
        mode = find_fake_mode()
        # Fake tensors have their storages on the meta device, whatever device they report.
        storage_device = _META if mode is not None else device
        key = key if mode is None else (key, id(mode), str(device))
        found = self._cache.find(key, storage_device) if self._cache else None
        if found is not None and found.filled is not None and found.storage.nbytes() == stop - start:
            return _Memory(view_storage(found.storage, 0, stop - start, device), start, found.filled)
        data = torch.zeros(stop - start, dtype=torch.uint8, device=device)
        memory = _Memory(data, start, FilledBytes())
        if self._cache:
            self._cache.keep(key, data.untyped_storage(), memory.filled)
        return memory

    def _fill(self, memory: _Memory, span: StorageSpan) -> None:
        """Read the bytes of a storage that are not in memory yet; the user may have changed those that are."""
        gaps = list(iter_gaps(memory.filled.spans, span.start, span.stop))
        if not gaps or memory.is_unread:
            return
        stored = self._catalog.find_storage(span.digest)
        assert stored is not None  # the catalog refuses batches without one
        opened = self._catalog.open(stored.batch)
        found = describe_entry(opened, stored.number)
        assert found.span is not None
        for start, stop in gaps:
            at = found.span.first + start - span.start
            target = memory.view(start, stop)
            if found.spec.packed:
                whole = torch.zeros(span.size_bytes, dtype=torch.uint8)
                spread_items(_read_packed(opened, found), found.spec, whole, 0)
                target.copy_(whole[at : at + stop - start])
            else:
                read_to_memory(opened.reader, found.entry, at, target)
            join_span(memory.filled.spans, ByteSpan(start, stop))

    def _spread(self, opened: Opened, found: DescribedEntry, memory: _Memory) -> None:
        """Read packed items to their positions in memory, unless they have been read."""
        span, spec = found.span, found.spec
        assert span is not None
        geometry = (span.at, spec.shape, spec.stride, item_bytes(spec.dtype))
        is_filled = not list(iter_gaps(memory.filled.spans, span.start, span.stop))
        if is_filled or geometry in memory.filled.packed or memory.is_unread:
            return
        offset = (span.at - memory.base) // item_bytes(spec.dtype)
        spread_items(_read_packed(opened, found), spec, memory.data, offset)
        memory.filled.packed.add(geometry)


def _verify_reach(found: DescribedEntry, span: StorageSpan, memory: _Memory) -> None:
    """Raise Corrupt for a tensor that reaches beyond its memory: torch would enlarge the storage to any size."""
    item = item_bytes(found.spec.dtype)
    start = span.at + found.spec.offset * item - memory.base
    if start < 0 or start % item or start + found.spec.span_bytes > memory.data.numel():
        what = found.entry.name
        raise Corrupt(f"{what} reaches beyond the storage that it belongs to; run `holdfast check`", key=what)


def _read_packed(opened: Opened, found: DescribedEntry) -> torch.Tensor:
    packed = new_memory(found.entry.size_bytes, CPU)
    opened.reader.read_all([(found.entry, view_bytes(packed))])
    return packed


def _resolve(found: DescribedEntry, device: torch.device | None) -> torch.device:
    """Return the device to read to, with its index; raise Unsupported if this machine does not have it."""
    if device is not None and device.type == "meta":
        return _META
    wanted = device or found.device
    if wanted.type in ("cpu", "meta"):
        return CPU
    try:
        return resolve_device(wanted)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise Unsupported(
            f"{found.entry.name}: the device {wanted} is not available: {first_line(error)}; pass device='cpu'"
        ) from error
