"""Exchanges memory of a target with new memory of the same size, and back; refuses if there is too little memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import torch

from holdfast.errors import OutOfMemory
from holdfast.snapshot.into.in_place import mark_written
from holdfast.snapshot.load.batches import view_tensor_memory
from holdfast.snapshot.load.entries import ReadTarget
from holdfast.tensors.dtypes import items_per_byte
from holdfast.tensors.memory import new_memory, view_raw
from holdfast.tensors.sharding.sharded import LocalBox
from holdfast.tensors.storage import tensor_bytes

_BLOCK_BYTES: Final = 8 << 20
"""How many bytes are exchanged at a time; a buffer of this size is allocated for it."""
_COPIED_HERE_BYTES: Final = 4 << 20
_MEMORY_FACTS: Final = "/proc/meminfo"
_Buffers = dict[tuple[torch.dtype, torch.device], torch.Tensor]
SwapPair = tuple[torch.Tensor, torch.Tensor]
"""Memory of the target, and new memory of the same shape, on the same device or on the CPU."""


class Swap:
    """Memory of the target, and new memory of the same size that can be exchanged with it, and back."""

    def __init__(self, pairs: Sequence[SwapPair], written: Sequence[torch.Tensor]) -> None:
        """Exchange these pairs; `written` are the tensors of the target whose version counters then change."""
        self._pairs = pairs
        self._written = written
        self._steps: list[_Exchange] = []

    def exchange(self) -> None:
        """Exchange the new memory and the target's; call it with signals delayed."""
        buffers: _Buffers = {}
        for pair in self._pairs:
            steps = _plan_exchanges(*pair, buffers)
            # Noted before it begins, so that a failure during a step, or right after it, can be undone.
            self._steps += steps
            for step in steps:
                step.exchange()
        mark_written(self._written)

    def exchange_back(self) -> None:
        """Undo `exchange`, also if it was not completed; call it with signals delayed."""
        while self._steps:
            self._steps[-1].undo()
            self._steps.pop()
        mark_written(self._written)


class WholeCopy:
    """New memory for all of a target, as targets of a read, and the swap that puts it in place."""

    def __init__(self, targets: Mapping[int, ReadTarget]) -> None:
        """Allocate the new memory; raises OutOfMemory if there is not enough."""
        needed = sum(each.nbytes for target in targets.values() for each in target.memory)
        on_host = sum(each.nbytes for target in targets.values() for each in target.memory if each.is_cpu)
        if shortage := find_shortage(on_host):
            raise refuse_memory(on_host, shortage)
        self.targets: dict[int, ReadTarget] = {}
        """The new memory, by the same numbers."""
        # Tensors that are the same memory share their new memory, too: exchanging it twice would restore the old.
        self._pairs: dict[object, list[SwapPair]] = {}
        try:
            for number, target in targets.items():
                self.targets[number] = self._add(target)
        except (RuntimeError, MemoryError) as error:
            raise refuse_memory(needed, str(error).partition("\n")[0]) from error
        pairs = [pair for pairs in self._pairs.values() for pair in pairs]
        self.swap = Swap(pairs, [each for target in targets.values() for each in target.memory])

    def _add(self, target: ReadTarget) -> ReadTarget:
        if target.pieces is not None:
            pieces = [
                LocalBox(box, torch.empty(old.shape, dtype=old.dtype, device=old.device)) for box, old in target.pieces
            ]
            self._pairs[id(target)] = [
                (one.tensor, other.tensor) for one, other in zip(target.pieces, pieces, strict=True)
            ]
            return target._replace(pieces=tuple(pieces))
        key = (target.tensor.device, target.tensor.data_ptr(), target.size_bytes)
        if key not in self._pairs:
            memory = new_memory(target.size_bytes, target.tensor.device)
            self._pairs[key] = [(view_tensor_memory(target.tensor, target.size_bytes), memory)]
        return target._replace(tensor=self._pairs[key][0][1])


class _Exchange:
    """A part of the target and new memory of the same size, exchanged by three copies."""

    __slots__ = ("_buffer", "_is_begun", "_is_done", "_new", "_target")

    def __init__(self, target: torch.Tensor, new: torch.Tensor, buffer: torch.Tensor) -> None:
        self._target = target
        self._new = new
        self._buffer: torch.Tensor | None = buffer
        self._is_begun = False
        self._is_done = False

    def exchange(self) -> None:
        """Exchange the items. Progress is noted without allocating memory, because any other line may fail."""
        with torch.no_grad():
            assert self._buffer is not None, "it is exchanged once"
            _copy(self._buffer, self._target)
            self._is_begun = True
            _copy(self._target, self._new)
            _copy(self._new, self._buffer)
            self._is_done = True
            self._buffer = None

    def undo(self) -> None:
        """Restore the target's old items."""
        with torch.no_grad():
            if self._is_done:
                _copy(self._target, self._new)
            elif self._is_begun and self._buffer is not None:
                _copy(self._target, self._buffer)


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy items; small contiguous memory without torch, whose threads wait for each other longer than a copy takes."""
    is_plain = target.is_cpu and source.is_cpu and target.is_contiguous() and source.is_contiguous()
    if is_plain and target.nbytes <= _COPIED_HERE_BYTES:
        tensor_bytes(target, target.nbytes)[:] = tensor_bytes(source, source.nbytes)
    else:
        target.copy_(source)


def _plan_exchanges(one: torch.Tensor, other: torch.Tensor, buffers: _Buffers) -> list[_Exchange]:
    """Cut two tensors into steps; allocates all the memory that these need, and changes nothing.

    Steps use the same buffer one after the other: only the last one that has begun may still need it.
    """
    with torch.no_grad():
        if items_per_byte(one.dtype) == 1:
            one, other = view_raw(one), view_raw(other)
        if not (one.dim() == 1 and one.is_contiguous() and other.is_contiguous()):
            return [_Exchange(one, other, torch.empty_like(one))]
        size = max(1, _BLOCK_BYTES // one.element_size())
        buffer = buffers.get((one.dtype, one.device))
        if buffer is None or buffer.numel() < min(size, one.numel()):
            buffer = buffers[one.dtype, one.device] = torch.empty_like(one[:size])
        starts = range(0, one.numel(), size)
        parts = [(one[start : start + size], other[start : start + size]) for start in starts]
        return [_Exchange(target, new, buffer[: target.numel()]) for target, new in parts]


def find_shortage(needed_bytes: int) -> str:
    """Say how little memory there is if this machine clearly lacks so much; "" if not, or if that is unknown."""
    facts = read_memory_facts(_MEMORY_FACTS)
    available = facts.get("MemAvailable")
    is_short = available is not None and needed_bytes > available + facts.get("SwapFree", 0)
    return f"{available} bytes are available" if is_short else ""


def read_memory_facts(path: str) -> dict[str, int]:
    """Return Linux's figures on memory, in bytes; empty on other systems."""
    try:
        with open(path, encoding="ascii") as file:
            lines = [line.split() for line in file]
    except OSError:
        return {}
    return {words[0].rstrip(":"): int(words[1]) << 10 for words in lines if words[-1] == "kB"}


def refuse_memory(needed_bytes: int, reason: str, *, option: str = "atomic=True", of: str = "") -> OutOfMemory:
    """Return the error for a load that may change nothing if it fails, and lacks the memory for that."""
    return OutOfMemory(
        f"{option} needs {needed_bytes} bytes of new memory for a second copy of {of or 'the target'}: {reason}."
        f" Nothing was changed; load without {option}, or free memory",
        needed_bytes=needed_bytes,
    )
