"""Measures many pairs of recorded tensors on all cores: reads a batch of both runs, then compares it in the cache."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Final, NamedTuple

import torch
from typing_extensions import Self

from holdfast.capture.compare.measure import TensorDistance, Tolerance, measure, measure_stats
from holdfast.capture.stored.events import Event
from holdfast.capture.stored.runs import Run
from holdfast.diff.quick_blocks import Workspace
from holdfast.errors import NotFound
from holdfast.objects.blocks import BlockPool
from holdfast.repo.engine import Engine
from holdfast.snapshot.load.batches import iter_batches
from holdfast.snapshot.load.reused import ReusedMemory
from holdfast.tensors.dtypes import find_dtype

_BATCH_BYTES: Final = 32 << 20
"""The bytes of a batch: enough that a read of them is one of a disk's large ones, few enough for the cache."""


class TensorPair(NamedTuple):
    """An event of each of two runs, whose tensors are to be compared."""

    ours: Run
    a: Event
    theirs: Run
    b: Event

    @property
    def has_values(self) -> bool:
        """Whether both tensors were kept and have the same shape."""
        return bool(self.a.leaf and self.b.leaf) and self.a.shape == self.b.shape

    @property
    def size_bytes(self) -> int:
        """The bytes to read."""
        if not self.has_values:
            return 0
        return sum(math.prod(event.shape) * find_dtype(event.dtype).itemsize for event in (self.a, self.b))

    def measure(self, tolerance: Tolerance | None) -> TensorDistance:
        """Return the distance from the values, else from the statistics, else from the digests."""
        a, b = self.a, self.b
        if a.shape != b.shape:
            note = f"shapes differ: {a.shape} against {b.shape}"
            return TensorDistance("digest", total=math.prod(a.shape), note=note)
        try:
            x, y = self.ours.read_tensor(a), self.theirs.read_tensor(b)
        except NotFound:
            return measure_stats(a.stats, b.stats, math.prod(a.shape))
        return measure(x, y, tolerance=tolerance)


class Measurer:
    """Measures pairs on a thread for each core, within a memory budget. Use it in a `with`, from one thread."""

    def __init__(
        self, tolerance: Tolerance | None, *, budget_bytes: int, advance: Callable[[int], object] = lambda _: None
    ) -> None:
        """Call `advance` with the bytes of each batch that is done."""
        self._tolerance = tolerance
        self._advance = advance
        # Half of it: the other half is for the threads that read.
        self._engine = Engine("holdfast-compare", budget_bytes=budget_bytes // 2, waits=False)
        self._batch_bytes = min(_BATCH_BYTES, budget_bytes // 2 // self._engine.threads)
        self._blocks = BlockPool(self._batch_bytes, kept=self._engine.threads, huge=True)
        self._spaces: SimpleQueue[Workspace] = SimpleQueue()

    def __enter__(self) -> Self:
        """Return the measurer."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop its threads."""
        self._engine.__exit__(kind, error, trace)

    def iter_distances(self, jobs: Iterable[TensorPair]) -> Iterator[TensorDistance]:
        """Yield the distance of each pair, in order, while later ones are measured."""
        batches = iter_batches(jobs, lambda job: job.size_bytes, self._batch_bytes)
        sized = ((batch, sum(job.size_bytes for job in batch)) for batch in batches)
        for found, size_bytes in self._engine.iter_results(self._measure_batch, sized):
            self._advance(size_bytes)
            yield from found

    def _measure_batch(self, batch: Sequence[TensorPair]) -> tuple[list[TensorDistance], int]:
        with self._blocks.lend() as block:
            try:
                space = self._spaces.get_nowait()
            except Empty:
                space = Workspace()
            try:
                found = self._measure_in(batch, ReusedMemory(block), space)
            finally:
                self._spaces.put(space)
        return found, sum(job.size_bytes for job in batch)

    def _measure_in(self, batch: Sequence[TensorPair], memory: ReusedMemory, space: Workspace) -> list[TensorDistance]:
        try:
            tensors = _read_batch([job for job in batch if job.has_values], memory)
        except NotFound:
            tensors = {}  # a segment no longer exists: then each pair says what is known of it
        found = []
        for job in batch:
            both = tensors.get(id(job))
            found.append(
                measure(*both, tolerance=self._tolerance, space=space) if both else job.measure(self._tolerance)
            )
        return found


def _read_batch(jobs: Sequence[TensorPair], memory: ReusedMemory) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """Return both tensors of each job, by its id; what one run has of them is read together."""
    wanted: dict[int, tuple[Run, list[Event]]] = {}
    for job in jobs:
        for run, event in ((job.ours, job.a), (job.theirs, job.b)):
            wanted.setdefault(id(run), (run, []))[1].append(event)
    read = {key: iter(run.read_tensors(events, memory)) for key, (run, events) in wanted.items()}
    return {id(job): (next(read[id(job.ours)]), next(read[id(job.theirs)])) for job in jobs}
