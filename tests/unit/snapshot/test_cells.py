"""Memory is cut as the chunks of its entry are, whether it is the whole tensor or a box of it."""

from __future__ import annotations

import pytest
import torch

import holdfast
from holdfast.repo.format.boxes import Box
from holdfast.repo.format.manifest import Manifest
from holdfast.repo.read.reader import open_snapshot
from holdfast.snapshot.batches import Cell, FilledPart, hash_on_devices, make_cells
from holdfast.tensors.spec import SpecDecoder

ROWS = 3000


def _make_manifest(tensor: torch.Tensor) -> Manifest:
    store = holdfast.open("memory://")
    store.save("x", {"w": tensor})
    snapshot = store.latest("x")
    assert snapshot is not None
    with open_snapshot(store.repository, snapshot.record) as reader:
        return reader.manifest


def _hash(part: FilledPart, manifest: Manifest) -> list[tuple[Cell, bool]]:
    (found,) = hash_on_devices([make_cells(part, manifest, SpecDecoder("x"))])
    return found


@pytest.fixture
def tensor() -> torch.Tensor:
    return torch.arange(ROWS * 257, dtype=torch.float32).view(ROWS, 257)


def test_memory_that_holds_an_entry_has_all_its_digests(tensor: torch.Tensor) -> None:
    manifest = _make_manifest(tensor)

    found = _hash(FilledPart(0, tensor.clone(), tensor.nbytes, None), manifest)

    assert len(found) == len(manifest.find_chunks(0).sizes) > 1
    assert all(is_held and cell.is_whole for cell, is_held in found)


def test_only_the_chunk_that_differs_is_found(tensor: torch.Tensor) -> None:
    manifest = _make_manifest(tensor)
    changed = tensor.clone()
    changed[-1, -1] += 1

    found = _hash(FilledPart(0, changed, tensor.nbytes, None), manifest)

    assert [is_held for _, is_held in found] == [True] * (len(found) - 1) + [False]


def test_of_a_box_only_whole_chunks_can_be_compared(tensor: torch.Tensor) -> None:
    manifest = _make_manifest(tensor)
    rows = tensor[1000:].clone()

    found = _hash(FilledPart(0, rows, rows.nbytes, Box((1000, 0), (ROWS - 1000, 257))), manifest)

    assert {cell.is_whole for cell, _ in found} == {True, False}
    assert all(is_held == cell.is_whole for cell, is_held in found)
    columns = tensor[:, :100].clone()
    cells = _hash(FilledPart(0, columns, columns.nbytes, Box((0, 0), (ROWS, 100))), manifest)
    assert not any(cell.is_whole for cell, _ in cells)
