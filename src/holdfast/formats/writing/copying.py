"""Copies stored tensors into files: reads ahead, verifies, hashes and casts while another thread writes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from types import TracebackType
from typing import Final, NamedTuple, Protocol

import torch
from typing_extensions import Self

from holdfast.digest import Digest
from holdfast.formats.digests import CellDigest, add_cast_errors
from holdfast.formats.receipt import CarriedFile, CastErrors, LeftOut, ReceiptTensor, TensorDigest
from holdfast.formats.writing.plan import PlannedTensor, SelectedTree, TensorPlan
from holdfast.formats.writing.snapshot_tensor import PieceReader, SnapshotTensor, TensorPiece
from holdfast.formats.writing.target import ExportTarget
from holdfast.formats.writing.zip_layout import add_crc
from holdfast.objects.blocks import BlockPool, LentBlock
from holdfast.objects.thread_pool import Task, ThreadPool
from holdfast.progress import Progress, Silent
from holdfast.repo.engine import Engine
from holdfast.repo.format.boxes import Box
from holdfast.snapshot.entries import is_cast
from holdfast.snapshot.opened import Opened
from holdfast.tensors.memory import view_bytes, wrap_memory
from holdfast.tensors.spec import dtype_name
from holdfast.trees.apply import cast_floating

_PIECES_AT_ONCE: Final = 1024
"""How many small tensors are read at a time."""
_WRITES: Final = 2
"""Batches that wait to be written; with those that are read and hashed, about eight are in memory."""


class TensorOutput(Protocol):
    """A file that is being written."""

    def write_at(self, start: int, data: memoryview) -> None:
        """Write all of `data` at byte `start`; called from one thread at a time."""

    def append_block(self, start: int, block: LentBlock) -> None:
        """Write page-aligned memory at byte `start`, which is not before the end of the file, and release it."""


@dataclass(frozen=True, slots=True)
class CopyJob:
    """A tensor, or some of its rows, and where its bytes go."""

    tensor: SnapshotTensor
    offset: int | None = None
    """The offset in the file; None to compute digests and write nothing."""
    rows: Box | None = None
    """The rows to copy; None for the whole tensor. The jobs for the rows of a tensor follow each other."""
    is_last: bool = True
    """Whether this job ends the tensor."""
    has_crc: bool = False
    """Whether to compute the CRC-32 of the job's bytes."""


class Copied(NamedTuple):
    """What was copied by one job."""

    crc: int
    """The CRC-32 of the job's bytes; 0 if it was not asked for."""
    source: TensorDigest | None
    """The tensor in the snapshot; None if the job does not end its tensor."""
    result: TensorDigest | None
    """The tensor as it was written; the same as `source` unless it was cast."""
    cast: CastErrors | None = None


class _Nowhere:
    """The output of jobs that write nothing."""

    def write_at(self, start: int, data: memoryview) -> None:
        raise AssertionError("these jobs have no place in a file")

    def append_block(self, start: int, block: LentBlock) -> None:
        raise AssertionError("these jobs have no place in a file")


@dataclass(frozen=True, slots=True)
class _Batch:
    """Pieces that are read together, and their bytes."""

    pieces: Sequence[tuple[int, TensorPiece]]
    """Each with the number of its job."""
    data: Sequence[memoryview]
    block: memoryview | None


class TensorCopier:
    """Copies the tensors of one snapshot; use it in a `with`, from one thread. It owns threads and a few buffers."""

    def __init__(self, opened: Opened, *, dtype: torch.dtype | None = None, progress: Progress | None = None) -> None:
        """Cast floating tensors to `dtype`, unless it is None; report copied bytes to `progress`."""
        self._pieces = PieceReader(opened)
        self._dtype = dtype
        self._progress = progress or Silent()
        self._engine = Engine("holdfast-export", budget_bytes=4 * self._pieces.piece_bytes, waits=False)
        self._writer = ThreadPool("holdfast-export-write", 1)
        self._blocks = BlockPool(self._pieces.piece_bytes, kept=8, huge=True)
        self._writes: deque[Task[None]] = deque()
        self._unfinished: _TensorTally | None = None
        """Of a tensor whose rows are copied into several files."""

    def __enter__(self) -> Self:
        """Return the copier."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop the threads; no file is written to after this."""
        self._engine.__exit__(kind, error, trace)
        self._writer.shutdown()

    def find_dtype(self, tensor: SnapshotTensor) -> torch.dtype:
        """Return the dtype that a tensor is written in."""
        spec = tensor.spec
        return self._dtype if self._dtype is not None and is_cast(spec, self._dtype) else spec.dtype

    def copy(self, jobs: Sequence[CopyJob], output: TensorOutput) -> list[Copied]:
        """Carry out jobs in order, and return what was copied by each; all bytes are written when this returns."""
        tallies = _Tallies(jobs, self._begin_tally, self._unfinished)
        try:
            for batch in self._iter_read(jobs):
                writes: list[tuple[int, memoryview]] = []
                for (number, _), data in zip(batch.pieces, batch.data, strict=True):
                    writes += tallies.add(number, data)
                    if jobs[number].offset is not None:
                        self._progress.advance(data.nbytes)
                self._write(output, writes, batch.block)
            copied = tallies.finish()
            self._unfinished = tallies.tensor
            return copied
        finally:
            self._finish_writes()

    def _begin_tally(self, tensor: SnapshotTensor) -> _TensorTally:
        return _TensorTally(tensor, self.find_dtype(tensor), self._pieces.find_digest(tensor))

    def digest(self, tensors: Sequence[SnapshotTensor]) -> list[Copied]:
        """Read tensors and return their digests before and after a cast; writes nothing."""
        return self.copy([CopyJob(tensor) for tensor in tensors], _Nowhere())

    def _iter_read(self, jobs: Sequence[CopyJob]) -> Iterator[_Batch]:
        batches = _iter_batches(self._iter_pieces(jobs), self._pieces.piece_bytes)
        return self._engine.iter_results(
            self._read, ((batch, sum(each[1].size_bytes for each in batch)) for batch in batches)
        )

    def _iter_pieces(self, jobs: Sequence[CopyJob]) -> Iterator[tuple[int, TensorPiece]]:
        for number, job in enumerate(jobs):
            for piece in self._pieces.iter_pieces(job.tensor, job.rows):
                yield number, piece

    def _read(self, batch: Sequence[tuple[int, TensorPiece]]) -> _Batch:
        pieces = [piece for _, piece in batch]
        block = self._blocks.take() if any(map(self._pieces.needs_buffer, pieces)) else None
        return _Batch(batch, self._pieces.read(pieces, memoryview(b"") if block is None else block), block)

    def _write(self, output: TensorOutput, writes: Sequence[tuple[int, memoryview]], block: memoryview | None) -> None:
        """Write on another thread; the block is used again when its bytes are written."""
        while len(self._writes) >= _WRITES:
            self._writes.popleft().result()
        self._writes.append(self._writer.submit(partial(self._write_all, output, writes, block)))

    def _write_all(
        self, output: TensorOutput, writes: Sequence[tuple[int, memoryview]], block: memoryview | None
    ) -> None:
        """Write the bytes of a batch, without a copy if they are one range of the block."""
        size = sum(data.nbytes for _, data in writes)
        if block is not None and writes and all(data.obj is block.obj for _, data in writes) and _is_range(writes):
            output.append_block(writes[0][0], LentBlock(block[:size], partial(self._blocks.put_back, block)))
            return
        for start, data in writes:
            output.write_at(start, data)
        if block is not None:
            self._blocks.put_back(block)

    def _finish_writes(self) -> None:
        """Wait for all writes, and raise the first error."""
        while self._writes:
            self._writes.popleft().result()


def _is_range(writes: Sequence[tuple[int, memoryview]]) -> bool:
    """Return whether writes follow each other in the file; they do so in memory."""
    return all(start + data.nbytes == following for (start, data), (following, _) in pairwise(writes))


def _iter_batches(
    pieces: Iterable[tuple[int, TensorPiece]], limit_bytes: int
) -> Iterator[list[tuple[int, TensorPiece]]]:
    batch: list[tuple[int, TensorPiece]] = []
    size = 0
    for number, piece in pieces:
        if batch and (size + piece.size_bytes > limit_bytes or len(batch) == _PIECES_AT_ONCE):
            yield batch
            batch, size = [], 0
        batch.append((number, piece))
        size += piece.size_bytes
    if batch:
        yield batch


class _Tallies:
    """Hashes and casts the bytes of jobs, which are passed in order."""

    def __init__(
        self,
        jobs: Sequence[CopyJob],
        begin: Callable[[SnapshotTensor], _TensorTally],
        unfinished: _TensorTally | None,
    ) -> None:
        """Continue `unfinished`, the tensor of the first job, if other jobs copied its first rows."""
        self._jobs = jobs
        self._begin = begin
        self.tensor = unfinished
        """The tensor of the last job, unless that job ends it."""
        self._copied: list[Copied] = []
        self._at = 0
        """How many bytes of the current job were written."""
        self._crc = 0

    def add(self, number: int, data: memoryview) -> Iterator[tuple[int, memoryview]]:
        """Add bytes of a job; yield what to write, and at which offset."""
        while len(self._copied) < number:
            self._end_job()
        job = self._jobs[number]
        result = self._find_tensor(job).add(data)
        self._crc = add_crc(result, self._crc) if job.has_crc else 0
        if job.offset is not None:
            yield job.offset + self._at, result
        self._at += result.nbytes

    def finish(self) -> list[Copied]:
        """Return what was copied by each job; those that are left have no bytes."""
        while len(self._copied) < len(self._jobs):
            self._end_job()
        return self._copied

    def _find_tensor(self, job: CopyJob) -> _TensorTally:
        if self.tensor is None:
            self.tensor = self._begin(job.tensor)
        return self.tensor

    def _end_job(self) -> None:
        job = self._jobs[len(self._copied)]
        tensor = self._find_tensor(job)
        self._copied.append(Copied(self._crc, *(tensor.finish() if job.is_last else (None, None))))
        self.tensor = None if job.is_last else tensor
        self._at = self._crc = 0


class _TensorTally:
    """Digests of one tensor before and after its cast, and the errors of the cast."""

    def __init__(self, tensor: SnapshotTensor, dtype: torch.dtype, stored: Digest | None) -> None:
        """Digest what is written in `dtype`; `stored` is the digest of the snapshot's tensor, if it is known."""
        self._spec = tensor.spec
        self._dtype = dtype
        self._stored = stored
        self._source = None if stored else CellDigest(tensor.spec.dtype, tensor.spec.shape)
        self._result = CellDigest(dtype, tensor.spec.shape) if dtype != tensor.spec.dtype else None
        self._errors = CastErrors(0.0, 0.0)

    def add(self, data: memoryview) -> memoryview:
        """Add bytes, and return them as they are to be written."""
        if self._source:
            self._source.update(data)
        if self._result is None:
            return data
        before = wrap_memory(data).view(self._spec.dtype)
        after = cast_floating(before, self._dtype)
        self._errors = add_cast_errors(self._errors, before, after)
        result = view_bytes(after.view(torch.uint8))
        self._result.update(result)
        return result

    def finish(self) -> tuple[TensorDigest, TensorDigest, CastErrors | None]:
        """Return the facts of the tensor before and after its cast."""
        digest = self._stored or (self._source.digest() if self._source else None)
        assert digest is not None, "a tensor that has no digest yet is hashed"
        source = TensorDigest(dtype_name(self._spec.dtype), self._spec.shape, digest)
        if self._result is None:
            return source, source, None
        result = TensorDigest(dtype_name(self._dtype), self._spec.shape, self._result.digest())
        return source, result, self._errors


@dataclass(frozen=True, slots=True)
class ExportWork:
    """One export: what to write, and what writes it."""

    opened: Opened
    tree: SelectedTree
    plan: TensorPlan
    copier: TensorCopier
    target: ExportTarget
    max_shard_bytes: int
    """The largest size of a file, for formats of several files."""


@dataclass(frozen=True, slots=True)
class WrittenExport:
    """What was written: the content of the receipt."""

    tensors: Sequence[ReceiptTensor]
    left_out: Sequence[LeftOut]
    files: Sequence[CarriedFile] = ()


def make_receipt_tensor(planned: PlannedTensor, copied: Copied, file: str, name_in_files: str = "") -> ReceiptTensor:
    """Return the line of the receipt for a tensor that was copied into a file."""
    assert copied.source is not None, "the last job of a tensor has its facts"
    assert copied.result is not None, "the last job of a tensor has its facts"
    name = name_in_files or planned.name_in_files
    return ReceiptTensor(planned.tensor.name, name, file, copied.source, copied.result, copied.cast)
