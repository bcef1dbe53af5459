"""Four ranks save to a bucket and load from it; other numbers of ranks load the same snapshot."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import holdfast
from holdfast.tensors.sharding import shard
from holdfast.testing.ranks import run_ranks
from tests.kit.patience import PATIENCE_S, RUN_S
from tests.servers.conftest import PlaceOf
from tests.servers.places import make_prefix

ROWS, COLUMNS = 1030, 300
"""More than a chunk, and not divisible by four."""


def make_state(rank: int, *, is_blank: bool) -> dict[str, Any]:
    """Return this rank's rows of a tensor, and a tensor that all ranks have."""
    whole = torch.arange(ROWS * COLUMNS, dtype=torch.float32).reshape(ROWS, COLUMNS)
    if is_blank:
        whole = torch.zeros_like(whole)
    start = sum(len(part) for part in whole.tensor_split(dist.get_world_size())[:rank])
    part = whole.tensor_split(dist.get_world_size())[rank].clone()
    return {
        "sharded": shard(part, global_shape=(ROWS, COLUMNS), offsets=(start, 0)),
        "replicated": whole[:7].clone(),
    }


def save(rank: int, url: str, environment: dict[str, str]) -> bool:
    os.environ.update(environment)
    with holdfast.open(url) as store:
        store.save("run/1", make_state(rank, is_blank=False), timeout_s=PATIENCE_S)
        store.save_async("run/2", make_state(rank, is_blank=False)).wait()
    return True


def load(rank: int, url: str, environment: dict[str, str]) -> list[bool]:
    os.environ.update(environment)
    expected, target = make_state(rank, is_blank=False), make_state(rank, is_blank=True)
    with holdfast.open(url) as store:
        latest = store.latest("run/")
        assert latest is not None
        assert latest.name == "run/2"
        store.load_into("run/1", target, timeout_s=PATIENCE_S)
    return [
        torch.equal(target["sharded"].tensor, expected["sharded"].tensor),
        torch.equal(target["replicated"], expected["replicated"]),
    ]


@pytest.mark.parametrize("server", ["small S3", pytest.param("SeaweedFS", marks=pytest.mark.slow)])
def test_four_ranks_save_and_any_number_loads(place_of: PlaceOf, server: str, tmp_path: Path) -> None:
    place = place_of(server)
    url = place.url(make_prefix(tmp_path))

    assert run_ranks(4, save, url, place.environment, timeout_s=RUN_S) == [True] * 4

    for size in (4, 3):
        assert run_ranks(size, load, url, place.environment, timeout_s=RUN_S) == [[True, True]] * size
    assert place.open(make_prefix(tmp_path)).list_all("leases/") == []
