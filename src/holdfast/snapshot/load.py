"""Loading: plan the memory of all wanted leaves, read all of it at once, then build the tree over it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal, TypeVar

import torch

from holdfast.errors import Corrupt, HoldfastError, NotFound, Unsupported
from holdfast.repo.manifest import Entry
from holdfast.repo.reader import SnapshotReader, Verify
from holdfast.repo.record import Json
from holdfast.snapshot.leaves import (
    ARRAY,
    BLOBS,
    GRAD,
    PARTS,
    PICKLE,
    TENSOR,
    decode_plain,
    is_one_entry,
    iter_entry_numbers,
    list_parts,
)
from holdfast.snapshot.opened import Opened
from holdfast.snapshot.pickled import unpickle_value
from holdfast.tensors.arrays import build_array
from holdfast.tensors.build import CPU, Block, build_tensor, fits_tray, plan_block, plan_tray
from holdfast.tensors.layouts import is_host_part
from holdfast.tensors.memory import new_memory, view_bytes, wrap_memory
from holdfast.tensors.parts import join
from holdfast.tensors.spec import TENSOR as TENSOR_TYPE
from holdfast.tensors.spec import Specs, TensorSpec
from holdfast.trees.encoding import decode_tree
from holdfast.trees.move import move_to_device
from holdfast.trees.outline import Path, iter_stored, join_name
from holdfast.trees.pick import matches, pick, rename_keys
from holdfast.trees.registered import Types

Aliases = Literal["preserve", "fresh"]
Device = torch.device | str | None
Item = TypeVar("Item")
SAVED: Final = "saved"
_RNG_STATE_BYTES: Final = 5056
"""The size of the state of torch's generator on the CPU."""


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """What to load, and how."""

    device: Device = "cpu"
    only: str | Sequence[str] | None = None
    verify: Verify = "full"
    mmap: bool = False
    rename: Mapping[str, str] = field(default_factory=dict)
    aliases: Aliases = "preserve"
    allow_pickle: bool = False


@dataclass(frozen=True, slots=True)
class InPlace:
    """Memory that is there already: an entry's bytes go straight into it."""

    tensor: torch.Tensor
    memory: torch.Tensor
    """The bytes of the tensor, on its device."""


class LeafReader:
    """Reads the leaves that were asked for in one go, and builds them when the tree is decoded."""

    def __init__(
        self,
        opened: Opened,
        types: Types,
        options: LoadOptions,
        *,
        in_place: Mapping[int, InPlace] | None = None,
        devices: Mapping[int, torch.device] | None = None,
    ) -> None:
        """Read nothing yet; entries in `in_place` will be read into what is given there, others go to `devices`."""
        self._opened = opened
        self._types = types
        self._options = options
        # At once: a device that torch does not know is the caller's mistake, and nothing need be read to say so.
        self._device = None if options.device == SAVED else torch.device(options.device or CPU)
        self._in_place = in_place or {}
        self._devices = devices or {}
        self._meanings = Specs(opened.name)
        self._specs: dict[int, tuple[Entry, TensorSpec]] = {}
        self._memory: dict[int, torch.Tensor] = {}
        self._sharing: dict[int, Sequence[int]] = {}
        self._blobs: dict[int, tuple[Entry, bytearray]] = {}
        # By entry and height: a tensor that is made of others begins with the same entry as the first of them.
        self._built: dict[tuple[int, int], torch.Tensor] = {}
        # Small ones, by their spec: read side by side, and built at once.
        self._small: dict[int, list[int]] = {}
        self._ready: dict[int, torch.Tensor] = {}

    def read(self, nodes: Iterable[tuple[str, Json]]) -> None:
        """Read all entries that these named nodes need, but for those that are to be read in place."""
        groups: dict[object, list[int]] = {}
        parts: set[int] = set()
        for name, node in nodes:
            if is_one_entry(node):
                self._take_up(node[1], name, groups)
                continue
            for number in iter_entry_numbers(node, what=f"{self._opened.name!r}, {name}"):
                self._take_up(number, name, groups)
                if node[0] == PARTS or (node[0] == GRAD and PARTS in (node[1][0], node[2][0])):
                    parts.add(number)
        here: list[list[int]] = []
        elsewhere: list[list[int]] = []
        for members in groups.values():
            # Some parts stay on the CPU, whichever device their tensor is on; the others are moved when it is built.
            is_here = bool(parts.intersection(members)) or any(self._find_device(each) == CPU for each in members)
            (here if is_here else elsewhere).append(members)
        blobs = [(entry, memoryview(data)) for entry, data in self._blobs.values()]
        self._read_groups(here, blobs)
        self._read_small()
        for batch in _batch(elsewhere, self._measure, self._opened.reader.budget_bytes // 2):
            self._read_groups(batch, [])
            for members in batch:
                self._move(members[0], self._find_device(members[0]))

    def _measure(self, members: Sequence[int]) -> int:
        return sum(self._specs[number][0].size_bytes for number in members)

    def _read_groups(self, groups: Sequence[Sequence[int]], fills: list[tuple[Entry, memoryview]]) -> None:
        blocks = [(members, self._plan(members)) for members in groups]
        fills = fills + [(fill.entry, fill.buffer) for _, block in blocks for fill in block.fills]
        self._opened.reader.read_all(fills)
        for members, block in blocks:
            self._memory.update(dict.fromkeys(members, block.finish()))
            self._sharing.update(dict.fromkeys(members, members))
            for number, place in zip(members, block.places, strict=True):
                entry, spec = self._specs[number]
                self._specs[number] = (entry, spec if spec.at == place else replace(spec, at=place))

    def _read_small(self) -> None:
        limit = self._opened.reader.budget_bytes // 2
        for batch in _batch(self._iter_alike(limit), self._measure, limit):
            trays = [plan_tray(self._specs[numbers[0]][1], len(numbers)) for numbers in batch]
            entries = [self._specs[number][0] for numbers in batch for number in numbers]
            buffers = [buffer for tray in trays for buffer in tray.cut()]
            self._opened.reader.read_all(list(zip(entries, buffers, strict=True)))
            for numbers, tray in zip(batch, trays, strict=True):
                self._ready.update(zip(numbers, tray.build(), strict=True))

    def _iter_alike(self, limit_bytes: int) -> Iterator[list[int]]:
        """Yield small tensors of one kind, as many as a limit allows."""
        for numbers in self._small.values():
            step = max(1, limit_bytes // self._specs[numbers[0]][0].size_bytes)
            yield from (numbers[at : at + step] for at in range(0, len(numbers), step))

    def read_in_place(self) -> None:
        """Read what goes straight to where it is wanted; if that fails, some of it has been overwritten."""
        places = [(self._specs[number][0], place.memory) for number, place in self._find_places()]
        here = [(entry, view_bytes(memory)) for entry, memory in places if memory.device == CPU]
        self._opened.reader.read_all(here)
        read_to_devices(self._opened.reader, [each for each in places if each[1].device != CPU])

    def _take_up(self, number: int, name: str, groups: dict[object, list[int]]) -> None:
        if number in self._specs or number in self._blobs:
            return
        entry = self._opened.entry(number)
        kind = entry.spec.get("type") if isinstance(entry.spec, dict) else None
        if kind != TENSOR_TYPE:
            self._blobs[number] = (entry, bytearray(entry.size_bytes))
            return
        spec = self._meanings.decode(entry.spec, size_bytes=entry.size_bytes, name=name)
        self._specs[number] = (entry, spec)
        if number in self._in_place:
            return
        if entry.alias and self._options.aliases == "preserve":
            groups.setdefault(entry.alias, []).append(number)
        elif self._is_small(number, entry, spec):
            self._small.setdefault(id(spec), []).append(number)
        else:
            groups["alone", number] = [number]

    def _is_small(self, number: int, entry: Entry, spec: TensorSpec) -> bool:
        if self._device != CPU or self._options.mmap or number in self._devices:
            return False
        return id(spec) in self._small or fits_tray(spec, entry.size_bytes)

    def _find_places(self) -> Iterator[tuple[int, InPlace]]:
        """Yield what is read in place; tied tensors, once."""
        seen = set()
        for number, place in self._in_place.items():
            key = (place.tensor.device, place.tensor.data_ptr(), place.memory.numel())
            if number in self._specs and key not in seen and place.memory.numel():
                seen.add(key)
                yield number, place

    def _plan(self, members: Sequence[int]) -> Block:
        found = [self._specs[number] for number in members]
        if self._options.mmap:
            is_alone = len(found) == 1 and not found[0][1].packed and found[0][0].size_bytes > 0
            mapped = self._opened.reader.map_entry(found[0][0]) if is_alone else None
            if mapped is not None:
                self._opened.reader.counters.mapped_entries += 1
                return Block(wrap_memory(mapped), (), (0,))
            self._opened.reader.counters.unmapped_entries += len(found)
        return plan_block(found, what=f"{self._opened.name!r}, {found[0][0].name!r}")

    def decode(self, node: list[Json], path: Path) -> object:
        """Return the value of a leaf; its entries must have been read."""
        tag = node[0]
        if is_one_entry(node) and node[1] in self._ready:
            return self._ready[node[1]]
        what = f"{self._opened.name!r}, {join_name(path)}"
        if tag in (TENSOR, PARTS, GRAD):
            return self._decode_tensor(node, what)
        entry, data = self._find_blob(node[1], what)
        if tag == ARRAY:
            return build_array(entry.spec, data, what=what)
        if tag == PICKLE:
            if not self._options.allow_pickle:
                raise Unsupported(
                    f"{what} was pickled: loading it may run any code; pass allow_pickle=True to allow it"
                )
            return unpickle_value(data, what=what)
        if tag == "@str":
            return _decode_text(data, what)
        return BLOBS[tag](data)

    def _find_blob(self, number: int, what: str) -> tuple[Entry, bytearray]:
        if number not in self._blobs:
            raise _disagree(what)
        return self._blobs[number]

    def _decode_tensor(self, node: list[Json], what: str, *, device: torch.device | None = None) -> torch.Tensor:
        if node[0] == GRAD:
            tensor = self._decode_tensor(node[1], what)
            with _refusing(what):
                tensor.grad = self._decode_tensor(node[2], f"{what}.grad")
            return tensor
        number = next(iter_entry_numbers(node, what=what), -1)
        first = node[3] if node[0] == PARTS else (node[2] if len(node) > 2 else None)
        key = (number if first is None else first, _find_height(node))
        is_shared = self._options.aliases == "preserve"
        if is_shared and first is not None and key in self._built and number not in self._in_place:
            return self._built[key]
        tensor = self._join(node, what) if node[0] == PARTS else self._build(number, what, device)
        if is_shared:
            self._built.setdefault(key, tensor)
        return tensor

    def _build(self, number: int, what: str, device: torch.device | None) -> torch.Tensor:
        if number not in self._specs:
            raise _disagree(what)
        if number in self._in_place:
            return self._in_place[number].tensor
        if number in self._ready:
            return self._ready[number]
        memory = self._memory[number]
        device = device or self._find_device(number)
        if memory.device != device:
            memory = self._move(number, device)
        return build_tensor(self._specs[number][1], memory, what=what)

    def _move(self, number: int, device: torch.device) -> torch.Tensor:
        """Return the memory on another device, one copy of it for all who share it."""
        memory, name = self._memory[number], self._specs[number][0].name
        if memory.is_meta:
            raise _disagree(name)  # one place wants it here, another where there are no bytes
        try:
            moved = move_to_device(memory, device)
        except (RuntimeError, AssertionError) as error:
            if self._device is not None or number in self._devices:
                raise
            raise Unsupported(f"{name} was on {device}, and cannot be put there: {error}; pass device=") from error
        for other in self._sharing[number]:
            if self._memory[other] is memory and self._find_device(other) == device:
                self._memory[other] = moved
        return moved

    def _find_device(self, number: int) -> torch.device:
        entry, spec = self._specs[number]
        if number in self._devices:
            return self._devices[number]
        if spec.meta or is_rng_state(entry.name, spec):
            return CPU
        if self._device is not None:
            return self._device
        saved = entry.note.get("device") if isinstance(entry.note, dict) else None
        with _refusing(entry.name):
            return torch.device(saved) if isinstance(saved, str) else CPU

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


def read_to_devices(reader: SnapshotReader, wanted: Sequence[tuple[Entry, torch.Tensor]]) -> None:
    """Fill memory on other devices, given as tensors of bytes; takes at most half of the budget on the host."""
    limit = reader.budget_bytes // 2
    for batch in _batch(wanted, lambda each: each[0].size_bytes, limit):
        if batch[0][0].size_bytes > limit:
            entry, memory = batch[0]
            for start in range(0, entry.size_bytes, limit):
                piece = new_memory(min(limit, entry.size_bytes - start), CPU)
                reader.read_into(entry, start, view_bytes(piece))
                memory[start : start + piece.numel()].copy_(piece)
            continue
        pieces = [new_memory(entry.size_bytes, CPU) for entry, _ in batch]
        reader.read_all([(entry, view_bytes(piece)) for (entry, _), piece in zip(batch, pieces, strict=True)])
        for (_, memory), piece in zip(batch, pieces, strict=True):
            memory.copy_(piece)


def _batch(items: Iterable[Item], measure: Callable[[Item], int], limit_bytes: int) -> Iterator[list[Item]]:
    """Yield the items in batches that fit into a limit; what does not fit is alone."""
    batch: list[Item] = []
    held = 0
    for item in items:
        size = measure(item)
        if batch and held + size > limit_bytes:
            yield batch
            batch, held = [], 0
        batch.append(item)
        held += size
    if batch:
        yield batch


def _find_height(node: Json) -> int:
    """Return how many tensors are put together, each from the one before, along the first parts of a node."""
    height = 0
    while node[0] in (PARTS, GRAD) and len(node) > 5:
        node, height = node[5], height + 1
    return height


@contextmanager
def _refusing(what: str) -> Iterator[None]:
    """Turn what torch refuses about a stored value into Corrupt, naming the leaf."""
    try:
        yield
    except HoldfastError:
        raise
    except (RuntimeError, TypeError, ValueError) as error:
        raise Corrupt(f"{what}: {error}", key=what) from error


def _disagree(what: str) -> Corrupt:
    return Corrupt(f"{what}: the stored tree and its entry disagree on what it is; run `holdfast check`", key=what)


def _decode_text(data: bytearray, what: str) -> str:
    try:
        return data.decode(errors="surrogatepass")
    except UnicodeDecodeError as error:
        raise Corrupt(f"{what} is not the text that it says: {error}", key=what) from error


def is_rng_state(name: str, spec: TensorSpec) -> bool:
    """Tell whether a tensor is the state of a random generator: those live on the CPU, whatever they are for."""
    is_bytes = spec.dtype == torch.uint8 and len(spec.shape) == 1
    return is_bytes and ("rng" in name.lower() or spec.shape[0] == _RNG_STATE_BYTES)


def load_tree(opened: Opened, options: LoadOptions, types: Types) -> Any:
    """Load a snapshot's tree, or the part of it that `only` chooses, into new memory."""
    node = opened.tree
    if options.only is not None:
        patterns = [options.only] if isinstance(options.only, str) else list(options.only)
        if not any(matches(leaf.name, patterns) for leaf in opened.leaves):
            raise NotFound(f"no leaf of {opened.name!r} fits {patterns}; `holdfast show {opened.name}` lists them")
        node = pick(node, lambda name: matches(name, patterns))
    if options.rename:
        node = rename_keys(node, options.rename)
    return load_node(opened, node, options, types)


def load_node(opened: Opened, node: Json, options: LoadOptions, types: Types) -> Any:
    """Load what an encoded tree, or one leaf of it, names."""
    reader = LeafReader(opened, types, options)
    with opened.resting():
        reader.read(iter_stored(node))
        return decode_tree(node, types=types, decode_leaf=reader.decode)
