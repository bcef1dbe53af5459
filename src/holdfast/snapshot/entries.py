"""The entries of a load: read in batches within the budget, cast, moved, checked on devices, turned into tensors."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

import torch

from holdfast.errors import Corrupt, HoldfastError, Unsupported
from holdfast.repo.format.entry import Entry
from holdfast.repo.read.read_plan import Region
from holdfast.repo.read.reader import SnapshotReader, WriteObserver
from holdfast.snapshot.batches import (
    SAVED,
    FilledPart,
    LoadOptions,
    SmallTensors,
    find_batch_count,
    hash_on_devices,
    iter_batches,
    make_cells,
    read_to_devices,
    view_tensor_memory,
)
from holdfast.snapshot.opened import EntryRef, Opened, find_saved_device
from holdfast.tensors.build import (
    CPU,
    SMALL_BATCH_DTYPES,
    MemoryBlock,
    SmallTensorBatch,
    build_tensor,
    fits_small_batch,
    measure_block,
    plan_block,
    plan_small_batch,
    spread_items,
    spread_memory,
)
from holdfast.tensors.fakes import enter_fake_mode, find_fake_mode
from holdfast.tensors.memory import new_memory, view_bytes, view_storage, wrap_memory
from holdfast.tensors.sharding import LocalBox
from holdfast.tensors.sources import group_equal
from holdfast.tensors.spec import TENSOR as TENSOR_TYPE
from holdfast.tensors.spec import SpecDecoder, TensorSpec, is_rng_state
from holdfast.tensors.storage import tensor_bytes
from holdfast.trees.apply import PACKED_FLOAT, cast_floating, move_to_device


def verify_dtype(dtype: torch.dtype | None) -> None:
    """Raise if no tensor can be cast to this dtype, before anything is read."""
    if not isinstance(dtype, torch.dtype | None):
        raise ValueError(f"dtype must be a dtype of torch or None, not {dtype!r}")
    cast_floating(torch.empty(0), dtype)


def is_cast(spec: TensorSpec, dtype: torch.dtype | None) -> bool:
    """Return whether a tensor of this spec changes if floating tensors are cast."""
    return dtype is not None and spec.dtype.is_floating_point and spec.dtype not in (dtype, PACKED_FLOAT)


def cast_spec(spec: TensorSpec, dtype: torch.dtype) -> TensorSpec:
    """Return the spec of a tensor after its memory was cast."""
    return replace(spec, dtype=dtype, at=spec.at // spec.dtype.itemsize * dtype.itemsize)


def verify_group(members: Sequence[tuple[Entry, TensorSpec, bool]], dtype: torch.dtype) -> bool:
    """Return whether shared memory is cast; raises if some of its tensors are to be cast and others not."""
    first, spec, should_cast = members[0]
    for entry, other, should_too in members[1:]:
        if (should_cast or should_too) and (should_cast, spec.dtype) != (should_too, other.dtype):
            raise Unsupported(
                f"{first.name} ({spec.dtype}) and {entry.name} ({other.dtype}) share memory, which cannot be cast to"
                f' {dtype} for both; pass aliases="fresh" to give each its own memory, or leave dtype= out'
            )
    return should_cast


def cast_memory(memory: torch.Tensor, saved: torch.dtype, dtype: torch.dtype) -> torch.Tensor:
    """Return memory, a tensor of bytes on any device, with its items cast to another dtype."""
    items = memory.numel() // saved.itemsize
    cast = cast_floating(build_tensor(TensorSpec(saved, (items,), (1,)), memory, what="memory"), dtype)
    return view_storage(cast.untyped_storage(), 0, cast.nbytes)


def cast_and_move(memory: torch.Tensor, saved: torch.dtype, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return memory cast and on another device; cast on the side where fewer bytes are moved."""
    if dtype.itemsize > saved.itemsize:
        return cast_memory(move_to_device(memory, device), saved, dtype)
    return move_to_device(cast_memory(memory, saved, dtype), device)


def cast_packed(block: MemoryBlock, dtype: torch.dtype, *, what: str) -> torch.Tensor:
    """Return the memory of packed items cast to another dtype; bytes between them are not touched."""
    assert block.scatter is not None
    spec, packed = block.scatter
    cast, items = cast_spec(spec, dtype), cast_memory(packed, spec.dtype, dtype)
    memory = spread_memory(cast, items.numel(), what)
    spread_items(items, cast, memory, 0)
    return memory


def read_cast(
    reader: SnapshotReader, entry: Entry, saved: torch.dtype, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Read an entry that is larger than half of the budget, and cast it piece by piece; returns its new memory."""
    items = entry.size_bytes // saved.itemsize
    memory = new_memory(items * dtype.itemsize, device)
    step = max(1, reader.budget_bytes // 2 // saved.itemsize)
    buffer = new_memory(min(items, step) * saved.itemsize, CPU)
    for first in range(0, items, step):
        last = min(items, first + step)
        piece = buffer[: (last - first) * saved.itemsize]
        reader.read_into(entry, first * saved.itemsize, view_bytes(piece))
        memory[first * dtype.itemsize : last * dtype.itemsize] = cast_and_move(piece, saved, dtype, device)
    return memory


def can_cast_small_batch(dtype: torch.dtype | None) -> bool:
    """Return whether small tensors may be cast together."""
    return dtype is None or dtype in SMALL_BATCH_DTYPES


def cast_small_batch(batch: SmallTensorBatch, dtype: torch.dtype | None) -> SmallTensorBatch:
    """Return a filled batch with its tensors cast, if they are floating."""
    if dtype is None or not is_cast(batch.spec, dtype):
        return batch
    return SmallTensorBatch(cast_spec(batch.spec, dtype), cast_floating(batch.memory, dtype))


class ReadTarget(NamedTuple):
    """Existing memory into which an entry's bytes are read directly."""

    tensor: torch.Tensor
    ref: EntryRef
    size_bytes: int
    """The bytes from the tensor's first item to its last."""
    pieces: tuple[LocalBox, ...] | None = None
    """This rank's boxes of a sharded tensor, each in separate memory; None for an ordinary tensor."""

    @property
    def entry(self) -> Entry:
        """The entry to read; created at each access."""
        return self.ref.find()

    @property
    def memory(self) -> list[torch.Tensor]:
        """All tensors that are written to."""
        return [self.tensor] if self.pieces is None else [piece.tensor for piece in self.pieces]


def drop_tied(targets: Sequence[ReadTarget]) -> Sequence[ReadTarget]:
    """Drop all but the last of those that are the same bytes of memory."""
    if not group_equal(array("Q", [each.tensor.data_ptr() for each in targets])):
        return targets
    return list({(each.tensor.device, each.tensor.data_ptr(), each.size_bytes): each for each in targets}.values())


class EntryReader:
    """Reads all requested entries at once, and builds ordinary tensors over their bytes."""

    def __init__(
        self,
        opened: Opened,
        options: LoadOptions,
        *,
        in_place: Mapping[int, ReadTarget] | None = None,
        devices: Mapping[int, torch.device] | None = None,
    ) -> None:
        """Entries in `in_place` are read into the memory given there, others are moved to `devices`."""
        # First: an unknown dtype or device is the caller's mistake, so it is raised before anything is read.
        verify_dtype(options.dtype)
        self._fake = find_fake_mode()
        self._device = None if options.device == SAVED else torch.device(options.device or CPU)
        self._opened = opened
        self._options = options
        self._in_place = in_place or {}
        self._devices = devices or {}
        self.specs = SpecDecoder(opened.name)
        # Specs change when memory is laid out or cast: they describe the tensor in `_memory`.
        self._specs: dict[int, tuple[Entry, TensorSpec]] = {}
        # Requested entries by alias number; an entry that shares no memory is a group by itself.
        self._groups: dict[object, list[int]] = {}
        # For each entry that was read: the memory of its group, and the members of the group.
        self._memory: dict[int, torch.Tensor] = {}
        self._sharing: dict[int, Sequence[int]] = {}
        # Read together in batches, and built at once.
        self._small = SmallTensors()
        self.find_ready = self._small.find
        """Returns the tensor of an entry that is already built, or None."""
        self._can_cast_small = can_cast_small_batch(options.dtype)
        # Entries that are excluded from casting; and entries that are still to be cast.
        self._kept: set[int] = set()
        self._uncast: set[int] = set()
        self._has_cast: set[int] = set()
        self._unread: set[int] = set()
        self.blobs: dict[int, tuple[Entry, bytearray]] = {}
        """Entries that are not tensors: arrays, texts, bytes."""

    def keep_dtypes(self, numbers: Iterable[int]) -> None:
        """Exclude entries from casting; call it before they are requested."""
        self._kept.update(numbers)

    def request(self, number: int, name: str) -> None:
        """Request an entry for the leaf of that name."""
        if number in self._specs or number in self.blobs or number in self._in_place:
            return
        saved, size_bytes, alias = self._opened.find_facts(number)
        kind = saved.get("type") if isinstance(saved, dict) else None
        if kind != TENSOR_TYPE:
            self.blobs[number] = (self._opened.entry(number), bytearray(size_bytes))
            return
        spec = self.specs.decode(saved, size_bytes=size_bytes, name=name)
        is_shared = alias and self._options.aliases == "preserve"
        if not is_shared and self._is_small(number, size_bytes, spec):
            self._small.add(number, spec)
            return
        self._specs[number] = (self._opened.entry(number), spec)
        if is_shared:
            self._groups.setdefault(alias, []).append(number)
        else:
            self._groups["alone", number] = [number]

    def _is_small(self, number: int, size_bytes: int, spec: TensorSpec) -> bool:
        if self._device != CPU or self._options.mmap or number in self._devices or number in self._kept or self._fake:
            return False
        return self._small.has_kind(spec) or (fits_small_batch(spec, size_bytes) and self._can_cast_small)

    def read(self, parts: set[int]) -> None:
        """Read all requested entries except those in place; `parts` are the entries of composite tensors."""
        here: list[list[int]] = []
        elsewhere: list[list[int]] = []
        for members in self._groups.values():
            if self._is_unread(members, parts):
                self._lay_out(members)
                continue
            # Some parts stay on the CPU whatever the device of their tensor; the others are moved when it is built.
            is_part = bool(parts.intersection(members))
            is_here = not self._must_cast(members) and any(self._find_device(each) == CPU for each in members)
            (here if is_part or is_here else elsewhere).append(members)
        blobs = [(entry, memoryview(data)) for entry, data in self.blobs.values()]
        self._read_groups(here, blobs)
        self._read_small()
        limit = self._opened.reader.budget_bytes // 2
        for batch in iter_batches(elsewhere, self._measure, limit):
            if not self._read_large(batch[0], limit):
                self._read_groups(batch, [])
                for members in batch:
                    self._move(members[0], self._find_device(members[0]))

    def _is_unread(self, members: Sequence[int], parts: set[int]) -> bool:
        """Return whether a group of tensors needs no values, because all of them become fake or meta tensors."""
        if not parts.isdisjoint(members) or any(self._specs[each][1].quantizer is not None for each in members):
            return False
        return self._fake is not None or all(self._find_device(each).type == "meta" for each in members)

    def _lay_out(self, members: Sequence[int]) -> None:
        """Give tensors memory without values, with the layout that they would have after a read."""
        dtype, saved = self._options.dtype, self._specs[members[0]][1].dtype
        must_cast = self._must_cast(members)
        offsets, size = measure_block([self._specs[number] for number in members])
        if must_cast and dtype is not None:
            size = size // saved.itemsize * dtype.itemsize
        with enter_fake_mode(self._fake):
            memory = new_memory(size, self._find_device(members[0]))
        for number, offset in zip(members, offsets, strict=True):
            entry, spec = self._specs[number]
            self._specs[number] = (entry, replace(spec, at=offset))
            self._memory[number] = memory
        self._unread.update(members)
        if must_cast and dtype is not None:
            self._note_cast(members, dtype)

    def _must_cast(self, members: Sequence[int]) -> bool:
        dtype = self._options.dtype
        if dtype is None:
            return False
        found = [(number, *self._specs[number]) for number in members]
        wanted = [(entry, spec, number not in self._kept and is_cast(spec, dtype)) for number, entry, spec in found]
        must_cast = verify_group(wanted, dtype)
        self._uncast.update(members if must_cast else ())
        return must_cast

    def _measure(self, members: Sequence[int]) -> int:
        return sum(self._specs[number][0].size_bytes for number in members)

    def _read_groups(self, groups: Sequence[Sequence[int]], fills: list[tuple[Entry, memoryview]]) -> None:
        blocks = [(members, self._plan(members)) for members in groups]
        fills = fills + [(fill.entry, fill.buffer) for _, block in blocks for fill in block.fills]
        self._opened.reader.read_all(fills)
        for members, block in blocks:
            self._memory.update(dict.fromkeys(members, self._finish(members, block)))
            self._sharing.update(dict.fromkeys(members, members))
            for number, offset in zip(members, block.offsets, strict=True):
                entry, spec = self._specs[number]
                self._specs[number] = (entry, spec if spec.at == offset else replace(spec, at=offset))

    def _finish(self, members: Sequence[int], block: MemoryBlock) -> torch.Tensor:
        dtype = self._options.dtype
        if dtype is None or block.scatter is None or members[0] not in self._uncast:
            return block.finish()
        memory = cast_packed(block, dtype, what=f"{self._opened.name!r}, {self._specs[members[0]][0].name!r}")
        self._note_cast(members, dtype)
        return memory

    def _note_cast(self, numbers: Iterable[int], dtype: torch.dtype) -> None:
        for number in numbers:
            entry, spec = self._specs[number]
            self._specs[number] = (entry, cast_spec(spec, dtype))
            self._uncast.discard(number)
            self._has_cast.add(number)

    def _read_large(self, members: Sequence[int], limit_bytes: int) -> bool:
        """Read and cast a tensor piece by piece if all of it exceeds the budget; return whether it did."""
        entry, spec = self._specs[members[0]]
        dtype = self._options.dtype
        is_alone = len(members) == 1 and not spec.packed and entry.size_bytes > limit_bytes
        if dtype is None or not is_alone or members[0] not in self._uncast:
            return False
        self._opened.reader.counters.unmapped_entries += self._options.mmap
        device = self._find_device(members[0])
        self._memory[members[0]] = read_cast(self._opened.reader, entry, spec.dtype, dtype, device)
        self._specs[members[0]] = (entry, replace(spec, at=0))
        self._sharing[members[0]] = members
        self._note_cast(members, dtype)
        return True

    def _read_small(self) -> None:
        reader = self._opened.reader
        for group in self._small.iter_batches(reader.budget_bytes // 2, find_batch_count(reader)):
            batches = [plan_small_batch(spec, len(numbers)) for spec, numbers in group]
            entries = [self._opened.entry(number) for _, numbers in group for number in numbers]
            buffers = [buffer for batch in batches for buffer in batch.list_buffers()]
            reader.read_all(list(zip(entries, buffers, strict=True)))
            for (_, numbers), batch in zip(group, batches, strict=True):
                self._small.put(numbers, cast_small_batch(batch, self._options.dtype).build())

    def read_in_place(
        self, left_out: Collection[int], watch: WriteObserver, *, targets: Mapping[int, ReadTarget] | None = None
    ) -> None:
        """Read entries into the existing memory, or into the replacements that are given.

        If that fails, some of it has been overwritten; `watch` records which.
        """
        wanted = [
            each for number, each in (self._in_place if targets is None else targets).items() if number not in left_out
        ]
        self._read_pieces([each for each in wanted if each.pieces is not None], watch)
        unique = drop_tied([each for each in wanted if each.pieces is None and each.size_bytes])
        here = [each for each in unique if each.tensor.device == CPU]
        count = find_batch_count(self._opened.reader)
        for start in range(0, len(here), count):
            some = here[start : start + count]
            fills = [(each.entry, tensor_bytes(each.tensor, each.size_bytes)) for each in some]
            self._opened.reader.read_all(fills, watch=watch)
        elsewhere = [each for each in unique if each.tensor.device != CPU]
        moves = [(each.entry, view_tensor_memory(each.tensor, each.size_bytes)) for each in elsewhere]
        read_to_devices(self._opened.reader, moves, watch)

    def _read_pieces(self, targets: Sequence[ReadTarget], watch: WriteObserver) -> None:
        """Read this rank's boxes of tensors, through other memory if a box is not contiguous."""
        limit = self._opened.reader.budget_bytes // 2
        wanted = [(each.entry, piece) for each in targets for piece in each.pieces or () if piece.tensor.numel()]
        for entry, _ in wanted:
            watch.expect(entry.name, 1)
        for batch in iter_batches(wanted, lambda pair: pair[1].tensor.nbytes, limit):
            regions, copies = [], []
            for entry, piece in batch:
                shape, item_bytes = self._find_geometry(entry), piece.tensor.element_size()
                memory = piece.tensor
                if memory.is_cpu and memory.is_contiguous():
                    watch.begin(entry.name)
                else:
                    memory = torch.empty(piece.tensor.shape, dtype=piece.tensor.dtype)
                    copies.append((entry, piece.tensor, memory))
                regions.append((entry, Region(piece.box, shape, item_bytes), tensor_bytes(memory, memory.nbytes)))
            self._opened.reader.read_regions(regions)
            with torch.no_grad():
                for entry, target, memory in copies:
                    watch.begin(entry.name)
                    target.copy_(memory)
            for entry, _ in batch:
                watch.end(entry.name)

    def _find_geometry(self, entry: Entry) -> tuple[int, ...]:
        return self.specs.decode(entry.spec, size_bytes=entry.size_bytes, name=entry.name).shape

    def _plan(self, members: Sequence[int]) -> MemoryBlock:
        found = [self._specs[number] for number in members]
        if self._options.mmap:
            is_alone = len(found) == 1 and not found[0][1].packed and found[0][0].size_bytes > 0
            # Mapped bytes are not verified here, so one could not tell a damaged copy from a damaged store.
            is_checked = self._options.verify == "device" and self._find_device(members[0]) != CPU
            can_map = is_alone and members[0] not in self._uncast and not is_checked
            mapped = self._opened.reader.map_entry(found[0][0]) if can_map else None
            if mapped is not None:
                self._opened.reader.counters.mapped_entries += 1
                return MemoryBlock(wrap_memory(mapped), (), (0,))
            self._opened.reader.counters.unmapped_entries += len(found)
        return plan_block(found, what=f"{self._opened.name!r}, {found[0][0].name!r}")

    def is_in_place(self, number: int) -> bool:
        """Return whether an entry is read into existing memory."""
        return number in self._in_place

    def build(self, number: int, what: str, device: torch.device | None) -> torch.Tensor:
        """Return the tensor of an entry, moved to its device if it was read elsewhere."""
        if number in self._in_place:
            return self._in_place[number].tensor
        ready = self.find_ready(number)
        if ready is not None:
            return ready
        if number not in self._specs:
            raise kind_mismatch(what)
        memory = self._memory[number]
        if number in self._unread:
            with enter_fake_mode(self._fake):
                return build_tensor(self._specs[number][1], memory, what=what)
        device = device or self._find_device(number)
        if memory.device != device or number in self._uncast:
            memory = self._move(number, device)
        return build_tensor(self._specs[number][1], memory, what=what)

    def _move(self, number: int, device: torch.device) -> torch.Tensor:
        """Return the memory on another device, cast if requested; one copy for all tensors that share it."""
        memory, name = self._memory[number], self._specs[number][0].name
        if memory.is_meta:
            raise kind_mismatch(name)  # one node needs its bytes, another one has it on the meta device
        dtype = self._options.dtype if number in self._uncast else None
        try:
            if dtype is None:
                moved = move_to_device(memory, device)
            else:
                moved = cast_and_move(memory, self._specs[number][1].dtype, dtype, device)
        except (RuntimeError, AssertionError) as error:
            if self._device is not None or number in self._devices:
                raise
            raise Unsupported(f"{name} was on {device}, and cannot be put there: {error}; pass device=") from error
        for other in self._sharing[number]:
            if self._memory[other] is memory and self._find_device(other) == device:
                self._memory[other] = moved
                if dtype is not None:
                    self._note_cast((other,), dtype)
        return moved

    def iter_moved(self) -> Iterator[FilledPart]:
        """Yield the memory on other devices whose bytes are those of an entry: not cast, and without gaps between."""
        for number, memory in self._memory.items():
            entry, spec = self._specs[number]
            is_moved = not memory.is_cpu and not memory.is_meta and number not in self._unread
            if not is_moved or number in self._has_cast or number in self._uncast or spec.packed:
                continue
            if self._opened.reader.manifest.find_chunks(number).dims < 2:
                yield FilledPart(number, memory[spec.at : spec.at + entry.size_bytes], entry.size_bytes, None)
            elif not (spec.offset or spec.conj or spec.neg):
                yield FilledPart(number, build_tensor(spec, memory, what=entry.name), entry.size_bytes, None)

    def _find_device(self, number: int) -> torch.device:
        entry, spec = self._specs[number]
        if number in self._devices:
            return self._devices[number]
        if spec.meta or is_rng_state(entry.name, spec):
            return CPU
        if self._device is not None:
            return self._device
        saved = find_saved_device(entry)
        with torch_errors_as_corrupt(entry.name):
            return CPU if saved is None else torch.device(saved)


@contextmanager
def torch_errors_as_corrupt(what: str) -> Iterator[None]:
    """Turn torch's refusal of a stored value into Corrupt, with the name of the leaf."""
    try:
        yield
    except HoldfastError:
        raise
    except (RuntimeError, TypeError, ValueError) as error:
        raise Corrupt(f"{what}: {error}", key=what) from error


def kind_mismatch(what: str) -> Corrupt:
    """Return the error for a leaf whose node and entry are of different kinds."""
    return Corrupt(f"{what}: the stored tree and its entry disagree on what it is; run `holdfast check`", key=what)


def verify_on_devices(parts: Iterable[FilledPart], opened: Opened, specs: SpecDecoder) -> None:
    """Raise Corrupt if memory on a device differs from the chunks that it was filled with; it is hashed there.

    Memory of the CPU is left out, and parts of chunks, which have no digest: they were verified when they were read.
    """
    manifest = opened.reader.manifest
    cells = [make_cells(part, manifest, specs) for part in parts if not part.tensor.is_cpu and part.size_bytes]
    for each, found in zip(cells, hash_on_devices(cells), strict=True):
        if not all(is_held for cell, is_held in found if cell.is_whole):
            name, device = manifest.names[each.part.number], each.part.tensor.device
            raise Corrupt(
                f"{opened.name!r}, {name}: its bytes on {device} are not those that were read from the store and"
                " verified on the host, so the copy to the device is damaged, not the store. Load it again; if that"
                " fails too, the device, its driver or its link to the host is faulty",
                key=name,
            )
