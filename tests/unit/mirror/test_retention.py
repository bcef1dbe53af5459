"""Snapshots of which a mirror has no copy that can be proven are not pruned."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast.mirror.mirror import Mirror
from holdfast.mirror.retention import keep_unmirrored
from holdfast.mirror.setting import MirrorSetting, record_mirror
from holdfast.objects.cloud.cloud_store import CloudStore
from holdfast.objects.memory import MemoryStore
from holdfast.objects.storage_options import StorageOptions
from holdfast.repo.handle.repository import Repository, open_repository
from holdfast.repo.names.snapshots import delete_snapshot
from holdfast.repo.upkeep.collect import publish_mark
from holdfast.repo.upkeep.prune import Keep, PrunePlan, read_prune_plan
from holdfast.repo.upkeep.transfer import copy_snapshot
from tests.kit.rounds import count_rounds
from tests.kit.s3_server import BUCKET, S3Server, Stored, serve_s3
from tests.kit.saving import keys, new_repo, noise, pack_of, save_bytes, snapshot_of


@pytest.fixture
def steps(local: Repository) -> Repository:
    for step in (1, 2, 3):
        save_bytes(local, f"run/{step}", {"x": noise(5000, step)})
    return local


@pytest.fixture
def memory() -> Repository:
    """Three steps in a store that a thread of this process uploads, not another process."""
    repo = new_repo(MemoryStore())
    for step in (1, 2, 3):
        save_bytes(repo, f"run/{step}", {"x": noise(5000, step)})
    return repo


def upload(repo: Repository, setting: MirrorSetting, *, options: StorageOptions | None = None) -> Mirror:
    """Attach a mirror to a handle, and upload all that it lacks."""
    mirror = Mirror(repo, replace(setting, wait=False, options=options or setting.options))
    mirror.sync()
    return mirror


def plan(repo: Repository) -> PrunePlan:
    return keep_unmirrored(repo, read_prune_plan(repo.store, "run/", Keep(last=1)))


def doomed(repo: Repository) -> list[str]:
    return [each.name for each in plan(repo).delete]


def test_without_a_mirror_nothing_changes(steps: Repository) -> None:
    assert doomed(steps) == ["run/1", "run/2"]


def test_only_what_the_mirror_has_is_pruned(local: Repository, setting: MirrorSetting) -> None:
    save_bytes(local, "run/1", {"x": b"1"})
    upload(local, setting)
    for step in (2, 3):
        save_bytes(local, f"run/{step}", {"x": b"later"})
    assert doomed(local) == ["run/1"]
    reasons = {each.snapshot.name: each.reasons for each in plan(local).verdicts}
    assert reasons["run/2"] == (f"not in its mirror {setting.url} yet",)


def test_a_mirror_that_nothing_was_uploaded_to_proves_nothing(steps: Repository, setting: MirrorSetting) -> None:
    record_mirror(steps, setting.url, "all")
    assert doomed(steps) == []
    for step in (1, 2):
        copy_snapshot(steps, snapshot_of(steps, f"run/{step}"), setting.open(steps.budget_bytes))
    assert doomed(steps) == []
    assert "nothing was uploaded to it; `holdfast mirror" in plan(steps).verdicts[0].reasons[0]
    upload(open_repository(steps.store), setting)
    assert doomed(steps) == ["run/1", "run/2"]


def test_other_content_in_the_mirror_is_no_copy(steps: Repository, setting: MirrorSetting) -> None:
    upload(steps, setting)
    save_bytes(setting.open(steps.budget_bytes), "run/1", {"x": b"other"}, overwrite=True)
    delete_snapshot(setting.open(steps.budget_bytes).store, "run/2")
    save_bytes(setting.open(steps.budget_bytes), "run/2", {"x": b"other"})
    assert doomed(steps) == []
    assert "saved later" in plan(steps).verdicts[0].reasons[0]


def test_what_was_deleted_in_the_mirror_on_purpose_is_pruned_here(steps: Repository, setting: MirrorSetting) -> None:
    upload(steps, setting)
    delete_snapshot(setting.open(steps.budget_bytes).store, "run/1")
    assert doomed(steps) == ["run/1", "run/2"]


def test_a_mirror_of_single_saves_protects_only_those(steps: Repository, setting: MirrorSetting) -> None:
    record_mirror(steps, setting.url, "named")
    assert doomed(steps) == ["run/1", "run/2"]


def test_a_mirror_that_cannot_be_reached_protects_everything(
    steps: Repository, bucket: MirrorSetting, server: S3Server
) -> None:
    upload(steps, bucket)
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


def with_server(setting: MirrorSetting, place: S3Server) -> MirrorSetting:
    return replace(setting, options=StorageOptions(place.options))


def test_a_mirror_is_asked_with_the_options_that_it_was_opened_with(steps: Repository, bucket: MirrorSetting) -> None:
    with serve_s3() as place:
        upload(steps, with_server(bucket, place))
        assert doomed(steps) == ["run/1", "run/2"]


def test_without_the_options_of_a_mirror_no_other_server_is_asked(
    steps: Repository, bucket: MirrorSetting, server: S3Server
) -> None:
    with serve_s3() as place:
        upload(steps, with_server(bucket, place))
    # The server of the environment has the same objects, but it is another place, and perhaps an old copy.
    server.objects |= place.objects
    server.requests.clear()
    other = open_repository(steps.store)
    assert doomed(other) == []
    names = "access_key_id, endpoint, region, secret_access_key"
    assert f"was opened with options ({names}) that this process lacks" in plan(other).verdicts[0].reasons[0]
    assert server.requests == []


def test_no_value_of_an_option_is_written_into_the_store(steps: Repository, bucket: MirrorSetting) -> None:
    with serve_s3() as place:
        upload(steps, with_server(bucket, place))
        stored = b"".join(steps.store.read(key, limit_bytes=1 << 20) for key in keys(steps.store, ""))
        assert b"secret_access_key" in stored
        assert not [value for value in place.options.values() if f'"{value}"'.encode() in stored]


@pytest.mark.parametrize("below", ["packs/", "manifests/", "snapshots/", "config/", ""])
def test_files_that_are_gone_from_the_mirror_keep_their_snapshots(
    below: str, steps: Repository, bucket: MirrorSetting, server: S3Server
) -> None:
    upload(steps, bucket)
    for key in [key for key in server.objects if key.startswith(f"mirror/{below}")]:
        del server.objects[key]
    assert doomed(steps) == []


def test_a_pack_that_is_cut_short_is_no_copy(steps: Repository, bucket: MirrorSetting, server: S3Server) -> None:
    upload(steps, bucket)
    for key in [key for key in server.objects if key.startswith("mirror/packs/")]:
        server.objects[key] = Stored(server.objects[key].data[:1000], server.objects[key].modified_s)
    assert doomed(steps) == []
    assert "repair --from" in plan(steps).verdicts[0].reasons[0]


def test_a_file_that_a_collector_has_marked_is_no_copy(steps: Repository, setting: MirrorSetting) -> None:
    there = upload(steps, setting).repository.store
    publish_mark(there, [there.stat(f"packs/{pack_of(setting.open(1 << 28), 'run/1', 'x').pack_id}")])
    assert doomed(steps) == ["run/2"]


def test_a_proof_takes_few_requests(local: Repository, bucket: MirrorSetting) -> None:
    for step in range(9):
        save_bytes(local, f"run/{step}", {"x": noise(5000, step)})
    upload(local, bucket)
    with count_rounds(CloudStore, "_ask") as rounds:
        assert len(doomed(local)) == 8
    # For each snapshot: its name is listed, its record and its manifest are read, and its pack is asked for.
    assert len(rounds.requests) <= 4 + 8 * 4
    assert rounds.greatest <= 6


def test_another_store_in_place_of_the_mirror_is_not_believed(steps: Repository, setting: MirrorSetting) -> None:
    upload(steps, setting)
    shutil.rmtree(setting.url)
    for step in (1, 2):
        copy_snapshot(steps, snapshot_of(steps, f"run/{step}"), setting.open(steps.budget_bytes))
    assert doomed(steps) == []
    assert "not the one that was uploaded to" in plan(steps).verdicts[0].reasons[0]


@pytest.mark.parametrize("below", ["snapshots", ""])
def test_what_a_mirror_has_lost_is_uploaded_again_once_it_is_noticed(
    below: str, memory: Repository, setting: MirrorSetting
) -> None:
    mirror = Mirror(memory, setting)
    save_bytes(memory, "run/4", {"x": b"4"})
    mirror.wait()
    shutil.rmtree(os.path.join(setting.url, below))
    found = read_prune_plan(memory.store, "run/", Keep(last=1))
    assert not keep_unmirrored(memory, found, only_reads=True).delete
    assert not mirror.state.waiting
    assert doomed(memory) == []
    mirror.wait()
    assert doomed(memory) == ["run/1", "run/2", "run/3"]


def test_an_upload_to_a_new_store_sends_all_that_the_old_one_had(memory: Repository, setting: MirrorSetting) -> None:
    mirror = Mirror(memory, setting)
    save_bytes(memory, "run/4", {"x": b"4"})
    mirror.wait()
    shutil.rmtree(setting.url)
    save_bytes(memory, "run/5", {"x": b"5"})
    assert mirror.wait().present == 5
    assert doomed(memory) == ["run/1", "run/2", "run/3", "run/4"]


def test_one_save_with_the_url_of_the_mirror_uses_its_options(server: S3Server) -> None:
    url = f"s3://{BUCKET}/m"
    with (
        serve_s3() as place,
        holdfast.open("memory://", mirror=url, mirror_options=place.options) as store,
    ):
        store.save("a", {"w": torch.ones(4)}, mirror=url)
    assert place.objects
    assert not server.requests


def test_a_plan_is_checked_again_when_it_is_applied(tmp_path: Path) -> None:
    with holdfast.open("memory://", mirror=tmp_path / "there") as store:
        for step in (1, 2):
            store.save(f"run/{step}", {"w": torch.full((4,), float(step))})
        assert store.mirror is not None
        store.mirror.wait()
        made = store.plan_prune("run/", keep_last=1)
        assert len(made.delete) == 1
        shutil.rmtree(tmp_path / "there/packs")
        shutil.rmtree(tmp_path / "there/manifests")
        done = store.apply_prune(made)
        assert [each.snapshot.name for each in done.kept] == ["run/1"]
        assert not done.deleted
