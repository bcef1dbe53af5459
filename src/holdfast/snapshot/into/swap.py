"""New memory for an atomic load: filled first, then exchanged with the target's when everything is verified."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch

from holdfast.errors import OutOfMemory
from holdfast.snapshot.into.in_place import mark_written
from holdfast.snapshot.load.batches import view_place
from holdfast.snapshot.load.entries import InPlace
from holdfast.tensors.dtypes import items_per_byte
from holdfast.tensors.memory import new_memory, view_raw
from holdfast.tensors.sharding.sharded import LocalBox

_BLOCK_BYTES: Final = 8 << 20
"""How many bytes are exchanged at a time; a buffer of this size is allocated for it."""
_MEMORY_FACTS: Final = "/proc/meminfo"
_Pair = tuple[torch.Tensor, torch.Tensor]


class Swap:
    """Memory of the target, and new memory of the same size that can be exchanged with it, and back."""

    def __init__(self, places: Mapping[int, InPlace]) -> None:
        """Allocate the new memory; raises OutOfMemory if there is not enough."""
        self._live = dict(places)
        verify_available(sum(each.nbytes for place in places.values() for each in place.memory if each.is_cpu))
        self.places: dict[int, InPlace] = {}
        """The new memory, by the same numbers."""
        # Tensors that are the same memory share their new memory, too: exchanging it twice would restore the old.
        self._pairs: dict[object, list[_Pair]] = {}
        try:
            for number, place in places.items():
                self.places[number] = self._add(place)
        except (RuntimeError, MemoryError) as error:
            needed = sum(each.nbytes for place in places.values() for each in place.memory)
            raise _refuse(needed, str(error).partition("\n")[0]) from error
        self._steps: list[_Step] = []

    def _add(self, place: InPlace) -> InPlace:
        if place.pieces is not None:
            pieces = [
                LocalBox(box, torch.empty(held.shape, dtype=held.dtype, device=held.device))
                for box, held in place.pieces
            ]
            self._pairs[id(place)] = [
                (one.tensor, other.tensor) for one, other in zip(place.pieces, pieces, strict=True)
            ]
            return place._replace(pieces=tuple(pieces))
        key = (place.tensor.device, place.tensor.data_ptr(), place.size_bytes)
        if key not in self._pairs:
            memory = new_memory(place.size_bytes, place.tensor.device)
            self._pairs[key] = [(view_place(place.tensor, place.size_bytes), memory)]
        return place._replace(tensor=self._pairs[key][0][1])

    def exchange(self) -> None:
        """Exchange the new memory and the target's; call it with signals delayed."""
        for pairs in self._pairs.values():
            for pair in pairs:
                steps = _cut(*pair)
                # Noted before it begins, so that a failure during a step, or right after it, can be undone.
                self._steps += steps
                for step in steps:
                    step.exchange()
        self._mark_written()

    def exchange_back(self) -> None:
        """Undo `exchange`, also if it was not completed; call it with signals delayed."""
        while self._steps:
            self._steps[-1].undo()
            self._steps.pop()
        self._mark_written()

    def _mark_written(self) -> None:
        mark_written([each for place in self._live.values() for each in place.memory])


class _Step:
    """A part of the target and new memory of the same size, exchanged by three copies."""

    __slots__ = ("_held", "_is_begun", "_is_done", "_mine", "_theirs")

    def __init__(self, mine: torch.Tensor, theirs: torch.Tensor, held: torch.Tensor) -> None:
        self._mine = mine
        self._theirs = theirs
        self._held: torch.Tensor | None = held
        self._is_begun = False
        self._is_done = False

    def exchange(self) -> None:
        """Exchange the items. Progress is noted without allocating memory, because any other line may fail."""
        with torch.no_grad():
            assert self._held is not None, "it is exchanged once"
            self._held.copy_(self._mine)
            self._is_begun = True
            self._mine.copy_(self._theirs)
            self._theirs.copy_(self._held)
            self._is_done = True
            self._held = None

    def undo(self) -> None:
        """Restore the target's old items."""
        with torch.no_grad():
            if self._is_done:
                self._mine.copy_(self._theirs)
            elif self._is_begun and self._held is not None:
                self._mine.copy_(self._held)


def _cut(one: torch.Tensor, other: torch.Tensor) -> list[_Step]:
    """Cut two tensors into steps; allocates all the memory that these need, and changes nothing."""
    with torch.no_grad():
        if items_per_byte(one.dtype) == 1:
            one, other = view_raw(one), view_raw(other)
        if not (one.dim() == 1 and one.is_contiguous() and other.is_contiguous()):
            return [_Step(one, other, torch.empty_like(one))]
        size = max(1, _BLOCK_BYTES // one.element_size())
        spare = torch.empty_like(one[:size])
        starts = range(0, one.numel(), size)
        parts = [(one[start : start + size], other[start : start + size]) for start in starts]
        return [_Step(mine, theirs, spare[: mine.numel()]) for mine, theirs in parts]


def verify_available(needed_bytes: int) -> None:
    """Raise OutOfMemory if this machine clearly lacks that much memory; if that is unknown, do nothing."""
    facts = read_memory_facts(_MEMORY_FACTS)
    available = facts.get("MemAvailable")
    if available is not None and needed_bytes > available + facts.get("SwapFree", 0):
        raise _refuse(needed_bytes, f"{available} bytes are available")


def read_memory_facts(path: str) -> dict[str, int]:
    """Return Linux's figures on memory, in bytes; empty on other systems."""
    try:
        with open(path, encoding="ascii") as file:
            lines = [line.split() for line in file]
    except OSError:
        return {}
    return {words[0].rstrip(":"): int(words[1]) << 10 for words in lines if words[-1] == "kB"}


def _refuse(needed_bytes: int, reason: str) -> OutOfMemory:
    return OutOfMemory(
        f"atomic=True needs {needed_bytes} bytes of new memory for a second copy of the target: {reason}."
        " Nothing was changed; load without atomic=True, or free memory",
        needed_bytes=needed_bytes,
    )
