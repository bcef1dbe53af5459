"""Safetensors files that an export writes, read by the safetensors library."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

import holdfast
from holdfast.errors import TooLarge, Unsupported
from holdfast.formats.writing import safetensors_file
from tests.kit.exports import assert_proved, assert_same, make_state


@pytest.fixture
def store(tmp_path: Path) -> holdfast.Store:
    return holdfast.open(tmp_path / "store")


def test_the_library_reads_every_tensor_bit_for_bit(store: holdfast.Store, tmp_path: Path) -> None:
    state = make_state()
    store.save("a", state)

    done = store.export("a", tmp_path / "model.safetensors", select="model")

    found = load_file(tmp_path / "model.safetensors")
    assert_same(found, state["model"])
    assert_proved(done.receipt, found)
    with safe_open(str(tmp_path / "model.safetensors"), "pt") as file:
        assert file.metadata() == {"format": "pt"}


@pytest.mark.parametrize("name", safetensors_file._DTYPES)
def test_every_dtype_that_the_format_has_is_kept(store: holdfast.Store, tmp_path: Path, name: str) -> None:
    dtype = getattr(torch, name, None)
    if dtype is None:
        pytest.skip(f"this torch has no {name}")
    raw = torch.randint(0, 2, (64,), dtype=torch.uint8)
    tensor = raw.view(dtype)
    store.save("a", {"x": tensor})

    store.export("a", tmp_path / "x.safetensors")

    assert_same(load_file(tmp_path / "x.safetensors"), {"x": tensor})


def test_a_dtype_that_the_format_lacks_is_refused_and_nothing_is_written(store: holdfast.Store, tmp_path: Path) -> None:
    store.save("a", {"x": torch.zeros(2, dtype=torch.complex128)})

    with pytest.raises(Unsupported, match=r"x is complex128, which safetensors cannot contain; leave it out"):
        store.export("a", tmp_path / "x.safetensors")

    assert [path.name for path in tmp_path.iterdir()] == ["store"]


@pytest.mark.parametrize("name", ["__metadata__", "a\udc80"])
def test_a_name_that_the_format_lacks_is_refused(store: holdfast.Store, tmp_path: Path, name: str) -> None:
    store.save("a", {name: torch.zeros(2)})

    with pytest.raises(Unsupported, match="safetensors has no tensors with the name"):
        store.export("a", tmp_path / "x.safetensors")


def test_tensors_begin_with_a_page_if_the_file_is_large(store: holdfast.Store, tmp_path: Path) -> None:
    store.save("a", {"x": torch.ones(1 << 18)})

    store.export("a", tmp_path / "x.safetensors")

    (length,) = struct.unpack("<Q", (tmp_path / "x.safetensors").read_bytes()[:8])
    assert (8 + length) % 4096 == 0


def test_items_are_aligned_whatever_the_order_of_dtypes(store: holdfast.Store, tmp_path: Path) -> None:
    store.save("a", {"b": torch.zeros(3, dtype=torch.uint8), "a": torch.zeros(2, dtype=torch.float64)})

    store.export("a", tmp_path / "x.safetensors")

    data = (tmp_path / "x.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    assert header["a"]["data_offsets"] == [0, 16]
    assert length % 8 == 0


def test_a_header_that_readers_refuse_is_not_written(
    store: holdfast.Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.save("a", {"x": torch.zeros(1)})
    monkeypatch.setattr(safetensors_file, "_MAX_HEADER_BYTES", 10)

    with pytest.raises(TooLarge, match="do not fit into the header of one safetensors file"):
        store.export("a", tmp_path / "x.safetensors")


def test_what_is_not_a_tensor_is_named_in_the_receipt(store: holdfast.Store, tmp_path: Path) -> None:
    store.save("a", {"w": torch.zeros(2), "step": 3, "rates": [0.5], "long": "x" * 5000})

    done = store.export("a", tmp_path / "x.safetensors")

    assert [(each.name, each.reason) for each in done.receipt.left_out] == [
        ("step", "an int: a safetensors file contains tensors only"),
        ("rates.0", "a float: a safetensors file contains tensors only"),
        ("long", "a str: a safetensors file contains tensors only"),
    ]
