"""The metadata of torch.distributed.checkpoint is converted to JSON and back exactly; anything else is refused."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from holdfast.distributed.dcp.metadata import decode_metadata, encode_metadata
from holdfast.errors import Corrupt, HoldfastError, NewerFormat
from tests.kit.capabilities import needs_torch
from tests.tensor_zoo import DTYPES

FORMATS = [torch.contiguous_format, torch.channels_last, torch.channels_last_3d, torch.preserve_format]


def make_tensor(*boxes: tuple[tuple[int, ...], tuple[int, ...]], size: tuple[int, ...], **more: Any) -> Any:
    chunks = [ChunkStorageMetadata(torch.Size(starts), torch.Size(sizes)) for starts, sizes in boxes]
    return TensorStorageMetadata(TensorProperties(**more), torch.Size(size), chunks)


def round_trip(metadata: Metadata) -> Metadata:
    text = json.dumps(encode_metadata(metadata))
    return decode_metadata(json.loads(text), ids={"checkpoint_id": "a", "save_id": "b"}, load_id="c", what="'x'")


def test_everything_that_is_planned_survives() -> None:
    state = {
        "whole": make_tensor(((0, 0), (3, 4)), size=(3, 4), dtype=torch.float8_e4m3fn),
        "cut": make_tensor(((0, 0), (1, 4)), ((1, 0), (2, 4)), size=(3, 4), dtype=torch.float32, requires_grad=True),
        "nothing": make_tensor(size=(0,), dtype=torch.bool),
        "scalar": make_tensor(((), ()), size=(), dtype=torch.complex64, pin_memory=True),
        "bytes": BytesStorageMetadata(),
    }
    planner_data = {"a.0": ("a", 0), "a.1": ("a", "1"), "b": ("b",)}

    found = round_trip(Metadata(state, planner_data))

    assert list(found.state_dict_metadata) == list(state)
    assert found.state_dict_metadata == state
    assert found.planner_data == planner_data
    assert [type(key) for key in found.planner_data["a.0"]] == [str, int]
    assert dataclasses.astuple(found.storage_meta)[:3] == ("a", "b", "c")  # type: ignore[arg-type]


@needs_torch("distributed.checkpoint.metadata.Metadata.version")
def test_the_version_survives() -> None:
    assert round_trip(Metadata({})).version == "1.0.0"


@pytest.mark.parametrize("memory_format", FORMATS, ids=str)
def test_memory_formats_survive(memory_format: torch.memory_format) -> None:
    tensor = make_tensor(((0,), (1,)), size=(1,), dtype=torch.half, memory_format=memory_format)

    found = round_trip(Metadata({"x": tensor})).state_dict_metadata["x"]

    assert isinstance(found, TensorStorageMetadata)
    assert found.properties.memory_format == memory_format


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_dtypes_survive(dtype: torch.dtype) -> None:
    found = round_trip(Metadata({"x": make_tensor(((0,), (1,)), size=(1,), dtype=dtype)})).state_dict_metadata["x"]

    assert isinstance(found, TensorStorageMetadata)
    assert found.properties.dtype == dtype


@pytest.mark.parametrize("data", [None, {"a": 1.5}, [1, ("b", {2: None})], "text"])
def test_plain_data_of_other_planners_survives(data: Any) -> None:
    assert round_trip(Metadata({}, data)).planner_data == data


def test_a_hint_is_no_part_of_what_an_index_means() -> None:
    assert MetadataIndex("a", [0], 1) == MetadataIndex("a", torch.Size([0]), 2)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"form": 2}, NewerFormat),
        ({"form": "1"}, Corrupt),
        ({"state": {"a": 1}}, Corrupt),
        ({"state": [["a", {"type": "bytes"}, 1]]}, Corrupt),
        ({"state": [[1, {"type": "bytes"}]]}, Corrupt),
        ({"state": [["a", {"type": "other"}]]}, NewerFormat),
        ({"state": [["a", {"type": "tensor", "dtype": "float32", "size": [-1]}]]}, Corrupt),
        ({"state": [["a", {"type": "tensor", "dtype": "float1024", "size": [1]}]]}, HoldfastError),
        ({"state": [["a", {"type": "tensor", "dtype": "float32", "size": [1], "chunks": [[0]]}]]}, Corrupt),
        ({"state": [["a", {"type": "tensor", "dtype": "float32", "size": [1], "chunks": 7}]]}, Corrupt),
        ({"state": [["a", {"type": "tensor", "dtype": "float32", "size": [1], "layout": "round"}]]}, NewerFormat),
        ({"planner": ["@tensor", 0]}, Corrupt),
        ({"version": 1}, Corrupt),
    ],
)
def test_what_makes_no_sense_is_refused(change: dict[str, Any], error: type[Exception]) -> None:
    value = encode_metadata(Metadata({}))

    with pytest.raises(error):
        decode_metadata(value | change, ids=None, load_id="", what="'x'")
