"""Ranks with accelerators compare replicas and look up chunks by digests: what is stored is not copied to the host."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import holdfast
from holdfast.testing.ranks import run_ranks
from tests.integration.device_ranks import WAYS, list_changed, save_three_times

CHUNKS = 50 + 1 + 1 + 1 + 1
"""What one rank hashes: the replicas and random bytes beside them, then its own value, its shard, and random bytes."""
OWN_BYTES = 2000 * 4 + 128 * 400
REPLICA_BYTES = 40_000


@pytest.mark.slow
def test_ranks_copy_only_what_the_store_lacks(tmp_path: Path) -> None:
    copied = run_ranks(2, save_three_times, tmp_path)

    for way in WAYS:
        first, second, third = zip(*(each[way] for each in copied), strict=True)
        # Each rank hashes its replicas once, to compare them, and looks up its share of them by the same digests.
        assert second == (32 * CHUNKS, 32 * CHUNKS)
        # Replicas are stored by one rank each, so one of the two copies the one that changed.
        assert sorted(third) == [32 * CHUNKS, 32 * CHUNKS + REPLICA_BYTES]
        assert sum(first) == 2 * (32 * CHUNKS + OWN_BYTES) + 50 * REPLICA_BYTES
    for found in run_ranks(2, list_changed, tmp_path):
        assert found == [[], [], ["w7"]] * len(WAYS)
    with holdfast.open(tmp_path / "mixed") as store:
        # On the device of one rank and the CPU of the other, and yet one value.
        snapshot = store.latest("mixed")
        assert snapshot is not None
        assert torch.equal(snapshot["w"].read(), torch.arange(5000.0))
        assert len(list(snapshot)) == 1
