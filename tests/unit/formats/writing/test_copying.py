"""Copying tensors into files: digests, casts, checksums, errors of the disk and of the store."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
import torch

import holdfast
from holdfast.formats.writing.copying import CopyJob, TensorCopier
from holdfast.formats.writing.plan import plan_tensors, select_tree
from holdfast.formats.writing.snapshot_tensor import SnapshotTensor
from holdfast.objects.blocks import LentBlock
from holdfast.repo.format.boxes import Box
from tests.kit.cells import digest_tensor
from tests.kit.exports import read_bytes


class MemoryFile:
    """A file in memory."""

    def __init__(self) -> None:
        self.data = bytearray()

    def write_at(self, start: int, data: memoryview) -> None:
        self.data.extend(bytes(max(0, start + data.nbytes - len(self.data))))
        self.data[start : start + data.nbytes] = data

    def append_block(self, start: int, block: LentBlock) -> None:
        self.write_at(start, block.memory)
        # Whoever still reads the block after its release would get wrong bytes.
        block.memory[:] = bytes(block.memory.nbytes)
        block.release()


class FullDisk(MemoryFile):
    """A file that cannot be written."""

    def write_at(self, start: int, data: memoryview) -> None:
        raise OSError("no space")


class CountedProgress:
    """Counts bytes."""

    def __init__(self) -> None:
        self.num_bytes = 0

    def begin(self, task: str, total_bytes: int) -> None:
        raise AssertionError("the export begins the task")

    def advance(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes

    def end(self) -> None:
        raise AssertionError("the export ends the task")


@contextmanager
def _copier(tmp_path: Path, tree: Any, **options: Any) -> Iterator[tuple[TensorCopier, dict[str, SnapshotTensor]]]:
    with holdfast.open(tmp_path / "store", budget_bytes=16 << 20) as store:
        store.save("a", tree)
        opened = store.snapshot("a").open()
        plan = plan_tensors(opened, select_tree(opened, "", ()))
        with TensorCopier(opened, **options) as copier:
            yield copier, {name: each.tensor for name, each in plan.tensors.items()}


def test_tensors_of_all_sizes_are_copied_with_their_digests(tmp_path: Path) -> None:
    tree = {
        "large": torch.randn(3_000_000),
        "small": torch.arange(5),
        "none": torch.empty(0),
        "more": torch.randn(1000),
    }
    file, progress, at = MemoryFile(), CountedProgress(), 0
    jobs = []

    with _copier(tmp_path, tree, progress=progress) as (copier, tensors):
        for tensor in tensors.values():
            jobs.append(CopyJob(tensor, at, has_crc=True))
            at += tensor.size_bytes
        copied = copier.copy(jobs, file)

    expected = [read_bytes(tensor) for tensor in tree.values()]
    assert file.data == b"".join(expected)
    assert [each.source.digest for each in copied if each.source] == [digest_tensor(tensor) for tensor in tree.values()]
    assert [each.crc for each in copied] == [crc32(data) for data in expected]
    assert all(each.result == each.source and each.cast is None for each in copied)
    assert progress.num_bytes == at


def test_a_cast_has_the_digests_of_both_sides_and_its_errors(tmp_path: Path) -> None:
    tree = {"x": torch.randn(500_000), "n": torch.arange(4)}
    file = MemoryFile()

    with _copier(tmp_path, tree, dtype=torch.bfloat16) as (copier, tensors):
        assert [copier.find_dtype(tensor) for tensor in tensors.values()] == [torch.bfloat16, torch.int64]
        copied = copier.copy([CopyJob(tensors["x"], 0), CopyJob(tensors["n"], 1_000_000)], file)

    cast = tree["x"].bfloat16()
    assert file.data == read_bytes(cast) + read_bytes(tree["n"])
    source, result, errors = copied[0].source, copied[0].result, copied[0].cast
    assert source is not None
    assert result is not None
    assert errors is not None
    assert (source.dtype, source.digest) == ("float32", digest_tensor(tree["x"]))
    assert (result.dtype, result.digest) == ("bfloat16", digest_tensor(cast))
    assert errors.max_abs == float((tree["x"].double() - cast.double()).abs().max())
    assert copied[1].cast is None


def test_rows_of_a_tensor_have_one_digest_together(tmp_path: Path) -> None:
    tree = {"x": torch.randn(10, 7)}
    file = MemoryFile()

    with _copier(tmp_path, tree) as (copier, tensors):
        first = CopyJob(tensors["x"], 100, rows=Box((0, 0), (6, 7)), is_last=False, has_crc=True)
        copied = copier.copy([first, CopyJob(tensors["x"], 300, rows=Box((6, 0), (4, 7)), has_crc=True)], file)

    data = read_bytes(tree["x"])
    assert bytes(file.data[100:268]) == data[:168]
    assert bytes(file.data[300:412]) == data[168:]
    assert copied[0].source is None
    assert copied[1].source is not None
    assert copied[1].source.digest == digest_tensor(tree["x"])
    assert copied[0].crc == crc32(data[:168])


def test_a_job_without_an_offset_writes_nothing(tmp_path: Path) -> None:
    file = MemoryFile()

    with _copier(tmp_path, {"x": torch.ones(3)}) as (copier, tensors):
        (copied,) = copier.copy([CopyJob(tensors["x"])], file)

    assert file.data == b""
    assert copied.source is not None
    assert copied.source.digest == digest_tensor(torch.ones(3))


def test_a_tensor_that_goes_into_two_files_has_one_digest(tmp_path: Path) -> None:
    # Its chunks are not its cells, because it shares memory with a part of itself.
    whole = torch.randn(600, 700)
    tree = {"x": whole, "part": whole[5:321]}
    first, second = MemoryFile(), MemoryFile()

    with _copier(tmp_path, tree) as (copier, tensors):
        copier.copy([CopyJob(tensors["x"], 0, rows=Box((0, 0), (400, 700)), is_last=False)], first)
        (copied,) = copier.copy([CopyJob(tensors["x"], 0, rows=Box((400, 0), (200, 700)))], second)

    assert first.data + second.data == read_bytes(whole)
    assert copied.source is not None
    assert copied.source.digest == digest_tensor(whole)


def test_an_error_of_the_disk_is_raised(tmp_path: Path) -> None:
    tree = {"x": torch.randn(100_000).t(), "y": torch.randn(10, dtype=torch.complex64).conj()}

    with _copier(tmp_path, tree) as (copier, tensors), pytest.raises(OSError, match="no space"):
        copier.copy([CopyJob(tensors["y"], 0)], FullDisk())
