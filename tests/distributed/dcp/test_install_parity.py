"""A state dict is loaded with the same result from torch's own files and from an installed store."""

from __future__ import annotations

import io
import tempfile
import warnings
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import holdfast.dcp
from tests.distributed.dcp_states import dcp
from tests.kit.dcp_calls import ALONE, ALONE_LATER, IN_THREAD

DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn])
SHAPES = st.lists(st.integers(0, 4), max_size=3)


def make_tensor(shape: list[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel()).view(shape).to(dtype)


VALUES = st.one_of(
    st.builds(make_tensor, SHAPES, DTYPES),
    st.builds(lambda dtype: make_tensor([3, 2], dtype).t(), DTYPES),
    st.none(),
    st.booleans(),
    st.integers(-(1 << 70), 1 << 70),
    st.floats(allow_nan=False),
    st.text(max_size=4),
    st.binary(max_size=4),
    st.binary(max_size=4).map(io.BytesIO),
    st.lists(st.integers(), max_size=3),
    st.tuples(st.integers(), st.text(max_size=2)),
    st.builds(lambda tensor: [tensor, 3], st.builds(make_tensor, SHAPES, DTYPES)),
    st.builds(lambda tensor: (tensor, 3), st.builds(make_tensor, SHAPES, DTYPES)),
    st.sets(st.integers(), max_size=2),
)
KEYS = st.text("abc_", min_size=1, max_size=3)
STATES = st.dictionaries(KEYS, st.one_of(VALUES, st.dictionaries(KEYS, VALUES, min_size=1, max_size=3)), max_size=4)


@pytest.fixture(autouse=True)
def _put_back() -> Iterator[None]:
    yield
    holdfast.dcp.uninstall()


def outline(value: Any) -> Any:
    """Return a value with all types and bits spelled out."""
    if isinstance(value, torch.Tensor):
        return (str(value.dtype), tuple(value.shape), value.contiguous().flatten().view(torch.uint8).tolist())
    if isinstance(value, io.BytesIO):
        return ("stream", value.getvalue(), value.tell())
    if isinstance(value, dict):
        return {key: outline(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return (type(value).__name__, [outline(each) for each in value])
    return (type(value).__name__, repr(value))


def blank(value: Any) -> Any:
    """Return a target for a load: tensors of zeros where there were tensors, and other values elsewhere."""
    if isinstance(value, torch.Tensor):
        return torch.zeros_like(value)
    if isinstance(value, dict):
        return {key: blank(each) for key, each in value.items()}
    if isinstance(value, list):
        return [blank(each) for each in value]
    return value


def save_and_load(state: dict[str, Any], path: Path, *, is_async: bool) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "torch.distributed is (disabled|unavailable)|.*is deprecated")
        if is_async:
            dcp.async_save(state, checkpoint_id=path, **IN_THREAD, **ALONE_LATER).result()
        else:
            dcp.save(state, checkpoint_id=path, **ALONE)
        loaded = blank(deepcopy(state))
        dcp.load(loaded, checkpoint_id=path, **ALONE)
    return outline(loaded)


@settings(max_examples=6)
@given(STATES, st.booleans())
def test_a_store_gives_back_what_torchs_files_give_back(state: dict[str, Any], is_async: bool) -> None:
    compare(state, is_async=is_async)


@pytest.mark.slow
@settings(max_examples=100)
@given(STATES, st.booleans())
def test_a_store_gives_back_what_torchs_files_give_back_many_times(state: dict[str, Any], is_async: bool) -> None:
    compare(state, is_async=is_async)


def compare(state: dict[str, Any], *, is_async: bool) -> None:
    with tempfile.TemporaryDirectory() as place:
        theirs = save_and_load(state, Path(place, "theirs"), is_async=is_async)
        with holdfast.dcp.install():
            ours = save_and_load(state, Path(place, "ours"), is_async=is_async)
            # What torch has written is read beside it.
            again = blank(deepcopy(state))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                dcp.load(again, checkpoint_id=Path(place, "theirs"), **ALONE)

    assert ours == theirs == outline(again) == outline(state)
