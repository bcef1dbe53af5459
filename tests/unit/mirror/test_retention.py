"""Snapshots that a mirror lacks are not pruned."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import holdfast
from holdfast.mirror.recorded import record_mirror
from holdfast.mirror.retention import keep_unmirrored
from holdfast.mirror.setting import MirrorSetting
from holdfast.repo.handle.repository import Repository
from holdfast.repo.names.snapshots import delete_snapshot
from holdfast.repo.upkeep.prune import Keep, PrunePlan, read_prune_plan
from holdfast.repo.upkeep.transfer import copy_snapshot
from tests.kit.s3_server import S3Server
from tests.kit.saving import save_bytes, snapshot_of


@pytest.fixture
def steps(local: Repository) -> Repository:
    for step in (1, 2, 3):
        save_bytes(local, f"run/{step}", {"x": str(step).encode()})
    return local


def plan(repo: Repository) -> PrunePlan:
    return keep_unmirrored(repo, read_prune_plan(repo.store, "run/", Keep(last=1)))


def doomed(repo: Repository) -> list[str]:
    return [each.name for each in plan(repo).delete]


def test_without_a_mirror_nothing_changes(steps: Repository) -> None:
    assert doomed(steps) == ["run/1", "run/2"]


def test_only_what_the_mirror_has_is_pruned(steps: Repository, setting: MirrorSetting) -> None:
    record_mirror(steps, setting.url, "all")
    assert doomed(steps) == []
    copy_snapshot(steps, snapshot_of(steps, "run/1"), setting.open(steps.budget_bytes))
    assert doomed(steps) == ["run/1"]
    reasons = {each.snapshot.name: each.reasons for each in plan(steps).verdicts}
    assert reasons["run/2"] == (f"not in its mirror {setting.url} yet",)


def test_other_content_in_the_mirror_is_no_copy(steps: Repository, setting: MirrorSetting) -> None:
    record_mirror(steps, setting.url, "all")
    save_bytes(setting.open(steps.budget_bytes), "run/1", {"x": b"other"})
    assert doomed(steps) == []
    assert "saved later" in plan(steps).verdicts[0].reasons[0]


def test_what_was_deleted_in_the_mirror_on_purpose_is_pruned_here(steps: Repository, setting: MirrorSetting) -> None:
    record_mirror(steps, setting.url, "all")
    there = setting.open(steps.budget_bytes)
    copy_snapshot(steps, snapshot_of(steps, "run/1"), there)
    delete_snapshot(there.store, "run/1")
    assert doomed(steps) == ["run/1"]


def test_a_mirror_of_single_saves_protects_only_those(steps: Repository, setting: MirrorSetting) -> None:
    record_mirror(steps, setting.url, "named")
    assert doomed(steps) == ["run/1", "run/2"]


def test_a_mirror_that_cannot_be_reached_protects_everything(
    steps: Repository, bucket: MirrorSetting, server: S3Server
) -> None:
    record_mirror(steps, bucket.url, "all")
    server.fault_of = lambda request: "403"
    assert doomed(steps) == []
    assert "cannot be read" in plan(steps).verdicts[0].reasons[0]


def test_a_store_prunes_what_was_uploaded(tmp_path: Path) -> None:
    with holdfast.open(tmp_path / "here", mirror=tmp_path / "there") as store:
        store.save("run/1", {"w": torch.ones(4)})
        assert store.mirror is not None
        store.mirror.wait()
        store.save("run/2", {"w": torch.zeros(4)})
        store.mirror.wait()
        assert [each.name for each in store.prune("run/", keep_last=1).deleted] == ["run/1"]
    assert set(holdfast.open(tmp_path / "there")) == {"run/1", "run/2"}


def test_a_manager_keeps_what_the_mirror_lacks(tmp_path: Path, server: S3Server) -> None:
    server.fault_of = lambda request: "403"
    with (
        holdfast.open(tmp_path / "here", mirror="s3://bucket/m", mirror_wait=False) as store,
        store.manager("run/", every=1, keep_last=1) as manager,
    ):
        for step in range(2):
            manager.step(step, {"w": torch.full((4,), float(step))})
            manager.wait()
    assert len(holdfast.open(tmp_path / "here")) == 2
