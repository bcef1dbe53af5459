"""Copying between a local store and a bucket: only what is missing is sent, nothing is downloaded to be verified."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from holdfast.errors import StoreError
from holdfast.objects.cloud.cloud_store import CloudStore
from holdfast.objects.local.local_store import LocalStore
from holdfast.repo.format.layout import PACKS
from holdfast.repo.handle.repository import MIN_BUDGET_BYTES, Repository, open_repository
from holdfast.repo.upkeep.check import Checker
from holdfast.repo.upkeep.transfer import copy_snapshot
from tests.kit.rounds import count_rounds
from tests.kit.s3_server import Fault, Request, S3Server, serve_s3
from tests.kit.saving import MIB, load_bytes, new_repo, noise, save_bytes, snapshot_of
from tests.unit.objects.cloud.servers import open_cloud

CHUNKS = 24
CONTENT = {"w": noise(CHUNKS * MIB, 1), "tiny": b"inline"}


@pytest.fixture
def server() -> Iterator[S3Server]:
    with serve_s3() as running:
        yield running


@pytest.fixture
def small_packs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let packs end at 2 MiB, so that a small snapshot has several."""
    traits = replace(open_cloud(S3Server()).traits, upload_bytes=2 * MIB)
    monkeypatch.setattr(CloudStore, "traits", property(lambda store: traits))


@pytest.fixture
def local(tmp_path: Path) -> Repository:
    repo = new_repo(LocalStore(str(tmp_path / "here")))
    save_bytes(repo, "a", CONTENT, metadata={"lr": 0.1})
    return repo


def open_bucket(server: S3Server) -> Repository:
    # The least memory that is allowed: few packs are in flight.
    return open_repository(open_cloud(server), create=True, budget_bytes=MIN_BUDGET_BYTES)


def sent_bytes(server: S3Server) -> int:
    """Return the size of all packs in the bucket: what was sent, because nothing deletes a pack here."""
    return sum(len(stored.data) for key, stored in server.objects.items() if PACKS in key)


def is_clean(repo: Repository) -> bool:
    return all(finding.severity == "note" for finding in Checker(repo.store, read=True).iter_findings())


def test_a_snapshot_goes_to_a_bucket_and_back_unchanged(server: S3Server, local: Repository, tmp_path: Path) -> None:
    copy_snapshot(local, snapshot_of(local, "a"), open_bucket(server))
    again = new_repo(LocalStore(str(tmp_path / "there")))
    bucket = open_bucket(server)
    copy_snapshot(bucket, snapshot_of(bucket, "a"), again)
    one, other = snapshot_of(local, "a"), snapshot_of(again, "a")
    assert load_bytes(again, "a") == CONTENT
    assert (one.digest, one.metadata, one.time_s) == (other.digest, other.metadata, other.time_s)
    assert is_clean(again)


@pytest.mark.usefixtures("small_packs")
def test_a_copy_that_was_cut_off_sends_only_the_rest(server: S3Server, local: Repository) -> None:
    packs: list[str] = []

    def refuse_the_tenth(request: Request) -> Fault | None:
        if request.kind == "PUT" and PACKS in request.key:
            packs.append(request.key)
        return "403" if len(set(packs)) > 9 else None

    server.fault_of = refuse_the_tenth
    with pytest.raises(StoreError):
        copy_snapshot(local, snapshot_of(local, "a"), open_bucket(server))
    before = sent_bytes(server)
    assert before >= 8 * MIB

    server.fault_of = lambda request: None
    result = copy_snapshot(local, snapshot_of(local, "a"), open_bucket(server))
    # Packs that were in flight may be sent again, but not those that were completed before.
    assert result.reused_bytes >= 3 * MIB
    assert sent_bytes(server) - before <= (CHUNKS + 1) * MIB - result.reused_bytes
    assert load_bytes(open_bucket(server), "a") == CONTENT


def test_what_the_bucket_has_is_neither_sent_nor_downloaded(server: S3Server, local: Repository) -> None:
    copy_snapshot(local, snapshot_of(local, "a"), open_bucket(server))
    save_bytes(local, "b", {"w": CONTENT["w"], "more": noise(3000, 7)})
    before = len(server.requests)
    result = copy_snapshot(local, snapshot_of(local, "b"), open_bucket(server))
    reads = [request for request in server.requests[before:] if request.kind == "GET" and PACKS in request.key]
    assert (result.new_bytes, result.reused_bytes) == (3000, CHUNKS * MIB)
    assert reads == []


def test_a_copy_that_is_there_is_found_without_a_download(server: S3Server, local: Repository) -> None:
    copy_snapshot(local, snapshot_of(local, "a"), open_bucket(server))
    before = len(server.requests)
    assert copy_snapshot(local, snapshot_of(local, "a"), open_bucket(server)).existed
    asked = server.requests[before:]
    assert not [request for request in asked if request.kind == "GET" and PACKS in request.key]
    assert not [request for request in asked if request.kind == "PUT"]


def test_a_copy_whose_pack_is_gone_is_made_again(server: S3Server, local: Repository) -> None:
    copy_snapshot(local, snapshot_of(local, "a"), open_bucket(server))
    for key in [key for key in server.objects if PACKS in key]:
        del server.objects[key]
    result = copy_snapshot(local, snapshot_of(local, "a"), open_bucket(server))
    assert result.new_bytes == CHUNKS * MIB + len(CONTENT["tiny"])
    assert load_bytes(open_bucket(server), "a") == CONTENT


def test_chunks_are_downloaded_together(server: S3Server, local: Repository, tmp_path: Path) -> None:
    copy_snapshot(local, snapshot_of(local, "a"), open_bucket(server))
    bucket, there = open_bucket(server), new_repo(LocalStore(str(tmp_path / "there")))
    snapshot = snapshot_of(bucket, "a")
    with count_rounds(CloudStore, "_ask") as rounds:
        copy_snapshot(bucket, snapshot, there)
    ranges = [what for what in rounds.requests if PACKS in what]
    assert len(ranges) == CHUNKS
    assert rounds.greatest <= len(rounds.requests) - CHUNKS + 1
