"""Finds snapshots by name, tag or prefix, and reads them as lazy mappings: only the requested parts are read."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import cached_property
from io import BufferedReader, BytesIO
from typing import Any

import torch

from holdfast.digest import Digest, hash_kind, short_hex
from holdfast.errors import AmbiguousName, Corrupt, NotFound
from holdfast.json_text import Json, canonical_json
from holdfast.repo.format.entry import Entry, digest_entry
from holdfast.repo.handle.repository import Repository
from holdfast.repo.names.snapshots import CommittedSnapshot
from holdfast.repo.read.reader import open_snapshot
from holdfast.repo.read.stream import open_entry, open_range
from holdfast.snapshot.batches import SAVED, Aliases, LoadOptions, read_to_memory
from holdfast.snapshot.display import (
    LeafLine,
    complete_keys,
    describe_leaf,
    describe_view,
    render_snapshot,
    render_tensor,
    render_view,
)
from holdfast.snapshot.entries import is_cast, verify_dtype
from holdfast.snapshot.into.load_into import load_into
from holdfast.snapshot.into.plan import IntoOptions, Journal
from holdfast.snapshot.leaves import PARTS, TENSOR, TENSOR_TAGS, describe_node, iter_entry_numbers
from holdfast.snapshot.load import load_node, load_tree
from holdfast.snapshot.merge_trees import opening_whole, warn_alone
from holdfast.snapshot.opened import FoundLeaves, Opened, find_saved_device
from holdfast.snapshot.slices import SliceIndex, is_sliceable, read_slice
from holdfast.tensors.build import CPU, build_tensor, plan_block
from holdfast.tensors.fakes import find_fake_mode
from holdfast.tensors.memory import new_memory, view_bytes, view_storage
from holdfast.tensors.spec import TensorSpec, decode_spec, is_rng_state
from holdfast.tensors.storage import ByteSpan, FilledBytes, StorageCache, iter_gaps, join_span
from holdfast.texts import count, format_bytes
from holdfast.trees.apply import move_to_device, resolve_device
from holdfast.trees.encoding import encode_tree, refuse
from holdfast.trees.outline import Leaf, TreePath, encode_short
from holdfast.trees.registered import Types


class SharedMemory:
    """The memory of the tensors of one open snapshot. Safe in any thread."""

    def __init__(self, opened: Opened) -> None:
        self._opened = opened
        self._cache = StorageCache()
        self._lock = threading.Lock()

    def read(self, leaf: Leaf, device: torch.device | str | None) -> torch.Tensor:
        """Read an ordinary tensor, or reuse memory that contains its bytes."""
        what = f"{self._opened.name!r}, {leaf.name}"
        (number,) = iter_entry_numbers(leaf.node, what=what)
        entry = self._opened.entry(number)
        spec = decode_spec(entry.spec, size_bytes=entry.size_bytes, what=what)
        target_device = CPU if is_rng_state(entry.name, spec) or spec.meta else _find_device(device, entry)
        with self._lock:
            if spec.packed:
                memory = self._read_packed(number, entry, spec, target_device)
            elif entry.alias:
                memory = self._read_shared(entry, spec, target_device)
            else:
                memory = self._find_or_read(number, entry, target_device)
            return build_tensor(spec, memory, what=what)

    def _find_or_read(self, number: int, entry: Entry, device: torch.device) -> torch.Tensor:
        found = self._find(number, device)
        if found is not None:
            return found
        memory = new_memory(entry.size_bytes, CPU)
        self._opened.reader.read_all([(entry, view_bytes(memory))])
        return self._keep(number, move_to_device(memory, device))

    def _read_packed(self, number: int, entry: Entry, spec: TensorSpec, device: torch.device) -> torch.Tensor:
        key = ("packed", entry.alias) if entry.alias else number
        found = self._find(key, device)
        if found is not None:
            return found
        block = plan_block([(entry, spec)], what=entry.name)
        self._opened.reader.read_all([(fill.entry, fill.buffer) for fill in block.fills])
        return self._keep(key, move_to_device(block.finish(), device))

    def _read_shared(self, entry: Entry, spec: TensorSpec, device: torch.device) -> torch.Tensor:
        """Fill the part of a group's memory that this tensor needs and that was not read yet."""
        key = ("alias", entry.alias)
        found = self._cache.find(key, device)
        if found is None or found.filled is None:
            memory, filled = new_memory(self._measure(entry.alias), device), FilledBytes()
            self._cache.keep(key, memory.untyped_storage(), filled)
        else:
            memory, filled = view_storage(found.storage, 0, found.storage.nbytes()), found.filled
        for start, stop in list(iter_gaps(filled.spans, spec.at, spec.at + entry.size_bytes)):
            read_to_memory(self._opened.reader, entry, start - spec.at, memory[start:stop])
            join_span(filled.spans, ByteSpan(start, stop))
        return memory

    def _measure(self, alias: int) -> int:
        """Return the size of a group's memory; pages that are never touched cost nothing."""
        manifest = self._opened.reader.manifest
        members = [self._opened.entry(number) for number in manifest.find_aliases(alias)]
        specs = [(entry, decode_spec(entry.spec, size_bytes=entry.size_bytes, what=entry.name)) for entry in members]
        block = plan_block(specs, what=members[0].name)
        if block.offsets != tuple(spec.at for _, spec in specs):
            raise Corrupt(
                f"{members[0].name}: the gaps between tensors that share memory are too large", key=members[0].name
            )
        return int(block.memory.numel())

    def _find(self, key: Hashable, device: torch.device) -> torch.Tensor | None:
        found = self._cache.find(key, device)
        return None if found is None else view_storage(found.storage, 0, found.storage.nbytes())

    def _keep(self, key: Hashable, memory: torch.Tensor) -> torch.Tensor:
        self._cache.keep(key, memory.untyped_storage())
        return memory


def _find_device(device: torch.device | str | None, entry: Entry) -> torch.device:
    """Return the device with its index, as existing tensors report it."""
    return resolve_device((find_saved_device(entry) if device == SAVED else device) or CPU)


LeafKey = str | Sequence[object]
"""A name, or a path of keys."""


class Snapshot:
    """One committed snapshot; reads nothing before the first access. Safe in any thread."""

    def __init__(self, repo: Repository, record: CommittedSnapshot, types: Types) -> None:
        """Keep the record; nothing is opened yet."""
        self._repo = repo
        self._record = record
        self._types = types
        self._lock = threading.Lock()
        self._opened: Opened | None = None

    @property
    def record(self) -> CommittedSnapshot:
        """The snapshot's record in the repository."""
        return self._record

    @property
    def repository(self) -> Repository:
        """The repository that has the snapshot: of the store, or of its mirror."""
        return self._repo

    @property
    def name(self) -> str:
        """Its name."""
        return self._record.name

    @property
    def digest(self) -> Digest:
        """The content digest: equal for equal content, whatever the name, the packing or the machine."""
        return self._record.digest

    @property
    def time(self) -> datetime:
        """When it was committed."""
        return datetime.fromtimestamp(self._record.time_s, timezone.utc)

    @property
    def metadata(self) -> Mapping[str, Json]:
        """The metadata that was passed to `save`."""
        # A copy: handles remember records, and a change here must not show in the next listing.
        return deepcopy(self._record.metadata)

    @property
    def environment(self) -> Mapping[str, Json]:
        """Where it was saved: host, versions, world size."""
        return deepcopy(self._record.environment)

    @property
    def logical_bytes(self) -> int:
        """Its size in bytes, without deduplication."""
        return self._record.logical_bytes

    def __repr__(self) -> str:
        """Show name, size and digest."""
        return f"<Snapshot {self.name!r} {short_hex(self.digest)}, {format_bytes(self.logical_bytes)}>"

    def _repr_html_(self) -> str:
        """Return a card for notebooks: facts, and the leaves with repeated layers folded."""
        return render_snapshot(self._record, self.open())

    def _ipython_key_completions_(self) -> list[str]:
        """Return the keys that a notebook offers after `snapshot["`."""
        return complete_keys(self)

    def __len__(self) -> int:
        """Return the number of leaves."""
        return len(self._root)

    def __iter__(self) -> Iterator[str]:
        """Yield the names of all leaves."""
        return iter(self._root)

    def keys(self) -> list[str]:
        """Return the names of all leaves, in the order of the tree."""
        return list(self)

    def __contains__(self, key: LeafKey) -> bool:
        """Return whether a leaf has that name, or a name that begins with it and a dot."""
        return key in self._root

    def __getitem__(self, key: LeafKey) -> Any:
        """Return a lazy tensor, a plain value, or a view of everything below a name.

        Raises NotFound, or AmbiguousName if two leaves have that name: a tuple of keys is never ambiguous.
        """
        return self._root[key]

    @cached_property
    def _root(self) -> View:
        opened = self.open()
        return View(
            _ViewContext(opened, self._types, SharedMemory(opened)), FoundLeaves("", opened.leaves, is_leaf=False)
        )

    def open(self) -> Opened:
        """Open it for reading; later calls return the same object."""
        with self._lock:
            if self._opened is None:
                self._opened = Opened(open_snapshot(self._repo, self._record))
            return self._opened

    def open_file(self, entry: str, *, start: int = 0, size_bytes: int | None = None) -> BufferedReader:
        """Open an entry, or `size_bytes` of it from `start` on, as a seekable stream; close it after use.

        Only chunks that are read from are fetched, and each is verified. Text and bytes can be opened, too, however
        short they are. Raises NotFound, which says what the value is if it has no bytes.
        """
        with ExitStack() as stack:
            reader = stack.enter_context(open_snapshot(self._repo, self._record))
            kept = ExitStack()
            try:
                opened = open_entry(reader, entry, start=start, size_bytes=size_bytes, on_close=kept.close)
            except NotFound as missing:
                data = self._find_short(entry, missing)
                return open_range(BytesIO(data), len(data), entry, start=start, size_bytes=size_bytes)
            kept.push(stack.pop_all())
        return opened

    def _find_short(self, name: str, missing: NotFound) -> bytes:
        """Return the bytes of a short value; raises `missing` if there is no such value, NotFound if it is no text."""
        try:
            found = self.open().find(name)
        except NotFound:
            raise missing from None
        data = encode_short(found.leaves[0]) if found.is_leaf else None
        if data is None:
            raise NotFound(f"no entry {name!r} in {self.name!r}: it {self._explain(found)}", name=name) from None
        return data

    def _explain(self, found: FoundLeaves) -> str:
        """Say what a value is that is not an entry."""
        leaf = found.leaves[0]
        if not found.is_leaf:
            return f"has {count(len(found.leaves), 'leaf')} below it; open one of them, such as {leaf.name!r}"
        numbers = iter_entry_numbers(leaf.node, what=leaf.name)
        entries = [repr(self.open().entry(number).name) for number in numbers]
        if entries:
            return f"is {describe_node(leaf.node)}, which is stored as {', '.join(entries)}; open one of them"
        return f"is {describe_node(leaf.node)}, which has no bytes; store.load({self.name!r}) loads it"

    def load(self, options: LoadOptions | None = None) -> Any:
        """Load the whole tree into new memory."""
        options = options or LoadOptions()
        if options.verify in ("full", "device") and options.progress is None:
            opened = self.open()
            warn_alone(self.name, opened.reader.manifests)
            return load_tree(opened, options, self._types)
        with opening_whole(self._repo, self._record, options.verify, options.progress) as opened:
            return load_tree(opened, options, self._types)

    def load_into(self, tree: Any, options: IntoOptions | None = None, *, journal: Journal | None = None) -> Any:
        """Load into an existing tree, in place, and return it."""
        options, journal = options or IntoOptions(), journal or Journal()
        record, verify, progress = self._record, options.verify, options.progress
        with journal.reporting(), opening_whole(self._repo, record, verify, progress) as opened:
            return load_into(opened, tree, options, self._types, journal=journal)

    def verify(self) -> None:
        """Read and verify every byte; raises Corrupt with the names of leaf, chunk and pack."""
        # Without a cache: the store itself is to be verified.
        with open_snapshot(self._repo, self._record, use_cache=False) as reader:
            for entry in reader.manifest.iter_entries():
                for _ in reader.iter_entry(entry):
                    pass


@dataclass(frozen=True, slots=True)
class _ViewContext:
    """What all views of one open snapshot share."""

    opened: Opened
    types: Types
    memory: SharedMemory


class View:
    """Everything below a name in a snapshot."""

    def __init__(self, context: _ViewContext, found: FoundLeaves) -> None:
        self._context = context
        self._found = found

    @property
    def name(self) -> str:
        """The prefix of the names of all its leaves."""
        return self._found.name

    def __repr__(self) -> str:
        """Show the name, the number of leaves and their size."""
        return f"<View {self.name!r}: {describe_view(self._context.opened, self._found.leaves)}>"

    def _repr_html_(self) -> str:
        """Return a card for notebooks: the leaves, with repeated layers folded."""
        return render_view(self.name, self._context.opened, self._found.leaves)

    def _ipython_key_completions_(self) -> list[str]:
        """Return the keys that a notebook offers after `view["`."""
        return complete_keys(self)

    def __len__(self) -> int:
        """Return the number of leaves."""
        return len(self._found.leaves)

    def __iter__(self) -> Iterator[str]:
        """Yield the names of the leaves, without the common prefix."""
        skip = len(self.name) + 1 if self.name else 0
        return (leaf.name[skip:] for leaf in self._found.leaves)

    def keys(self) -> list[str]:
        """Return the names of the leaves, without the common prefix."""
        return list(self)

    def __contains__(self, key: LeafKey) -> bool:
        """Return whether there is a leaf or a group of leaves with that name."""
        try:
            self._find(key)
        except NotFound:
            return False
        except AmbiguousName:
            return True
        return True

    def __getitem__(self, key: LeafKey) -> Any:
        """Return a lazy tensor, a plain value, or a view of everything below a name."""
        found = self._find(key)
        if not found.is_leaf:
            return View(self._context, found)
        leaf = found.leaves[0]
        if leaf.tag in TENSOR_TAGS:
            return LazyTensor(self._context, leaf)
        return load_node(self._context.opened, leaf.node, LoadOptions(), self._context.types)

    def load(self, options: LoadOptions | None = None) -> dict[str, Any]:
        """Load all leaves into new memory, by name."""
        options = options or LoadOptions()
        tree: list[Json] = ["dict"]
        for name, leaf in zip(self, self._found.leaves, strict=True):
            tree += [name, leaf.node]
        loaded: dict[str, Any] = load_node(self._context.opened, tree, options, self._context.types)
        return loaded

    def _find(self, key: LeafKey) -> FoundLeaves:
        if isinstance(key, str):
            return self._context.opened.find(f"{self.name}.{key}" if self.name else key)
        if self.name:
            raise NotFound(f"paths begin at the snapshot itself; ask it for {tuple(key)!r}")
        return self._context.opened.find_path(key, self._encode_key)

    def _encode_key(self, key: object) -> Json:
        def encode_leaf(value: object, path: TreePath) -> Json:
            raise refuse(value, path)

        return encode_tree(key, types=self._context.types, encode_leaf=encode_leaf)


@dataclass(frozen=True, slots=True)
class LazyTensor:
    """A tensor in a snapshot: its shape and dtype are known, its values are read on request."""

    _context: _ViewContext
    _leaf: Leaf

    @property
    def name(self) -> str:
        """Its name in the snapshot."""
        return self._leaf.name

    @property
    def shape(self) -> torch.Size:
        """Its shape."""
        return torch.Size(self._read_spec()[1].shape) if self._is_ordinary else self.read().shape

    @property
    def dtype(self) -> torch.dtype:
        """Its dtype."""
        return self._read_spec()[1].dtype if self._is_ordinary else self.read().dtype

    @property
    def size_bytes(self) -> int:
        """Its size in bytes, without deduplication."""
        return sum(entry.size_bytes for entry in self._entries())

    @property
    def is_sliceable(self) -> bool:
        """Whether reading a slice reads only the chunks that contain it, and not the whole tensor."""
        return self._is_ordinary and is_sliceable(self._read_spec()[1])

    @property
    def digest(self) -> Digest:
        """The content digest: equal for tensors that are equal bit for bit, whatever their names."""
        digests = [digest_entry(_drop_location(entry)) for entry in self._entries()]
        if self._is_ordinary:
            return digests[0]
        kind = canonical_json(self._leaf.node[1:3]) if self._leaf.tag == PARTS else b"grad"
        return hash_kind("parts", [kind, *digests])

    def __repr__(self) -> str:
        """Show name, shape, dtype and size."""
        if not self._is_ordinary:
            return f"<LazyTensor {self.name!r} {self._describe().label}, {format_bytes(self.size_bytes)}>"
        return f"<LazyTensor {self.name!r} {tuple(self.shape)} {self.dtype}, {format_bytes(self.size_bytes)}>"

    def _repr_html_(self) -> str:
        """Return a card for notebooks, without values."""
        opened = self._context.opened
        share = self.size_bytes / max(opened.reader.snapshot.logical_bytes, 1)
        return render_tensor(self._describe(), self.digest, share=share, snapshot=opened.name)

    def _describe(self) -> LeafLine:
        return describe_leaf(self._context.opened, self._leaf)

    def read(
        self,
        *,
        device: torch.device | str | None = "cpu",
        aliases: Aliases = "preserve",
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """Read and verify it.

        Tensors that shared memory when they were saved share it here as well, and so do repeated reads of one tensor,
        while that memory is in use. aliases="fresh" returns new memory, and so does `dtype`, which a floating tensor is
        cast to.
        """
        if aliases not in ("preserve", "fresh"):
            raise ValueError(f"aliases must be 'preserve' or 'fresh', not {aliases!r}")
        verify_dtype(dtype)
        is_shared = aliases == "preserve" and self._is_ordinary and not is_cast(self._read_spec()[1], dtype)
        if is_shared and not _is_unread(device):
            return self._context.memory.read(self._leaf, device)
        options = LoadOptions(device=device, aliases=aliases, dtype=dtype)
        tensor: torch.Tensor = load_node(self._context.opened, self._leaf.node, options, self._context.types)
        return tensor

    def __getitem__(self, index: SliceIndex | tuple[SliceIndex, ...]) -> torch.Tensor:
        """Read a slice into new, contiguous memory; fetches only the chunks that contain it."""
        if not self._is_ordinary:
            return self.read()[index]
        if find_fake_mode() is not None:
            return self.read(aliases="fresh")[index].clone(memory_format=torch.contiguous_format)
        entry, spec = self._read_spec()
        return read_slice(self._context.opened.reader, entry, spec, index)

    @property
    def _is_ordinary(self) -> bool:
        return self._leaf.tag == TENSOR

    def _entries(self) -> list[Entry]:
        return [self._context.opened.entry(number) for number in iter_entry_numbers(self._leaf.node, what=self.name)]

    def _read_spec(self) -> tuple[Entry, TensorSpec]:
        entry = self._entries()[0]
        return entry, decode_spec(entry.spec, size_bytes=entry.size_bytes, what=self.name)


def _is_unread(device: torch.device | str | None) -> bool:
    """Return whether the values of what is read are not needed (fake or meta tensors)."""
    is_meta = device is not None and device != SAVED and torch.device(device).type == "meta"
    return is_meta or find_fake_mode() is not None


def _drop_location(entry: Entry) -> Entry:
    """Return the entry without its name and alias, which are not part of its content."""
    spec = {key: value for key, value in entry.spec.items() if key != "at"} if isinstance(entry.spec, dict) else None
    return entry._replace(name="", alias=0, spec=spec)
