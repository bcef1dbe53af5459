"""What each rank reads to locate the bytes of a checkpoint: every manifest once, and less than torch's metadata."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from holdfast.dcp import StorageReader, StorageWriter
from tests.distributed.conftest import World
from tests.distributed.dcp_states import dcp
from tests.distributed.outcomes import counting
from tests.distributed.placing import place

LAYERS = 60
ROWS, COLUMNS = 240, 256
"""Shards of 60 KiB and more, below any chunk: the more rows manifests have for their bytes, the worse for us."""


def make_state(value: float) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    full = torch.full((ROWS, COLUMNS), value)
    return {f"layers.{number}.weight": place(full + number, mesh, [Shard(0)]) for number in range(LAYERS)}


def save_both(rank: int, path: Path) -> None:
    state = make_state(1.0)
    dcp.save(state, storage_writer=StorageWriter(path / "ours", "run"))
    dcp.save(state, checkpoint_id=str(path / "theirs"))


def load_counted(rank: int, path: Path) -> dict[str, Any]:
    state = make_state(0.0)
    with counting(path / "ours") as (store, inner):
        dcp.load(state, storage_reader=StorageReader(store, "run"))
    reads = [count for key, count in inner.reads.items() if key.startswith("manifests/")]
    return {"reads": reads, "manifest_bytes": inner.read_bytes["manifests"], "tensor_bytes": inner.read_bytes["packs"]}


@pytest.mark.parametrize("loaders", [1, 3])
def test_each_rank_reads_every_manifest_once_and_less_than_torch_reads_of_its_metadata(
    world: World, tmp_path: Path, loaders: int
) -> None:
    world(4)(save_both, tmp_path)
    theirs = (tmp_path / "theirs" / ".metadata").stat().st_size

    for outcome in world(loaders)(load_counted, tmp_path):
        assert outcome["reads"] == [1] * (1 + 4)
        assert outcome["manifest_bytes"] < theirs
        assert outcome["manifest_bytes"] < 0.02 * outcome["tensor_bytes"]
