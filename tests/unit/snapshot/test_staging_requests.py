"""A save in the background costs as many requests on an object store as one in the foreground."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from holdfast.objects.cloud.cloud_store import CloudStore
from holdfast.store import Store
from tests.kit.rounds import count_rounds
from tests.kit.s3_server import S3Server, serve_s3
from tests.unit.objects.cloud.servers import open_cloud


@pytest.fixture
def server() -> Iterator[S3Server]:
    """An empty bucket."""
    with serve_s3() as running:
        yield running


def test_an_unchanged_save_in_the_background_costs_few_requests(server: S3Server) -> None:
    store = Store(open_cloud(server))
    state = {f"w{number}": torch.full((20_000,), float(number)) for number in range(4)}
    store.save("run/0", state)
    server.requests.clear()
    with count_rounds(CloudStore, "_ask") as rounds:
        result = store.save_async("run/1", state).result()
    assert result.new_bytes == 0
    assert server.count("GET", "packs/") == 0
    assert len(server.requests) <= 21, rounds.requests
    assert rounds.greatest <= 12
