"""Existing tensors as targets: what can be read directly into them, which overlap, and exchange of their memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from holdfast.errors import OutOfMemory
from holdfast.repo.format.boxes import slices
from holdfast.snapshot.batches import view_tensor_memory
from holdfast.snapshot.entries import ReadTarget, kind_mismatch
from holdfast.snapshot.opened import EntryRef
from holdfast.tensors.composite import ORDINARY_CLASSES, has_own_bytes
from holdfast.tensors.fakes import has_values
from holdfast.tensors.memory import new_memory, view_raw
from holdfast.tensors.sharding import LocalBox, describe
from holdfast.tensors.spec import (
    TensorSpec,
    contiguous_stride,
    count_bytes,
    encode_quantizer,
    find_span,
    items_per_byte,
)
from holdfast.tensors.storage import alloc_storage, free_storage, is_allocated, tensor_bytes

_MAX_WORK: Final = 100_000
"""Limit on the work to decide whether two interleaved tensors share items; beyond it they count as sharing."""


def is_strided(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has a shape, strides and a dtype, and can be copied into."""
    return tensor.layout == torch.strided and not tensor.is_nested


def is_ordinary(tensor: torch.Tensor) -> bool:
    """Return whether a tensor consists of strided items in memory and nothing else."""
    return has_own_bytes(tensor) and not tensor.is_meta


def can_copy_ordinary(target: torch.Tensor) -> bool:
    """Return whether an ordinary tensor can be copied into a strided one without a change of its values.

    A tensor that is made of others, such as a quantised weight, would round them, or cannot be copied into.
    """
    is_composite = hasattr(type(target), "__tensor_flatten__") and type(target) not in ORDINARY_CLASSES
    return not is_composite or find_pieces(target) is not None


def find_read_target(target: torch.Tensor, ref: EntryRef, spec: TensorSpec) -> ReadTarget | None:
    """Return the target's memory if the saved bytes can be read directly into it."""
    if spec.meta:
        return None
    if not is_ordinary(target):
        return find_shard_target(target, target, ref, spec)
    if (encode_quantizer(target) if target.is_quantized else None) != spec.quantizer:
        return None
    layout = (target.dtype, tuple(target.shape), target.stride(), target.is_conj(), target.is_neg())
    is_same = layout == (spec.dtype, spec.shape, spec.stride, spec.conj, spec.neg)
    if not is_same or spec.packed or spec.offset or target.data_ptr() == 0:
        return None
    size = spec.span_bytes
    # Its storage may have been freed, or resized.
    is_large_enough = int(target.storage_offset()) * target.element_size() + size <= target.untyped_storage().nbytes()
    return ReadTarget(target, ref, size) if is_large_enough else None


def find_shard_target(target: object, tensor: torch.Tensor, ref: EntryRef, spec: TensorSpec) -> ReadTarget | None:
    """Return this rank's boxes of a sharded tensor, if the saved bytes can be read directly into them."""
    pieces = find_pieces(target)
    is_row = not (spec.packed or spec.offset or spec.conj or spec.neg or spec.quantizer)
    is_row = is_row and spec.stride == contiguous_stride(spec.shape)
    if pieces is None or not is_row or tensor.dtype != spec.dtype or any(piece.tensor.is_meta for piece in pieces):
        return None
    return ReadTarget(tensor, ref, 0, pieces)


def find_pieces(target: object) -> tuple[LocalBox, ...] | None:
    """Return this rank's boxes of a sharded tensor; None if it is not sharded."""
    if isinstance(target, torch.Tensor) and (is_ordinary(target) or not is_strided(target) or not has_values(target)):
        return None
    leaf = describe(target)
    return leaf.pieces if leaf.kind in ("shards", "replica") else None


def list_memory(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the ordinary tensors that contain a tensor's items here: itself, or this rank's boxes of it."""
    if is_ordinary(tensor):
        return [tensor]
    if torch.nn.parameter.is_lazy(tensor):
        return []
    return [piece.tensor for piece in find_pieces(tensor) or () if is_ordinary(piece.tensor)]


def cut_like(target: object, value: Any) -> Any:
    """Return this rank's part of a whole tensor if the target is such a part; otherwise the value itself."""
    is_whole = isinstance(value, torch.Tensor) and is_ordinary(value)
    if not is_whole or not isinstance(target, torch.Tensor) or is_ordinary(target) or find_pieces(target) is None:
        return value
    if target.shape != value.shape:
        return value
    made = torch.empty_like(target, dtype=value.dtype, requires_grad=False)
    copy_into(made, value, what="a tensor that ranks share")
    return made


def repeats_items(tensor: torch.Tensor) -> bool:
    """Return whether several items of a tensor share memory, as in an expanded one."""
    return any(step == 0 and size > 1 for step, size in zip(tensor.stride(), tensor.shape, strict=True))


def copy_into(target: torch.Tensor, saved: object, *, what: str) -> None:
    """Copy a tensor into an existing one, converting it if needed; a freed target gets memory first."""
    if not isinstance(saved, torch.Tensor):
        raise kind_mismatch(what)
    pieces = find_pieces(target)
    if pieces is not None:
        for piece in pieces:
            copy_into(piece.tensor, saved[slices(piece.box)], what=what)
        return
    flags = [(each.dtype, each.is_conj(), each.is_neg()) for each in (target, saved)]
    # Copied as raw bits where these mean the same: torch cannot copy some dtypes.
    is_raw = is_ordinary(target) and is_ordinary(saved) and flags[0] == flags[1] and not target.is_quantized
    is_new = is_ordinary(target) and allocate_if_freed(target)
    try:
        with torch.no_grad():
            if is_raw and items_per_byte(target.dtype) == 1:
                view_raw(target).copy_(view_raw(saved))
                mark_written([target])
            else:
                target.copy_(saved)
    except RuntimeError:
        if is_new:
            free_storage(target)
        raise


def allocate_if_freed(target: torch.Tensor) -> bool:
    """Allocate memory for an ordinary tensor that has items but no memory; return whether it did."""
    return target.numel() > 0 and not is_allocated(target) and alloc_storage(target, target.shape)


def mark_written(tensors: Sequence[torch.Tensor]) -> None:
    """Bump the version counters, so that autograd graphs notice that their saved tensors have changed."""
    torch.autograd.graph.increment_version([tensor for tensor in tensors if not tensor.is_inference()])


class Claim(NamedTuple):
    """A range of memory, and the value that is to be loaded into it."""

    name: str
    target: torch.Tensor
    start: int
    """An address on the target's device."""
    stop: int
    ref: EntryRef
    spec: TensorSpec
    number: int | None = None
    """The entry, if it can also be read into new memory."""

    @property
    def geometry(self) -> tuple[object, ...]:
        """Equal geometry means the same items of the same memory."""
        target = self.target
        return self.start, target.dtype, tuple(target.shape), target.stride(), target.is_conj(), target.is_neg()

    @property
    def content(self) -> tuple[object, ...]:
        """Equal content means equal items in the same order."""
        spec = self.spec
        flags = (spec.offset, spec.packed, spec.conj, spec.neg, spec.meta, spec.quantizer and repr(spec.quantizer))
        digests = b"".join([chunk.digest for chunk in self.ref.find().chunks])
        return digests, spec.dtype, spec.shape, spec.stride, *flags

    @property
    def alias_position(self) -> tuple[int, int]:
        """The saved tensor's alias group and offset in it; 0 unless the target has the same geometry."""
        target, spec = self.target, self.spec
        is_alike = (target.dtype, target.stride()) == (spec.dtype, spec.stride) and not spec.packed
        return self.ref.find().alias if is_alike else 0, spec.at + spec.offset * target.element_size()


def make_claim(name: str, target: torch.Tensor, ref: EntryRef, spec: TensorSpec) -> Claim | None:
    """Return the claim of a target on its memory; None if it has no memory that others could share."""
    if not is_ordinary(target) or target.numel() == 0:
        return None
    start = target.data_ptr()
    if start == 0:
        return None
    return Claim(name, target, start, start + find_span_bytes(target), ref, spec)


def find_span_bytes(tensor: torch.Tensor) -> int:
    """Return the number of bytes from an ordinary tensor's first item to its last."""
    items = tensor.numel() if tensor.is_contiguous() else find_span(tensor.shape, tensor.stride())
    return count_bytes(tensor.dtype, items)


def find_conflicts(claims: Sequence[Claim]) -> Iterator[tuple[Claim, Claim]]:
    """Yield the claims that want different values in the same memory, each with the earlier one."""
    devices: dict[torch.device, list[int]] = {}
    for number, claim in enumerate(claims):
        devices.setdefault(claim.target.device, []).append(number)
    for numbers in devices.values():
        # Two stable sorts: comparing tuples would take 64 bytes for each tensor.
        numbers.sort(key=lambda number: claims[number].stop)
        numbers.sort(key=lambda number: claims[number].start)
        for cluster in _iter_overlapping(claims, numbers):
            yield from _find_conflicts([(number, claims[number]) for number in cluster])


def _iter_overlapping(claims: Sequence[Claim], numbers: Sequence[int]) -> Iterator[list[int]]:
    """Yield groups of claims whose memory overlaps, given in the order of memory; single claims are left out."""
    cluster: list[int] = []
    reach = 0
    for number in numbers:
        claim = claims[number]
        if claim.start >= reach:
            if len(cluster) > 1:
                yield cluster
            cluster = []
        cluster.append(number)
        reach = max(reach, claim.stop)
    if len(cluster) > 1:
        yield cluster


def _find_conflicts(cluster: Sequence[tuple[int, Claim]]) -> Iterator[tuple[Claim, Claim]]:
    """Compare claims on one device, by number, in the order of their memory."""
    distinct: dict[tuple[object, ...], tuple[int, Claim]] = {}
    for number, claim in cluster:
        distinct.setdefault((claim.geometry, claim.content, claim.alias_position), (number, claim))
    around: list[tuple[int, Claim]] = []
    for number, claim in distinct.values():
        around = [item for item in around if item[1].stop > claim.start]
        for other_number, other in around:
            if not _agree(other, claim):
                yield (other, claim) if other_number < number else (claim, other)
        around.append((number, claim))


def _agree(one: Claim, other: Claim) -> bool:
    if one.geometry == other.geometry:
        return one.content == other.content
    (group, at), (other_group, other_at) = one.alias_position, other.alias_position
    if group and group == other_group and other.start - one.start == other_at - at:
        return True
    return not _share_items(one.target, other.target)


def _share_items(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors with overlapping memory share an item, or whether that takes too long to decide."""
    if items_per_byte(one.dtype) > 1 or items_per_byte(other.dtype) > 1:
        return True
    try:
        arrays = np.asarray(_Outline(one)), np.asarray(_Outline(other))
        return np.shares_memory(*arrays, max_work=_MAX_WORK)  # type: ignore[arg-type]  # any number will do
    except np.exceptions.TooHardError:
        return True


class _Outline:
    """The addresses of a tensor's items, for numpy to compare; the memory itself may be unreadable by the host."""

    def __init__(self, tensor: torch.Tensor) -> None:
        size = tensor.element_size()
        self.__array_interface__ = {
            "version": 3,
            "typestr": f"|V{size}",
            "shape": tuple(tensor.shape),
            "strides": tuple(step * size for step in tensor.stride()),
            "data": (tensor.data_ptr(), True),
        }


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
