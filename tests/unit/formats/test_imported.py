"""Sources of an import: digests appear in their notes once every byte was read, and casts are measured once."""

from __future__ import annotations

from pathlib import Path

import torch

from holdfast.digest import hash_bytes
from holdfast.formats.imported import Cast, FileOrigin, ImportedFile, ImportedTensor, decode_file, decode_tensor
from holdfast.formats.stream_digest import WaitingRoom
from holdfast.repo.files import plan_files
from holdfast.tensors.sources import SourcePlan
from tests.kit.checkpoints import digest_raw, read_raw


def _plan(tensor: torch.Tensor) -> ImportedTensor:
    plan = SourcePlan()
    plan.add("w", tensor)
    return ImportedTensor(plan.make()[0], None, FileOrigin("in file", "a.pt"), WaitingRoom())


def test_the_note_appears_when_every_byte_was_read() -> None:
    tensor = torch.randn(100)
    source = _plan(tensor)
    source.read(0, 200)
    assert source.note is None

    data = source.read(200, 400)

    assert bytes(data) == read_raw(tensor)[200:]
    found = decode_tensor(source.name, source.spec, source.note)
    assert found is not None
    assert (found.name, found.name_in_files, found.file) == ("w", "in file", "a.pt")
    assert found.source == found.result
    assert found.result.digest == digest_raw(tensor)


def test_a_tensor_that_is_not_in_c_order_has_the_digest_of_c_order() -> None:
    tensor = torch.randn(10, 20).t()

    found = decode_tensor("w", _plan(tensor).spec, _plan(tensor).note)

    assert found is not None
    assert found.result.digest == digest_raw(tensor)


def test_a_file_has_its_digest_beside_its_time(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b"{}")
    (inner,) = plan_files([str(tmp_path / "config.json")])
    source = ImportedFile(inner, WaitingRoom())
    assert source.note == inner.note

    source.read(0, 2)

    found = decode_file(source.name, source.size_bytes, source.note)
    assert found is not None
    assert (found.path, found.size_bytes, found.digest) == ("config.json", 2, hash_bytes(b"{}"))
    assert source.note["mtime_ns"] == inner.mtime_ns


def test_notes_of_other_entries_say_nothing_of_an_import() -> None:
    for note in (None, {}, {"device": "cuda:0"}, {"mtime_ns": 3}):
        assert decode_tensor("w", {}, note) is None
        assert decode_file("w", 0, note) is None


def test_a_piece_that_is_cast_twice_counts_once() -> None:
    cast = Cast(torch.float32, torch.float16)
    data = memoryview(bytearray(read_raw(torch.tensor([1e6, 1.0, -1e6]))))

    for _ in range(2):
        cast.apply(data, 0)

    assert (cast.errors.num_overflowed, cast.errors.max_abs, cast.errors.max_rel) == (2, 0.0, 0.0)
