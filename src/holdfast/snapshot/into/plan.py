"""What it takes to load into a tree: collected while the tree is matched, carried out when everything fits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch

from holdfast.repo.format.manifest import Manifest
from holdfast.repo.format.record import Json
from holdfast.repo.read.reader import Verify, verify_mode
from holdfast.repo.read.regions import Region
from holdfast.snapshot.into.in_place import Claim
from holdfast.snapshot.into.setters import Undo
from holdfast.snapshot.leaves import decode_plain, is_one_entry, iter_entry_numbers
from holdfast.snapshot.load.entries import InPlace
from holdfast.snapshot.load.load import LeafReader
from holdfast.snapshot.load.opened import EntryAt, Opened
from holdfast.tensors.sharding.sharded import Piece
from holdfast.tensors.spec import Specs, TensorSpec
from holdfast.trees.outline import Path, iter_leaves, iter_stored, join_name
from holdfast.trees.registered import Types

Replicas = Literal["auto", "each", "broadcast"]
"""Who reads what all ranks hold the same of: each of them, or one, who sends it to the others; or what is faster."""
Wants = dict[int, tuple[Region, ...] | None]
"""Entries by number, and the boxes of them that are wanted; None is all of it."""
Prepare = Callable[[LeafReader], Callable[[], None]]
"""Decodes what was read into new memory, which may still be refused; what it returns puts that in place."""


@dataclass(frozen=True, slots=True)
class Step:
    """Something that is put in place after all leaves were read."""

    name: str
    """Of the leaf, or of the object that is given its state."""
    prepare: Prepare
    keep: Callable[[], Undo]
    """Keeps the present value, and returns a function that puts it back."""
    memory: tuple[torch.Tensor, ...] = ()
    """Tensors of the target that it writes to, or may write to."""
    is_tensor: bool = False
    """It writes to nothing but that one tensor."""


class Look(NamedTuple):
    """A value that cannot be changed, and what was saved for it."""

    target: Any
    node: Json
    path: Path


class Check(NamedTuple):
    """A value that was saved by somebody else's format, and what tells from it what does not fit."""

    node: Json
    path: Path
    find_problems: Callable[[Any], Iterable[str]]


@dataclass(frozen=True, slots=True)
class IntoOptions:
    """How to load into a tree."""

    strict: bool = True
    rename: Mapping[str, str] = field(default_factory=dict)
    cast: bool = False
    assign: bool = False
    verify: Verify = "full"
    allow_pickle: bool = False
    replicas: Replicas = "each"
    atomic: bool = False

    def __post_init__(self) -> None:
        """Refuse words that mean nothing."""
        if self.replicas not in ("auto", "each", "broadcast"):
            raise ValueError(f"replicas must be 'auto', 'each' or 'broadcast', not {self.replicas!r}")
        verify_mode(self.verify)


class Meaning(NamedTuple):
    """An ordinary tensor in the snapshot."""

    at: EntryAt
    spec: TensorSpec


@dataclass(slots=True)
class IntoPlan:
    """What is to be done once everything fits, and what does not."""

    opened: Opened
    options: IntoOptions
    types: Types
    specs: Specs
    problems: list[str] = field(default_factory=list)
    nodes: list[tuple[str, Json]] = field(default_factory=list)
    """Leaves to read, by name."""
    in_place: dict[int, InPlace] = field(default_factory=dict)
    """Entries whose bytes go straight to where they are wanted."""
    devices: dict[int, torch.device] = field(default_factory=dict)
    """Where other entries go that are not wanted on the CPU."""
    names: dict[int, str] = field(default_factory=dict)
    """Of what is read in place into memory of the target; entries that are read into new memory are not here."""
    claims: list[Claim] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    """In the order of the tree."""
    looks: list[Look] = field(default_factory=list)
    """What is there already and must be what was saved: to be read and compared."""
    checks: list[Check] = field(default_factory=list)
    """What has to be read before it is known whether it fits."""
    converted: dict[tuple[int, torch.dtype], tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    """What was read and what became of it, by identity and dtype."""
    is_replaced: bool = False
    """Something takes the place of what is there, instead of being copied into it."""

    def add_problem(self, path: Path, text: str) -> None:
        """Note something that does not fit."""
        self.problems.append(f"{join_name(path) or 'the tree'}: {text}")

    def read_below(self, node: Json, path: Path) -> None:
        """Read every leaf of a tree that is decoded as a whole."""
        prefix = join_name(path)
        for leaf in iter_leaves(node):
            if leaf.tag.startswith("@"):
                self.nodes.append((".".join(filter(None, (prefix, leaf.name))), leaf.node))

    def find_meaning(self, node: Json, name: str) -> Meaning:
        """Return what an ordinary tensor's node stands for."""
        numbers = (node[1],) if is_one_entry(node) else iter_entry_numbers(node, what=f"{self.opened.name!r}, {name}")
        number = next(iter(numbers))
        spec, size_bytes, _ = self.opened.find_facts(number)
        return Meaning(EntryAt(self.opened, number), self.specs.decode(spec, size_bytes=size_bytes, name=name))

    def fill(self, place: InPlace, name: str, *, is_new: bool = False) -> None:
        """Read an entry straight to where it is wanted; with `is_new`, into memory that no one else uses yet."""
        self.in_place[place.at.number] = place
        if not is_new:
            self.names[place.at.number] = name

    def add_step(
        self, path: Path, prepare: Prepare, keep: Callable[[], Undo], memory: Iterable[torch.Tensor] = ()
    ) -> None:
        """Put something in place after all leaves were read."""
        self.steps.append(Step(join_name(path), prepare, keep, tuple(memory)))

    def send(self, node: Json, target: torch.Tensor, path: Path) -> None:
        """Read a tensor to where the target is whose place it takes, unless that has no memory anywhere."""
        if not target.is_meta:
            numbers = iter_entry_numbers(node, what=f"{self.opened.name!r}, {join_name(path)}")
            self.devices.update(dict.fromkeys(numbers, target.device))

    def decode_plain(self, node: Json) -> Any:
        """Return a plain value, a key for instance."""
        return decode_plain(node, self.types)

    def list_wants(self) -> Wants:
        """Return what has to be read of which entries."""
        wants: Wants = {}
        read = [*self.nodes, *((join_name(look.path), look.node) for look in self.looks)]
        read += [stored for check in self.checks for stored in iter_stored(check.node)]
        for name, node in read:
            wants.update(dict.fromkeys(iter_entry_numbers(node, what=f"{self.opened.name!r}, {name}")))
        for number, place in self.in_place.items():
            wants[number] = None if place.pieces is None else self._list_regions(place, place.pieces)
        return wants

    def _list_regions(self, place: InPlace, pieces: Iterable[Piece]) -> tuple[Region, ...]:
        entry = place.entry
        shape = self.specs.decode(entry.spec, size_bytes=entry.size_bytes, name=entry.name).shape
        return tuple(Region(piece.box, shape, piece.tensor.element_size()) for piece in pieces)

    def relocate(self, manifest: Manifest) -> None:
        """Go on with another manifest of the same entries, which tells where their chunks lie."""
        self.opened.reader.manifest = manifest

    def branch(self) -> IntoPlan:
        """Return an empty plan for the same snapshot, to be absorbed or forgotten."""
        return IntoPlan(self.opened, self.options, self.types, self.specs)

    def absorb(self, other: IntoPlan) -> None:
        """Do what another plan does as well."""
        self.problems += other.problems
        self.nodes += other.nodes
        self.in_place.update(other.in_place)
        self.devices.update(other.devices)
        self.names.update(other.names)
        self.claims += other.claims
        self.steps += other.steps
        self.looks += other.looks
        self.checks += other.checks
        self.is_replaced |= other.is_replaced
