"""Restoring what a store has lost from another one: only damaged and missing chunks are copied."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.objects.local.local_store import LocalStore
from holdfast.repo.format.layout import MANIFESTS, PACKS
from holdfast.repo.handle.repository import Repository, open_repository
from holdfast.repo.upkeep.check import Checker
from holdfast.repo.upkeep.repair import apply_repair, plan_repair
from holdfast.repo.upkeep.transfer import copy_snapshot
from tests.kit.s3_server import S3Server, serve_s3
from tests.kit.saving import MIB, keys, load_bytes, new_repo, noise, pack_of, rot, save_bytes, snapshot_of
from tests.unit.objects.cloud.servers import open_cloud

CONTENT = {"w": noise(4 * MIB, 1), "v": noise(700, 2)}


@pytest.fixture
def server() -> Iterator[S3Server]:
    with serve_s3() as running:
        yield running


@pytest.fixture
def local(tmp_path: Path) -> Repository:
    repo = new_repo(LocalStore(str(tmp_path / "here")))
    save_bytes(repo, "a", CONTENT, metadata={"lr": 0.1})
    return repo


@pytest.fixture
def bucket(server: S3Server, local: Repository) -> Repository:
    """A copy in a bucket."""
    repo = open_repository(open_cloud(server), create=True)
    copy_snapshot(local, snapshot_of(local, "a"), repo)
    return repo


def repair(repo: Repository, source: Repository) -> list[str]:
    plan = plan_repair(repo, source=source)
    assert not plan.losses
    return [f"{action.kind} {action.target}" for action in apply_repair(repo, plan, source=source)]


def is_clean(repo: Repository) -> bool:
    return not [each for each in Checker(repo.store, read=True).iter_findings() if each.severity == "error"]


def test_one_damaged_chunk_is_downloaded_and_nothing_else(
    local: Repository, bucket: Repository, server: S3Server
) -> None:
    at = pack_of(local, "a", "w")
    rot(local.store, f"packs/{at.pack_id}", at.offset + MIB + 7)
    before = server.count("GET", PACKS)
    assert f"quarantine {at.pack_id}" in repair(local, bucket)
    assert server.count("GET", PACKS) - before == 1
    assert load_bytes(local, "a") == CONTENT
    assert snapshot_of(local, "a").metadata == {"lr": 0.1}


def test_a_lost_pack_is_restored(local: Repository, bucket: Repository) -> None:
    local.store.delete(keys(local.store, PACKS)[0])
    assert "restore a" in repair(local, bucket)
    assert load_bytes(local, "a") == CONTENT
    assert is_clean(local)


def test_a_lost_manifest_is_restored(local: Repository, bucket: Repository) -> None:
    local.store.delete(keys(local.store, MANIFESTS)[0])
    assert "restore a" in repair(local, bucket)
    assert load_bytes(local, "a") == CONTENT
    assert is_clean(local)


def test_a_bucket_is_repaired_from_a_local_store(local: Repository, bucket: Repository, server: S3Server) -> None:
    for key in [key for key in server.objects if PACKS in key]:
        del server.objects[key]
    assert "restore a" in repair(bucket, local)
    assert load_bytes(bucket, "a") == CONTENT


def test_equal_content_under_another_name_will_do(local: Repository, tmp_path: Path) -> None:
    other = new_repo(LocalStore(str(tmp_path / "other")))
    save_bytes(other, "same", CONTENT)
    local.store.delete(keys(local.store, PACKS)[0])
    assert "restore a" in repair(local, other)
    assert load_bytes(local, "a") == CONTENT
    assert snapshot_of(local, "a").metadata == {"lr": 0.1}


def test_other_content_under_the_same_name_is_not_used(local: Repository, tmp_path: Path) -> None:
    other = new_repo(LocalStore(str(tmp_path / "other")))
    save_bytes(other, "a", {"w": noise(4 * MIB, 9), "v": noise(700, 2)})
    local.store.delete(keys(local.store, PACKS)[0])
    plan = plan_repair(local, source=other)
    assert {loss.snapshot for loss in plan.losses} == {"a"}
    assert "restore" not in {action.kind for action in plan.actions}


def test_without_a_source_nothing_is_restored(local: Repository) -> None:
    local.store.delete(keys(local.store, PACKS)[0])
    plan = plan_repair(local)
    assert plan.losses
    assert apply_repair(local, plan) == [action for action in plan.actions if action.kind != "restore"]
