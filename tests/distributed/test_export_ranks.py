"""A snapshot of many ranks, exported by one process: whole tensors, or a DCP folder for any number of ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict_loader import load

import holdfast
from tests.distributed.conftest import World
from tests.distributed.placing import Meshes, find_differences, list_cases, make_full, make_tree


def save_all(rank: int, path: Path) -> None:
    with holdfast.open(path) as store:
        store.save("all", make_tree(Meshes()))


def load_with_dcp(rank: int, folder: Path) -> list[str]:
    meshes = Meshes()
    tree = make_tree(meshes, shift=1, zero=True)
    load(tree, checkpoint_id=folder)
    return find_differences(tree, make_tree(meshes, shift=1))


@pytest.fixture(scope="module")
def store(world: World, tmp_path_factory: pytest.TempPathFactory) -> holdfast.Store:
    """Return a store with a snapshot of tensors in every placement over two ranks."""
    folder = tmp_path_factory.mktemp("ranks") / "store"
    world(2)(save_all, folder)
    return holdfast.open(folder)


def test_shards_of_two_ranks_become_whole_tensors(store: holdfast.Store, tmp_path: Path) -> None:
    full = make_full()

    store.export("all", tmp_path / "all.safetensors")

    found = load_file(tmp_path / "all.safetensors")
    assert sorted(found) == sorted(list_cases())
    for case, (name, _) in list_cases().items():
        assert (found[case].shape, found[case].dtype) == (full[name].shape, full[name].dtype), case
        ours, theirs = (each.reshape(-1).view(torch.uint8) for each in (found[case], full[name]))
        assert torch.equal(ours, theirs), case


def test_torch_loads_whole_tensors_from_a_file(store: holdfast.Store, tmp_path: Path) -> None:
    store.export("all", tmp_path / "all.pt", format="torch")

    found = torch.load(tmp_path / "all.pt", weights_only=True)
    assert torch.equal(found["large, rows and columns"], make_full()["large"])


@pytest.mark.parametrize("size", [1, 2])
def test_dcp_loads_the_folder_on_any_number_of_ranks(
    world: World, store: holdfast.Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr("holdfast.formats.writing.dcp_folder.CHUNK_BYTES", 100_000)
    store.export("all", tmp_path / "out", format="dcp")

    assert world(size)(load_with_dcp, tmp_path / "out") == [[]] * size
