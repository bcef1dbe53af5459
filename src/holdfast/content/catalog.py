"""The contents of all batches for one reader, and tensors rebuilt from them that share memory as when written."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field, replace
from typing import Final

import torch

from holdfast.content.batch import PREFIX, TENSORS
from holdfast.errors import Corrupt, HoldfastError, NewerFormat, NotFound, StoreError, Unsupported
from holdfast.json_text import Json
from holdfast.lru import LruCache
from holdfast.repo.format.entry import Entry
from holdfast.repo.handle.repository import Repository
from holdfast.repo.names.snapshots import CommittedSnapshot, iter_names
from holdfast.repo.read.reader import open_snapshot
from holdfast.snapshot.batches import SAVED, LoadOptions, read_to_memory
from holdfast.snapshot.leaves import GRAD, TENSOR, TENSOR_TAGS, iter_entry_numbers
from holdfast.snapshot.load import load_node
from holdfast.snapshot.opened import Opened
from holdfast.tensors.build import CPU, build_tensor, spread_items
from holdfast.tensors.composite import first_line
from holdfast.tensors.fakes import find_fake_mode, has_values, leave_fake_mode, make_fake
from holdfast.tensors.memory import ALIGNMENT, new_memory, view_bytes, view_storage
from holdfast.tensors.spec import TensorSpec, decode_spec, item_bytes
from holdfast.tensors.storage import ByteSpan, FilledBytes, StorageCache, find_span_at, iter_gaps, join_span
from holdfast.trees.apply import resolve_device
from holdfast.trees.registered import Types

_MAX_OPEN: Final = 8
_MAX_BYTES: Final = 1 << 60
_NOTE: Final = re.compile(r"([0-9a-f.]*):([0-9]{1,19}):([0-9a-f]{64}):(-?[0-9]{1,19}):([0-9]{1,19})\Z")


@dataclass(frozen=True, slots=True)
class StorageSpan:
    """The position of an entry in the memory that it was copied from, as its note describes it."""

    group: str
    """Names one content of one original storage, across batches; empty if there are no bytes."""
    at: int
    """Offset of the entry in the original storage, in bytes."""
    digest: str
    """Digest of the stored storage that a tensor over this entry is a view of."""
    first: int
    """Offset of the stored storage from the start of the entry, in bytes; may be negative."""
    size_bytes: int
    """Size of the stored storage."""

    @property
    def start(self) -> int:
        """Where the stored storage begins in the original one, in bytes."""
        return self.at + self.first

    @property
    def stop(self) -> int:
        """Where the stored storage ends in the original one, in bytes."""
        return self.start + self.size_bytes


def parse_storage_note(note: Json, *, what: str) -> StorageSpan | None:
    """Parse the note of an entry; return None if it does not mention a storage."""
    value = note.get("storage") if isinstance(note, dict) else None
    if value is None:
        return None
    parts = _NOTE.match(value) if isinstance(value, str) else None
    if parts is None:
        raise Corrupt(f"{what}: the note about its storage is malformed; run `holdfast check`", key=what)
    span = StorageSpan(parts[1], int(parts[2]), parts[3], int(parts[4]), int(parts[5]))
    if not 0 <= span.start <= span.stop <= _MAX_BYTES or not 0 <= span.at <= _MAX_BYTES:
        raise Corrupt(f"{what}: the offsets of its storage are out of range; run `holdfast check`", key=what)
    return span


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A stored tensor: the name of its batch, and its node in the tree of that batch."""

    batch: str
    node: list[Json]


@dataclass(frozen=True, slots=True)
class StorageEntry:
    """An entry that contains all bytes of a storage: the name of its batch, and its number there."""

    batch: str
    number: int


@dataclass(slots=True)
class _Contents:
    """The contents of all batches."""

    batches: dict[str, CommittedSnapshot] = field(default_factory=dict)
    order: dict[str, tuple[float, str]] = field(default_factory=dict)
    names: dict[str, StoredTensor] = field(default_factory=dict)
    storages: dict[str, StorageEntry] = field(default_factory=dict)
    spans: dict[str, list[ByteSpan]] = field(default_factory=dict)
    """By group: the byte ranges that are stored, sorted; ranges that overlap are joined."""
    damaged: list[str] = field(default_factory=list)


class Catalog:
    """The batches as of the last `refresh`; empty before the first one. Not thread-safe."""

    def __init__(self, repo: Repository) -> None:
        self._repo = repo
        self._found = _Contents()
        self._open: LruCache[str, Opened] = LruCache(
            _MAX_OPEN, on_drop=lambda opened: opened.__exit__(None, None, None)
        )

    @property
    def damaged(self) -> list[str]:
        """The names of the batches that could not be read."""
        return self._found.damaged

    def find_tensor(self, name: str) -> StoredTensor | None:
        """Return the newest tensor of that name, or None."""
        return self._found.names.get(name)

    def find_storage(self, digest: str) -> StorageEntry | None:
        """Return an entry that contains the storage with that digest, or None."""
        return self._found.storages.get(digest)

    def find_span(self, span: StorageSpan) -> ByteSpan:
        """Return the byte range that shares memory with a storage: all ranges that overlap it, joined."""
        found = find_span_at(self._found.spans.get(span.group, ()), span.start)
        return found or ByteSpan(span.start, span.stop)

    def names(self) -> list[str]:
        """Return the names of all tensors, sorted."""
        return sorted(self._found.names)

    def refresh(self) -> None:
        """Read new batches from the store, and forget deleted ones."""
        listed: dict[str, CommittedSnapshot] = {}
        damaged = []
        for record in iter_names(self._repo.store, PREFIX):
            if isinstance(record, CommittedSnapshot):
                listed[record.name] = record
            else:
                damaged.append(record.stem)
        if not self._found.batches.keys() <= listed.keys():
            self.close()
            self._found = _Contents()
        self._found.damaged = damaged
        order = _find_order(listed)
        for name in sorted(listed.keys() - self._found.batches.keys(), key=order.__getitem__):
            self._found.batches[name] = listed[name]
            self._found.order[name] = order[name]
            try:
                self._add(name)
            except (NotFound, Corrupt, NewerFormat, StoreError):
                # Other batches can still be read. If a tensor is not found, the error mentions the damaged batches.
                self._found.damaged.append(name)
                del self._found.batches[name]

    def open(self, batch: str) -> Opened:
        """Return an open batch; the last few are kept open."""
        opened = self._open.get(batch)
        if opened is None:
            opened = Opened(open_snapshot(self._repo, self._found.batches[batch]))
            self._open.put(batch, opened)
        return opened

    def close(self) -> None:
        """Close the batches that are open."""
        self._open.clear()

    def _add(self, batch: str) -> None:
        opened = self.open(batch)
        nodes = list(_iter_nodes(opened))
        numbers = {number for _, _, node in nodes for number in iter_entry_numbers(node, what=repr(batch))}
        spans = {number: span for number in sorted(numbers) if (span := _read_span(opened, number))}
        sizes = {span.digest: span.size_bytes for number, span in spans.items() if _is_complete(opened, number, span)}
        for number, span in spans.items():
            # Reading allocates the size in the note. So a complete entry in this batch must confirm it, or a small
            # damaged file could ask for any amount of memory.
            if sizes.get(span.digest) != span.size_bytes:
                what = f"{batch!r}, {opened.entry(number).name!r}"
                raise Corrupt(f"{what} belongs to a storage that is not in its batch; run `holdfast check`", key=what)
        for number, span in spans.items():
            if _is_complete(opened, number, span):
                self._found.storages[span.digest] = StorageEntry(batch, number)
            if span.size_bytes:
                join_span(self._found.spans.setdefault(span.group, []), ByteSpan(span.start, span.stop))
        for kind, name, node in nodes:
            known = self._found.names.get(name)
            if kind == TENSORS and (known is None or self._found.order[known.batch] <= self._found.order[batch]):
                self._found.names[name] = StoredTensor(batch, node)


def _is_complete(opened: Opened, number: int, span: StorageSpan) -> bool:
    """Return whether an entry contains all bytes of the storage that it belongs to."""
    entry = opened.entry(number)
    if isinstance(entry.spec, dict) and entry.spec.get("packed"):
        spec = decode_spec(entry.spec, size_bytes=entry.size_bytes, what=entry.name)
        return span.first == 0 and spec.span_bytes == span.size_bytes
    return span.first >= 0 and span.first + span.size_bytes <= entry.size_bytes


def _iter_nodes(opened: Opened) -> Iterator[tuple[str, str, list[Json]]]:
    """Yield kind, name and node of each tensor and storage of a batch; nothing for snapshots that are not batches."""
    for leaf in opened.leaves:
        match leaf.path_json:
            case (("tensors" | "storages") as kind, str(name)) if leaf.tag in TENSOR_TAGS:
                yield kind, name, leaf.node


def _read_span(opened: Opened, number: int) -> StorageSpan | None:
    entry = opened.entry(number)
    return parse_storage_note(entry.note, what=f"{opened.name!r}, {entry.name!r}")


def _find_order(listed: dict[str, CommittedSnapshot]) -> dict[str, tuple[float, str]]:
    """Return sort keys of batches: by time, but batches of one writer always in the order in which it wrote them."""
    latest: dict[str, float] = {}
    order = {}
    for name in sorted(listed):
        writer = name.rpartition("-")[0]
        latest[writer] = max(latest.get(writer, 0.0), listed[name].time_s)
        order[name] = (latest[writer], name)
    return order


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
