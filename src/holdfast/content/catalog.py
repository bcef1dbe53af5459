"""The contents of all batches, for one reader: tensors by name, storages by digest, and which bytes share memory."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from holdfast.content.batch import TENSORS
from holdfast.content.batch_writer import PREFIX
from holdfast.errors import Corrupt, NewerFormat, NotFound, StoreError
from holdfast.json_text import Json
from holdfast.lru import LruCache
from holdfast.repo.handle.repository import Repository
from holdfast.repo.names.snapshots import CommittedSnapshot, iter_names
from holdfast.repo.read.reader import open_snapshot
from holdfast.snapshot.leaves import TENSOR_TAGS, iter_entry_numbers
from holdfast.snapshot.load.opened import Opened
from holdfast.tensors.spec import decode_spec
from holdfast.tensors.storage_cache import ByteSpan, find_span_at, join_span

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
