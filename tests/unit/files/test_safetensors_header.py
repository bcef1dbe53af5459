"""The tensors of safetensors files are found by the header alone, and a header that lies finds none."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.files import safetensors_header as module
from holdfast.files.safetensors_header import read_safetensors
from holdfast.repo.format.grid import Extent
from tests.kit.tensor_files import make_safetensors, write_safetensors


def read(data: bytes) -> list[Extent]:
    return read_safetensors(io.BytesIO(data), len(data))


def tensor(start: int, stop: int, shape: list[int], dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.float64, torch.bool])
def test_the_tensors_of_a_real_file_are_where_the_library_wrote_them(tmp_path: Path, dtype: torch.dtype) -> None:
    state = {"a": torch.arange(60).reshape(6, 10).to(dtype), "b": torch.ones(7, dtype=dtype)}
    data = write_safetensors(tmp_path / "m", state).read_bytes()

    found = read(data)

    assert {each.shape: data[each.start : each.stop] for each in found} == {
        tuple(each.shape): bytes(each.reshape(-1).view(torch.uint8).numpy()) for each in state.values()
    }
    assert {each.item_bytes for each in found} == {dtype.itemsize}


def test_a_scalar_an_empty_tensor_and_metadata_are_understood() -> None:
    header = {
        "__metadata__": {"format": "pt"},
        "s": tensor(0, 4, []),
        "e": tensor(4, 4, [0, 3]),
        "t": tensor(4, 12, [2]),
    }

    found = read(make_safetensors(header, data_bytes=12))

    assert [(each.stop - each.start, each.shape) for each in found] == [(4, ()), (8, (2,))]


def test_items_smaller_than_a_byte_are_counted_in_bytes_of_a_row() -> None:
    data = make_safetensors({"w": tensor(0, 20, [4, 10], "F4")}, data_bytes=20)

    assert [(each.item_bytes, each.shape) for each in read(data)] == [(1, (4, 5))]


SOUND = {"a": tensor(0, 40, [10]), "b": tensor(40, 80, [5, 2])}
LIES: dict[str, object] = {
    "no object": [1, 2],
    "no tensor": {"a": 7},
    "no offsets": {"a": {"dtype": "F32", "shape": [10]}},
    "three offsets": {"a": {"dtype": "F32", "shape": [10], "data_offsets": [0, 40, 80]}},
    "one offset": {"a": {"dtype": "F32", "shape": [10], "data_offsets": [40]}},
    "texts for numbers": {"a": {"dtype": "F32", "shape": ["10"], "data_offsets": [0, 40]}},
    "negative": {"a": tensor(-40, 0, [10])},
    "backwards": {"a": tensor(40, 0, [10])},
    "beyond the file": {"a": tensor(0, 8000, [2000])},
    "overlapping": {"a": tensor(0, 40, [10]), "b": tensor(20, 60, [10])},
    "a shape that does not fit": {"a": tensor(0, 40, [7])},
    "items of three bytes": {"a": tensor(0, 30, [10])},
    "bytes of no items": {"a": tensor(0, 40, [0])},
    "too many dims": {"a": tensor(0, 4, [1] * 100)},
    "a number beyond all bounds": b'{"a":{"shape":[1' + b"0" * 9000 + b'],"data_offsets":[0,40]}}',
    "no JSON": b"{" + b"\xff" * 50,
    "nested too deep": b'{"a":' + b"[" * 5000 + b"]" * 5000 + b"}",
    "too many brackets": b'{"a":[' + b",".join([b"[]"] * 200_000) + b"]}",
}


@pytest.mark.parametrize("lie", LIES)
def test_a_header_that_lies_finds_no_tensors(lie: str) -> None:
    assert read(make_safetensors(LIES[lie], data_bytes=80)) == []


def test_the_lies_are_the_only_reason() -> None:
    assert len(read(make_safetensors(SOUND, data_bytes=80))) == 2


@pytest.mark.parametrize("size", [0, 3, 8, 20, 100])
def test_a_truncated_file_finds_no_tensors(size: int) -> None:
    data = make_safetensors(SOUND, data_bytes=80)

    assert read(data[:size]) == []


def test_a_long_header_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    data = make_safetensors(SOUND, data_bytes=80)
    monkeypatch.setattr(module, "MAX_HEADER_BYTES", len(json.dumps(SOUND)))
    assert read(data)
    monkeypatch.setattr(module, "MAX_HEADER_BYTES", len(json.dumps(SOUND)) - 1)

    assert read(data) == []


numbers = st.integers(-5, 200) | st.integers()
tensors = st.fixed_dictionaries(
    {
        "dtype": st.just("F32"),
        "shape": st.lists(numbers, max_size=3),
        "data_offsets": st.lists(numbers, min_size=2, max_size=2),
    }
)


@given(st.dictionaries(st.text(max_size=3), tensors, max_size=4), st.integers(0, 300))
def test_whatever_a_header_says_extents_are_inside_the_file_and_apart(header: object, data_bytes: int) -> None:
    data = make_safetensors(header, data_bytes=data_bytes)

    found = read(data)

    edges = [edge for each in found for edge in (each.start, each.stop)]
    assert edges == sorted(edges)
    assert all(0 <= edge <= len(data) for edge in edges)
