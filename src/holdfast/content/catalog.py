"""What batches hold, for one reader: tensors by name, storages by digest, and which bytes share a memory."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from holdfast.content.batch import TENSORS
from holdfast.content.batch_writer import PREFIX
from holdfast.content.spans import ByteSpan, find_span, join_span
from holdfast.errors import Corrupt, NewerFormat, NotFound, StoreError
from holdfast.repo.format.record import Json
from holdfast.repo.handle.repository import Repository
from holdfast.repo.names.snapshots import Snapshot, iter_names
from holdfast.repo.read.reader import open_snapshot
from holdfast.snapshot.leaves import GRAD, PARTS, TENSOR, iter_entry_numbers
from holdfast.snapshot.load.opened import Opened
from holdfast.tensors.spec import decode_spec

_MAX_OPEN: Final = 8
_MAX_BYTES: Final = 1 << 60
_TENSOR_TAGS: Final = (TENSOR, PARTS, GRAD)
_PLACE: Final = re.compile(r"([0-9a-f.]*):([0-9]{1,19}):([0-9a-f]{64}):(-?[0-9]{1,19}):([0-9]{1,19})\Z")


@dataclass(frozen=True, slots=True)
class StorageSpan:
    """Where the bytes of an entry lie in the storage that they were taken from, as its note says."""

    group: str
    """Names one content of one storage, across batches; empty if there are no bytes."""
    at: int
    digest: str
    """Of the storage that a tensor over this entry is a view of."""
    first: int
    """Where that storage begins, in bytes from the start of the entry; before it, if negative."""
    size_bytes: int

    @property
    def start(self) -> int:
        """Where the storage begins in that which it was taken from."""
        return self.at + self.first

    @property
    def stop(self) -> int:
        """Where it ends."""
        return self.start + self.size_bytes


def parse_place(note: Json, *, what: str) -> StorageSpan | None:
    """Read the note of an entry; None if it says nothing about a storage."""
    value = note.get("storage") if isinstance(note, dict) else None
    if value is None:
        return None
    parts = _PLACE.match(value) if isinstance(value, str) else None
    if parts is None:
        raise Corrupt(f"{what}: the note on its storage makes no sense; run `holdfast check`", key=what)
    place = StorageSpan(parts[1], int(parts[2]), parts[3], int(parts[4]), int(parts[5]))
    if not 0 <= place.start <= place.stop <= _MAX_BYTES or not 0 <= place.at <= _MAX_BYTES:
        raise Corrupt(f"{what}: its storage lies where it cannot; run `holdfast check`", key=what)
    return place


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor by name: the batch that it is in, and its node there."""

    batch: str
    node: list[Json]


@dataclass(frozen=True, slots=True)
class Provider:
    """An entry that holds all bytes of a storage."""

    batch: str
    number: int


@dataclass(slots=True)
class _Contents:
    """What was found in all batches."""

    batches: dict[str, Snapshot] = field(default_factory=dict)
    order: dict[str, tuple[float, str]] = field(default_factory=dict)
    names: dict[str, StoredTensor] = field(default_factory=dict)
    storages: dict[str, Provider] = field(default_factory=dict)
    spans: dict[str, list[ByteSpan]] = field(default_factory=dict)
    """By group, in order: which bytes are held, those that overlap being one."""
    damaged: list[str] = field(default_factory=list)


class Catalog:
    """Knows the batches that were there when it was refreshed. One thread at a time."""

    def __init__(self, repo: Repository) -> None:
        """Know nothing yet."""
        self._repo = repo
        self._found = _Contents()
        self._open: OrderedDict[str, Opened] = OrderedDict()

    @property
    def damaged(self) -> list[str]:
        """The batches that could not be read."""
        return self._found.damaged

    def find_tensor(self, name: str) -> StoredTensor | None:
        """Return the newest tensor of that name."""
        return self._found.names.get(name)

    def find_storage(self, digest: str) -> Provider | None:
        """Return an entry that holds the storage."""
        return self._found.storages.get(digest)

    def find_span(self, place: StorageSpan) -> ByteSpan:
        """Return the bytes that share a memory with a storage: what overlaps it, what overlaps that, and so on."""
        found = find_span(self._found.spans.get(place.group, ()), place.start)
        return found or ByteSpan(place.start, place.stop)

    def names(self) -> list[str]:
        """Return the names of all tensors, sorted."""
        return sorted(self._found.names)

    def refresh(self) -> None:
        """Look for batches that are new, and forget those that are gone."""
        listed: dict[str, Snapshot] = {}
        damaged = []
        for record in iter_names(self._repo.store, PREFIX):
            if isinstance(record, Snapshot):
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
                self._take_up(name)
            except (NotFound, Corrupt, NewerFormat, StoreError):
                # The others can still be read; what is only in here is missing, and the error for that says so.
                self._found.damaged.append(name)
                del self._found.batches[name]

    def open(self, batch: str) -> Opened:
        """Open a batch, or find it open."""
        opened = self._open.get(batch)
        if opened is None:
            opened = self._open[batch] = Opened(open_snapshot(self._repo, self._found.batches[batch]))
            while len(self._open) > _MAX_OPEN:
                self._open.popitem(last=False)[1].__exit__(None, None, None)
        self._open.move_to_end(batch)
        return opened

    def close(self) -> None:
        """Close the batches that are open."""
        while self._open:
            self._open.popitem()[1].__exit__(None, None, None)

    def _take_up(self, batch: str) -> None:
        opened = self.open(batch)
        nodes = list(_iter_nodes(opened))
        numbers = {number for _, _, node in nodes for number in iter_entry_numbers(node, what=repr(batch))}
        places = {number: place for number in sorted(numbers) if (place := _find_place(opened, number))}
        sizes = {place.digest: place.size_bytes for number, place in places.items() if _holds(opened, number, place)}
        for number, place in places.items():
            # A small file must not ask for much memory: what a storage is said to hold is there, in this batch.
            if sizes.get(place.digest) != place.size_bytes:
                what = f"{batch!r}, {opened.entry(number).name!r}"
                raise Corrupt(f"{what} belongs to a storage that is not there; run `holdfast check`", key=what)
        for number, place in places.items():
            if _holds(opened, number, place):
                self._found.storages[place.digest] = Provider(batch, number)
            if place.size_bytes:
                join_span(self._found.spans.setdefault(place.group, []), ByteSpan(place.start, place.stop))
        for kind, name, node in nodes:
            held = self._found.names.get(name)
            if kind == TENSORS and (held is None or self._found.order[held.batch] <= self._found.order[batch]):
                self._found.names[name] = StoredTensor(batch, node)


def _holds(opened: Opened, number: int, place: StorageSpan) -> bool:
    """Tell whether an entry has all bytes of the storage that it belongs to."""
    entry = opened.entry(number)
    if isinstance(entry.spec, dict) and entry.spec.get("packed"):
        spec = decode_spec(entry.spec, size_bytes=entry.size_bytes, what=entry.name)
        return place.first == 0 and spec.span_bytes == place.size_bytes
    return place.first >= 0 and place.first + place.size_bytes <= entry.size_bytes


def _iter_nodes(opened: Opened) -> Iterator[tuple[str, str, list[Json]]]:
    """Yield the kind, name and node of all that a batch holds; other snapshots under the prefix hold nothing."""
    for leaf in opened.leaves:
        match leaf.path_json:
            case (("tensors" | "storages") as kind, str(name)) if leaf.tag in _TENSOR_TAGS:
                yield kind, name, leaf.node


def _find_place(opened: Opened, number: int) -> StorageSpan | None:
    entry = opened.entry(number)
    return parse_place(entry.note, what=f"{opened.name!r}, {entry.name!r}")


def _find_order(listed: dict[str, Snapshot]) -> dict[str, tuple[float, str]]:
    """Return keys by which batches are sorted: by time, but those of one writer as they were written, come what may."""
    latest: dict[str, float] = {}
    order = {}
    for name in sorted(listed):
        writer = name.rpartition("-")[0]
        latest[writer] = max(latest.get(writer, 0.0), listed[name].time_s)
        order[name] = (latest[writer], name)
    return order
