"""A batch of tensors that are committed together: copies of their bytes, and how they become one snapshot.

The tree of such a snapshot is `{"tensors": {name: tensor}, "storages": {digest: bytes}}`. The note of an entry that has
bytes contains, besides the device, `"storage": "group:at:digest:first:size"`. Entries of one group, in any snapshot,
were views of one memory; this entry begins at byte `at` of it. The storage that the tensor is a view of has that digest
and size. It begins `first` bytes after the start of the entry, or before it if negative.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch

from holdfast.content.seen_storages import SeenStorages
from holdfast.digest import hash_bytes
from holdfast.errors import Unsupported
from holdfast.json_text import Json, parse_json
from holdfast.repo.format.chunk import CHUNK_BYTES
from holdfast.repo.format.source import BytesSource, Source
from holdfast.repo.write.writer import Request, WriteOptions
from holdfast.snapshot.leaves import TENSOR, LeafWriter, renumber
from holdfast.snapshot.save.copies import StagedSource
from holdfast.tensors.build import CPU, build_tensor, spread_items
from holdfast.tensors.composite import has_own_bytes, verify_readable
from holdfast.tensors.dtypes import item_bytes, items_per_byte, number_bytes
from holdfast.tensors.memory import ALIGNMENT, new_memory, view_bytes, view_storage, wrap_memory
from holdfast.tensors.sources import SourceForm, TensorSource, TensorSpan, iter_overlapping
from holdfast.tensors.spec import SpecEncoder, TensorSpec, count_bytes, describe
from holdfast.trees.encoding import encode_tree
from holdfast.trees.outline import TREE
from holdfast.trees.registered import Types

TENSORS: Final = "tensors"
STORAGES: Final = "storages"
_RECORD_BYTES: Final = 1024
"""Estimated memory per tensor, besides its bytes."""


@dataclass(frozen=True, slots=True)
class StagedTensor:
    """The description of an ordinary tensor, and its byte range in its storage, at the time of staging."""

    spec: TensorSpec
    device: str
    group: str
    """Names the content of its storage (see `SeenStorages`); empty if the tensor has no bytes."""
    start: int
    stop: int

    @property
    def geometry(self) -> tuple[object, ...]:
        """Equal for tensors that are the same items of a storage."""
        return (self.start, self.stop, self.spec.shape, self.spec.stride, item_bytes(self.spec.dtype))


@dataclass(frozen=True, slots=True)
class _Record:
    """The node of one name, and its tensors, which the node numbers from 0."""

    node: list[Json]
    tensors: tuple[tuple[str, StagedTensor], ...]


@dataclass(frozen=True, slots=True)
class _Copy:
    """A copy of bytes of a storage."""

    start: int
    stop: int
    memory: torch.Tensor

    def covers(self, start: int, stop: int) -> bool:
        return self.start <= start and stop <= self.stop

    def view(self, start: int, stop: int) -> torch.Tensor:
        return self.memory[start - self.start : stop - self.start]


class Batch:
    """Tensors by name and storages by digest, to be committed as one snapshot. Not thread-safe."""

    def __init__(self, name: str) -> None:
        """Create an empty batch; `name` is the name of its snapshot."""
        self.name = name
        self.size_bytes = 0
        self._records: dict[tuple[str, str], _Record] = {}
        self._copies: dict[str, list[_Copy]] = {}
        self._types = Types(())

    def __len__(self) -> int:
        """Return the number of names in the batch."""
        return len(self._records)

    def add_tensor(self, name: str, tensor: torch.Tensor, seen: SeenStorages, types: Types, *, copy: bool) -> None:
        """Add a tensor; without `copy`, its memory must not change until the batch is committed."""
        node, tensors = _split(name, tensor, types)
        staged = tuple((part_name, self._stage(part, seen, copy=copy)) for part_name, part in tensors)
        self._records[TENSORS, name] = _Record(node, staged)
        self.size_bytes += _RECORD_BYTES * max(1, len(staged))

    def add_storage(self, digest: str, memory: torch.Tensor, seen: SeenStorages, *, copy: bool) -> None:
        """Add a whole storage; `memory` is a tensor of bytes over it."""
        self._records[STORAGES, digest] = _Record([TENSOR, 0], ((digest, self._stage(memory, seen, copy=copy)),))
        self.size_bytes += _RECORD_BYTES

    def _stage(self, tensor: torch.Tensor, seen: SeenStorages, *, copy: bool) -> StagedTensor:
        spec = describe(tensor)
        size_bytes = 0 if spec.meta else spec.span_bytes
        if not size_bytes:
            return StagedTensor(spec, str(tensor.device), "", 0, 0)
        per_byte = items_per_byte(spec.dtype)
        start = int(tensor.storage_offset()) * item_bytes(spec.dtype) if per_byte == 1 else 0
        stop = start + size_bytes
        storage = tensor.untyped_storage()
        group = seen.find_group(storage, start, stop)
        self._keep(group, storage, start, stop, copy=copy)
        return StagedTensor(spec, str(tensor.device), group, start, stop)

    def _keep(self, group: str, storage: torch.UntypedStorage, start: int, stop: int, *, copy: bool) -> None:
        copies = self._copies.setdefault(group, [])
        # The largest copy comes first, so that a base is copied once, however many of its views follow.
        if copies and copies[0].covers(start, stop):
            return
        memory = view_storage(storage, start, stop)
        if copy or storage.device.type != "cpu":
            memory = new_memory(stop - start, CPU).copy_(memory)
        copies.append(_Copy(start, stop, memory))
        if stop - start > copies[0].stop - copies[0].start:
            copies[0], copies[-1] = copies[-1], copies[0]
        self.size_bytes += stop - start

    def make_request(self, environment: Mapping[str, Json]) -> Request:
        """Return the request that saves the batch as one snapshot."""
        nodes: dict[str, dict[str, _Node]] = {TENSORS: {}, STORAGES: {}}
        named: list[tuple[str, StagedTensor]] = []
        for (kind, name), record in self._records.items():
            numbers = dict(enumerate(range(len(named), len(named) + len(record.tensors))))
            nodes[kind][name] = _Node(renumber(record.node, numbers))
            named += [(f"{kind}.{part_name}", staged) for part_name, staged in record.tensors]

        def encode_leaf(value: object, path: Sequence[object]) -> Json:
            assert isinstance(value, _Node)
            return value.json

        spec = {TREE: encode_tree(nodes, types=self._types, encode_leaf=encode_leaf)}
        return Request(
            self.name, _plan(_make_unique(named), self._copies), spec, options=WriteOptions(environment=environment)
        )


def _split(name: str, tensor: torch.Tensor, types: Types) -> tuple[list[Json], list[tuple[str, torch.Tensor]]]:
    """Return the node of a tensor and the ordinary tensors that it consists of; raise Unsupported with its name."""
    # Check is_leaf before grad: torch warns if a tensor that is not a leaf is asked for its gradient.
    if has_own_bytes(tensor) and not (tensor.requires_grad and tensor.is_leaf and tensor.grad is not None):
        try:
            verify_readable(tensor)
        except Unsupported as error:
            raise Unsupported(f"{name}: {error}") from error
        return [TENSOR, 0], [(name, tensor)]
    leaf = LeafWriter(types, grads=True)
    node = leaf.encode(tensor, (name,))
    sources = leaf.make_sources()
    nodes = parse_json(leaf.encode_nodes([node]).data, where=name)
    return nodes[0], [(source.name, source.tensor) for source in sources if isinstance(source, TensorSource)]


@dataclass(frozen=True, slots=True, eq=False)
class _Node:
    """A node that is already encoded."""

    json: Json


def _make_unique(named: Iterable[tuple[str, StagedTensor]]) -> list[tuple[str, StagedTensor]]:
    """Return the tensors with unique entry names: a tensor may have the same name as the gradient of another."""
    unique: dict[str, StagedTensor] = {}
    for name, staged in named:
        unique_name, count = name, 1
        while unique_name in unique:
            count += 1
            unique_name = f"{name}#{count}"
        unique[unique_name] = staged
    return list(unique.items())


@dataclass(frozen=True, slots=True)
class _CopiedRange:
    """A byte range of one storage that overlapping tensors cover without a gap."""

    start: int
    stop: int
    members: tuple[int, ...]
    memory: torch.Tensor

    def read(self, start: int, stop: int) -> memoryview:
        return view_bytes(self.memory[start - self.start : stop - self.start])


def _plan(named: Sequence[tuple[str, StagedTensor]], copies: Mapping[str, Sequence[_Copy]]) -> list[Source]:
    """Return a source for each tensor, in order."""
    specs = SpecEncoder()
    groups: dict[str, list[int]] = {}
    sources: dict[int, Source] = {}
    for number, (name, staged) in enumerate(named):
        if staged.group:
            groups.setdefault(staged.group, []).append(number)
        else:
            empty = None if staged.spec.meta else ("", 0, hash_bytes(b"").hex(), 0, 0)
            sources[number] = BytesSource(name, b"", specs.encode(staged.spec), _make_note(staged, empty))
    alias = 0
    for group, numbers in groups.items():
        for copied in _group_ranges(numbers, named, copies[group]):
            is_shared = len(copied.members) > 1
            alias += is_shared
            sources.update(_plan_range(copied, named, alias if is_shared else 0, specs))
    return [sources[number] for number in range(len(named))]


def _group_ranges(
    numbers: Sequence[int], named: Sequence[tuple[str, StagedTensor]], copies: Sequence[_Copy]
) -> Iterator[_CopiedRange]:
    spans = (TensorSpan(number, named[number][1].start, named[number][1].stop) for number in numbers)
    for group in iter_overlapping(spans):
        low, high = group[0].start, max(span.stop for span in group)
        yield _CopiedRange(low, high, tuple(span.number for span in group), _gather(low, high, copies))


def _gather(low: int, high: int, copies: Sequence[_Copy]) -> torch.Tensor:
    """Return the bytes of a range from the copies that cover it; where copies overlap, they are equal."""
    whole = next((copy for copy in copies if copy.covers(low, high)), None)
    if whole is not None:
        return whole.view(low, high)
    memory = new_memory(high - low, CPU)
    for copy in copies:
        start, stop = max(low, copy.start), min(high, copy.stop)
        if start < stop:
            memory[start - low : stop - low] = copy.view(start, stop)
    return memory


def _plan_range(
    copied: _CopiedRange, named: Sequence[tuple[str, StagedTensor]], alias: int, specs: SpecEncoder
) -> Iterator[tuple[int, StagedSource]]:
    """Yield a source for each tensor of a range.

    Chunks are on one grid that starts with the range, and each source begins on it. So the range has the same chunks in
    any batch; the planner of snapshots, which cuts at every edge of a tensor, would store it again for other views.
    """
    members = [named[number][1] for number in copied.members]
    if len(members) == 1 and not members[0].spec.has_gaps:
        yield copied.members[0], _plan_single(copied, *named[copied.members[0]], specs)
        return
    if len({staged.geometry for staged in members}) == 1 and members[0].spec.has_gaps:
        yield from _plan_packed(copied, named, alias, specs)
        return
    is_whole = any((staged.start, staged.stop) == (copied.start, copied.stop) for staged in members)
    digest = hash_bytes(copied.read(copied.start, copied.stop)).hex() if is_whole else ""
    pad = copied.start % ALIGNMENT if alias else 0
    for number, staged in zip(copied.members, members, strict=True):
        item = item_bytes(staged.spec.dtype)
        before = staged.start - copied.start
        # A view with larger items may not be aligned to the range; then its bytes are stored a second time.
        is_aligned = before % item == 0
        start = copied.start + before // CHUNK_BYTES * CHUNK_BYTES if is_aligned else staged.start
        reach = -(-(staged.stop - copied.start) // CHUNK_BYTES) * CHUNK_BYTES
        stop = min(copied.stop, copied.start + reach) if is_aligned else staged.stop
        spec = replace(staged.spec, offset=(staged.start - start) // item)
        if alias:
            spec = replace(spec, at=pad + start - copied.start)
        if is_whole and is_aligned:
            storage = (digest, copied.start - start, copied.stop - copied.start)
        else:
            part_digest = hash_bytes(copied.read(staged.start, staged.stop)).hex()
            storage = (part_digest, staged.start - start, staged.stop - staged.start)
        note = _make_note(staged, (staged.group, start, *storage))

        def fetch(first: int, last: int, start: int = start) -> memoryview:
            return copied.read(start + first, start + last)

        traits = (specs.encode(spec), note, alias, (), number_bytes(spec.dtype))
        yield number, StagedSource(named[number][0], stop - start, *traits, fetch)


def _plan_single(copied: _CopiedRange, name: str, staged: StagedTensor, specs: SpecEncoder) -> StagedSource:
    """Return the source of the only tensor of a range; most ranges have one tensor."""
    size_bytes = copied.stop - copied.start
    data = view_bytes(copied.memory)
    note = _make_note(staged, (staged.group, copied.start, hash_bytes(data).hex(), 0, size_bytes))
    traits = (specs.encode(staged.spec), note, 0, (), number_bytes(staged.spec.dtype))
    return StagedSource(name, size_bytes, *traits, lambda start, stop: data[start:stop])


def _plan_packed(
    copied: _CopiedRange, named: Sequence[tuple[str, StagedTensor]], alias: int, specs: SpecEncoder
) -> Iterator[tuple[int, StagedSource]]:
    """Yield sources for tensors with gaps between their items: only the items are stored, without the gaps."""
    first = named[copied.members[0]][1]
    memory = copied.memory
    if memory.storage_offset() % item_bytes(first.spec.dtype):
        memory = memory.clone()
    size_bytes = count_bytes(first.spec.dtype, math.prod(first.spec.packed_shape))
    # When such a tensor is read, its storage has zeros in the gaps. The digest is that of this storage.
    spread = torch.zeros(copied.stop - copied.start, dtype=torch.uint8)
    digest = ""
    for number in copied.members:
        name, staged = named[number]
        twin = build_tensor(replace(staged.spec, at=int(memory.storage_offset())), memory, what=name)
        spec = replace(staged.spec, packed=True)
        source = TensorSource(name, twin, SourceForm(spec, size_bytes))
        if not digest:
            items = wrap_memory(memoryview(bytearray(source.read(0, size_bytes))))
            spread_items(items, spec, spread, 0)
            digest = hash_bytes(view_bytes(spread)).hex()
        note = _make_note(staged, (staged.group, staged.start, digest, 0, spread.numel()))
        traits = (specs.encode(spec), note, alias, (), number_bytes(spec.dtype))
        yield number, StagedSource(name, size_bytes, *traits, source.read)


def _make_note(staged: StagedTensor, storage: Sequence[str | int] | None) -> Json:
    note: dict[str, Json] = {} if staged.device in ("cpu", "meta") else {"device": staged.device}
    if storage is not None:
        # A string, not a list: there are many notes, and a string is faster to encode and to check.
        note["storage"] = ":".join(map(str, storage))
    return note or None
