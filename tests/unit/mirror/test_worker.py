"""Uploads behind a handle: started by commits, never an error of the save, finished or left when the store closes."""

from __future__ import annotations

import logging
import shutil
from dataclasses import replace

import pytest

from holdfast.mirror.setting import MirrorSetting, RecordedMirror, read_mirrors
from holdfast.mirror.worker import UploadWorker
from holdfast.objects.memory import MemoryStore
from holdfast.objects.storage_options import StorageOptions
from holdfast.repo.handle.repository import Repository
from tests.kit.s3_server import S3Server
from tests.kit.saving import load_bytes, new_repo, save_bytes, snapshot_of


@pytest.fixture
def memory() -> Repository:
    """A store that only a thread of this process can upload: quick, and faults can be planted."""
    return new_repo(MemoryStore())


def attach(repo: Repository, setting: MirrorSetting) -> UploadWorker:
    worker = UploadWorker(repo, setting)
    repo.commits.watch(worker.note_commit)
    return worker


def test_a_commit_starts_an_upload(memory: Repository, setting: MirrorSetting) -> None:
    worker = attach(memory, setting)
    assert worker.is_idle
    save_bytes(memory, "a", {"x": b"1"})
    assert worker.wait()
    assert worker.is_idle
    assert load_bytes(setting.open(memory.budget_bytes), "a") == {"x": b"1"}


def test_a_process_uploads_a_store_on_disk(local: Repository, setting: MirrorSetting) -> None:
    worker = attach(local, setting)
    save_bytes(local, "a", {"x": b"1"})
    worker.finish()
    assert worker.news.read().is_complete
    assert load_bytes(setting.open(local.budget_bytes), "a") == {"x": b"1"}


def test_what_earlier_processes_left_is_uploaded_with_the_first_commit(
    memory: Repository, setting: MirrorSetting
) -> None:
    save_bytes(memory, "left", {"x": b"0"})
    worker = attach(memory, setting)
    save_bytes(memory, "a", {"x": b"1"})
    worker.wait()
    assert load_bytes(setting.open(memory.budget_bytes), "left") == {"x": b"0"}


def test_an_error_of_the_mirror_is_logged_once_and_never_raised(
    memory: Repository, bucket: MirrorSetting, server: S3Server, caplog: pytest.LogCaptureFixture
) -> None:
    server.fault_of = lambda request: "403"
    worker = attach(memory, bucket)
    with caplog.at_level(logging.WARNING, logger="holdfast.mirror.worker"):
        for number in range(3):
            save_bytes(memory, f"run/{number}", {"x": b"1"})
            worker.wait()
    assert len(caplog.records) == 1
    assert "snapshots are saved, but not uploaded" in caplog.text
    state = worker.news.read()
    assert "do not allow this" in state.last_error
    assert set(state.waiting) == {"run/0", "run/1", "run/2"}
    assert not worker.is_idle

    server.fault_of = lambda request: None
    worker.finish()
    assert worker.news.read().is_complete
    assert worker.news.read().last_error == ""


def test_a_mirror_is_recorded_even_if_it_cannot_be_reached(
    memory: Repository, bucket: MirrorSetting, server: S3Server
) -> None:
    server.fault_of = lambda request: "403"
    worker = attach(memory, bucket)
    save_bytes(memory, "a", {"x": b"1"})
    worker.wait()
    assert read_mirrors(memory.store) == {bucket.url: RecordedMirror()}


def test_the_store_that_was_uploaded_to_and_the_names_of_its_options_are_recorded(
    memory: Repository, bucket: MirrorSetting, server: S3Server
) -> None:
    setting = replace(bucket, options=StorageOptions(server.options))
    worker = attach(memory, setting)
    save_bytes(memory, "a", {"x": b"1"})
    worker.wait()
    store_id = setting.open(memory.budget_bytes).identity.store_id
    names = ("access_key_id", "endpoint", "region", "secret_access_key")
    assert read_mirrors(memory.store) == {bucket.url: RecordedMirror("all", store_id, names)}


def test_another_store_in_place_of_the_mirror_gets_everything_and_a_warning(
    memory: Repository, setting: MirrorSetting, caplog: pytest.LogCaptureFixture
) -> None:
    worker = attach(memory, setting)
    save_bytes(memory, "a", {"x": b"1"})
    worker.wait()
    shutil.rmtree(setting.url)
    with caplog.at_level(logging.WARNING, logger="holdfast.mirror.worker"):
        save_bytes(memory, "b", {"x": b"2"})
        worker.wait()
    assert "another store is at" in caplog.text
    there = setting.open(memory.budget_bytes)
    assert load_bytes(there, "a") == {"x": b"1"}
    assert read_mirrors(memory.store)[setting.url].store_id == there.identity.store_id


def test_closing_reports_what_is_left(
    memory: Repository, bucket: MirrorSetting, server: S3Server, caplog: pytest.LogCaptureFixture
) -> None:
    server.fault_of = lambda request: "403"
    worker = attach(memory, bucket)
    save_bytes(memory, "a", {"x": b"1"})
    with caplog.at_level(logging.WARNING, logger="holdfast.mirror.worker"):
        worker.finish()
        worker.finish()
    left = [record for record in caplog.records if "were not uploaded" in record.getMessage()]
    assert len(left) == 1
    assert "mirror --yes" in left[0].getMessage()


def test_closing_need_not_wait(memory: Repository, setting: MirrorSetting) -> None:
    worker = attach(memory, MirrorSetting(setting.url, wait=False))
    save_bytes(memory, "a", {"x": b"1"})
    worker.finish()
    save_bytes(memory, "b", {"x": b"2"})
    assert worker.wait()
    assert snapshot_of(memory, "b").name == "b"
    there = setting.open(memory.budget_bytes)
    assert not there.store.list("snapshots/") or load_bytes(there, "a") == {"x": b"1"}


def test_a_time_to_wait_is_kept(memory: Repository, setting: MirrorSetting) -> None:
    worker = attach(memory, MirrorSetting(setting.url, wait=60.0))
    save_bytes(memory, "a", {"x": b"1"})
    worker.finish()
    assert worker.news.read().is_complete
