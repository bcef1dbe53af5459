"""What a notebook shows of a snapshot, and offers as keys; nothing of it reads a tensor."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import holdfast
from holdfast.snapshot.display import complete_keys
from tests.unit.display.test_markup import Reader

LAYERS = 5


def make_state() -> dict[str, object]:
    layers = {str(number): {"weight": torch.ones(64, 64), "bias": torch.ones(64)} for number in range(LAYERS)}
    model = {"embed": torch.ones(10, 64), "layers": layers}
    return {"model": model, "rng": holdfast.RngState(), "step": 7, "sparse": torch.eye(3).to_sparse(), "<i>": 1}


@pytest.fixture
def store(tmp_path: Path) -> holdfast.Store:
    """A store with one snapshot of a model of several layers, and a tag with markup in its metadata."""
    store = holdfast.open(tmp_path / "ckpts")
    store.save("run/1", make_state(), metadata={"loss": 0.25, "note": "<b>bold</b>"})
    store.tag("best", "run/1")
    return store


def damage_packs(store: holdfast.Store) -> None:
    """Make every tensor unreadable; manifests stay as they are."""
    for pack in Path(store.url, "packs").rglob("*"):
        if pack.is_file():
            pack.chmod(0o644)
            pack.write_bytes(b"")


def test_the_card_of_a_snapshot_folds_layers_and_reads_no_tensor(store: holdfast.Store) -> None:
    damage_packs(store)

    text = Reader(store["run/1"]._repr_html_()).text

    assert "model.layers.#.weight5 x float32 (64, 64)80.0 KiB" in text
    assert "model.embedfloat32 (10, 64)2.5 KiB" in text
    assert "RNG state" in text
    assert "step7" in text
    assert "sparse_coo" in text
    assert "metadata: loss 0.25, note <b>bold</b>" in text
    assert "python.words" not in text


def test_the_card_of_a_part_lists_its_leaves(store: holdfast.Store) -> None:
    text = Reader(store["run/1"]["model"]._repr_html_()).text

    assert "run/1: model" in text
    assert "model.layers.#.bias" in text
    assert "step" not in text


def test_the_card_of_a_tensor_shows_dtype_shape_and_share_of_the_snapshot(store: holdfast.Store) -> None:
    text = Reader(store["run/1"]["model.embed"]._repr_html_()).text

    assert "float32 (10, 64)" in text
    assert "2.5 KiB" in text
    assert "% of run/1" in text


def test_the_card_of_a_store_lists_snapshots_with_tags_and_metadata(store: holdfast.Store) -> None:
    text = Reader(store._repr_html_()).text

    assert "snapshots 1" in text
    assert "run/1" in text
    assert "best" in text
    assert "loss 0.25" in text


def test_the_card_of_an_empty_store_says_how_to_begin(tmp_path: Path) -> None:
    assert "store.save(" in Reader(holdfast.open(tmp_path / "new")._repr_html_()).text
    assert not (tmp_path / "new").exists()


def test_keys_are_the_names_of_leaves_and_of_groups(store: holdfast.Store) -> None:
    snapshot = store["run/1"]

    keys = snapshot._ipython_key_completions_()

    assert {"model", "model.layers", "model.layers.0", "model.layers.0.weight", "step"} <= set(keys)
    assert len(keys) == len(set(keys))
    for key in keys:
        assert key in snapshot
    assert "layers.0.weight" in snapshot["model"]._ipython_key_completions_()


def test_completed_keys_of_a_flat_mapping_are_its_names() -> None:
    assert complete_keys(["a", "b"]) == ["a", "b"]


def test_reprs_show_sizes_with_units(store: holdfast.Store) -> None:
    snapshot = store["run/1"]

    assert repr(snapshot["model.embed"]) == "<LazyTensor 'model.embed' (10, 64) torch.float32, 2.5 KiB>"
    assert repr(snapshot["model"]) == "<View 'model': 11 leaves, 83.8 KiB>"
    assert repr(snapshot).startswith("<Snapshot 'run/1' ")
    assert repr(snapshot).endswith(" KiB>")
