"""Batches of tensors that are committed together: fingerprints of live storages, copies of bytes, the commit."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from holdfast.digest import fingerprint, hash_bytes
from holdfast.errors import Unsupported
from holdfast.json_text import Json, parse_json
from holdfast.objects.protocol import ObjectStore
from holdfast.repo.format.chunk import CHUNK_BYTES
from holdfast.repo.format.layout import verify_name
from holdfast.repo.format.source import BytesSource, Source
from holdfast.repo.handle.repository import Repository
from holdfast.repo.write.writer import Request, WriteOptions, save
from holdfast.snapshot.leaves import TENSOR, LeafWriter, renumber
from holdfast.snapshot.save import describe_environment
from holdfast.snapshot.staging import StagedSource
from holdfast.tensors.build import CPU, build_tensor, spread_items
from holdfast.tensors.composite import has_own_bytes, verify_readable
from holdfast.tensors.memory import ALIGNMENT, new_memory, view_bytes, view_storage, wrap_memory
from holdfast.tensors.sources import SourceForm, TensorSource, TensorSpan, iter_overlapping
from holdfast.tensors.spec import (
    SpecEncoder,
    TensorSpec,
    count_bytes,
    describe,
    find_span,
    item_bytes,
    items_per_byte,
    number_bytes,
)
from holdfast.trees.encoding import encode_tree
from holdfast.trees.outline import TREE
from holdfast.trees.registered import Types

_CELL_BYTES: Final = 256 << 10
_MAX_PIECES: Final = 32
"""If a cell has more pieces than this, they are joined into one."""
_SWEEP_EVERY: Final = 1024


@dataclass(frozen=True, slots=True)
class _Piece:
    """The fingerprint of a byte range within one cell."""

    start: int
    stop: int
    fingerprint: bytes

    def is_unchanged(self, storage: torch.UntypedStorage) -> bool:
        return _fingerprint(storage, self.start, self.stop) == self.fingerprint


@dataclass(slots=True)
class _Seen:
    """A storage, the name of its current content, and fingerprints of its bytes by cell."""

    ref: StorageWeakRef
    group: str
    cells: dict[int, list[_Piece]] = field(default_factory=dict)


class SeenStorages:
    """Names the content of storages. A name is valid until the content changes or the storage dies. Not thread-safe."""

    def __init__(self, prefix: str) -> None:
        """Start without storages; all names begin with `prefix`."""
        self._prefix = prefix
        self._count = 0
        # By address, which is not reused while the weak reference exists.
        self._seen: dict[int, _Seen] = {}

    def find_group(self, storage: torch.UntypedStorage, start: int, stop: int) -> str:
        """Return the name of a storage's content, and remember these bytes; a new name if remembered ones changed."""
        seen = self._seen.get(storage._cdata)
        if seen is None or seen.ref.expired():  # type: ignore[no-untyped-call]  # not typed in torch
            seen = self._begin(storage)
        elif not self._is_unchanged(seen, storage, start, stop):
            self._renew(seen)
        if not self._remember(seen, storage, start, stop):
            self._renew(seen)
            self._remember(seen, storage, start, stop)
        return seen.group

    def _renew(self, seen: _Seen) -> None:
        """Give the current content a new name; tensors stored under the old name are not affected."""
        seen.group, seen.cells = self._new_name(), {}

    def _begin(self, storage: torch.UntypedStorage) -> _Seen:
        if len(self._seen) % _SWEEP_EVERY == _SWEEP_EVERY - 1:
            live = {key: seen for key, seen in self._seen.items() if not seen.ref.expired()}  # type: ignore[no-untyped-call]  # as above
            self._seen = live
        seen = _Seen(StorageWeakRef(storage), self._new_name())  # type: ignore[no-untyped-call]  # as above
        self._seen[storage._cdata] = seen
        return seen

    def _new_name(self) -> str:
        self._count += 1
        return f"{self._prefix}.{self._count}"

    def _is_unchanged(self, seen: _Seen, storage: torch.UntypedStorage, start: int, stop: int) -> bool:
        return all(
            piece.is_unchanged(storage)
            for cell in _iter_cells(start, stop)
            for piece in seen.cells.get(cell, ())
            if piece.start < stop and start < piece.stop
        )

    def _remember(self, seen: _Seen, storage: torch.UntypedStorage, start: int, stop: int) -> bool:
        """Remember the fingerprints of bytes; return False if a change of other bytes in these cells was found."""
        return all(
            _remember_piece(
                seen.cells.setdefault(cell, []),
                storage,
                max(start, cell * _CELL_BYTES),
                min(stop, (cell + 1) * _CELL_BYTES),
            )
            for cell in _iter_cells(start, stop)
        )


def _remember_piece(pieces: list[_Piece], storage: torch.UntypedStorage, start: int, stop: int) -> bool:
    """Remember a piece of a cell; if the cell has too many pieces, check all and join them. False if one changed."""
    if not any(piece.start <= start and stop <= piece.stop for piece in pieces):
        pieces[:] = [piece for piece in pieces if not (start <= piece.start and piece.stop <= stop)]
        pieces.append(_Piece(start, stop, _fingerprint(storage, start, stop)))
    if len(pieces) <= _MAX_PIECES:
        return True
    # Joining takes a new fingerprint. If bytes have changed, that would give two contents the same name.
    if not all(piece.is_unchanged(storage) for piece in pieces):
        return False
    low, high = min(piece.start for piece in pieces), max(piece.stop for piece in pieces)
    pieces[:] = [_Piece(low, high, _fingerprint(storage, low, high))]
    return True


def _iter_cells(start: int, stop: int) -> range:
    return range(start // _CELL_BYTES, -(-stop // _CELL_BYTES))


def _fingerprint(storage: torch.UntypedStorage, start: int, stop: int) -> bytes:
    return fingerprint(view_bytes(view_storage(storage, start, stop).cpu()))


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


PREFIX: Final = "content/"
"""Prefix of the snapshot names of all batches."""
_MAX_NAMES: Final = 10_000
"""The most names in a batch, however small their tensors are."""


class BatchWriter:
    """Collects tensors and commits them in batches. Safe to use from any thread; a forked child starts empty."""

    def __init__(self, reopen: Callable[[], Repository], *, budget_bytes: int, types: Types) -> None:
        """Open the repository with `reopen`; up to `budget_bytes` of copies wait to be committed, in two batches."""
        self._reopen = reopen
        self._limit_bytes = budget_bytes // 2
        self._types = types
        self._start()

    def _start(self) -> None:
        self._pid = os.getpid()
        self._repo = self._reopen()
        self.id = os.urandom(12).hex()
        self._digests: set[str] = set()
        self._seen = SeenStorages(self.id)
        self._num_batches = 0
        self._pending = self._new_batch()
        self._sealed: list[Batch] = []
        self._error: BaseException | None = None
        self._worker: threading.Thread | None = None
        self._lock = threading.RLock()
        self._room = threading.Condition(self._lock)
        self._commit_lock = threading.Lock()
        self._committer: int | None = None
        self.num_changes = 0
        """How many tensors and storages were added. A reader compares it to notice that it must refresh."""

    @property
    def store(self) -> ObjectStore:
        """The store that it writes to."""
        return self._repo.store

    def write(self, name: str, tensor: torch.Tensor, *, in_background: bool = False) -> None:
        """Add a tensor; a full batch is committed before this returns, or on a background thread."""
        self._restart_after_fork()
        name = verify_name(name, what="tensor")
        size_bytes = _measure(tensor)

        def add(batch: Batch, *, copy: bool) -> None:
            batch.add_tensor(name, tensor, self._seen, self._types, copy=copy)

        self._add(add, size_bytes, in_background=in_background)

    def write_storage(self, digest: str, storage: torch.UntypedStorage) -> None:
        """Add a whole storage under its digest, unless this writer has written that digest before."""
        self._restart_after_fork()
        if digest in self._digests:
            return
        memory = view_storage(storage, 0, storage.nbytes())

        def add(batch: Batch, *, copy: bool) -> None:
            batch.add_storage(digest, memory, self._seen, copy=copy)

        self._add(add, storage.nbytes(), in_background=False)
        self._digests.add(digest)

    def flush(self) -> None:
        """Commit everything added so far; it is durable and visible once this returns.

        Raises errors of this commit and of commits in the background. Batches that could not be committed are kept:
        call flush again to retry.
        """
        self._restart_after_fork()
        with self._lock:
            self._seal()
            worker = self._worker
            # Called within a commit on this thread, because the garbage collector finalised the writer. That commit
            # also commits the batch that was just sealed.
            if self._committer == threading.get_ident():
                return
        if worker is not None:
            worker.join()
        with self._lock:
            error, self._error = self._error, None
        if error is not None:
            raise error
        self._drain()

    def _add(self, add: Callable[..., None], size_bytes: int, *, in_background: bool) -> None:
        if size_bytes > self._limit_bytes:
            self._commit_uncopied(add)
            return
        if in_background:
            self._wait_for_room(size_bytes)
        elif self._sealed:
            # Commit batches that failed before. If they fail again, nothing more is added.
            self.flush()
        with self._lock:
            self.num_changes += 1
            add(self._pending, copy=True)
            is_full = not self._has_room(1)
            if is_full:
                self._seal()
                if in_background:
                    self._start_worker()
        if is_full and not in_background:
            self._drain()

    def _has_room(self, size_bytes: int) -> bool:
        return self._pending.size_bytes + size_bytes <= self._limit_bytes and len(self._pending) < _MAX_NAMES

    def _wait_for_room(self, size_bytes: int) -> None:
        """Wait while one full batch is being committed and the next one is full, too; raise if the commit failed."""
        with self._room:
            if self._sealed:
                self._start_worker()
            self._room.wait_for(lambda: not self._sealed or self._has_room(size_bytes) or self._error is not None)
            if self._error is not None and not self._has_room(size_bytes):
                raise self._error

    def _start_worker(self) -> None:
        if self._worker is None and self._error is None:
            # Not a daemon thread, so that the interpreter waits for it at exit.
            self._worker = threading.Thread(target=self._drain_in_background, name="holdfast-batches")
            self._worker.start()

    def _commit_uncopied(self, add: Callable[..., None]) -> None:
        """Commit a tensor that is too large to be copied directly from its own memory, while the caller waits."""
        self.flush()
        with self._lock:
            self.num_changes += 1
            batch = self._new_batch()
            # If the commit fails, the batch is dropped: the caller may change its memory afterwards.
            add(batch, copy=False)
        with self._commit_lock:
            self._commit(batch)

    def _new_batch(self) -> Batch:
        self._num_batches += 1
        return Batch(f"{PREFIX}{self.id}-{self._num_batches:08}")

    def _seal(self) -> None:
        if len(self._pending):
            self._sealed.append(self._pending)
            self._pending = self._new_batch()

    def _drain(self) -> None:
        """Commit full batches in order; a batch that fails is kept, and so are those after it."""
        with self._commit_lock:
            while self._sealed:
                self._commit(self._sealed[0])
                with self._room:
                    self._sealed.pop(0)
                    self._room.notify_all()

    def _commit(self, batch: Batch) -> None:
        self._committer = threading.get_ident()
        try:
            # Safe to repeat: if an earlier attempt was committed and only its reply was lost, name and content are
            # the same.
            save(self._repo, batch.make_request(describe_environment()))
        finally:
            self._committer = None

    def _drain_in_background(self) -> None:
        try:
            while True:
                self._drain()
                with self._lock:
                    if not self._sealed:
                        self._worker = None
                        return
        except BaseException as error:  # noqa: BLE001  # `flush` raises it
            with self._room:
                self._error = error
                self._worker = None
                self._room.notify_all()

    def _restart_after_fork(self) -> None:
        # The parent commits what was added before the fork. Its locks may be locked in the child for ever.
        if os.getpid() != self._pid:
            self._start()

    def end(self) -> None:
        """Commit what is left, unless this is a forked child that has not used the writer."""
        if os.getpid() == self._pid:
            self.flush()


def _measure(tensor: torch.Tensor) -> int:
    """Return how many bytes a copy takes; 0 for tensors made of other tensors, which are always copied."""
    if not has_own_bytes(tensor) or tensor.is_meta or tensor.numel() == 0 or not tensor.untyped_storage().data_ptr():
        return 0
    return find_span(tensor.shape, tensor.stride()) * tensor.element_size()
