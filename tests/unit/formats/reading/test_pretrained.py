"""Folders of `save_pretrained`: weights in one file or shards, and every other file carried along."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import holdfast
from holdfast.errors import BadFile
from holdfast.formats.reading.safetensors_file import list_weights, read_folder
from holdfast.repo.files import open_source_folder
from tests.kit.checkpoints import assert_same


@pytest.fixture
def store(tmp_path: Path) -> holdfast.Store:
    return holdfast.open(tmp_path / "store")


def _make_model() -> Any:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=32, vocab_size=100, n_positions=16)
    return transformers.GPT2LMHeadModel(config)


@pytest.mark.parametrize("max_shard_size", ["5GB", "40KB"])
def test_a_model_of_transformers_comes_back_with_its_files(
    store: holdfast.Store, tmp_path: Path, max_shard_size: str
) -> None:
    model = _make_model()
    model.save_pretrained(tmp_path / "model", max_shard_size=max_shard_size)

    done = store.import_(tmp_path / "model", "m")

    loaded = store.load("m")
    assert done.receipt.format == "hf"
    assert_same(loaded, {name: model.state_dict()[name].detach() for name in loaded})
    missing, unexpected = _make_model().load_state_dict(loaded, strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])  # tied: transformers stores it once
    for name in ("config.json", "generation_config.json"):
        with store.open_file("m", name) as file:
            assert file.read() == (tmp_path / "model" / name).read_bytes()
    assert {file.path for file in done.receipt.files} == {"config.json", "generation_config.json"}
    assert (len({each.file for each in done.receipt.tensors}) > 1) == (max_shard_size == "40KB")
    assert store.verify_import(tmp_path / "model", "m") == []


@pytest.mark.parametrize("sharded", [False, True])
def test_weights_of_torch_save_are_read_too(store: holdfast.Store, tmp_path: Path, sharded: bool) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    state = {"a": torch.randn(4), "b": torch.randn(5)}
    if sharded:
        torch.save({"a": state["a"]}, folder / "pytorch_model-00001-of-00002.bin")
        torch.save({"b": state["b"]}, folder / "pytorch_model-00002-of-00002.bin")
        names = {name: f"pytorch_model-0000{number}-of-00002.bin" for number, name in enumerate(state, 1)}
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    else:
        torch.save(state, folder / "pytorch_model.bin")

    done = store.import_(folder, "m")

    assert_same(store.load("m"), state)
    assert [file.path for file in done.receipt.files] == ["config.json"]


def _write_shards(folder: Path, shards: dict[str, dict[str, torch.Tensor]], weight_map: dict[str, str] | None) -> None:
    folder.mkdir()
    for name, state in shards.items():
        save_file(state, folder / name)
    if weight_map is not None:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize(
    ("shards", "weight_map", "reason"),
    [
        ({"1": ["a"], "2": ["a"]}, None, r"'a' is in 1.safetensors and in 2.safetensors; remove the shard that is old"),
        ({"1": ["a"]}, {"a": "1", "b": "2"}, r"names files that are missing: 2.safetensors"),
        (
            {"1": ["a"], "2": ["b"]},
            {"a": "2", "b": "1"},
            r"the index says that 'a' is in 2.safetensors, and it is in 1",
        ),
        ({"1": ["a", "c"]}, {"a": "1"}, r"the index says that 'c' is in no file"),
        ({"1": ["a"], "2": ["b"]}, {"a": "1"}, r"2.safetensors is not in model.safetensors.index.json"),
    ],
)
def test_an_index_that_does_not_fit_its_shards_is_refused(
    store: holdfast.Store,
    tmp_path: Path,
    shards: dict[str, list[str]],
    weight_map: dict[str, str] | None,
    reason: str,
) -> None:
    named = {f"{name}.safetensors": {key: torch.ones(2) for key in keys} for name, keys in shards.items()}
    index = None if weight_map is None else {key: f"{name}.safetensors" for key, name in weight_map.items()}
    _write_shards(tmp_path / "model", named, index)

    with pytest.raises(BadFile, match=reason):
        store.import_(tmp_path / "model", "m")
    assert store.snapshots() == []


def test_a_folder_without_other_files_has_the_format_of_its_weights(tmp_path: Path) -> None:
    _write_shards(tmp_path / "model", {"m.safetensors": {"a": torch.ones(1)}}, None)

    assert read_folder(open_source_folder(str(tmp_path / "model")), "safetensors").format == "safetensors"
    (tmp_path / "older").mkdir()
    torch.save({"a": torch.ones(1)}, tmp_path / "older" / "pytorch_model.bin")
    assert read_folder(open_source_folder(str(tmp_path / "older")), "torch").format == "torch"
    assert list_weights(["m.safetensors", "x"]) == {"safetensors": ["m.safetensors"]}
