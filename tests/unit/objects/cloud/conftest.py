"""A small S3 server for each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.kit.s3_server import S3Server, serve_s3


@pytest.fixture
def server() -> Iterator[S3Server]:
    """An empty bucket."""
    with serve_s3() as running:
        yield running
