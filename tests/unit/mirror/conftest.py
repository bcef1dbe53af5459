"""A local store and the URL of its mirror: in another directory, or on a small S3 server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.mirror.setting import MirrorSetting
from holdfast.objects.local.local_store import LocalStore
from holdfast.repo.handle.repository import Repository
from tests.kit.s3_server import BUCKET, S3Server, serve_s3
from tests.kit.saving import new_repo


@pytest.fixture
def local(tmp_path: Path) -> Repository:
    return new_repo(LocalStore(str(tmp_path / "here")))


@pytest.fixture
def setting(tmp_path: Path) -> MirrorSetting:
    """A mirror in a directory that does not exist yet."""
    return MirrorSetting(str(tmp_path / "there"))


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    """An empty bucket; the environment, which child processes inherit, tells how to reach it."""
    with serve_s3() as running:
        monkeypatch.setenv("AWS_ENDPOINT_URL", running.endpoint)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        monkeypatch.setenv("AWS_REGION", "us-east-1")
        yield running


@pytest.fixture
def bucket(server: S3Server) -> MirrorSetting:
    """A mirror in the bucket of the server."""
    return MirrorSetting(f"s3://{BUCKET}/mirror")
