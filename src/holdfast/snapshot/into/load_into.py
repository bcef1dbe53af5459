"""Loading in place: list what does not match, find what differs, read into existing memory, journal each write."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import FrameType, TracebackType
from typing import Any, Final, NamedTuple

import torch
from typing_extensions import Self

from holdfast.digest import Digest, hash_bytes
from holdfast.errors import Mismatch, Unsupported
from holdfast.json_text import Json
from holdfast.repo.engine import Engine
from holdfast.repo.format.entry import ChunkTable, Entry
from holdfast.repo.read.read_plan import Region
from holdfast.repo.read.reader import SnapshotReader
from holdfast.snapshot.batches import Cell, FilledPart, LoadOptions, PartCells, hash_on_devices, make_cells
from holdfast.snapshot.entries import ReadTarget, drop_tied, verify_on_devices
from holdfast.snapshot.into.held import NOTED_BYTES, HeldContent, HeldMemory, Since
from holdfast.snapshot.into.in_place import (
    Swap,
    SwapPair,
    WholeCopy,
    find_conflicts,
    find_shortage,
    find_span_bytes,
    list_memory,
    mark_written,
    refuse_memory,
)
from holdfast.snapshot.into.match import FIXED, TreeMatcher
from holdfast.snapshot.into.plan import (
    Check,
    ImmutableCheck,
    IntoOptions,
    IntoPlan,
    Journal,
    WrittenLeaf,
    add_sentence,
    find_address_range,
)
from holdfast.snapshot.into.undo import FieldSetter, Undo
from holdfast.snapshot.leaves import ARRAY, PICKLE
from holdfast.snapshot.load import LeafReader, count_bytes, load_node
from holdfast.snapshot.opened import Opened
from holdfast.tensors.spec import SpecDecoder
from holdfast.tensors.storage import tensor_bytes
from holdfast.texts import list_lines
from holdfast.trees.encoding import decode_tree
from holdfast.trees.outline import TreePath, iter_stored
from holdfast.trees.pick import rename_keys
from holdfast.trees.registered import Types

_log = logging.getLogger(__name__)

_HASHED_HERE_BYTES: Final = 64 << 10
"""Smaller pieces of memory are hashed by the caller: a thread takes longer to begin."""


class Patch(NamedTuple):
    """A part of the target that differs from the snapshot, and new memory for it."""

    number: int
    tensor: torch.Tensor
    """The tensor of the target whose memory it is."""
    entry: Entry
    """With the chunks that are needed, and no others."""
    region: Region
    memory: torch.Tensor
    """A view of the target."""


class Changes:
    """The parts of a target that differ from a snapshot, read into new memory, and the swap that puts them in place."""

    def __init__(self, reader: SnapshotReader, patches: Sequence[Patch]) -> None:
        """Allocate the new memory; raises OutOfMemory if there is not enough."""
        self._reader = reader
        self._patches = patches
        self.size_bytes = sum(patch.region.size_bytes for patch in patches)
        self.numbers = {patch.number for patch in patches}
        """The entries that some part of the target differs from."""
        if shortage := find_shortage(self.size_bytes):
            raise self._refuse(shortage)
        try:
            # On the CPU, whatever the target's device: there it is read, verified and kept until the load is final.
            self._new = [torch.empty(each.memory.shape, dtype=each.memory.dtype) for each in patches]
        except (RuntimeError, MemoryError) as error:
            raise self._refuse(str(error).partition("\n")[0]) from error
        pairs: list[SwapPair] = [(patch.memory, new) for patch, new in zip(patches, self._new, strict=True)]
        self.swap = Swap(pairs, list({id(patch.tensor): patch.tensor for patch in patches}.values()))

    def _refuse(self, reason: str) -> Exception:
        return refuse_memory(self.size_bytes, reason, option="since=", of="what changes")

    def read(self) -> None:
        """Read and verify the new bytes; the target is not changed."""
        wanted = [
            (patch.entry, patch.region, tensor_bytes(new, new.nbytes))
            for patch, new in zip(self._patches, self._new, strict=True)
        ]
        self._reader.read_regions(wanted)


def find_changes(plan: IntoPlan, since: Since) -> Changes:
    """Return what of the plan's targets differs from the snapshot; memory whose content is not known is hashed."""
    held = plan.options.held
    finder = _Finder(plan, HeldMemory() if held is None or since.check else held)
    changes = Changes(plan.opened.reader, finder.find_patches())
    total = sum(part.size_bytes for part in _iter_parts(plan))
    text = "%r into a tree that holds %r: %d of %d bytes are read, %d bytes of the tree were hashed"
    _log.info(text, plan.opened.name, since.name, changes.size_bytes, total, finder.hashed_bytes)
    return changes


def iter_contents(plan: IntoPlan) -> Iterator[tuple[torch.Tensor, int, HeldContent]]:
    """Yield what the memory of a target holds after the plan was carried out, for `HeldMemory.note`."""
    changed = _list_changed(plan)
    for part in _iter_parts(plan, NOTED_BYTES):
        if part.tensor.untyped_storage()._cdata not in changed:
            table = plan.opened.reader.manifest.find_chunks(part.number)
            yield part.tensor, part.size_bytes, HeldContent(table, part.box)


def verify_targets(plan: IntoPlan) -> None:
    """Compare the digests of what is on devices after the plan was carried out; raises Corrupt if one differs."""
    changed = _list_changed(plan)
    parts = _cut_targets([*plan.in_place.values()])
    kept = (part for part in parts if part.tensor.untyped_storage()._cdata not in changed)
    verify_on_devices(kept, plan.opened, plan.specs)


def _list_changed(plan: IntoPlan) -> set[int]:
    """Return the storages that a step may write to: code of the user may have changed them after they were filled."""
    tensors = (tensor for step in plan.steps for each in step.memory for tensor in list_memory(each))
    return {tensor.untyped_storage()._cdata for tensor in tensors}


def _iter_parts(plan: IntoPlan, min_bytes: int = 1) -> Iterator[FilledPart]:
    """Yield the memory of the target, tied tensors once."""
    return _cut_targets([plan.in_place[number] for number in plan.names], min_bytes)


def _cut_targets(targets: Sequence[ReadTarget], min_bytes: int = 1) -> Iterator[FilledPart]:
    for target in drop_tied([each for each in targets if each.pieces is None and each.size_bytes >= min_bytes]):
        yield FilledPart(target.ref.number, target.tensor, target.size_bytes, None)
    for target in targets:
        for box, tensor in target.pieces or ():
            if tensor.nbytes >= min_bytes:
                yield FilledPart(target.ref.number, tensor, tensor.nbytes, box)


class _Finder:
    """Finds the parts of a target that differ from the snapshot."""

    def __init__(self, plan: IntoPlan, held: HeldMemory) -> None:
        self._plan = plan
        self._held = held
        self._manifest = plan.opened.reader.manifest
        self.hashed_bytes = 0

    def find_patches(self) -> list[Patch]:
        patches: list[Patch] = []
        unknown: list[PartCells] = []
        for part in _iter_parts(self._plan):
            cells = make_cells(part, self._manifest, self._plan.specs)
            rows = self._find_changed(part, cells.table)
            if rows is None:
                unknown.append(cells)
            else:
                patches += self._make_patches(cells, rows)
        self.hashed_bytes = sum(cells.part.size_bytes for cells in unknown)
        on_host = [cells for cells in unknown if cells.part.tensor.is_cpu]
        with Engine("holdfast-compare", budget_bytes=self._plan.opened.reader.budget_bytes, waits=False) as engine:
            for cells in on_host:
                patches += self._make_patches(cells, _hash_rows(engine, cells))
        elsewhere = [cells for cells in unknown if not cells.part.tensor.is_cpu]
        for cells, found in zip(elsewhere, hash_on_devices(elsewhere), strict=True):
            patches += self._make_patches(cells, [cell.row for cell, is_held in found if not is_held])
        return patches

    def _find_changed(self, part: FilledPart, table: ChunkTable) -> Sequence[int] | None:
        """Return the chunks that differ from what the memory is known to hold; None if that is unknown."""
        content = self._held.find(part.tensor, part.size_bytes)
        return table.find_changed(content.table) if content is not None and content.box == part.box else None

    def _make_patches(self, cells: PartCells, rows: Sequence[int]) -> Iterator[Patch]:
        part = cells.part
        for cell in cells.iter_joined(rows):
            entry = self._manifest.cut_entry(part.number, {row: cells.places[row] for row in cell.rows})
            yield Patch(part.number, part.tensor, entry, cell.region, cell.memory)


def _hash_rows(engine: Engine, cells: PartCells) -> list[int]:
    """Return the chunks that memory does not hold, by its own digest, or of which it has only a part."""
    every = list(cells.iter_cells(range(len(cells.table.sizes))))

    def differs(cell: Cell) -> bool:
        return not cell.is_whole or hash_memory(cell.memory) != cells.table.find_digest(cell.row)

    is_small = cells.part.size_bytes < _HASHED_HERE_BYTES
    items = ((cell, cell.region.size_bytes) for cell in every)
    found = map(differs, every) if is_small else engine.iter_results(differs, items)
    return [cell.row for cell, is_changed in zip(every, found, strict=True) if is_changed]


def hash_memory(memory: torch.Tensor) -> Digest:
    """Return the digest of memory of the host, in C order."""
    # Referenced until its bytes are hashed: if the memory has gaps, it is a copy that nothing else keeps alive.
    contiguous = memory.contiguous()
    return hash_bytes(tensor_bytes(contiguous, contiguous.nbytes))


_LISTED: Final = 50
"""How many problems an error lists before it only counts them."""


class Loading:
    """One load into a matching target. With `atomic`, use it in a `with`: an error then restores everything.

    Direct: entries are read into the target's memory; then steps put in place what was read into new memory. Atomic:
    all entries are read into new memory, and the old state of what the steps change is kept; then the memory is
    exchanged and the steps are taken. All of it is undone unless `settle` is called. With `since`, the same is done
    with the parts of entries that the target does not hold.
    """

    def __init__(self, plan: IntoPlan, journal: Journal) -> None:
        """With `atomic`, allocate the new memory; raises OutOfMemory if there is not enough."""
        self._plan = plan
        self._journal = journal
        journal.list_leaves = lambda: list_leaves(plan)
        self._acts: list[Callable[[], None]] = []
        self._undos: list[Undo] = []
        self._begun: list[int] = []
        self._swap: Swap | None = None
        self._changes: Changes | None = None
        self.targets: Mapping[int, ReadTarget] = plan.in_place
        """The memory that entries are read into, by number."""
        if plan.options.since is not None:
            # Of the target's own memory only what changes is read, into new memory.
            self.targets = {number: each for number, each in plan.in_place.items() if number not in plan.names}
        elif plan.options.atomic:
            whole = WholeCopy({number: plan.in_place[number] for number in plan.names})
            self._swap = whole.swap
            self.targets = {**plan.in_place, **whole.targets}

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Restore everything if an atomic load has failed."""
        if error is not None and self._swap is not None and not self._journal.is_empty:
            self._roll_back(self._swap, error)

    def read(self, left_out: Collection[int] = ()) -> None:
        """Read all entries, except those that other ranks send to this one."""
        opened, since = self._plan.opened, self._plan.options.since
        if since is not None:
            self._changes = find_changes(self._plan, since)
            self._swap = self._changes.swap
        with opened.reader.reporting(f"load {opened.name}", lambda: self._count_bytes(left_out)):
            self._read(left_out)

    def _count_bytes(self, left_out: Collection[int]) -> int:
        placed = [tensor.nbytes for at, each in self.targets.items() if at not in left_out for tensor in each.memory]
        changed = self._changes.size_bytes if self._changes is not None else 0
        return sum(placed) + changed + count_bytes(self._plan.opened, self._plan.nodes)

    def _read(self, left_out: Collection[int]) -> None:
        plan = self._plan
        _verify_pickles(plan)
        options = LoadOptions(allow_pickle=plan.options.allow_pickle, verify=plan.options.verify)
        reader = LeafReader(plan.opened, plan.types, options, in_place=plan.in_place, devices=plan.devices)
        reader.read(plan.nodes)
        self._acts = [step.prepare(reader) for step in plan.steps]
        reader.verify_on_devices()
        verify_fits(plan)
        if self._swap is None:
            with self._writing():
                reader.read_in_place(left_out, self._journal)
            return
        reader.read_in_place(left_out, Journal(), targets=self.targets)
        if self._changes is not None:
            self._changes.read()
        self._undos = [step.keep() for step in plan.steps]

    @contextmanager
    def receiving(self, left_out: Collection[int]) -> Iterator[None]:
        """Journal that other ranks send these entries."""
        if self._swap is not None:
            yield
            return
        names = [self._plan.in_place[number].ref.name for number in left_out]
        with self._writing(), self._journal.writing(names):
            yield

    def put(self) -> None:
        """Put what was read into new memory in place, restore the states of objects, and verify what is on devices."""
        with self._writing():
            if self._swap is not None:
                with delaying_signals(), self._journal.writing(self._list_swapped()):
                    self._swap.exchange()
            for number, act in enumerate(self._acts):
                self._begun.append(number)
                with self._journal.writing([_step_key(number)]):
                    act()
            if self._plan.options.verify == "device":
                verify_targets(self._plan)

    def settle(self) -> None:
        """Make an atomic load final: it is not rolled back any more."""
        self._swap = None
        self._undos.clear()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Add what was overwritten to an error before other ranks receive it; bump the version counters of autograd."""
        try:
            yield
        except BaseException as error:
            if self._swap is None and not self._journal.is_empty:
                self._journal.report(error)
            raise
        finally:
            if self._swap is None:
                mark_written([tensor for target in self._plan.in_place.values() for tensor in target.memory])

    def _list_swapped(self) -> list[str]:
        numbers = self._plan.names if self._changes is None else self._changes.numbers
        return [self._plan.in_place[number].ref.name for number in numbers]

    def _roll_back(self, swap: Swap, error: BaseException) -> None:
        """Restore everything, last things first; an object that refuses its old state is noted as partly written."""
        refused = []
        with delaying_signals():
            for number in reversed(self._begun):
                try:
                    self._undos[number]()
                except Exception as reason:  # noqa: BLE001 - code of the user; the error below has its text
                    refused.append(f"{self._plan.steps[number].name or 'the tree'} refused its old state: {reason}")
                else:
                    self._journal.forget([_step_key(number)])
            swap.exchange_back()
            self._journal.forget(self._list_swapped())
            add_sentence(error, "; ".join(refused) or "The target was restored: it is as it was before the load")


def _step_key(number: int) -> tuple[str, int]:
    """Return the journal's key of a step; entries have their names as keys."""
    return ("step", number)


def list_leaves(plan: IntoPlan) -> Sequence[WrittenLeaf]:
    """Return the leaves and objects of the target that a plan writes to."""
    leaves = []
    for number, name in sorted(plan.names.items(), key=lambda item: item[1]):
        target = plan.in_place[number]
        sizes = [target.size_bytes] if target.pieces is None else [piece.tensor.nbytes for piece in target.pieces]
        spans = [
            span for each, size in zip(target.memory, sizes, strict=True) for span in find_address_range(each, size)
        ]
        leaves.append(WrittenLeaf(target.ref.name, name, tuple(spans), is_tensor=True))
    for number, step in enumerate(plan.steps):
        memory = [each for tensor in step.memory for each in list_memory(tensor)]
        spans = [span for each in memory for span in find_address_range(each, find_span_bytes(each))]
        leaves.append(WrittenLeaf(_step_key(number), step.name, tuple(spans), is_tensor=step.is_tensor))
    return leaves


def verify_fits(plan: IntoPlan) -> None:
    """Raise Mismatch if there are problems."""
    if not plan.problems:
        return
    text = f"{plan.opened.name!r} does not fit; nothing was changed:{list_lines(plan.problems, _LISTED)}"
    raise Mismatch(text, problems=tuple(plan.problems))


def _verify_pickles(plan: IntoPlan) -> None:
    for name, node in plan.nodes:
        if node[0] == PICKLE and not plan.options.allow_pickle:
            raise Unsupported(
                f"{plan.opened.name!r}, {name} was pickled: loading it may run any code;"
                " pass allow_pickle=True to allow it. Nothing was changed"
            )


@contextmanager
def delaying_signals() -> Iterator[None]:
    """Delay Python's signal handlers until the end of the `with` block.

    Python runs handlers in the main thread only, so other threads need nothing. Signals that Python does not handle are
    not delayed.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        arrived.append(number)

    stack = ExitStack()
    try:
        # Restored in reverse order, SIGINT's last: an interrupt during the loop cannot stop the others from being
        # restored.
        numbers = sorted(signal.valid_signals(), key=lambda number: number != signal.SIGINT)
        for number in numbers:
            if callable(signal.getsignal(number)):
                stack.callback(signal.signal, number, signal.signal(number, note))
        yield
    finally:
        stack.close()
        for each in dict.fromkeys(arrived):
            signal.raise_signal(each)


def load_into(opened: Opened, tree: Any, options: IntoOptions, types: Types, *, journal: Journal | None = None) -> Any:
    """Fill `tree` in place and return it, or the saved value if `tree` is plain; changes nothing unless all matches.

    Any error after the first write, whatever its type, has the attributes `overwritten` and `partly_written`, and says
    the same in its text or in a note.

    Raises:
        Mismatch: keys, shapes or dtypes differ; all of them are listed, and nothing was changed.
        Corrupt: bytes in the store are damaged.
        OutOfMemory: `atomic`, and there is no memory for a second copy; nothing was changed.
    """
    journal = journal or Journal()
    with opened.pausing_gc():
        plan = match_tree(opened, tree, options, types)
        check_values(plan)
        verify_fits(plan)
        with journal.reporting(), Loading(plan, journal) as loading:
            loading.read()
            loading.put()
            loading.settle()
            note_held(plan)
    return plan.result


def match_tree(opened: Opened, tree: Any, options: IntoOptions, types: Types) -> IntoPlan:
    """Return the plan of a load into `tree`; what does not match is in its `problems`."""
    plan = IntoPlan(opened, options, types, SpecDecoder(opened.name), result=tree)
    node = rename_keys(opened.tree, options.rename) if options.rename else opened.tree
    TreeMatcher(plan).match(tree, node, (), FieldSetter(plan, "result"))
    return plan


def check_values(plan: IntoPlan) -> None:
    """Read the values that decide whether the tree matches, and add what does not match; needs the chunks of these."""
    for fixed in plan.immutable_checks:
        _check_immutable(plan, fixed)
    for check in plan.checks:
        _run_check(plan, check)
    _resolve_conflicts(plan)


def note_held(plan: IntoPlan) -> None:
    """Let the handle remember what the target holds after the plan was carried out, if that was verified."""
    if plan.options.held is not None and plan.options.verify in ("full", "device"):
        plan.options.held.note(iter_contents(plan))


def _check_immutable(plan: IntoPlan, check: ImmutableCheck) -> None:
    """Read the saved value of a target that cannot be changed, and add a problem if the two differ."""
    target = check.target
    saved = load_node(plan.opened, check.node, LoadOptions(), plan.types)
    if check.node[0] != ARRAY:
        is_same = type(saved) is type(target) and bool(saved == target)
    else:
        is_alike = (saved.dtype, saved.shape) == (target.dtype, target.shape)
        is_same = is_alike and bool(saved.tobytes() == target.tobytes())
    if not is_same:
        plan.add_problem(check.path, FIXED)


def _run_check(plan: IntoPlan, check: Check) -> None:
    """Read a value of a foreign format, and add what does not match."""
    reader = LeafReader(plan.opened, plan.types, LoadOptions(allow_pickle=plan.options.allow_pickle))
    reader.read(iter_stored(check.node))

    def decode(node: list[Json], path: TreePath) -> object:
        return reader.decode(node, (*check.path, *path))

    saved = decode_tree(check.node, types=plan.types, decode_leaf=decode)
    for text in check.find_problems(saved):
        plan.add_problem(check.path, text)


def _resolve_conflicts(plan: IntoPlan) -> None:
    """Refuse different values for the same memory; where new memory can be used instead, use it."""
    for first, second in find_conflicts(plan.claims):
        spare = second if second.number is not None else first
        if spare.number is not None:
            plan.in_place.pop(spare.number, None)
            plan.names.pop(spare.number, None)
        elif first.geometry == second.geometry:
            text = f"the target shares its memory with {first.name}, and the snapshot has different values for them"
            plan.problems.append(f"{second.name}: {text}")
        else:
            text = (
                f"the target shares memory with {first.name}, and the snapshot keeps them separate; clone() one of them"
            )
            plan.problems.append(f"{second.name}: {text}")
    plan.claims.clear()  # not needed any more, and there may be very many
