"""Folders that an export writes for torch.distributed.checkpoint, read by torch itself."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

import holdfast
from holdfast.errors import Unsupported
from holdfast.formats.writing import dcp_folder
from holdfast.formats.writing.dcp_folder import FlatState
from holdfast.formats.writing.pickle_text import TensorRef
from tests.kit.dcp_calls import ALONE
from tests.kit.exports import assert_same, make_state


@pytest.fixture
def store(tmp_path: Path) -> holdfast.Store:
    return holdfast.open(tmp_path / "store")


def _clear(value: Any) -> Any:
    """Return the same state with other values."""
    if isinstance(value, torch.Tensor):
        return torch.zeros_like(value, memory_format=torch.contiguous_format)
    if isinstance(value, dict):
        return {key: _clear(child) for key, child in value.items()}
    return [_clear(child) for child in value] if isinstance(value, list) else None


def _quietly(call: Callable[..., Any], *arguments: Any, folder: Path) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch warns of a save or load without ranks
        return call(*arguments, checkpoint_id=folder, **ALONE)


def _load(folder: Path, target: Any) -> Any:
    _quietly(load, target, folder=folder)
    return target


@pytest.mark.parametrize("chunk_bytes", [1 << 20, 500])
def test_dcp_loads_a_training_state(
    store: holdfast.Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk_bytes: int
) -> None:
    state = make_state()
    store.save("a", state)
    monkeypatch.setattr(dcp_folder, "CHUNK_BYTES", chunk_bytes)

    done = store.export("a", tmp_path / "out", format="dcp")

    target = _load(tmp_path / "out", _clear({"model": state["model"], "optimizer": state["optimizer"], "step": 0}))
    assert_same(target["model"], state["model"])
    assert_same(target["optimizer"]["state"][0], state["optimizer"]["state"][0])
    assert target["step"] == 7
    assert done.receipt.left_out == ()


def test_items_have_the_names_and_paths_that_dcp_gives_them(store: holdfast.Store, tmp_path: Path) -> None:
    state = make_state() | {"mixed": [torch.ones(1), {"k": 2}, [3, torch.ones(2)]], "plain": [[1], [2]], "pair": (1, 2)}
    store.save("a", state)
    _quietly(save, state, folder=tmp_path / "torch")

    store.export("a", tmp_path / "out", format="dcp")

    theirs, ours = (FileSystemReader(tmp_path / name).read_metadata() for name in ("torch", "out"))
    assert sorted(ours.state_dict_metadata) == sorted(theirs.state_dict_metadata)
    assert ours.planner_data == theirs.planner_data
    assert {name: type(each) for name, each in ours.state_dict_metadata.items()} == {
        name: type(each) for name, each in theirs.state_dict_metadata.items()
    }


def test_large_tensors_are_several_chunks(
    store: holdfast.Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.save("a", {"x": torch.arange(1000.0).view(10, 100)})
    monkeypatch.setattr(dcp_folder, "CHUNK_BYTES", 1200)

    store.export("a", tmp_path / "out", format="dcp")

    stored = FileSystemReader(tmp_path / "out").read_metadata().state_dict_metadata["x"]
    assert isinstance(stored, TensorStorageMetadata)
    assert [tuple(chunk.sizes) for chunk in stored.chunks] == [(3, 100)] * 3 + [(1, 100)]


def test_torch_converts_the_folder_with_its_nested_containers(store: holdfast.Store, tmp_path: Path) -> None:
    state = {"a": {"b": [torch.ones(2), {"c": torch.zeros(1)}]}, "groups": [{"lr": 0.1, "params": [0, 1]}], "n": [1, 2]}
    store.save("a", state)

    store.export("a", tmp_path / "out", format="dcp")

    dcp_to_torch_save(tmp_path / "out", tmp_path / "a.pt")
    found = torch.load(tmp_path / "a.pt", weights_only=True)
    assert torch.equal(found["a"]["b"][0], torch.ones(2))
    assert torch.equal(found["a"]["b"][1]["c"], torch.zeros(1))
    assert (found["groups"], found["n"]) == (state["groups"], state["n"])


def test_tied_tensors_are_stored_once(store: holdfast.Store, tmp_path: Path) -> None:
    tensor = torch.randn(50_000)
    store.save("a", {"x": tensor, "y": tensor})

    store.export("a", tmp_path / "out", format="dcp")

    assert (tmp_path / "out" / "__0_0.distcp").stat().st_size < 1.5 * tensor.nbytes
    target = _load(tmp_path / "out", {"x": torch.zeros(50_000), "y": torch.zeros(50_000)})
    assert torch.equal(target["x"], tensor)
    assert torch.equal(target["y"], tensor)


def test_files_are_limited_in_size(store: holdfast.Store, tmp_path: Path) -> None:
    tree = {f"x{number}": torch.full((1000,), float(number)) for number in range(5)}
    store.save("a", tree)

    store.export("a", tmp_path / "out", format="dcp", max_shard_size=12_000)

    assert len(list((tmp_path / "out").glob("*.distcp"))) > 1
    assert_same(_load(tmp_path / "out", _clear(tree)), tree)


def test_a_tensor_alone_gets_a_name(store: holdfast.Store, tmp_path: Path) -> None:
    store.save("a", {"model": {"w": torch.ones(3)}})

    store.export("a", tmp_path / "out", format="dcp", select="model.w")

    assert torch.equal(_load(tmp_path / "out", {"w": torch.zeros(3)})["w"], torch.ones(3))


def test_what_dcp_cannot_express_is_reported() -> None:
    state = FlatState()

    state.add({"empty": {}, "pair": (TensorRef(1), 2), "plain": (1, 2)}, ("x",))

    assert state.values == {"x.pair.0": TensorRef(1), "x.pair.1": 2, "x.plain": (1, 2)}
    assert [(each.name, each.reason) for each in state.left_out] == [
        ("x.empty", "an empty dict: DCP has values only"),
        ("x.pair", "a tuple of tensors, written as a list"),
    ]


def test_two_values_of_one_name_are_refused() -> None:
    state = FlatState()
    state.add(1, ("a.b",))

    with pytest.raises(Unsupported, match=r"two values would both be called 'a\.b' in DCP"):
        state.add({"b": 2}, ("a",))
