"""DCP directories: shards become one tensor, nested keys a nested tree, and the metadata is never unpickled."""

from __future__ import annotations

import os
import pickle
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

import holdfast
from holdfast.errors import BadFile, Untrusted
from holdfast.formats.reading.dcp_folder import read_dcp_folder
from holdfast.repo.files import open_source_folder
from holdfast.testing.ranks import run_ranks
from tests.kit.checkpoints import assert_same, save_dcp, save_sharded_dcp

_RUN_S = 120.0
_NEEDS_EXTENSIONS = pytest.mark.skipif(
    "transform_descriptors" not in {field.name for field in fields(_StorageInfo)}, reason="this torch has no extensions"
)


@pytest.fixture
def store(tmp_path: Path) -> holdfast.Store:
    return holdfast.open(tmp_path / "store")


def _make_state() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(600, 700, generator=generator)
    return {
        "model": {
            "weight": weight,
            "turned": weight.t().clone().t(),
            "scalar": torch.tensor(3.0, dtype=torch.bfloat16),
        },
        "optimizer": {"state": {"w": {"step": torch.tensor(4.0)}}, "groups": [{"lr": 0.1, "params": ["w"]}]},
        "list": [torch.ones(2), {"a": 1}],
        "step": 7,
        "texts": ("a", b"b", None),
    }


def test_a_nested_state_comes_back_with_its_values(store: holdfast.Store, tmp_path: Path) -> None:
    state = _make_state()
    save_dcp(state, tmp_path / "dcp")

    done = store.import_(tmp_path / "dcp", "m")

    state["model"]["turned"] = state["model"]["turned"].contiguous()  # DCP knows shapes, not strides
    loaded = store.load("m")
    assert_same({key: loaded[key] for key in state}, state)
    assert done.receipt.format == "dcp"
    assert {each.file for each in done.receipt.tensors} == {"__0_0.distcp"}
    assert store.verify_import(tmp_path / "dcp", "m") == []


def test_shards_of_two_ranks_become_one_tensor(store: holdfast.Store, tmp_path: Path) -> None:
    run_ranks(2, save_sharded_dcp, str(tmp_path / "dcp"), timeout_s=_RUN_S)

    store.import_(tmp_path / "dcp", "m")

    whole = torch.arange(1000 * 601, dtype=torch.float32).view(1000, 601)
    loaded = store.load("m")
    assert torch.equal(loaded["model"]["rows"], whole)
    assert torch.equal(loaded["model"]["columns"], whole)
    assert torch.equal(loaded["model"]["replica"], whole[:3])
    saved = store.save("from memory", {"rows": whole})
    assert saved.new_bytes == 0, "the chunks of the import are those of a save from memory"


def _change_metadata(folder: Path, change: Any) -> None:
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    path.write_bytes(pickle.dumps(change(metadata)))


def _drop_shard(metadata: Metadata) -> Metadata:
    data = {index: info for index, info in metadata.storage_data.items() if index.fqn != "model.weight"}
    return replace(metadata, storage_data=data)


def _move_to(name: str) -> Any:
    def change(metadata: Metadata) -> Metadata:
        infos = metadata.storage_data.items()
        return replace(metadata, storage_data={index: replace(info, relative_path=name) for index, info in infos})

    return change


def _lengthen(metadata: Metadata) -> Metadata:
    infos = metadata.storage_data.items()
    return replace(metadata, storage_data={index: replace(info, length=1 << 40) for index, info in infos})


def _halve(metadata: Metadata) -> Metadata:
    stored: Any = metadata.state_dict_metadata["model.weight"]
    stored.chunks[0].sizes = torch.Size([300, 700])
    return metadata


def _double(metadata: Metadata) -> Metadata:
    stored: Any = metadata.state_dict_metadata["model.weight"]
    stored.chunks.append(stored.chunks[0])
    return metadata


def _compress(metadata: Metadata) -> Metadata:
    infos = metadata.storage_data.items()
    changed = {index: replace(info, transform_descriptors=["zstd"]) for index, info in infos}
    return replace(metadata, storage_data=changed)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_drop_shard, "a shard of 'model.weight' is not stored"),
        (_move_to("../../etc/passwd"), "which is not a file of this directory"),
        (_move_to(".."), "which is not a file of this directory"),
        (_move_to("__9_9.distcp"), r"lacks the file __9_9\.distcp; copy the whole directory"),
        (_lengthen, r"__0_0\.distcp is cut off"),
        (_halve, "another shape or dtype than .metadata says"),
        (_double, "two shards cover the same items"),
        pytest.param(_compress, "is compressed by extensions of DCP", marks=_NEEDS_EXTENSIONS),
        (lambda metadata: {"a": 1}, "is not the metadata of a DCP checkpoint"),
        (lambda metadata: replace(metadata, storage_data=None), "does not list the state or the files"),
        (
            lambda metadata: replace(metadata, storage_data={MetadataIndex("x"): _StorageInfo("a", -1, 2)}),
            "a stored item has no valid place",
        ),
    ],
)
def test_metadata_that_does_not_fit_the_files_is_refused(
    store: holdfast.Store, tmp_path: Path, change: Any, reason: str
) -> None:
    save_dcp(_make_state(), tmp_path / "dcp")
    _change_metadata(tmp_path / "dcp", change)

    with pytest.raises(BadFile, match=reason):
        store.import_(tmp_path / "dcp", "m")
    assert store.snapshots() == []


class Evil:
    """Runs a command when it is unpickled."""

    def __reduce__(self) -> Any:
        return os.system, ("touch pwned",)


@pytest.mark.parametrize("is_in_value", [False, True])
def test_a_pickle_that_would_run_code_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_in_value: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    save_dcp({"a": torch.ones(2), "value": Evil()} if is_in_value else {"a": torch.ones(2)}, tmp_path / "dcp")
    if not is_in_value:
        _change_metadata(tmp_path / "dcp", lambda metadata: replace(metadata, planner_data=Evil()))

    with pytest.raises(Untrusted, match=r"contains '(posix|os)\.system'"):
        read_dcp_folder(open_source_folder(str(tmp_path / "dcp")))
    assert not (tmp_path / "pwned").exists()


def test_a_checkpoint_without_paths_is_flat(tmp_path: Path) -> None:
    save_dcp({"a": {"b": torch.ones(2)}}, tmp_path / "dcp")
    _change_metadata(tmp_path / "dcp", lambda metadata: replace(metadata, planner_data=None))

    assert list(read_dcp_folder(open_source_folder(str(tmp_path / "dcp"))).tree) == ["a.b"]
