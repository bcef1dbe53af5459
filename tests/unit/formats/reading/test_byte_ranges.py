"""Ranges, joined ranges, strided items and boxes give the same bytes as the tensor in memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from holdfast.errors import BadFile, SourceChanged
from holdfast.formats.reading import byte_ranges
from holdfast.formats.reading.byte_ranges import (
    BoxBytes,
    FileBytes,
    Geometry,
    Piece,
    SlicedBytes,
    assemble,
    iter_gathered,
    join_bytes,
    open_file,
)
from holdfast.repo.format.boxes import Box
from tests.kit.checkpoints import read_raw


@pytest.fixture
def matrix() -> torch.Tensor:
    return torch.arange(60 * 50, dtype=torch.int32).view(60, 50)


@pytest.fixture
def file(tmp_path: Path, matrix: torch.Tensor) -> FileBytes:
    (tmp_path / "raw").write_bytes(read_raw(matrix))
    return open_file(str(tmp_path / "raw"))


def _write_piece(tmp_path: Path, matrix: torch.Tensor, box: Box, *, transposed: bool = False) -> Piece:
    part = matrix[tuple(map(slice, box.starts, box.stops))]
    path = tmp_path / f"{box.starts}-{box.sizes}"
    path.write_bytes(read_raw(part.t() if transposed else part))
    stride = (1, box.sizes[0]) if transposed else (box.sizes[1], 1)
    return Piece(box, open_file(str(path)), Geometry(4, box.sizes, stride))


def test_ranges_join_and_slice(file: FileBytes) -> None:
    whole = bytes(file.read(0, file.size_bytes))

    joined = join_bytes([file.narrow(100, 200), file.narrow(0, 50), SlicedBytes(file, 300, 40)])

    expected = whole[100:200] + whole[:50] + whole[300:340]
    assert joined.size_bytes == len(expected)
    for start, stop in [(0, 190), (90, 110), (149, 151), (150, 190), (0, 1)]:
        assert bytes(joined.read(start, stop)) == expected[start:stop]


@pytest.mark.parametrize("span_bytes", [32 << 20, 1000, 4])
def test_strided_items_are_gathered_in_c_order_within_any_limit(
    file: FileBytes, matrix: torch.Tensor, monkeypatch: pytest.MonkeyPatch, span_bytes: int
) -> None:
    monkeypatch.setattr(byte_ranges, "SPAN_BYTES", span_bytes)
    for view in (matrix.t(), matrix[3:, ::7], matrix[:, 4], matrix.view(6, 10, 50).permute(2, 0, 1)[::3]):
        geometry = Geometry(4, tuple(view.shape), view.stride(), int(view.storage_offset()))

        found = b"".join(iter_gathered(file, geometry))

        assert found == read_raw(view)


def test_boxes_are_assembled_on_the_grid_of_the_tensor(tmp_path: Path, matrix: torch.Tensor) -> None:
    boxes = [Box((0, 0), (25, 50)), Box((25, 0), (35, 20)), Box((25, 20), (35, 30))]
    pieces = [_write_piece(tmp_path, matrix, box, transposed=number == 1) for number, box in enumerate(boxes)]

    reader = assemble((60, 50), 4, pieces, what="w")

    assert isinstance(reader, BoxBytes)
    assert bytes(reader.read(0, reader.size_bytes)) == read_raw(matrix)
    assert bytes(reader.read(4001, 7777)) == read_raw(matrix)[4001:7777]


def test_one_piece_that_is_the_whole_tensor_is_read_as_it_is(tmp_path: Path, matrix: torch.Tensor) -> None:
    piece = _write_piece(tmp_path, matrix, Box((0, 0), (60, 50)))

    assert assemble((60, 50), 4, [piece], what="w") is piece.reader


@pytest.mark.parametrize(
    ("boxes", "reason"),
    [
        ([Box((0, 0), (25, 50))], "shards are missing; they cover 1250 of 3000 items"),
        ([Box((0, 0), (40, 50)), Box((20, 0), (40, 50))], "two shards cover the same items"),
        ([Box((0, 0), (60, 50)), Box((0, 0), (60, 50))], "two shards cover the same items"),
        ([Box((0, 0), (61, 50))], "is outside of the tensor"),
        ([Box((0,), (60,))], "another number of dimensions"),
    ],
)
def test_boxes_that_do_not_cover_the_tensor_once_are_refused(file: FileBytes, boxes: list[Box], reason: str) -> None:
    pieces = [Piece(box, file, Geometry(4, box.sizes, tuple(np.ones(len(box.sizes), int)))) for box in boxes]

    with pytest.raises(BadFile, match=reason):
        assemble((60, 50), 4, pieces, what="w")


def test_a_file_that_is_cut_off_meanwhile_raises(tmp_path: Path, file: FileBytes) -> None:
    (tmp_path / "raw").write_bytes(b"short")

    with pytest.raises(SourceChanged):
        file.read(0, 10)


def test_a_missing_file_and_a_directory_are_named(tmp_path: Path) -> None:
    with pytest.raises(BadFile, match="does not exist"):
        open_file(str(tmp_path / "none"))
    with pytest.raises(BadFile, match="is a directory"):
        open_file(str(tmp_path))
