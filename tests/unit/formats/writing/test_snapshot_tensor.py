"""Reading stored tensors in pieces, in C order, whatever their strides."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast.formats.writing.plan import plan_tensors, select_tree
from holdfast.formats.writing.snapshot_tensor import PieceReader, SnapshotTensor, iter_slabs
from holdfast.repo.format.boxes import Box, whole
from holdfast.snapshot.opened import Opened
from tests.kit.exports import damage_packs, read_bytes

SMALL_BUDGET = 16 << 20


@contextmanager
def _open(tmp_path: Path, tree: Any) -> Iterator[tuple[Opened, dict[str, SnapshotTensor]]]:
    with holdfast.open(tmp_path / "store", budget_bytes=SMALL_BUDGET) as store:
        store.save("a", tree)
        opened = store.snapshot("a").open()
        plan = plan_tensors(opened, select_tree(opened, "", ()))
        yield opened, {name: each.tensor for name, each in plan.tensors.items()}


def _read(reader: PieceReader, tensor: SnapshotTensor) -> bytes:
    found, at = bytearray(), 0
    for piece in reader.iter_pieces(tensor):
        assert piece.start == at
        buffer = memoryview(bytearray(reader.piece_bytes))
        (data,) = reader.read([piece], buffer)
        assert data.nbytes == piece.size_bytes
        found += data
        at = piece.stop
    return bytes(found)


def test_the_bytes_of_every_kind_of_tensor_are_those_of_its_items_in_c_order(tmp_path: Path) -> None:
    base = torch.randn(40, 30)
    tree = {
        "plain": base,
        "view": base[3:9],
        "turned": base.t(),
        "gaps": torch.randn(50, 50)[:, ::9],
        "expanded": torch.randn(6, 1).expand(6, 5),
        "scalar": torch.tensor(3),
        "empty": torch.empty(0, 4),
        "conjugate": torch.randn(7, dtype=torch.complex64).conj(),
        "negative": torch.randn(7, dtype=torch.complex64).conj().imag,
        "last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "overlapping": torch.arange(10.0).as_strided((4, 4), (2, 1)),
    }

    with _open(tmp_path, tree) as (opened, tensors):
        found = {name: _read(PieceReader(opened), tensor) for name, tensor in tensors.items()}

    assert found == {name: read_bytes(tensor) for name, tensor in tree.items()}


@pytest.mark.parametrize("shape", [(3_000_000,), (1500, 1999), (2, 3, 500_001)])
@pytest.mark.parametrize("is_turned", [False, True])
def test_large_tensors_are_read_in_pieces_within_the_budget(
    tmp_path: Path, shape: tuple[int, ...], is_turned: bool
) -> None:
    tensor = torch.arange(float(torch.Size(shape).numel())).view(shape)
    tensor = tensor.permute(*reversed(range(len(shape)))) if is_turned else tensor

    with _open(tmp_path, {"x": tensor}) as (opened, tensors):
        reader = PieceReader(opened)
        sizes = [piece.size_bytes for piece in reader.iter_pieces(tensors["x"])]
        assert _read(reader, tensors["x"]) == read_bytes(tensor)

    limit = SMALL_BUDGET // 4 if is_turned and len(shape) > 1 else reader.piece_bytes
    assert max(sizes) <= limit
    assert len(sizes) > 1


def test_pieces_end_where_chunks_end(tmp_path: Path) -> None:
    with _open(tmp_path, {"x": torch.randn(1700, 1111)}) as (opened, tensors):
        sizes = [ref.size_bytes for ref in opened.entry(tensors["x"].number).chunks]
        ends = {sum(sizes[: number + 1]) for number in range(len(sizes))}

        assert {piece.stop for piece in PieceReader(opened).iter_pieces(tensors["x"])} <= ends


def test_small_tensors_are_read_together(tmp_path: Path) -> None:
    tree = {str(number): torch.full((10,), number) for number in range(50)}

    with _open(tmp_path, tree) as (opened, tensors):
        reader = PieceReader(opened)
        pieces = [piece for tensor in tensors.values() for piece in reader.iter_pieces(tensor)]
        found = reader.read(pieces, memoryview(bytearray(reader.piece_bytes)))

    assert [bytes(data) for data in found] == [read_bytes(tensor) for tensor in tree.values()]


def test_damage_is_found_while_reading(tmp_path: Path) -> None:
    with _open(tmp_path, {"x": torch.randn(300_000)}) as (opened, tensors):
        damage_packs(tmp_path / "store")

        with pytest.raises(holdfast.Corrupt, match="damaged"):
            _read(PieceReader(opened), tensors["x"])


@pytest.mark.parametrize("limit", [1, 4, 7, 24, 96, 1000])
@pytest.mark.parametrize("shape", [(), (5,), (2, 3, 4), (3, 0)])
def test_slabs_cover_a_box_in_order_within_the_limit(shape: tuple[int, ...], limit: int) -> None:
    items = torch.arange(torch.Size(shape).numel()).view(shape)

    slabs = list(iter_slabs(whole(shape), 4, limit))

    found = [items[tuple(map(slice, slab.starts, slab.stops))].flatten() for slab in slabs]
    assert torch.cat([*found, torch.empty(0, dtype=torch.int64)]).tolist() == list(range(items.numel()))
    assert all(part.numel() * 4 <= max(limit, 4) for part in found)


def test_slabs_of_some_rows_stay_inside() -> None:
    assert list(iter_slabs(Box((2, 0), (3, 4)), 1, 8)) == [Box((2, 0), (2, 4)), Box((4, 0), (1, 4))]
