"""Folders that an export writes for transformers, read by transformers and safetensors themselves."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

import holdfast
from holdfast.errors import Unsupported
from tests.kit.exports import assert_same, make_state


@pytest.fixture
def store(tmp_path: Path) -> holdfast.Store:
    return holdfast.open(tmp_path / "store")


def _make_gpt2() -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(3)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=1, n_head=2, n_embd=32, vocab_size=64))


@pytest.mark.parametrize("max_shard_size", ["5GB", 9000])
def test_transformers_loads_the_folder_with_its_tied_weights(
    store: holdfast.Store, tmp_path: Path, max_shard_size: int | str
) -> None:
    model = _make_gpt2()
    store.save("a", {"model": model.state_dict(), "config.json": model.config.to_json_string(), "step": 4})

    done = store.export("a", tmp_path / "out", format="hf", select="model", max_shard_size=max_shard_size)

    found = type(model).from_pretrained(tmp_path / "out")
    assert_same(found.state_dict(), model.state_dict())
    assert found.lm_head.weight.data_ptr() == found.transformer.wte.weight.data_ptr()
    shards = list((tmp_path / "out").glob("model*.safetensors"))
    assert (len(shards) > 1) is (max_shard_size == 9000)
    assert [file.path for file in done.receipt.files] == ["config.json"]
    tied = {tensor.name: tensor.name_in_files for tensor in done.receipt.tensors}
    assert tied["model.lm_head.weight"] == "transformer.wte.weight"


def test_shards_and_index_contain_each_tensor_once(store: holdfast.Store, tmp_path: Path) -> None:
    pytest.importorskip("huggingface_hub", reason="needs huggingface_hub, which `make test` installs")
    state = make_state()
    store.save("a", state)

    done = store.export("a", tmp_path / "out", format="hf", select="model", max_shard_size=2000)

    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    names = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    found: dict[str, Any] = {}
    for name in names:
        shard = load_file(tmp_path / "out" / name)
        assert not found.keys() & shard.keys()
        assert {index["weight_map"][key] for key in shard} == {name}
        found |= shard
    del state["model"]["head.weight"]  # the same tensor as embed.weight
    assert_same(found, state["model"])
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in found.values())
    assert {tensor.file for tensor in done.receipt.tensors} == set(names)


def test_the_metadata_of_a_file_names_tensors_that_are_the_same(store: holdfast.Store, tmp_path: Path) -> None:
    store.save("a", make_state())

    store.export("a", tmp_path / "out", format="hf", select="model")

    with safe_open(str(tmp_path / "out" / "model.safetensors"), "pt") as file:
        assert file.metadata() == {"format": "pt", "head.weight": "embed.weight"}


def test_tensors_that_overlap_in_part_are_each_written(store: holdfast.Store, tmp_path: Path) -> None:
    base = torch.arange(20.0)
    tree = {"base": base, "part": base[5:10], "other": base[8:15]}
    store.save("a", tree)

    store.export("a", tmp_path / "out", format="hf")

    assert_same(load_file(tmp_path / "out" / "model.safetensors"), tree)


def test_files_at_the_top_of_the_tree_are_written_beside_the_weights(store: holdfast.Store, tmp_path: Path) -> None:
    tree = {"w": torch.ones(2), "config.json": "{}", "tokenizer.model": b"\x00\x01", "vocab.txt": "word\n" * 3000}
    store.save("a", tree)

    done = store.export("a", tmp_path / "out", format="hf")

    assert (tmp_path / "out" / "config.json").read_text() == "{}"
    assert (tmp_path / "out" / "tokenizer.model").read_bytes() == b"\x00\x01"
    assert (tmp_path / "out" / "vocab.txt").read_text() == "word\n" * 3000
    assert done.receipt.left_out == ()


def test_a_file_with_the_name_of_a_weight_file_is_refused(store: holdfast.Store, tmp_path: Path) -> None:
    store.save("a", {"w": torch.ones(2), "model.safetensors.index.json": "{}"})

    with pytest.raises(Unsupported, match="which is the name of a file of weights; rename it"):
        store.export("a", tmp_path / "out", format="hf")

    assert not (tmp_path / "out").exists()


def test_without_huggingface_hub_several_files_are_refused_and_one_is_written(
    store: holdfast.Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.save("a", make_state())
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)

    with pytest.raises(Unsupported, match=r"install it with: pip install 'holdfast\[hf\]'"):
        store.export("a", tmp_path / "out", format="hf", select="model", max_shard_size=2000)
    store.export("a", tmp_path / "one", format="hf", select="model")

    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "store"]
