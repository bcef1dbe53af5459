"""Sources of an import: digests appear in their notes once every byte was read, and casts are measured once."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import torch

from holdfast.digest import hash_bytes
from holdfast.formats.digests import WaitingRoom
from holdfast.formats.importing import Cast, FileOrigin, ImportedFile, ImportedTensor, decode_file, decode_tensor
from holdfast.repo.files import plan_files
from holdfast.repo.format.chunk import ChunkRef
from holdfast.repo.format.entry import ChunkRows, Entry, EntryRows
from holdfast.tensors.sources import SourcePlan
from tests.kit.checkpoints import digest_raw, read_raw


def _plan(tensor: torch.Tensor) -> ImportedTensor:
    plan = SourcePlan()
    plan.add("w", tensor)
    return ImportedTensor(plan.make()[0], None, FileOrigin("in file", "a.pt"), WaitingRoom())


def _store(source: ImportedTensor | ImportedFile) -> Entry:
    """Return the entry that a save would write."""
    refs = ChunkRows()
    for start, stop in pairwise((0, *(source.cuts or (source.size_bytes,)))):
        data = source.read(start, stop)
        refs.extend([ChunkRef(hash_bytes(data), len(data), None, bytes(data))])
    return EntryRows([source], refs)[0]


def test_the_digest_of_a_tensor_follows_from_its_chunks() -> None:
    tensor = torch.randn(700, 900)
    source = _plan(tensor)

    found = decode_tensor(_store(source))

    assert "digest" not in source.note["import"]
    assert found is not None
    assert (found.name, found.name_in_files, found.file) == ("w", "in file", "a.pt")
    assert found.source == found.result
    assert found.result.digest == digest_raw(tensor)


def test_a_tensor_that_overlaps_with_another_has_its_digest_once_every_byte_was_read() -> None:
    whole = torch.randn(700, 900)
    plan = SourcePlan()
    plan.add("w", whole)
    plan.add("part", whole[10:600])
    source = ImportedTensor(plan.make()[0], None, FileOrigin("in file", "a.pt"), WaitingRoom())
    source.read(0, 36_000)
    assert source.note is None

    found = decode_tensor(_store(source))

    assert "digest" in source.note["import"]  # type: ignore[index]
    assert found is not None
    assert found.result.digest == digest_raw(whole)


def test_a_tensor_that_is_not_in_c_order_has_the_digest_of_c_order() -> None:
    tensor = torch.randn(10, 20).t()

    found = decode_tensor(_store(_plan(tensor)))

    assert found is not None
    assert found.result.digest == digest_raw(tensor)


def test_a_file_has_its_digest_beside_its_time(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b"{}")
    (inner,) = plan_files([str(tmp_path / "config.json")])
    source = ImportedFile(inner, WaitingRoom())
    assert source.note == inner.note

    found = decode_file(_store(source))
    assert found is not None
    assert (found.path, found.size_bytes, found.digest) == ("config.json", 2, hash_bytes(b"{}"))
    assert source.note["mtime_ns"] == inner.mtime_ns


def test_notes_of_other_entries_say_nothing_of_an_import() -> None:
    for note in (None, {}, {"device": "cuda:0"}, {"mtime_ns": 3}):
        entry = Entry("w", 0, (), {}, note)
        assert decode_tensor(entry) is None
        assert decode_file(entry) is None


def test_a_piece_that_is_cast_twice_counts_once() -> None:
    cast = Cast(torch.float32, torch.float16)
    data = memoryview(bytearray(read_raw(torch.tensor([1e6, 1.0, -1e6]))))

    for _ in range(2):
        cast.apply(data, 0)

    assert (cast.errors.num_overflowed, cast.errors.max_abs, cast.errors.max_rel) == (2, 0.0, 0.0)
