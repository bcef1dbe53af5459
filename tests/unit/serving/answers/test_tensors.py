"""Values of a tensor: statistics in one pass, heat maps, slices; of every kind of tensor."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import holdfast
from holdfast.errors import BadName, NotFound, TooLarge
from holdfast.serving.answer import encode_json
from holdfast.serving.answers import tensors
from holdfast.serving.answers.tensors import (
    OpenTensor,
    iter_boxes,
    iter_summary,
    open_tensor,
    parse_index,
    read_heat,
    read_values,
)

TREE: dict[str, Any] = {
    "matrix": torch.arange(300.0).reshape(15, 20),
    "half": torch.linspace(-1, 1, 50, dtype=torch.bfloat16),
    "ints": torch.arange(10),
    "flags": torch.tensor([True, False, True]),
    "complex": torch.tensor([3 + 4j]),
    "scalar": torch.tensor(2.5),
    "empty": torch.zeros(0, 4),
    "bad": torch.tensor([math.nan, math.inf, -math.inf, 0.0, 2.0]),
    "deep": torch.arange(2 * 3 * 4 * 5.0).reshape(2, 3, 4, 5),
    "strided": torch.arange(12.0).reshape(3, 4).t(),
    "window": torch.arange(9.0).unfold(0, 3, 1),
    "sparse": torch.eye(3).to_sparse(),
    "array": np.arange(6.0).reshape(2, 3),
    "quantized": torch.quantize_per_tensor(torch.tensor([0.5, 1.0]), 0.5, 0, torch.quint8),
    "text": "not a tensor",
    "names": np.array(["a", "b"]),
}


@pytest.fixture(scope="module")
def snapshot(tmp_path_factory: pytest.TempPathFactory) -> Iterator[holdfast.Snapshot]:
    with holdfast.open(tmp_path_factory.mktemp("tensors") / "store") as store:
        store.save("a", TREE)
        yield store.snapshot("a")


@pytest.mark.parametrize("leaf", [name for name in TREE if name not in ("text", "names")])
def test_statistics_are_those_of_the_whole_tensor(
    snapshot: holdfast.Snapshot, leaf: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensors, "_BLOCK_ITEMS", 7)
    *_, found = iter_summary(open_tensor(snapshot, leaf))
    whole = torch.as_tensor(TREE[leaf])
    whole = whole.to_dense() if whole.is_sparse else whole.dequantize() if whole.is_quantized else whole
    values = (whole.abs() if whole.is_complex() else whole).to(torch.float64).flatten()
    finite = values[values.isfinite()]

    assert (found["done"], found["items"], found["shape"]) == (len(values), len(values), list(whole.shape))
    assert found["nan"] == int(values.isnan().sum())
    assert sum(found["histogram"]["counts"]) == len(finite)
    if len(finite):
        assert found["min"] == float(finite.min())
        assert found["mean"] == pytest.approx(float(finite.mean()))
        assert found["std"] == pytest.approx(float(finite.std(correction=0)), abs=1e-6)
    else:
        assert found["min"] is None


def test_partial_statistics_are_reported_while_it_is_read(
    snapshot: holdfast.Snapshot, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensors, "_BLOCK_ITEMS", 60)
    monkeypatch.setattr(tensors, "_REPORT_S", -1.0)

    found = list(iter_summary(open_tensor(snapshot, "matrix")))

    assert [each["done"] for each in found] == [60, 120, 180, 240, 300]
    assert found[0]["max"] == 59


def test_no_block_is_larger_than_the_limit(snapshot: holdfast.Snapshot, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensors, "_BLOCK_ITEMS", 25)
    sizes: list[int] = []
    real = OpenTensor.read

    def read(tensor: OpenTensor, index: tensors.Index) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
        block = real(tensor, index)
        sizes.append(block.size)
        return block

    monkeypatch.setattr(OpenTensor, "read", read)
    list(iter_summary(open_tensor(snapshot, "matrix")))
    read_heat(open_tensor(snapshot, "matrix"), "")

    assert sum(sizes) == 600
    assert max(sizes) <= 25


@pytest.mark.parametrize(
    ("shape", "limit"), [((), 4), ((7,), 3), ((3, 5), 5), ((3, 5), 2), ((2, 3, 4), 100), ((0, 3), 2)]
)
def test_boxes_cover_a_tensor_once(shape: tuple[int, ...], limit: int) -> None:
    seen = np.zeros(shape, dtype=int)
    for box in iter_boxes(shape, limit):
        seen[box] += 1

    assert (seen == 1).all()


def test_values_by_index(snapshot: holdfast.Snapshot) -> None:
    matrix = open_tensor(snapshot, "matrix")

    assert read_values(matrix, "2, 3:5")["values"] == [43.0, 44.0]
    assert read_values(matrix, "-1, -1")["values"] == [299.0]
    assert read_values(open_tensor(snapshot, "bad"), "")["values"] == ["nan", "inf", "-inf", 0.0, 2.0]
    assert read_values(open_tensor(snapshot, "scalar"), "")["values"] == [2.5]
    assert read_values(open_tensor(snapshot, "flags"), "0:2")["values"] == [True, False]


@pytest.mark.parametrize("text", ["15", "-16", "a", "1:b", "1, 2, 3", "0:3:2", "1:3x"])
def test_a_bad_index_is_explained(text: str) -> None:
    with pytest.raises(BadName):
        parse_index(text, (15, 20))


def test_a_heat_map_has_means_and_exact_values(snapshot: holdfast.Snapshot, monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = open_tensor(snapshot, "matrix")
    exact = read_heat(matrix, "0:2, 0:3")
    monkeypatch.setattr(tensors, "MAX_CELLS", 5)
    coarse = read_heat(matrix, "")

    assert exact["cells"] == [[0.0, 1.0, 2.0], [20.0, 21.0, 22.0]]
    assert np.array(coarse["cells"]).shape == (5, 5)
    assert coarse["cells"][0][0] == pytest.approx(21.5)
    assert read_heat(open_tensor(snapshot, "deep"), "1")["index"] == [1, 0, [0, 4], [0, 5]]
    assert read_heat(open_tensor(snapshot, "bad"), "")["cells"] == [[None, None, None, 0.0, 2.0]]
    assert read_heat(open_tensor(snapshot, "scalar"), "")["cells"] == [[2.5]]


def test_of_a_huge_slice_some_rows_are_read(snapshot: holdfast.Snapshot, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensors, "_HEAT_ITEMS", 100)

    found = read_heat(open_tensor(snapshot, "matrix"), "")

    assert found["stride"] == 3
    assert [line[0] for line in found["cells"]] == [0.0, 60.0, 120.0, 180.0, 240.0]


def test_the_map_of_a_tensor_without_values_has_no_cells(snapshot: holdfast.Snapshot) -> None:
    assert read_heat(open_tensor(snapshot, "empty"), "")["cells"] == []


def test_what_is_no_tensor_or_too_large_is_refused(
    snapshot: holdfast.Snapshot, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(NotFound, match="not a tensor"):
        open_tensor(snapshot, "text")
    with pytest.raises(BadName, match="cannot be shown as numbers"):
        open_tensor(snapshot, "names")
    with pytest.raises(BadName, match="selects nothing"):
        read_heat(open_tensor(snapshot, "empty"), "0:0")
    monkeypatch.setattr(tensors, "_WHOLE_BYTES", 8)
    with pytest.raises(TooLarge, match="too large"):
        open_tensor(snapshot, "window")


def summarize(values: torch.Tensor) -> Any:
    *_, found = iter_summary(OpenTensor("w", tuple(values.shape), str(values.dtype), values.nbytes, values))
    return found


@pytest.mark.parametrize(
    "values",
    [
        torch.arange(1000) + 1_700_000_000_000_000,
        1e8 + torch.linspace(-1, 1, 1000, dtype=torch.float64),
        torch.cat([torch.full((500,), 1e9), torch.zeros(500)]),
        torch.full((3,), 0.1),
    ],
)
def test_the_spread_of_large_values_that_differ_by_little_is_right(
    values: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensors, "_BLOCK_ITEMS", 7)

    expected = np.std((values - values[0]).to(torch.float64).numpy())

    assert summarize(values)["std"] == pytest.approx(expected, rel=1e-6, abs=0.0)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_values_whose_sums_are_too_large_for_a_float_give_an_answer(sign: float) -> None:
    values = torch.full((400, 400), 1.7e308, dtype=torch.float64)
    values[200:] *= sign
    whole = OpenTensor("w", (400, 400), "float64", values.nbytes, values)

    assert summarize(values)["max"] == 1.7e308
    assert summarize(torch.tensor([1e200, 3e200], dtype=torch.float64))["mean"] == 2e200
    encode_json(summarize(values))
    encode_json(read_heat(whole, ""))


def test_unsigned_integers_keep_all_digits() -> None:
    values = torch.tensor([1, 2**64 - 1], dtype=torch.uint64)

    assert read_values(OpenTensor("w", (2,), "uint64", 16, values), "")["values"] == [1, 2**64 - 1]
