"""Loading: plan the memory of all requested leaves, read everything at once, then build the tree over it."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, Final

import torch

from holdfast.errors import Corrupt, NotFound, Unsupported
from holdfast.json_text import Json
from holdfast.repo.format.entry import Entry
from holdfast.repo.read.reader import WriteObserver
from holdfast.snapshot.batches import LoadOptions
from holdfast.snapshot.entries import EntryReader, ReadTarget, kind_mismatch, torch_errors_as_corrupt, verify_on_devices
from holdfast.snapshot.leaves import (
    ARRAY,
    BLOBS,
    GRAD,
    PARTS,
    PAYLOAD,
    PICKLE,
    TENSOR_TAGS,
    decode_plain,
    is_ordinary_node,
    iter_entry_numbers,
    list_parts,
)
from holdfast.snapshot.opened import Opened
from holdfast.snapshot.pickled import load_payload, unpickle_value
from holdfast.tensors.build import CPU, is_contiguous_alone, new_empty
from holdfast.tensors.composite import SUBCLASS, is_host_part, join
from holdfast.tensors.fakes import find_fake_mode, leave_fake_mode, make_fake
from holdfast.tensors.memory import new_memory, view_bytes, wrap_memory
from holdfast.tensors.sources import build_array
from holdfast.tensors.spec import SpecDecoder, TensorSpec, item_bytes
from holdfast.trees.encoding import decode_tree
from holdfast.trees.outline import TreePath, iter_stored, join_name
from holdfast.trees.pick import matches, pick, rename_keys
from holdfast.trees.registered import Types


class LeafReader:
    """Reads all requested leaves at once, and builds them while the tree is decoded."""

    def __init__(
        self,
        opened: Opened,
        types: Types,
        options: LoadOptions,
        *,
        in_place: Mapping[int, ReadTarget] | None = None,
        devices: Mapping[int, torch.device] | None = None,
    ) -> None:
        """Entries in `in_place` are read into the memory given there, others are moved to `devices`."""
        self._opened = opened
        self._types = types
        self._options = options
        self._fake = find_fake_mode()
        self._entries = EntryReader(opened, options, in_place=in_place, devices=devices)
        self._find_ready = self._entries.find_ready
        # By entry and depth: a composite tensor begins with the same entry as its first part.
        self._built: dict[tuple[int, int], torch.Tensor] = {}

    def read(self, nodes: Iterable[tuple[str, Json]]) -> None:
        """Read all entries of these named nodes, except those that are read in place."""
        parts: set[int] = set()
        request = self._entries.request
        for name, node in nodes:
            if is_ordinary_node(node):
                request(node[1], name)
                continue
            numbers = list(iter_entry_numbers(node, what=f"{self._opened.name!r}, {name}"))
            if node[0] == PARTS or (node[0] == GRAD and PARTS in (node[1][0], node[2][0])):
                parts.update(numbers)
                self._entries.keep_dtypes(_iter_kept(node))
            for number in numbers:
                request(number, name)
        with leave_fake_mode(self._fake):
            self._entries.read(parts)

    def read_in_place(
        self, left_out: Collection[int], watch: WriteObserver, *, targets: Mapping[int, ReadTarget] | None = None
    ) -> None:
        """Read entries into the existing memory, or into the replacements that are given.

        If that fails, some of it has been overwritten; `watch` records which.
        """
        self._entries.read_in_place(left_out, watch, targets=targets)

    def verify_on_devices(self) -> None:
        """Raise Corrupt if what was copied to a device is damaged there; does nothing unless `verify` is "device"."""
        if self._options.verify == "device":
            verify_on_devices(self._entries.iter_moved(), self._opened, self._entries.specs)

    def decode(self, node: list[Json], path: TreePath) -> object:
        """Return the value of a leaf; its entries must have been read."""
        tag = node[0]
        ready = self._find_ready(node[1]) if is_ordinary_node(node) else None
        if ready is not None:
            return ready
        what = f"{self._opened.name!r}, {join_name(path)}"
        if tag in TENSOR_TAGS:
            with leave_fake_mode(self._fake):
                tensor = self._decode_tensor(node, what)
                return tensor if self._fake is None else make_fake(tensor, self._fake, what=what)
        entry, data = self._find_blob(node[1], what)
        if tag == ARRAY:
            return build_array(entry.spec, data, what=what)
        if tag == PICKLE:
            if not self._options.allow_pickle:
                raise Unsupported(
                    f"{what} was pickled: loading it may run any code; pass allow_pickle=True to allow it"
                )
            return unpickle_value(data, what=what)
        if tag == PAYLOAD:
            return load_payload(data, what=what, weights_only=not self._options.allow_pickle)
        if tag == "@str":
            return _decode_text(data, what)
        return BLOBS[tag](data)

    def _find_blob(self, number: int, what: str) -> tuple[Entry, bytearray]:
        if number not in self._entries.blobs:
            raise kind_mismatch(what)
        return self._entries.blobs[number]

    def _decode_tensor(self, node: list[Json], what: str, *, device: torch.device | None = None) -> torch.Tensor:
        if node[0] == GRAD:
            tensor = self._decode_tensor(node[1], what)
            with torch_errors_as_corrupt(what):
                tensor.grad = self._decode_tensor(node[2], f"{what}.grad")
            return tensor
        number = next(iter_entry_numbers(node, what=what), -1)
        first = node[3] if node[0] == PARTS else (node[2] if len(node) > 2 else None)
        key = (number if first is None else first, _find_height(node))
        is_shared = self._options.aliases == "preserve"
        if is_shared and first is not None and key in self._built and not self._entries.is_in_place(number):
            return self._built[key]
        tensor = self._join(node, what) if node[0] == PARTS else self._entries.build(number, what, device)
        if is_shared:
            self._built.setdefault(key, tensor)
        return tensor

    def _join(self, node: list[Json], what: str) -> torch.Tensor:
        tensors = {
            role: self._decode_tensor(child, what, device=CPU if is_host_part(node[1], role) else None)
            for role, child in list_parts(node, what=what)
        }
        try:
            return join(node[1], node[2], tensors, types=self._types, decode_value=self._decode_plain)
        except (Corrupt, Unsupported) as error:
            raise type(error)(f"{what}: {error}") from error

    def _decode_plain(self, node: Json) -> object:
        return decode_plain(node, self._types)


def _iter_kept(node: list[Json]) -> Iterator[int]:
    """Yield the entries of tensors of registered classes, which are never cast: only the class knows their meaning."""
    if node[0] == GRAD:
        yield from _iter_kept(node[1])
        yield from _iter_kept(node[2])
    elif node[0] == PARTS and node[1] == SUBCLASS:
        yield from iter_entry_numbers(node, what="")


def _find_height(node: Json) -> int:
    """Return how deep composite tensors are nested along the first parts of a node."""
    height = 0
    while node[0] in (PARTS, GRAD) and len(node) > 5:
        node, height = node[5], height + 1
    return height


def _decode_text(data: bytearray, what: str) -> str:
    try:
        return data.decode(errors="surrogatepass")
    except UnicodeDecodeError as error:
        raise Corrupt(f"{what} is not valid text: {error}", key=what) from error


def load_tree(opened: Opened, options: LoadOptions, types: Types) -> Any:
    """Load a snapshot's tree, or the part that `only` selects, into new memory."""
    node = opened.tree
    if options.only is not None:
        patterns = [options.only] if isinstance(options.only, str) else list(options.only)
        if not any(matches(leaf.name, patterns) for leaf in opened.leaves):
            raise NotFound(f"no leaf of {opened.name!r} fits {patterns}; `holdfast show {opened.name}` lists them")
        node = pick(node, lambda name: matches(name, patterns))
    if options.rename:
        node = rename_keys(node, options.rename)
    with opened.reader.reporting(f"load {opened.name}", lambda: count_bytes(opened, iter_stored(node))):
        return load_node(opened, node, options, types)


def count_bytes(opened: Opened, nodes: Iterable[tuple[str, Json]]) -> int:
    """Return the size of all entries of these named nodes, each counted once."""
    numbers = {number for name, node in nodes for number in iter_entry_numbers(node, what=name)}
    return sum(opened.find_facts(number)[1] for number in numbers)


def load_node(opened: Opened, node: Json, options: LoadOptions, types: Types) -> Any:
    """Load the leaves of an encoded tree, or of one node."""
    reader = LeafReader(opened, types, options)
    with opened.pausing_gc():
        reader.read(iter_stored(node))
        tree = decode_tree(node, types=types, decode_leaf=reader.decode)
        reader.verify_on_devices()
        return tree


_ALIGNMENT: Final = 64
"""A cache line, which is also a multiple of the size of every item."""


class ReusedMemory:
    """A block of memory for tensors that are used for a short time; for one thread at a time.

    Memory that was used before takes no page faults, and a small block of it stays in the cache.
    """

    def __init__(self, block: memoryview) -> None:
        """Use a writable block."""
        self._bytes = wrap_memory(block)
        self._used_bytes = 0

    def clear(self) -> None:
        """Use the memory from the start again; the tensors in it change with the next read."""
        self._used_bytes = 0

    def take(self, size_bytes: int) -> torch.Tensor:
        """Return bytes of the block, or new memory if they do not fit."""
        start = self._used_bytes
        if size_bytes > self._bytes.numel() - start:
            return new_memory(size_bytes, CPU)
        self._used_bytes = min(-(-(start + size_bytes) // _ALIGNMENT) * _ALIGNMENT, self._bytes.numel())
        return self._bytes[start : start + size_bytes]


class TensorReader:
    """Reads tensors of one snapshot, by name, into memory that the caller gives. Safe in any thread."""

    def __init__(self, opened: Opened) -> None:
        self._opened = opened
        self._specs = SpecDecoder(opened.name)

    def read(self, names: Iterable[str], memory: ReusedMemory) -> list[torch.Tensor]:
        """Read and verify tensors, all at once; each is valid until the memory is cleared."""
        tensors: list[torch.Tensor] = []
        fills: list[tuple[Entry, memoryview]] = []
        for name in names:
            node = self._opened.find(name).leaves[0].node
            found = self._place(node[1], name, memory) if is_ordinary_node(node) else None
            if found is None:
                options = LoadOptions(device=CPU, aliases="fresh")
                tensors.append(load_node(self._opened, node, options, Types()))
                continue
            tensor, entry, raw = found
            tensors.append(tensor)
            if raw.numel():
                fills.append((entry, view_bytes(raw)))
        self._opened.reader.read_all(fills)
        return tensors

    def _place(self, number: int, name: str, memory: ReusedMemory) -> tuple[torch.Tensor, Entry, torch.Tensor] | None:
        """Return the tensor of an entry over memory that is still to be filled; None if it is not that simple."""
        saved, size_bytes, _ = self._opened.find_facts(number)
        try:
            spec = self._specs.decode(saved, size_bytes=size_bytes, name=name)
        except Corrupt:
            return None  # an ordinary read raises the error with all details
        if not is_contiguous_alone(spec, size_bytes) or spec.quantizer is not None:
            return None
        raw = memory.take(size_bytes)
        return _view(raw, spec), self._opened.entry(number), raw


def _view(raw: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    size = item_bytes(spec.dtype)
    assert raw.numel() == size * math.prod(spec.shape), "the spec fits the entry"
    start = int(raw.storage_offset()) // size
    return new_empty(spec.dtype, CPU).set_(raw.untyped_storage(), start, spec.shape, spec.stride)
