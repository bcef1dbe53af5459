"""Files through a store: each method takes a name, a tag or a snapshot, and calls what the command line calls."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import holdfast
import holdfast.store as own
from holdfast import Snapshot, Store
from holdfast.cli.verbs import files as verbs
from holdfast.files import keep


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return holdfast.open(tmp_path / "s")


def test_the_store_and_the_command_line_use_the_same_functions() -> None:
    for name in ("keep_files", "plan_sources", "restore_files"):
        assert getattr(own, name) is getattr(verbs, name) is getattr(keep, name)


REFERENCES: dict[str, Callable[[Store], str | Snapshot]] = {
    "name": lambda store: "x",
    "tag": lambda store: "best",
    "snapshot": lambda store: store["x"],
}


@pytest.mark.parametrize("kind", REFERENCES)
def test_kept_files_are_restored_and_opened(store: Store, tmp_path: Path, kind: str) -> None:
    (tmp_path / "a.txt").write_bytes(b"abc")
    store.put("x", tmp_path / "a.txt")
    store.tag("best", "x")
    snapshot = REFERENCES[kind](store)

    restored = store.get(snapshot, tmp_path / "out")

    assert (restored.num_files, restored.num_bytes) == (1, 3)
    assert (tmp_path / "out/a.txt").read_bytes() == b"abc"
    with store.open_file(snapshot, "a.txt") as stream:
        assert stream.read() == b"abc"


@pytest.mark.parametrize("kind", REFERENCES)
def test_a_tree_is_exported_verified_and_imported_again(store: Store, tmp_path: Path, kind: str) -> None:
    store.save("x", {"w": torch.arange(5.0)})
    store.tag("best", "x")
    snapshot, file = REFERENCES[kind](store), tmp_path / "w.safetensors"

    store.export(snapshot, file)
    imported = store.import_(file, "again")

    assert store.verify_export(file, snapshot) == []
    assert [tensor.name for tensor in imported.receipt.tensors] == ["w"]
    assert store.verify_import(file, "again") == []
    assert torch.equal(store.load("again")["w"], torch.arange(5.0))


@pytest.mark.slow
def test_an_export_in_the_background_is_complete_once_the_store_is_closed(store: Store, tmp_path: Path) -> None:
    store.save("x", {"w": torch.arange(5.0)})

    with store:
        store.export_async("x", tmp_path / "w.safetensors")

    assert store.verify_export(tmp_path / "w.safetensors", "x") == []
