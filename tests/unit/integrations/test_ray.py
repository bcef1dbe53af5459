"""Checkpoints of Ray Train: where they are, what Ray gets, what is deleted.

Ray's context and its `report` are replaced by a double here; tests/integration/frameworks/test_ray_kill.py runs Ray.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import holdfast
from holdfast.errors import NotFound, Unsupported

pytest.importorskip("ray.train", reason="needs Ray Train, which `make test` installs")

import pyarrow.fs  # after the test for the library
import ray.train
import ray.train.collective

from holdfast.integrations.ray import RayCheckpoints  # likewise


class FakeRay:
    """Does what Ray does for one worker: gives it a context, uploads, and remembers the last checkpoint."""

    def __init__(self, folder: Path) -> None:
        self.world_size = 1
        self.filesystem: Any = pyarrow.fs.LocalFileSystem()
        self.checkpoint: Any = None
        self.reports: list[dict[str, Any]] = []
        self._folder = folder

    def get_context(self) -> Any:
        storage = SimpleNamespace(storage_filesystem=self.filesystem, experiment_fs_path=str(self._folder / "exp"))
        return SimpleNamespace(
            get_storage=lambda: storage,
            get_world_size=lambda: self.world_size,
            get_world_rank=lambda: 0,
            get_experiment_name=lambda: "exp",
        )

    def report(
        self, metrics: Any, *, checkpoint: Any, checkpoint_upload_fn: Callable[..., Any], **options: Any
    ) -> None:
        self.checkpoint = checkpoint_upload_fn(checkpoint, options["checkpoint_dir_name"])
        self.reports.append({"metrics": metrics, **options})


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    made = FakeRay(tmp_path)
    monkeypatch.setattr(ray.train, "get_context", made.get_context)
    monkeypatch.setattr(ray.train, "report", made.report)
    monkeypatch.setattr(ray.train, "get_checkpoint", lambda: made.checkpoint)
    monkeypatch.setattr(ray.train.collective, "broadcast_from_rank_zero", lambda value: value)
    return made


@pytest.mark.parametrize("async_", [True, False])
def test_a_worker_resumes_from_what_it_has_reported(fake: FakeRay, async_: bool) -> None:
    RayCheckpoints({"weight": torch.arange(4.0), "step": 3}, async_=async_).report({"loss": 0.5})
    state: dict[str, Any] = {"weight": torch.zeros(4), "step": 0}

    assert RayCheckpoints(state).is_resumed

    assert state["step"] == 3
    assert torch.equal(state["weight"], torch.arange(4.0))


def test_a_run_without_a_checkpoint_begins_anew(fake: FakeRay) -> None:
    state = {"step": 0}

    assert not RayCheckpoints(state).is_resumed
    assert state == {"step": 0}


def test_the_checkpoint_that_ray_gets_is_inside_the_experiment(fake: FakeRay, tmp_path: Path) -> None:
    RayCheckpoints({"step": 3}).report({}, checkpoint_dir_name="step-3")

    assert fake.checkpoint.path == str(tmp_path / "exp" / "step-3")
    assert fake.checkpoint.filesystem == fake.filesystem
    assert torch.load(tmp_path / "exp" / "step-3" / "state.pt") == {"step": 3}


def test_metrics_and_options_are_passed_on(fake: FakeRay) -> None:
    RayCheckpoints({"step": 3}, async_=False).report({"loss": 0.5, "note": "x"}, validation=True)

    report = fake.reports[0]
    assert report["metrics"] == {"loss": 0.5, "note": "x"}
    assert report["validation"] is True
    assert report["checkpoint_upload_mode"] is ray.train.CheckpointUploadMode.SYNC


def test_ray_deletes_nothing_after_the_upload(fake: FakeRay) -> None:
    RayCheckpoints({"step": 3}).report({})

    assert fake.reports[0]["checkpoint_upload_mode"] is ray.train.CheckpointUploadMode.ASYNC
    assert fake.reports[0]["delete_local_checkpoint_after_upload"] is False


def test_numbers_among_the_metrics_are_in_the_metadata(fake: FakeRay, tmp_path: Path) -> None:
    RayCheckpoints({"step": 3}).report({"loss": 0.5, "note": "x", "bad": float("nan"), "flag": True})

    assert holdfast.open(tmp_path / "exp" / "holdfast").snapshots()[0].metadata["metrics"] == {"loss": 0.5}


def test_what_ray_has_deleted_is_deleted_from_the_store_at_the_next_report(fake: FakeRay, tmp_path: Path) -> None:
    checkpoints = RayCheckpoints({"step": 0})
    for step in (1, 2):
        checkpoints.report({}, checkpoint_dir_name=f"step-{step}")
    shutil.rmtree(tmp_path / "exp" / "step-1")

    checkpoints.report({}, checkpoint_dir_name="step-3")

    found = holdfast.open(tmp_path / "exp" / "holdfast").snapshots()
    assert [each.name for each in found] == ["exp/step-2", "exp/step-3"]


def test_checkpoints_of_an_experiment_of_the_same_name_elsewhere_are_not_deleted(fake: FakeRay, tmp_path: Path) -> None:
    shared = holdfast.open(tmp_path / "shared")
    RayCheckpoints({"step": 1}, store=shared).report({}, checkpoint_dir_name="step-1")
    fake._folder = tmp_path / "elsewhere"

    RayCheckpoints({"step": 2}, store=shared).report({}, checkpoint_dir_name="step-2")

    assert [each.name for each in shared.snapshots()] == ["exp/step-1", "exp/step-2"]


def test_another_store_may_be_shared_by_experiments(fake: FakeRay, tmp_path: Path) -> None:
    shared = holdfast.open(tmp_path / "shared")
    shared.save("other/step-1", {"step": 1})

    RayCheckpoints({"step": 3}, store=shared).report({}, checkpoint_dir_name="step-3")

    assert [each.name for each in shared.snapshots()] == ["exp/step-3", "other/step-1"]
    state = {"step": 0}
    RayCheckpoints(state, store=tmp_path / "unused")
    assert state == {"step": 3}


def test_an_experiment_that_was_moved_resumes(fake: FakeRay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    RayCheckpoints({"step": 3}).report({}, checkpoint_dir_name="step-3")
    moved = tmp_path / "moved"
    (tmp_path / "exp").rename(tmp_path / "new")
    moved.mkdir()
    (tmp_path / "new").rename(moved / "exp")
    fake._folder = moved
    fake.checkpoint = ray.train.Checkpoint(str(moved / "exp" / "step-3"), fake.filesystem)
    state = {"step": 0}

    assert RayCheckpoints(state).is_resumed
    assert state == {"step": 3}


def test_a_checkpoint_of_another_kind_is_refused(fake: FakeRay, tmp_path: Path) -> None:
    fake.checkpoint = ray.train.Checkpoint.from_directory(tmp_path)

    with pytest.raises(NotFound, match=r"has no state\.pt"):
        RayCheckpoints({"step": 0})


def test_storage_that_is_no_directory_is_refused(fake: FakeRay) -> None:
    fake.filesystem = SimpleNamespace(type_name="s3")

    with pytest.raises(Unsupported, match="storage_path is on s3"):
        RayCheckpoints({"step": 0})


def test_several_workers_need_torch_distributed(fake: FakeRay) -> None:
    fake.world_size = 2

    with pytest.raises(Unsupported, match="TorchTrainer"):
        RayCheckpoints({"step": 0})
