"""Uploads in a child process: their result, their errors, and `kill -9` in the middle."""

from __future__ import annotations

import os
import signal
import threading
from dataclasses import replace

import pytest

from holdfast.errors import StoreError
from holdfast.mirror.setting import MirrorSetting
from holdfast.mirror.upload import UploadNews
from holdfast.mirror.worker import can_upload_apart, make_upload_job, upload_apart
from holdfast.objects.memory import MemoryStore
from holdfast.objects.storage_options import StorageOptions
from holdfast.repo.format.layout import PACKS
from holdfast.repo.handle.repository import Repository
from tests.kit.s3_server import Fault, Request, S3Server
from tests.kit.saving import MIB, load_bytes, new_repo, noise, save_bytes

CONTENT = {"w": noise(3 * MIB, 1)}


def upload(repo: Repository, setting: MirrorSetting, news: UploadNews) -> None:
    upload_apart(make_upload_job(repo, setting, news), news)


def test_only_stores_that_another_process_can_open_are_uploaded_apart(
    local: Repository, setting: MirrorSetting
) -> None:
    assert can_upload_apart(local, setting)
    assert not can_upload_apart(new_repo(MemoryStore()), setting)
    assert not can_upload_apart(local, replace(setting, options=StorageOptions({"retry_config": object()})))


def test_a_child_uploads_and_reports(local: Repository, setting: MirrorSetting) -> None:
    save_bytes(local, "a", CONTENT)
    news = UploadNews(setting.url)
    upload(local, setting, news)
    state = news.read()
    assert (state.present, state.waiting, state.sent_bytes) == (1, (), 3 * MIB)
    assert load_bytes(setting.open(local.budget_bytes), "a") == CONTENT


def test_an_error_of_the_child_is_raised(local: Repository, setting: MirrorSetting) -> None:
    save_bytes(local, "a", CONTENT)
    with open(setting.url, "w", encoding="utf-8") as file:
        file.write("a file is no store")
    with pytest.raises(StoreError, match="there"):
        upload(local, setting, UploadNews(setting.url))


def test_a_child_that_is_killed_is_continued_by_the_next(
    local: Repository, bucket: MirrorSetting, server: S3Server
) -> None:
    save_bytes(local, "a", CONTENT)
    is_sent, go_on = threading.Event(), threading.Event()

    def wait_at_the_commit(request: Request) -> Fault | None:
        if request.kind == "PUT" and "snapshots/" in request.key and not is_sent.is_set():
            is_sent.set()
            server.lock.release()
            go_on.wait(30)
            server.lock.acquire()
            return "lose request"
        return None

    server.fault_of = wait_at_the_commit
    news = UploadNews(bucket.url)
    job = make_upload_job(local, bucket, news)
    errors: list[BaseException] = []

    def run() -> None:
        try:
            upload_apart(job, news)
        except StoreError as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    assert is_sent.wait(60)
    child = job._child
    assert child is not None
    os.kill(child.pid, signal.SIGKILL)
    go_on.set()
    thread.join()
    assert "ended with code -9" in str(errors[0])
    sent = server.count("PUT", PACKS)

    news = UploadNews(bucket.url)
    upload(local, bucket, news)
    assert server.count("PUT", PACKS) == sent
    assert news.read().sent_bytes == 0
    assert load_bytes(bucket.open(local.budget_bytes), "a") == CONTENT


def test_a_child_that_is_stopped_is_no_error(local: Repository, setting: MirrorSetting) -> None:
    save_bytes(local, "a", CONTENT)
    news = UploadNews(setting.url)
    job = make_upload_job(local, setting, news)
    job.stop()
    upload_apart(job, news)
