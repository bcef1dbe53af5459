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

from typing_extensions import Self

from holdfast.errors import Mismatch, Unsupported
from holdfast.snapshot.into.changes import Changes, find_changes, verify_targets
from holdfast.snapshot.into.in_place import find_span_bytes, list_memory, mark_written
from holdfast.snapshot.into.journal import Journal, WrittenLeaf, add_sentence, find_address_range
from holdfast.snapshot.into.plan import IntoPlan
from holdfast.snapshot.into.swap import Swap, WholeCopy
from holdfast.snapshot.into.undo import Undo
from holdfast.snapshot.leaves import PICKLE
from holdfast.snapshot.load.entries import ReadTarget
from holdfast.snapshot.load.load import LeafReader, count_bytes
from holdfast.snapshot.load.options import LoadOptions
from holdfast.texts import list_lines

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
