"""Loading from a server: the rounds of a load do not grow with the number of tensors."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from holdfast.objects.cloud.cloud_store import CloudStore
from holdfast.store import Store
from tests.kit.rounds import count_rounds
from tests.kit.s3_server import S3Server, serve_s3
from tests.unit.objects.cloud.servers import open_cloud

TENSORS = 3000
MIB = 1 << 20


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    """A server with a snapshot of many small tensors and one of a large matrix."""
    with serve_s3() as running:
        store = Store(open_cloud(running))
        store.save("small", {f"t{number}": torch.full((300,), number) for number in range(TENSORS)})
        store.save("large", {"w": torch.arange(4 * MIB, dtype=torch.int32).reshape(1024, 4096)})
        yield running


def test_many_small_tensors_are_loaded_in_one_round(server: S3Server) -> None:
    store = Store(open_cloud(server))

    with count_rounds(CloudStore, "_ask") as rounds:
        found = store.load("small")

    assert all(torch.equal(found[f"t{number}"], torch.full((300,), number)) for number in range(TENSORS))
    assert rounds.greatest <= 4  # listing, record, manifest, tensors


def test_many_small_tensors_are_filled_in_one_round(server: S3Server) -> None:
    store = Store(open_cloud(server))
    target = {f"t{number}": torch.zeros(300, dtype=torch.int64) for number in range(TENSORS)}

    with count_rounds(CloudStore, "_ask") as rounds:
        store.load_into("small", target)

    assert all(torch.equal(target[f"t{number}"], torch.full((300,), number)) for number in range(TENSORS))
    assert rounds.greatest <= 5


def test_rows_of_a_slice_that_are_far_apart_are_read_in_one_round(server: S3Server) -> None:
    tensor = Store(open_cloud(server))["large"]["w"]

    with count_rounds(CloudStore, "_ask") as rounds:
        found = tensor[::200, 5:7]

    assert torch.equal(found, torch.arange(4 * MIB, dtype=torch.int32).reshape(1024, 4096)[::200, 5:7])
    assert rounds.greatest == 1
    assert len(rounds.requests) <= 6


def test_a_slice_of_rows_reads_only_their_chunks(server: S3Server) -> None:
    tensor = Store(open_cloud(server))["large"]["w"]
    before = len(server.requests)

    found = tensor[10:20]

    assert torch.equal(found, torch.arange(10 * 4096, 20 * 4096, dtype=torch.int32).reshape(10, 4096))
    assert len(server.requests) - before == 1
