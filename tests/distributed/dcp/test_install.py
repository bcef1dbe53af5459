"""A store installed as the default of torch.distributed.checkpoint: frameworks save to it and find checkpoints."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import _storage_utils, filesystem
from torch.distributed.checkpoint.api import CheckpointException

import holdfast
import holdfast.dcp
from holdfast.errors import Unsupported
from tests.distributed.dcp_states import dcp
from tests.kit.capabilities import needs_parameter

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
TORCH = (filesystem.FileSystemWriter, filesystem.FileSystemReader)


@pytest.fixture(autouse=True)
def _put_back() -> Iterator[None]:
    yield
    holdfast.dcp.uninstall()


def load(path: Path | str, **options: Any) -> dict[str, Any]:
    state: dict[str, Any] = {"w": torch.zeros(3), "step": 0}
    dcp.load(state, checkpoint_id=path, **options)
    return {"w": state["w"].tolist(), "step": state["step"]}


def make_state(value: float) -> dict[str, Any]:
    return {"w": torch.full((3,), float(value)), "step": int(value)}


def test_a_checkpoint_id_alone_saves_to_a_store_beside_it(tmp_path: Path) -> None:
    with holdfast.dcp.install():
        for step in (1, 2):
            dcp.save(make_state(step), checkpoint_id=tmp_path / f"step-{step}")
        found = [load(tmp_path / f"step-{step}") for step in (1, 2)]

    assert found == [{"w": [1, 1, 1], "step": 1}, {"w": [2, 2, 2], "step": 2}]
    assert [snapshot.name for snapshot in holdfast.open(tmp_path / ".holdfast").snapshots()] == ["step-1", "step-2"]


def test_frameworks_find_a_marker_where_they_look(tmp_path: Path) -> None:
    with holdfast.dcp.install():
        dcp.save(make_state(1), checkpoint_id=tmp_path / "step-1")

    assert os.listdir(tmp_path / "step-1") == [".metadata"]
    assert (tmp_path / "step-1" / ".metadata").is_file()


def test_one_store_serves_all_paths(tmp_path: Path) -> None:
    store = holdfast.open(tmp_path / "s")

    with holdfast.dcp.install(store):
        dcp.save(make_state(1), storage_writer=dcp.FileSystemWriter(tmp_path / "run" / "step-1"))
        found = load(tmp_path / "run" / "step-1")

    assert found == {"w": [1, 1, 1], "step": 1}
    assert [snapshot.name for snapshot in store.snapshots()] == [str(tmp_path / "run" / "step-1").strip("/")]


def test_the_marker_leads_to_the_store_when_another_is_installed(tmp_path: Path) -> None:
    with holdfast.dcp.install(str(tmp_path / "s")):
        dcp.save(make_state(1), checkpoint_id=tmp_path / "step-1")

    with holdfast.dcp.install():
        assert load(tmp_path / "step-1") == {"w": [1, 1, 1], "step": 1}


def test_a_path_may_be_spelled_otherwise_when_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with holdfast.dcp.install(holdfast.open(tmp_path / "s")):
        dcp.save(make_state(1), checkpoint_id="run/step-1")

        assert load(tmp_path / "run" / "step-1") == {"w": [1, 1, 1], "step": 1}


def test_a_store_and_its_markers_can_be_moved_together(tmp_path: Path) -> None:
    with holdfast.dcp.install():
        dcp.save(make_state(1), checkpoint_id=tmp_path / "run" / "step-1")
        os.rename(tmp_path / "run", tmp_path / "moved")

        assert load(tmp_path / "moved" / "step-1") == {"w": [1, 1, 1], "step": 1}


def test_what_torch_has_written_is_still_read(tmp_path: Path) -> None:
    dcp.save(make_state(4), checkpoint_id=tmp_path / "old")

    with holdfast.dcp.install():
        assert load(tmp_path / "old") == {"w": [4, 4, 4], "step": 4}


def test_all_names_are_put_back(tmp_path: Path) -> None:
    with holdfast.dcp.install():
        swapped = [module.FileSystemWriter for module in (dcp, filesystem, _storage_utils)]

    assert TORCH[0] not in swapped
    for module in (dcp, filesystem, _storage_utils):
        assert (module.FileSystemWriter, module.FileSystemReader) == TORCH


def test_a_checkpoint_is_overwritten_unless_that_is_refused(tmp_path: Path) -> None:
    with holdfast.dcp.install():
        dcp.save(make_state(1), checkpoint_id=tmp_path / "a")
        dcp.save(make_state(2), checkpoint_id=tmp_path / "a")
        with pytest.raises(CheckpointException, match="Checkpoint already exists"):
            dcp.save(make_state(3), storage_writer=dcp.FileSystemWriter(tmp_path / "a", overwrite=False))

        assert load(tmp_path / "a")["step"] == 2


def test_ids_are_what_torch_keeps_there(tmp_path: Path) -> None:
    with holdfast.dcp.install():
        writer = dcp.FileSystemWriter(tmp_path / "a")
        dcp.save(make_state(1), storage_writer=writer)
        reader = dcp.FileSystemReader(tmp_path / "a")
        meta = reader.read_metadata().storage_meta

    assert meta is not None
    assert (meta.checkpoint_id, meta.save_id, meta.load_id) == (tmp_path / "a", writer.save_id, reader.load_id)
    assert (writer.path, reader.path) == (tmp_path / "a", tmp_path / "a")


def test_a_url_is_left_to_others_and_extensions_are_refused(tmp_path: Path) -> None:
    with holdfast.dcp.install():
        assert not dcp.FileSystemWriter.validate_checkpoint_id("s3://bucket/x")
        with pytest.raises(Unsupported, match="extensions"):
            dcp.FileSystemWriter(tmp_path, _extensions=[1])


@needs_parameter("distributed.checkpoint.save", "use_collectives")
def test_without_collectives_each_rank_has_its_marker(tmp_path: Path) -> None:
    with holdfast.dcp.install():
        dcp.save(make_state(1), checkpoint_id=tmp_path / "a", use_collectives=False)

        assert os.listdir(tmp_path / "a") == ["__0.metadata"]
        assert load(tmp_path / "a") == {"w": [1, 1, 1], "step": 1}


def test_more_than_plain_values_are_loaded_if_that_is_allowed(tmp_path: Path) -> None:
    state = {"w": torch.ones(3), "step": pytest.approx}
    with holdfast.dcp.install():
        with pytest.warns(UserWarning, match="weights_only=False"):
            dcp.save(state, checkpoint_id=tmp_path / "a")
        with pytest.raises(CheckpointException, match="weights_only=False"):
            load(tmp_path / "a")
    with holdfast.dcp.install(weights_only=False):
        assert load(tmp_path / "a")["step"] is pytest.approx
