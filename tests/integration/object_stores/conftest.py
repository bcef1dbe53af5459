"""A small S3 server, and the environment that a command line or another process finds it with."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.kit.s3_server import S3Server, serve_s3


@pytest.fixture
def server() -> Iterator[S3Server]:
    """An empty bucket."""
    with serve_s3() as running:
        yield running


@pytest.fixture
def environment(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    """The same, with its address and credentials in the environment."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    return server
