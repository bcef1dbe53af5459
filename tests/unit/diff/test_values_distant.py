"""Comparing values in a bucket: the rounds do not grow with the number of tensors."""

from __future__ import annotations

import torch

from holdfast.objects.cloud.cloud_store import CloudStore
from holdfast.store import Store
from tests.kit.rounds import count_rounds
from tests.kit.s3_server import serve_s3
from tests.unit.objects.cloud.servers import open_cloud


def test_many_tensors_that_changed_are_read_together() -> None:
    before = {f"w{number}": torch.arange(3000.0) for number in range(40)}
    after = {name: tensor + 1 for name, tensor in before.items()}
    with serve_s3() as server:
        store = Store(open_cloud(server))
        store.save("a", before)
        store.save("b", after)
        with count_rounds(CloudStore, "_ask") as rounds:
            found = Store(open_cloud(server)).diff("a", "b", values=True)

    assert [change.distances[0].max_abs for change in found.changes] == [1.0] * 40
    assert sum("packs/" in request for request in rounds.requests) <= 4
    assert rounds.greatest <= 16
