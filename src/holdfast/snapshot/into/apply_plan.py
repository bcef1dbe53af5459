"""Carries out the plan of a load: reads, writes to the target, journals each write.

An atomic load reads into new memory first, exchanges it with the target's when everything is verified, and can be
rolled back.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import FrameType, TracebackType
from typing import Final

import torch
from typing_extensions import Self

from holdfast.errors import Mismatch, OutOfMemory, Unsupported
from holdfast.snapshot.into.in_place import find_span_bytes, list_memory, mark_written
from holdfast.snapshot.into.journal import Journal, WrittenLeaf, add_sentence, find_address_range
from holdfast.snapshot.into.plan import IntoPlan
from holdfast.snapshot.into.undo import Undo
from holdfast.snapshot.leaves import PICKLE
from holdfast.snapshot.load.batches import view_tensor_memory
from holdfast.snapshot.load.entries import ReadTarget
from holdfast.snapshot.load.load import LeafReader, count_bytes
from holdfast.snapshot.load.options import LoadOptions
from holdfast.tensors.dtypes import items_per_byte
from holdfast.tensors.memory import new_memory, view_raw
from holdfast.tensors.sharding.sharded import LocalBox
from holdfast.texts import list_lines

_LISTED: Final = 50
"""How many problems an error lists before it only counts them."""
_BLOCK_BYTES: Final = 8 << 20
"""How many bytes are exchanged at a time; a buffer of this size is allocated for it."""
_MEMORY_FACTS: Final = "/proc/meminfo"
_Pair = tuple[torch.Tensor, torch.Tensor]


class Loading:
    """One load into a matching target. With `atomic`, use it in a `with`: an error then restores everything.

    Direct: entries are read into the target's memory; then steps put in place what was read into new memory. Atomic:
    all entries are read into new memory, and the old state of what the steps change is kept; then the memory is
    exchanged and the steps are taken. All of it is undone unless `settle` is called.
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
        self.targets: Mapping[int, ReadTarget] = plan.in_place
        """The memory that entries are read into, by number."""
        if plan.options.atomic:
            self._swap = Swap({number: plan.in_place[number] for number in plan.names})
            self.targets = {**plan.in_place, **self._swap.targets}

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Restore everything if an atomic load has failed."""
        if error is not None and self._swap is not None and not self._journal.is_empty:
            self._roll_back(self._swap, error)

    def apply(self, left_out: Collection[int]) -> None:
        """Read all entries and take all steps."""
        self.read(left_out)
        self.put()

    def read(self, left_out: Collection[int]) -> None:
        """Read all entries, except those that other ranks send to this one."""
        opened = self._plan.opened
        with opened.reader.reporting(f"load {opened.name}", lambda: self._count_bytes(left_out)):
            self._read(left_out)

    def _count_bytes(self, left_out: Collection[int]) -> int:
        placed = [tensor.nbytes for at, each in self.targets.items() if at not in left_out for tensor in each.memory]
        return sum(placed) + count_bytes(self._plan.opened, self._plan.nodes)

    def _read(self, left_out: Collection[int]) -> None:
        plan = self._plan
        _verify_pickles(plan)
        options = LoadOptions(allow_pickle=plan.options.allow_pickle)
        reader = LeafReader(plan.opened, plan.types, options, in_place=plan.in_place, devices=plan.devices)
        reader.read(plan.nodes)
        self._acts = [step.prepare(reader) for step in plan.steps]
        verify_fits(plan)
        if self._swap is None:
            with self._writing():
                reader.read_in_place(left_out, self._journal)
            return
        reader.read_in_place(left_out, Journal(), targets=self.targets)
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
        """Put what was read into new memory in place, and restore the states of objects."""
        with self._writing():
            if self._swap is not None:
                with delaying_signals(), self._journal.writing(self._list_swapped()):
                    self._swap.exchange()
            for number, act in enumerate(self._acts):
                self._begun.append(number)
                with self._journal.writing([_step_key(number)]):
                    act()

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
        return [self._plan.in_place[number].ref.name for number in self._plan.names]

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


class Swap:
    """Memory of the target, and new memory of the same size that can be exchanged with it, and back."""

    def __init__(self, targets: Mapping[int, ReadTarget]) -> None:
        """Allocate the new memory; raises OutOfMemory if there is not enough."""
        self._live = dict(targets)
        verify_available(sum(each.nbytes for target in targets.values() for each in target.memory if each.is_cpu))
        self.targets: dict[int, ReadTarget] = {}
        """The new memory, by the same numbers."""
        # Tensors that are the same memory share their new memory, too: exchanging it twice would restore the old.
        self._pairs: dict[object, list[_Pair]] = {}
        try:
            for number, target in targets.items():
                self.targets[number] = self._add(target)
        except (RuntimeError, MemoryError) as error:
            needed = sum(each.nbytes for target in targets.values() for each in target.memory)
            raise _refuse(needed, str(error).partition("\n")[0]) from error
        self._steps: list[_Exchange] = []

    def _add(self, target: ReadTarget) -> ReadTarget:
        if target.pieces is not None:
            pieces = [
                LocalBox(box, torch.empty(old.shape, dtype=old.dtype, device=old.device)) for box, old in target.pieces
            ]
            self._pairs[id(target)] = [
                (one.tensor, other.tensor) for one, other in zip(target.pieces, pieces, strict=True)
            ]
            return target._replace(pieces=tuple(pieces))
        key = (target.tensor.device, target.tensor.data_ptr(), target.size_bytes)
        if key not in self._pairs:
            memory = new_memory(target.size_bytes, target.tensor.device)
            self._pairs[key] = [(view_tensor_memory(target.tensor, target.size_bytes), memory)]
        return target._replace(tensor=self._pairs[key][0][1])

    def exchange(self) -> None:
        """Exchange the new memory and the target's; call it with signals delayed."""
        for pairs in self._pairs.values():
            for pair in pairs:
                steps = _plan_exchanges(*pair)
                # Noted before it begins, so that a failure during a step, or right after it, can be undone.
                self._steps += steps
                for step in steps:
                    step.exchange()
        self._mark_written()

    def exchange_back(self) -> None:
        """Undo `exchange`, also if it was not completed; call it with signals delayed."""
        while self._steps:
            self._steps[-1].undo()
            self._steps.pop()
        self._mark_written()

    def _mark_written(self) -> None:
        mark_written([each for target in self._live.values() for each in target.memory])


class _Exchange:
    """A part of the target and new memory of the same size, exchanged by three copies."""

    __slots__ = ("_buffer", "_is_begun", "_is_done", "_new", "_target")

    def __init__(self, target: torch.Tensor, new: torch.Tensor, buffer: torch.Tensor) -> None:
        self._target = target
        self._new = new
        self._buffer: torch.Tensor | None = buffer
        self._is_begun = False
        self._is_done = False

    def exchange(self) -> None:
        """Exchange the items. Progress is noted without allocating memory, because any other line may fail."""
        with torch.no_grad():
            assert self._buffer is not None, "it is exchanged once"
            self._buffer.copy_(self._target)
            self._is_begun = True
            self._target.copy_(self._new)
            self._new.copy_(self._buffer)
            self._is_done = True
            self._buffer = None

    def undo(self) -> None:
        """Restore the target's old items."""
        with torch.no_grad():
            if self._is_done:
                self._target.copy_(self._new)
            elif self._is_begun and self._buffer is not None:
                self._target.copy_(self._buffer)


def _plan_exchanges(one: torch.Tensor, other: torch.Tensor) -> list[_Exchange]:
    """Cut two tensors into steps; allocates all the memory that these need, and changes nothing."""
    with torch.no_grad():
        if items_per_byte(one.dtype) == 1:
            one, other = view_raw(one), view_raw(other)
        if not (one.dim() == 1 and one.is_contiguous() and other.is_contiguous()):
            return [_Exchange(one, other, torch.empty_like(one))]
        size = max(1, _BLOCK_BYTES // one.element_size())
        buffer = torch.empty_like(one[:size])
        starts = range(0, one.numel(), size)
        parts = [(one[start : start + size], other[start : start + size]) for start in starts]
        return [_Exchange(target, new, buffer[: target.numel()]) for target, new in parts]


def verify_available(needed_bytes: int) -> None:
    """Raise OutOfMemory if this machine clearly lacks that much memory; if that is unknown, do nothing."""
    facts = read_memory_facts(_MEMORY_FACTS)
    available = facts.get("MemAvailable")
    if available is not None and needed_bytes > available + facts.get("SwapFree", 0):
        raise _refuse(needed_bytes, f"{available} bytes are available")


def read_memory_facts(path: str) -> dict[str, int]:
    """Return Linux's figures on memory, in bytes; empty on other systems."""
    try:
        with open(path, encoding="ascii") as file:
            lines = [line.split() for line in file]
    except OSError:
        return {}
    return {words[0].rstrip(":"): int(words[1]) << 10 for words in lines if words[-1] == "kB"}


def _refuse(needed_bytes: int, reason: str) -> OutOfMemory:
    return OutOfMemory(
        f"atomic=True needs {needed_bytes} bytes of new memory for a second copy of the target: {reason}."
        " Nothing was changed; load without atomic=True, or free memory",
        needed_bytes=needed_bytes,
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
