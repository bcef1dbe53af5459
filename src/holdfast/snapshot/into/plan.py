"""The plan of a load into a tree, and the journal of the leaves that the load has written so far."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple

import torch

from holdfast.errors import HoldfastError
from holdfast.json_text import Json
from holdfast.progress import Progress
from holdfast.repo.format.manifest import Manifest
from holdfast.repo.read.read_plan import Region
from holdfast.repo.read.reader import Verify, verify_mode
from holdfast.snapshot.entries import ReadTarget
from holdfast.snapshot.into.held import HeldMemory, Since
from holdfast.snapshot.into.in_place import Claim, cut_like
from holdfast.snapshot.into.undo import Undo
from holdfast.snapshot.leaves import decode_plain, is_ordinary_node, iter_entry_numbers
from holdfast.snapshot.load import LeafReader
from holdfast.snapshot.opened import EntryRef, Opened
from holdfast.tensors.sharding import LocalBox
from holdfast.tensors.spec import SpecDecoder, TensorSpec, can_convert, find_role, give_role
from holdfast.texts import add_note, list_some
from holdfast.trees.outline import TreePath, iter_leaves, iter_stored, join_name
from holdfast.trees.registered import Types

ReplicaMode = Literal["auto", "each", "broadcast"]
"""Who reads replicated tensors: "each" rank, one rank that "broadcast"s them, or whichever is faster ("auto")."""
Wants = dict[int, tuple[Region, ...] | None]
"""Entries by number, and the boxes of them that are needed; None is the whole entry."""
Prepare = Callable[[LeafReader], Callable[[], None]]
"""Decodes what was read into new memory, and may still refuse it; returns a function that puts it in place."""


@dataclass(frozen=True, slots=True)
class Step:
    """A change to the target that is made after all leaves were read."""

    name: str
    """The name of the leaf, or of the object whose state is restored."""
    prepare: Prepare
    keep: Callable[[], Undo]
    """Keeps the current value, and returns a function that restores it."""
    memory: tuple[torch.Tensor, ...] = ()
    """Tensors of the target that it writes to, or may write to."""
    is_tensor: bool = False
    """It writes to that one tensor and nothing else."""


class ImmutableCheck(NamedTuple):
    """A value that cannot be changed, and the saved one that it must equal."""

    target: Any
    node: Json
    path: TreePath


class Check(NamedTuple):
    """A value of a foreign format, and a function that returns what does not match."""

    node: Json
    path: TreePath
    find_problems: Callable[[Any], Iterable[str]]


@dataclass(frozen=True, slots=True)
class IntoOptions:
    """Options of a load into a tree."""

    strict: bool = True
    rename: Mapping[str, str] = field(default_factory=dict)
    cast: bool = False
    assign: bool = False
    verify: Verify = "full"
    allow_pickle: bool = False
    replicas: ReplicaMode = "each"
    atomic: bool = False
    progress: Progress | None = None
    held: HeldMemory | None = None
    """Where to remember what the target holds after the load."""
    since: Since | None = None
    """Read only what the target does not hold, and change nothing if that fails."""

    @property
    def is_transaction(self) -> bool:
        """Return whether a load that fails must change nothing."""
        return self.atomic or self.since is not None

    def __post_init__(self) -> None:
        """Refuse unknown values."""
        if self.replicas not in ("auto", "each", "broadcast"):
            raise ValueError(f"replicas must be 'auto', 'each' or 'broadcast', not {self.replicas!r}")
        verify_mode(self.verify)


class SavedTensor(NamedTuple):
    """An ordinary tensor in the snapshot."""

    ref: EntryRef
    spec: TensorSpec


@dataclass(slots=True)
class IntoPlan:
    """What is to be done if everything matches, and what does not match."""

    opened: Opened
    options: IntoOptions
    types: Types
    specs: SpecDecoder
    problems: list[str] = field(default_factory=list)
    nodes: list[tuple[str, Json]] = field(default_factory=list)
    """Leaves to read, by name."""
    in_place: dict[int, ReadTarget] = field(default_factory=dict)
    """Entries whose bytes are read directly into the target."""
    devices: dict[int, torch.device] = field(default_factory=dict)
    """Devices of entries that are read into new memory on another device than the CPU."""
    names: dict[int, str] = field(default_factory=dict)
    """Names of entries that are read into memory of the target; entries that are read into new memory are not here."""
    claims: list[Claim] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    """In the order of the tree."""
    immutable_checks: list[ImmutableCheck] = field(default_factory=list)
    """Values that cannot be changed: to be read and compared."""
    checks: list[Check] = field(default_factory=list)
    """Values that must be read before it is known whether they match."""
    converted: dict[tuple[int, torch.dtype], tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    """Tensors that were read, and their conversions, by identity and dtype."""
    is_replaced: bool = False
    """Some value replaces an existing one instead of being copied into it."""
    result: Any = None
    """The tree; or the saved value, once it is loaded, if the whole tree is one plain value."""

    def add_problem(self, path: TreePath, text: str) -> None:
        """Add something that does not match."""
        self.problems.append(f"{join_name(path) or 'the tree'}: {text}")

    def read_below(self, node: Json, path: TreePath) -> None:
        """Read every leaf of a tree that is decoded as a whole."""
        prefix = join_name(path)
        for leaf in iter_leaves(node):
            if leaf.tag.startswith("@"):
                self.nodes.append((".".join(filter(None, (prefix, leaf.name))), leaf.node))

    def find_saved(self, node: Json, name: str) -> SavedTensor:
        """Return the entry and spec of an ordinary tensor's node."""
        numbers = (
            (node[1],) if is_ordinary_node(node) else iter_entry_numbers(node, what=f"{self.opened.name!r}, {name}")
        )
        number = next(iter(numbers))
        spec, size_bytes, _ = self.opened.find_facts(number)
        return SavedTensor(EntryRef(self.opened, number), self.specs.decode(spec, size_bytes=size_bytes, name=name))

    def fill(self, memory: ReadTarget, name: str, *, is_new: bool = False) -> None:
        """Read an entry directly into memory; with `is_new`, memory that nothing else uses yet."""
        self.in_place[memory.ref.number] = memory
        if not is_new:
            self.names[memory.ref.number] = name

    def add_step(
        self, path: TreePath, prepare: Prepare, keep: Callable[[], Undo], memory: Iterable[torch.Tensor] = ()
    ) -> None:
        """Add a change that is made after all leaves were read."""
        self.steps.append(Step(join_name(path), prepare, keep, tuple(memory)))

    def read_to_device_of(self, node: Json, target: torch.Tensor, path: TreePath) -> None:
        """Read a tensor to the device of the target that it replaces, unless that is the meta device."""
        if not target.is_meta:
            numbers = iter_entry_numbers(node, what=f"{self.opened.name!r}, {join_name(path)}")
            self.devices.update(dict.fromkeys(numbers, target.device))

    def decode_plain(self, node: Json) -> Any:
        """Return a plain value, for example a key."""
        return decode_plain(node, self.types)

    def list_wants(self) -> Wants:
        """Return which parts of which entries must be read."""
        wants: Wants = {}
        read = [*self.nodes, *((join_name(check.path), check.node) for check in self.immutable_checks)]
        read += [stored for check in self.checks for stored in iter_stored(check.node)]
        for name, node in read:
            wants.update(dict.fromkeys(iter_entry_numbers(node, what=f"{self.opened.name!r}, {name}")))
        for number, memory in self.in_place.items():
            wants[number] = None if memory.pieces is None else self._list_regions(memory, memory.pieces)
        return wants

    def _list_regions(self, memory: ReadTarget, pieces: Iterable[LocalBox]) -> tuple[Region, ...]:
        entry = memory.entry
        shape = self.specs.decode(entry.spec, size_bytes=entry.size_bytes, name=entry.name).shape
        return tuple(Region(piece.box, shape, piece.tensor.element_size()) for piece in pieces)

    def relocate(self, manifest: Manifest) -> None:
        """Use another manifest of the same entries, which has the locations of their chunks."""
        self.opened.reader.manifest = manifest

    def branch(self) -> IntoPlan:
        """Return an empty plan for the same snapshot, to be absorbed or dropped."""
        return IntoPlan(self.opened, self.options, self.types, self.specs)

    def absorb(self, other: IntoPlan) -> None:
        """Add everything that another plan does."""
        self.problems += other.problems
        self.nodes += other.nodes
        self.in_place.update(other.in_place)
        self.devices.update(other.devices)
        self.names.update(other.names)
        self.claims += other.claims
        self.steps += other.steps
        self.immutable_checks += other.immutable_checks
        self.checks += other.checks
        self.is_replaced |= other.is_replaced


def fit_replacement(plan: IntoPlan, target: torch.Tensor, value: Any, path: TreePath) -> Any:
    """Return the replacement of a target: converted to its dtype if allowed, and a parameter if the target was one."""
    value = cut_like(target, fit_value(plan, target, value, path))
    is_parameter = isinstance(target, torch.nn.Parameter)
    if is_parameter and isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter):
        value = torch.nn.Parameter(value, requires_grad=target.requires_grad)
    return value


def fit_value(plan: IntoPlan, target: torch.Tensor, value: Any, path: TreePath) -> Any:
    """Return a tensor of the target's shape and dtype, converted if allowed."""
    if not isinstance(value, torch.Tensor):
        return value
    # The shape and dtype of a composite tensor are known only now.
    if not (target.is_nested or value.is_nested) and target.shape != value.shape:
        text = f"shape {tuple(target.shape)} in the target, {tuple(value.shape)} in the snapshot"
        plan.add_problem(path, text)
    if target.dtype != value.dtype and check_cast(plan, target, value.dtype, path):
        # One object stays one object.
        converted = plan.converted.setdefault((id(value), target.dtype), (value, _convert(value, target.dtype)))
        return converted[1]
    return value


def check_cast(plan: IntoPlan, target: torch.Tensor, saved: torch.dtype, path: TreePath) -> bool:
    """Return whether the saved dtype may be converted to the target's; otherwise add a problem."""
    text = f"{target.dtype} in the target, {saved} in the snapshot"
    if not plan.options.cast:
        plan.add_problem(path, f"{text}; cast=True converts")
    elif not (can_convert(saved) and (target.is_quantized or can_convert(target.dtype))):
        plan.add_problem(path, f"{text}, which torch cannot convert; give the target that dtype")
    else:
        return True
    return False


def _convert(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor as another dtype: in the same role, and with its gradient if it can have one."""
    is_smooth = dtype.is_floating_point or dtype.is_complex
    made = give_role(value.detach().to(dtype), find_role(value), requires_grad=value.requires_grad and is_smooth)
    if is_smooth and value.is_leaf and value.grad is not None:
        made.grad = value.grad.to(dtype)
    return made


_LISTED: Final = 50
"""How many leaves a sentence lists before it only counts them."""


class AddressRange(NamedTuple):
    """A range of memory addresses on one device."""

    device: str
    start: int
    stop: int


class WrittenLeaf(NamedTuple):
    """A leaf of the target, or an object in it, that a load writes to."""

    key: Hashable
    """The key of the leaf in the journal."""
    name: str
    spans: tuple[AddressRange, ...] = ()
    """The memory that it occupies; empty if it is not a tensor."""
    is_tensor: bool = False
    """The memory is all of its state; an object may have more."""


class Overwritten(NamedTuple):
    """What a load has changed in its target."""

    whole: tuple[str, ...]
    """Leaves that have the new value."""
    partly: tuple[str, ...]
    """Leaves that may have a mixture of the old and the new value."""


class Journal:
    """Records when the write of a leaf begins and ends. Any thread may call `begin` and `end`."""

    def __init__(self) -> None:
        self.where = "the target"
        """Names the target in the sentence."""
        self.list_leaves: Callable[[], Sequence[WrittenLeaf]] = tuple
        """Returns all leaves that may be written to; called only when there is an error to report."""
        self._expected: Counter[Hashable] = Counter()
        # Single operations on sets and lists are atomic, so no lock is needed.
        self._begun: set[Hashable] = set()
        self._ended: list[Hashable] = []

    def expect(self, key: Hashable, parts: int = 1) -> None:
        """Record that a leaf is written in several parts; it is complete when all of them have ended."""
        self._expected[key] += parts

    def begin(self, key: Hashable) -> None:
        """Record that the write of a leaf begins."""
        self._begun.add(key)

    def end(self, key: Hashable) -> None:
        """Record that one part of a leaf is written."""
        self._ended.append(key)

    @contextmanager
    def writing(self, keys: Sequence[Hashable]) -> Iterator[None]:
        """Record that these leaves are being written, and are complete when the `with` ends without an error."""
        for key in keys:
            self.expect(key)
            self.begin(key)
        yield
        self._ended += keys

    def forget(self, keys: Iterable[Hashable]) -> None:
        """Record that these leaves have their old values again."""
        self._begun.difference_update(keys)

    @contextmanager
    def reporting(self) -> Iterator[None]:
        """Add what was overwritten to an error that ends the `with`; without any write the error is unchanged."""
        try:
            yield
        except BaseException as error:
            self.report(error)
            raise

    @property
    def is_empty(self) -> bool:
        """Return whether nothing was written."""
        return not self._begun

    def find_overwritten(self, leaves: Sequence[WrittenLeaf]) -> Overwritten:
        """Return which of these leaves were written; a write to shared memory counts for every leaf that shares it."""
        ended = Counter(self._ended)
        whole = {key for key in self._begun if ended[key] >= self._expected[key]}
        partly = self._begun - whole
        states = ["partly" if leaf.key in partly else "whole" if leaf.key in whole else "" for leaf in leaves]
        found = list(states)
        for one, other in _iter_sharing(leaves):
            for number, neighbour in ((one, other), (other, one)):
                if states[neighbour] == "partly" and found[number] != "partly":
                    found[number] = "partly"
                elif states[neighbour] == "whole" and not found[number]:
                    is_same = leaves[number].is_tensor and leaves[number].spans == leaves[neighbour].spans
                    found[number] = "whole" if is_same else "partly"
        by_state: dict[str, dict[str, None]] = {"whole": {}, "partly": {}, "": {}}
        for leaf, state in zip(leaves, found, strict=True):
            by_state[state][leaf.name] = None
        return Overwritten(tuple(sorted(by_state["whole"])), tuple(sorted(by_state["partly"])))

    def report(self, error: BaseException) -> None:
        """Add what was overwritten to an error: as attributes, and as a sentence in its text or in a note.

        Without any write the error is unchanged.
        """
        if self.is_empty:
            return
        found = self.find_overwritten(self.list_leaves())
        # Through `__dict__`, because the exception's class may refuse to set attributes.
        vars(error).update(overwritten=found.whole + found.partly, partly_written=found.partly)
        add_sentence(error, self.describe(found))

    def describe(self, found: Overwritten) -> str:
        """Return the sentence for an error."""
        parts = [f"Before this error, the load had written to {self.where}"]
        if found.whole:
            parts.append(f"New values: {_list_names(found.whole)}")
        if found.partly:
            parts.append(f"Perhaps a mixture of old and new: {_list_names(found.partly)}")
        return ". ".join([*parts, "Everything else is unchanged"])


def add_sentence(error: BaseException, text: str) -> None:
    """Add a sentence to the text of a Holdfast error, or as a note to any other; only once per error."""
    if isinstance(error, HoldfastError):
        if text not in str(error):
            error.args = (f"{str(error).rstrip(' .')}. {text}", *error.args[1:])
        return
    add_note(error, text)


def _list_names(names: Sequence[str]) -> str:
    return list_some([name or "the tree" for name in names], _LISTED)


def _iter_sharing(leaves: Sequence[WrittenLeaf]) -> Iterator[tuple[int, int]]:
    """Yield pairs of leaves, by number, that share memory."""
    spans = sorted((span, number) for number, leaf in enumerate(leaves) for span in leaf.spans)
    around: list[tuple[AddressRange, int]] = []
    for span, number in spans:
        around = [item for item in around if item[0].device == span.device and item[0].stop > span.start]
        for _, other in around:
            if other != number:
                yield other, number
        around.append((span, number))


def find_address_range(tensor: torch.Tensor, size_bytes: int) -> tuple[AddressRange, ...]:
    """Return the addresses of a tensor's first bytes; empty if it has no memory."""
    start = tensor.data_ptr() if size_bytes else 0
    return (AddressRange(str(tensor.device), start, start + size_bytes),) if start else ()
