"""safetensors files of the real library are read; whatever that library refuses is refused, with a reason."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import holdfast
from holdfast.errors import BadFile
from holdfast.formats.reading.byte_ranges import open_file
from holdfast.formats.reading.found import Placeholders
from holdfast.formats.reading.safetensors_file import DTYPES, read_safetensors_file, read_tensors, read_weight_map
from holdfast.repo.files import open_source_folder
from tests.kit.checkpoints import assert_same, make_state, read_raw


@pytest.mark.parametrize("code", DTYPES)
def test_every_dtype_comes_back_bit_for_bit(tmp_path: Path, code: str) -> None:
    dtype = DTYPES[code]
    raw = torch.arange(64, dtype=torch.uint8) % 2 if dtype == torch.bool else torch.arange(64, dtype=torch.uint8)
    tensor = raw.view(dtype)
    save_file({"x": tensor}, tmp_path / "m.safetensors")

    store = holdfast.open(tmp_path / "store")
    store.import_(tmp_path / "m.safetensors", "m")

    loaded = store.load("m")["x"]
    assert loaded.dtype == dtype
    assert read_raw(loaded.view(torch.uint8)) == read_raw(tensor.view(torch.uint8))


def test_a_header_is_checked_against_the_file(tmp_path: Path) -> None:
    state = make_state()
    save_file(state, tmp_path / "m.safetensors", metadata={"format": "pt", "by": "test"})

    found = read_tensors(open_file(str(tmp_path / "m.safetensors")), Placeholders(), where="m")

    assert {name: (tensor.dtype, tensor.shape) for name, tensor in found.tensors.items()} == {
        name: (tensor.dtype, tensor.shape) for name, tensor in state.items()
    }
    assert found.metadata == {"format": "pt", "by": "test"}


def _write(path: Path, header: Any, data: bytes = bytes(8), *, length: int | None = None) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)


def _slot(**changes: Any) -> Any:
    return {"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}}


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        (_slot(dtype="F33"), "has the dtype 'F33', which this torch does not have"),
        (_slot(shape=[3]), r"has 8 bytes, which do not fit F32 \[3\]"),
        (_slot(shape=[-2]), "malformed shape"),
        (_slot(shape=[1 << 61]), "malformed shape"),
        (_slot(data_offsets=[0, 16]), "ends at byte 16 of 8: the file is cut off"),
        (_slot(data_offsets=[8, 0]), "is cut off or damaged"),
        (_slot(shape=[1], data_offsets=[4, 8]), "overlaps another one, or follows a gap"),
        (_slot(shape=[1], data_offsets=[0, 4]), "4 bytes after its last tensor"),
        (_slot(extra=1), "malformed header"),
        ({**_slot(), "y": _slot()["x"]}, "overlaps another one"),
        ({**_slot(), "__metadata__": {"a": 1}}, "malformed metadata"),
        (b'{"x":' + json.dumps(_slot()["x"]).encode() + b',"x":' + json.dumps(_slot()["x"]).encode() + b"}", "twice"),
        (b"[" * 100_000, "is damaged"),
        (b"not json", "is damaged"),
        (b"[]", "is damaged"),
    ],
)
def test_a_malformed_header_is_refused_with_its_reason(tmp_path: Path, header: Any, reason: str) -> None:
    _write(tmp_path / "m", header)

    with pytest.raises(BadFile, match=reason):
        read_safetensors_file(str(tmp_path / "m"))


@pytest.mark.parametrize("length", [1 << 62, 100_000_001, 5000])
def test_a_header_longer_than_the_file_is_refused(tmp_path: Path, length: int) -> None:
    _write(tmp_path / "m", _slot(), length=length)

    with pytest.raises(BadFile, match="is cut off or no safetensors file"):
        read_safetensors_file(str(tmp_path / "m"))


def test_a_file_that_is_cut_off_is_refused(tmp_path: Path) -> None:
    save_file(make_state(), tmp_path / "m")
    (tmp_path / "m").write_bytes((tmp_path / "m").read_bytes()[:-1])

    with pytest.raises(BadFile, match="cut off"):
        read_safetensors_file(str(tmp_path / "m"))


@pytest.mark.parametrize(
    ("index", "reason"),
    [
        ({"weight_map": {"a": "none.safetensors"}}, r"names files that are missing: none\.safetensors"),
        ({"weight_map": {"a": "../m"}}, "no valid weight_map"),
        ({"weight_map": {"a": "/etc/passwd"}}, "no valid weight_map"),
        ({"weight_map": {"a": ".."}}, "no valid weight_map"),
        ({"weight_map": {}}, "no valid weight_map"),
        ([], "no valid weight_map"),
    ],
)
def test_an_index_with_bad_names_is_refused(tmp_path: Path, index: Any, reason: str) -> None:
    (tmp_path / "index.json").write_text(json.dumps(index))

    with pytest.raises(BadFile, match=reason):
        read_weight_map(open_source_folder(str(tmp_path)), "index.json")


def test_a_large_tensor_has_the_chunks_of_a_save_from_memory(tmp_path: Path) -> None:
    state = {"w": torch.randn(1500, 1000)}
    save_file(state, tmp_path / "m")
    store = holdfast.open(tmp_path / "store")
    store.import_(tmp_path / "m", "m")

    assert store.save("n", state).new_bytes == 0
    assert_same(store.load("m"), state)
