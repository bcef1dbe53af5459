"""Finds which parts of a target differ from a snapshot: what is known of its memory decides, or a hash of it."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import torch

from holdfast.digest import Digest, hash_bytes
from holdfast.repo.engine import Engine
from holdfast.repo.format.entry import ChunkTable, Entry
from holdfast.repo.read.read_plan import Region
from holdfast.repo.read.reader import SnapshotReader
from holdfast.snapshot.into.held import NOTED_BYTES, HeldContent, HeldMemory, Since
from holdfast.snapshot.into.in_place import list_memory
from holdfast.snapshot.into.plan import IntoPlan
from holdfast.snapshot.into.swap import Swap, SwapPair, find_shortage, refuse_memory
from holdfast.snapshot.load.cells import Cell, FilledPart, PartCells, hash_on_devices, make_cells
from holdfast.snapshot.load.device_check import verify_on_devices
from holdfast.snapshot.load.entries import ReadTarget, drop_tied
from holdfast.tensors.storage import tensor_bytes

_log = logging.getLogger(__name__)

_HASHED_HERE_BYTES: Final = 64 << 10
"""Smaller pieces of memory are hashed by the caller: a thread takes longer to begin."""


class Patch(NamedTuple):
    """A part of the target that differs from the snapshot, and new memory for it."""

    number: int
    tensor: torch.Tensor
    """The tensor of the target whose memory it is."""
    entry: Entry
    """With the chunks that are needed, and no others."""
    region: Region
    memory: torch.Tensor
    """A view of the target."""


class Changes:
    """The parts of a target that differ from a snapshot, read into new memory, and the swap that puts them in place."""

    def __init__(self, reader: SnapshotReader, patches: Sequence[Patch]) -> None:
        """Allocate the new memory; raises OutOfMemory if there is not enough."""
        self._reader = reader
        self._patches = patches
        self.size_bytes = sum(patch.region.size_bytes for patch in patches)
        self.numbers = {patch.number for patch in patches}
        """The entries that some part of the target differs from."""
        if shortage := find_shortage(self.size_bytes):
            raise self._refuse(shortage)
        try:
            # On the CPU, whatever the target's device: there it is read, verified and kept until the load is final.
            self._new = [torch.empty(each.memory.shape, dtype=each.memory.dtype) for each in patches]
        except (RuntimeError, MemoryError) as error:
            raise self._refuse(str(error).partition("\n")[0]) from error
        pairs: list[SwapPair] = [(patch.memory, new) for patch, new in zip(patches, self._new, strict=True)]
        self.swap = Swap(pairs, list({id(patch.tensor): patch.tensor for patch in patches}.values()))

    def _refuse(self, reason: str) -> Exception:
        return refuse_memory(self.size_bytes, reason, option="since=", of="what changes")

    def read(self) -> None:
        """Read and verify the new bytes; the target is not changed."""
        wanted = [
            (patch.entry, patch.region, tensor_bytes(new, new.nbytes))
            for patch, new in zip(self._patches, self._new, strict=True)
        ]
        self._reader.read_regions(wanted)


def find_changes(plan: IntoPlan, since: Since) -> Changes:
    """Return what of the plan's targets differs from the snapshot; memory whose content is not known is hashed."""
    held = plan.options.held
    finder = _Finder(plan, HeldMemory() if held is None or since.check else held)
    changes = Changes(plan.opened.reader, finder.find_patches())
    total = sum(part.size_bytes for part in _iter_parts(plan))
    text = "%r into a tree that holds %r: %d of %d bytes are read, %d bytes of the tree were hashed"
    _log.info(text, plan.opened.name, since.name, changes.size_bytes, total, finder.hashed_bytes)
    return changes


def iter_contents(plan: IntoPlan) -> Iterator[tuple[torch.Tensor, int, HeldContent]]:
    """Yield what the memory of a target holds after the plan was carried out, for `HeldMemory.note`."""
    changed = _list_changed(plan)
    for part in _iter_parts(plan, NOTED_BYTES):
        if part.tensor.untyped_storage()._cdata not in changed:
            table = plan.opened.reader.manifest.find_chunks(part.number)
            yield part.tensor, part.size_bytes, HeldContent(table, part.box)


def verify_targets(plan: IntoPlan) -> None:
    """Compare the digests of what is on devices after the plan was carried out; raises Corrupt if one differs."""
    changed = _list_changed(plan)
    parts = _cut_targets([*plan.in_place.values()])
    kept = (part for part in parts if part.tensor.untyped_storage()._cdata not in changed)
    verify_on_devices(kept, plan.opened, plan.specs)


def _list_changed(plan: IntoPlan) -> set[int]:
    """Return the storages that a step may write to: code of the user may have changed them after they were filled."""
    tensors = (tensor for step in plan.steps for each in step.memory for tensor in list_memory(each))
    return {tensor.untyped_storage()._cdata for tensor in tensors}


def _iter_parts(plan: IntoPlan, min_bytes: int = 1) -> Iterator[FilledPart]:
    """Yield the memory of the target, tied tensors once."""
    return _cut_targets([plan.in_place[number] for number in plan.names], min_bytes)


def _cut_targets(targets: Sequence[ReadTarget], min_bytes: int = 1) -> Iterator[FilledPart]:
    for target in drop_tied([each for each in targets if each.pieces is None and each.size_bytes >= min_bytes]):
        yield FilledPart(target.ref.number, target.tensor, target.size_bytes, None)
    for target in targets:
        for box, tensor in target.pieces or ():
            if tensor.nbytes >= min_bytes:
                yield FilledPart(target.ref.number, tensor, tensor.nbytes, box)


class _Finder:
    """Finds the parts of a target that differ from the snapshot."""

    def __init__(self, plan: IntoPlan, held: HeldMemory) -> None:
        self._plan = plan
        self._held = held
        self._manifest = plan.opened.reader.manifest
        self.hashed_bytes = 0

    def find_patches(self) -> list[Patch]:
        patches: list[Patch] = []
        unknown: list[PartCells] = []
        for part in _iter_parts(self._plan):
            cells = make_cells(part, self._manifest, self._plan.specs)
            rows = self._find_changed(part, cells.table)
            if rows is None:
                unknown.append(cells)
            else:
                patches += self._make_patches(cells, rows)
        self.hashed_bytes = sum(cells.part.size_bytes for cells in unknown)
        on_host = [cells for cells in unknown if cells.part.tensor.is_cpu]
        with Engine("holdfast-compare", budget_bytes=self._plan.opened.reader.budget_bytes, waits=False) as engine:
            for cells in on_host:
                patches += self._make_patches(cells, _hash_rows(engine, cells))
        elsewhere = [cells for cells in unknown if not cells.part.tensor.is_cpu]
        for cells, found in zip(elsewhere, hash_on_devices(elsewhere), strict=True):
            patches += self._make_patches(cells, [cell.row for cell, is_held in found if not is_held])
        return patches

    def _find_changed(self, part: FilledPart, table: ChunkTable) -> Sequence[int] | None:
        """Return the chunks that differ from what the memory is known to hold; None if that is unknown."""
        content = self._held.find(part.tensor, part.size_bytes)
        return table.find_changed(content.table) if content is not None and content.box == part.box else None

    def _make_patches(self, cells: PartCells, rows: Sequence[int]) -> Iterator[Patch]:
        part = cells.part
        for cell in cells.iter_joined(rows):
            entry = self._manifest.cut_entry(part.number, {row: cells.places[row] for row in cell.rows})
            yield Patch(part.number, part.tensor, entry, cell.region, cell.memory)


def _hash_rows(engine: Engine, cells: PartCells) -> list[int]:
    """Return the chunks that memory does not hold, by its own digest, or of which it has only a part."""
    every = list(cells.iter_cells(range(len(cells.table.sizes))))

    def differs(cell: Cell) -> bool:
        return not cell.is_whole or hash_memory(cell.memory) != cells.table.find_digest(cell.row)

    is_small = cells.part.size_bytes < _HASHED_HERE_BYTES
    items = ((cell, cell.region.size_bytes) for cell in every)
    found = map(differs, every) if is_small else engine.iter_results(differs, items)
    return [cell.row for cell, is_changed in zip(every, found, strict=True) if is_changed]


def hash_memory(memory: torch.Tensor) -> Digest:
    """Return the digest of memory of the host, in C order."""
    # Referenced until its bytes are hashed: if the memory has gaps, it is a copy that nothing else keeps alive.
    contiguous = memory.contiguous()
    return hash_bytes(tensor_bytes(contiguous, contiguous.nbytes))
