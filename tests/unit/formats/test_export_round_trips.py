"""In and out again: files of the real libraries are imported, exported, and read back by the libraries, bit for bit."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

import holdfast
from holdfast.dcp import StorageWriter
from tests.kit.dcp_calls import ALONE
from tests.kit.exports import assert_same, make_state


@pytest.fixture
def store(tmp_path: Path) -> holdfast.Store:
    return holdfast.open(tmp_path / "store")


def _make_weights() -> dict[str, Any]:
    weights = {name: tensor.clone().contiguous() for name, tensor in make_state()["model"].items()}
    return {name: tensor for name, tensor in weights.items() if name != "head.weight"}


def test_a_safetensors_file_comes_back(store: holdfast.Store, tmp_path: Path) -> None:
    save_file(_make_weights(), tmp_path / "in.safetensors")

    taken = store.import_(tmp_path / "in.safetensors", "a")
    given = store.export("a", tmp_path / "out.safetensors")

    assert_same(load_file(tmp_path / "out.safetensors"), load_file(tmp_path / "in.safetensors"))
    assert {each.name: each.source for each in given.receipt.tensors} == {
        each.name: each.result for each in taken.receipt.tensors
    }


def test_a_torch_file_comes_back_with_views_and_values(store: holdfast.Store, tmp_path: Path) -> None:
    state = make_state()
    torch.save(state, tmp_path / "in.pt")

    store.import_(tmp_path / "in.pt", "a")
    store.export("a", tmp_path / "out.pt", format="torch")

    found = torch.load(tmp_path / "out.pt", weights_only=True)
    assert_same(found["model"], state["model"])
    assert found["optimizer"]["param_groups"] == state["optimizer"]["param_groups"]
    assert (found["step"], found["note"], found["rates"]) == (7, "a note", [0.1, 0.2])
    assert found["model"]["turned"].stride() == state["model"]["turned"].stride()
    assert found["model"]["embed.weight"].data_ptr() == found["model"]["head.weight"].data_ptr()


def test_a_dcp_folder_comes_back(store: holdfast.Store, tmp_path: Path) -> None:
    state = {"model": _make_weights(), "step": 7, "groups": [{"lr": 0.5}]}
    target: dict[str, Any] = {
        "model": {name: torch.zeros_like(each) for name, each in state["model"].items()},  # type: ignore[attr-defined]
        "step": 0,
        "groups": [{"lr": 0.0}],
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch warns of a save or load without ranks
        save(state, checkpoint_id=tmp_path / "in", **ALONE)
        store.import_(tmp_path / "in", "a")
        store.export("a", tmp_path / "out", format="dcp")
        load(target, checkpoint_id=tmp_path / "out", **ALONE)

    assert_same(target["model"], state["model"])  # type: ignore[arg-type]
    assert (target["step"], target["groups"]) == (7, [{"lr": 0.5}])


@pytest.mark.parametrize("max_shard_size", ["5GB", "10KB"])
def test_a_pretrained_folder_comes_back_with_its_files(
    store: holdfast.Store, tmp_path: Path, max_shard_size: str
) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(5)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=1, n_head=2, n_embd=32, vocab_size=64))
    model.save_pretrained(tmp_path / "in")

    store.import_(tmp_path / "in", "a")
    done = store.export("a", tmp_path / "out", format="hf", max_shard_size=max_shard_size)

    assert (tmp_path / "out" / "config.json").read_bytes() == (tmp_path / "in" / "config.json").read_bytes()
    assert {file.path for file in done.receipt.files} == {"config.json", "generation_config.json"}
    assert_same(type(model).from_pretrained(tmp_path / "out").state_dict(), model.state_dict())
    assert store.verify_export(tmp_path / "out", "a") == []


def test_a_snapshot_of_the_dcp_plug_in_becomes_a_torch_file(store: holdfast.Store, tmp_path: Path) -> None:
    state = {"model": _make_weights(), "step": 7, "groups": [{"lr": 0.5, "betas": (0.9, 0.99)}]}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch warns of a save without ranks
        save(state, checkpoint_id="a", storage_writer=StorageWriter(store), **ALONE)

    store.export("a", tmp_path / "out.pt", format="torch")

    found = torch.load(tmp_path / "out.pt", weights_only=True)
    assert_same(found["model"], state["model"])  # type: ignore[arg-type]
    assert (found["step"], found["groups"]) == (7, state["groups"])
