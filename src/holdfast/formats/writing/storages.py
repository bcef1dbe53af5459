"""Plans the storages of a torch file: which bytes of which entries they are, and the tensors that are views of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from holdfast.formats.receipt import LeftOut
from holdfast.formats.writing.plan import PlannedTensor
from holdfast.formats.writing.snapshot_tensor import SnapshotTensor, is_c_order
from holdfast.snapshot.load.opened import Opened
from holdfast.tensors.spec import TensorSpec, contiguous_stride

_ALONE: Final = "memory that it shares with other tensors in part: written as a tensor of its own"


@dataclass(frozen=True, slots=True)
class TensorView:
    """A tensor as a view of a storage; offset and strides are in items."""

    storage: int
    offset: int
    stride: tuple[int, ...]
    spec: TensorSpec


@dataclass(frozen=True, slots=True)
class StoragePlan:
    """The storages to write, and a view for each tensor, by the number of its entry."""

    storages: list[SnapshotTensor] = field(default_factory=list)
    views: dict[int, TensorView] = field(default_factory=dict)
    left_out: list[LeftOut] = field(default_factory=list)

    def is_whole(self, tensor: SnapshotTensor) -> bool:
        """Return whether the items of a tensor in C order are those of its storage, in the same shape."""
        view, spec = self.views[tensor.number], tensor.spec
        base = self.storages[view.storage]
        is_plain = is_c_order(replace(spec, packed=False, stride=view.stride)) and not (spec.conj or spec.neg)
        return is_plain and view.offset == 0 and spec.shape == base.spec.shape


def plan_storages(opened: Opened, tensors: Sequence[PlannedTensor]) -> StoragePlan:
    """Give tensors that share memory one storage, if one of them contains all of that memory."""
    plan = StoragePlan()
    groups: dict[object, list[SnapshotTensor]] = {}
    for each in tensors:
        alias = opened.find_facts(each.tensor.number)[2]
        groups.setdefault(alias or ("alone", each.tensor.number), []).append(each.tensor)
    for members in groups.values():
        for shared in _iter_overlapping(opened, members):
            _add_storage(plan, opened, shared)
    return plan


def _iter_overlapping(opened: Opened, members: Sequence[SnapshotTensor]) -> Iterator[list[SnapshotTensor]]:
    """Yield the members in groups whose bytes overlap; packed tensors of one alias are the same tensor."""
    if any(member.spec.packed for member in members):
        yield list(members)
        return
    group: list[SnapshotTensor] = []
    end = 0
    for member in sorted(members, key=lambda each: (each.spec.at, -_find_size(opened, each))):
        if group and member.spec.at >= end:
            yield group
            group = []
        group.append(member)
        end = max(end, member.spec.at + _find_size(opened, member))
    yield group


def _add_storage(plan: StoragePlan, opened: Opened, members: Sequence[SnapshotTensor]) -> None:
    # Sorted: the first member begins first, and is the longest of those that begin there.
    first = members[0]
    end = first.spec.at + _find_size(opened, first)
    is_covered = all(member.spec.at + _find_size(opened, member) <= end for member in members)
    # torch loads a storage with one dtype.
    if is_covered and len({member.spec.dtype for member in members}) == 1:
        _add_views(plan, opened, first, members)
        return
    for member in members:
        plan.left_out.append(LeftOut(member.name, _ALONE))
        _add_views(plan, opened, member, [member])


def _add_views(plan: StoragePlan, opened: Opened, base: SnapshotTensor, members: Sequence[SnapshotTensor]) -> None:
    for member in members:
        spec = member.spec
        offset = 0 if spec.packed else (spec.at - base.spec.at) // member.item_bytes + spec.offset
        stride = _pack_stride(spec) if spec.packed else spec.stride
        plan.views[member.number] = TensorView(len(plan.storages), offset, stride, spec)
    plan.storages.append(_flatten(opened, base))


def _flatten(opened: Opened, base: SnapshotTensor) -> SnapshotTensor:
    """Return the bytes of an entry as a tensor; the tensor itself if it is all of them, in C order."""
    spec, size_bytes = base.spec, _find_size(opened, base)
    is_raw = is_c_order(spec) and not (spec.conj or spec.neg)
    if is_raw and base.size_bytes == size_bytes:
        return base
    items = size_bytes // base.item_bytes
    return SnapshotTensor(base.name, base.number, TensorSpec(spec.dtype, (items,), (1,)))


def _find_size(opened: Opened, tensor: SnapshotTensor) -> int:
    return opened.find_facts(tensor.number)[1]


def _pack_stride(spec: TensorSpec) -> tuple[int, ...]:
    """Return the strides of items without gaps; dimensions of stride 0 keep it."""
    dense = iter(contiguous_stride(spec.packed_shape))
    return tuple(next(dense) if step or size == 1 else 0 for size, step in zip(spec.shape, spec.stride, strict=True))
