"""Memory that tensors of one snapshot share when they are read one by one."""

from __future__ import annotations

import threading
from collections.abc import Hashable

import torch

from holdfast.errors import Corrupt
from holdfast.repo.format.entry import Entry
from holdfast.snapshot.leaves import iter_entry_numbers
from holdfast.snapshot.load.batches import read_to_memory
from holdfast.snapshot.load.opened import Opened, find_saved_device
from holdfast.snapshot.load.options import SAVED
from holdfast.tensors.build import CPU, build_tensor, plan_block
from holdfast.tensors.memory import new_memory, view_bytes, view_storage
from holdfast.tensors.spec import TensorSpec, decode_spec, is_rng_state
from holdfast.tensors.storage_cache import ByteSpan, FilledBytes, StorageCache, iter_gaps, join_span
from holdfast.trees.move import move_to_device, resolve_device
from holdfast.trees.outline import Leaf


class SharedMemory:
    """The memory of the tensors of one open snapshot. Safe in any thread."""

    def __init__(self, opened: Opened) -> None:
        self._opened = opened
        self._cache = StorageCache()
        self._lock = threading.Lock()

    def read(self, leaf: Leaf, device: torch.device | str | None) -> torch.Tensor:
        """Read an ordinary tensor, or reuse memory that contains its bytes."""
        what = f"{self._opened.name!r}, {leaf.name}"
        (number,) = iter_entry_numbers(leaf.node, what=what)
        entry = self._opened.entry(number)
        spec = decode_spec(entry.spec, size_bytes=entry.size_bytes, what=what)
        target_device = CPU if is_rng_state(entry.name, spec) or spec.meta else _find_device(device, entry)
        with self._lock:
            if spec.packed:
                memory = self._read_packed(number, entry, spec, target_device)
            elif entry.alias:
                memory = self._read_shared(entry, spec, target_device)
            else:
                memory = self._find_or_read(number, entry, target_device)
            return build_tensor(spec, memory, what=what)

    def _find_or_read(self, number: int, entry: Entry, device: torch.device) -> torch.Tensor:
        found = self._find(number, device)
        if found is not None:
            return found
        memory = new_memory(entry.size_bytes, CPU)
        self._opened.reader.read_all([(entry, view_bytes(memory))])
        return self._keep(number, move_to_device(memory, device))

    def _read_packed(self, number: int, entry: Entry, spec: TensorSpec, device: torch.device) -> torch.Tensor:
        key = ("packed", entry.alias) if entry.alias else number
        found = self._find(key, device)
        if found is not None:
            return found
        block = plan_block([(entry, spec)], what=entry.name)
        self._opened.reader.read_all([(fill.entry, fill.buffer) for fill in block.fills])
        return self._keep(key, move_to_device(block.finish(), device))

    def _read_shared(self, entry: Entry, spec: TensorSpec, device: torch.device) -> torch.Tensor:
        """Fill the part of a group's memory that this tensor needs and that was not read yet."""
        key = ("alias", entry.alias)
        found = self._cache.find(key, device)
        if found is None or found.filled is None:
            memory, filled = new_memory(self._measure(entry.alias), device), FilledBytes()
            self._cache.keep(key, memory.untyped_storage(), filled)
        else:
            memory, filled = view_storage(found.storage, 0, found.storage.nbytes()), found.filled
        for start, stop in list(iter_gaps(filled.spans, spec.at, spec.at + entry.size_bytes)):
            read_to_memory(self._opened.reader, entry, start - spec.at, memory[start:stop])
            join_span(filled.spans, ByteSpan(start, stop))
        return memory

    def _measure(self, alias: int) -> int:
        """Return the size of a group's memory; pages that are never touched cost nothing."""
        manifest = self._opened.reader.manifest
        members = [self._opened.entry(number) for number in manifest.find_aliases(alias)]
        specs = [(entry, decode_spec(entry.spec, size_bytes=entry.size_bytes, what=entry.name)) for entry in members]
        block = plan_block(specs, what=members[0].name)
        if block.offsets != tuple(spec.at for _, spec in specs):
            raise Corrupt(
                f"{members[0].name}: the gaps between tensors that share memory are too large", key=members[0].name
            )
        return int(block.memory.numel())

    def _find(self, key: Hashable, device: torch.device) -> torch.Tensor | None:
        found = self._cache.find(key, device)
        return None if found is None else view_storage(found.storage, 0, found.storage.nbytes())

    def _keep(self, key: Hashable, memory: torch.Tensor) -> torch.Tensor:
        self._cache.keep(key, memory.untyped_storage())
        return memory


def _find_device(device: torch.device | str | None, entry: Entry) -> torch.device:
    """Return the device with its index, as existing tensors report it."""
    return resolve_device((find_saved_device(entry) if device == SAVED else device) or CPU)
