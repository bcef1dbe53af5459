"""Ranks that compress: all of them declare the codec at the same time, and the sizes of all are told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

import holdfast
from holdfast.repo.format.chunk import BLOSC2
from holdfast.repo.handle.compression import Compression
from tests.distributed.conftest import World
from tests.distributed.placing import place
from tests.kit.encoded import CONFIGS
from tests.kit.patience import PATIENCE_S
from tests.kit.saving import keys, read_entries

ROWS = 600


def make_full() -> torch.Tensor:
    return (torch.arange(ROWS * 1000) % 997).to(torch.bfloat16).reshape(ROWS, 1000)


def make_tree(rank: int) -> dict[str, Any]:
    mesh = DeviceMesh("cpu", torch.arange(dist.get_world_size()))
    return {"sharded": place(make_full(), mesh, [Shard(0)]), "mine": holdfast.per_rank(make_full()[rank:] + 1)}


def save_and_load(rank: int, path: Path, compression: Compression) -> tuple[int, int, bytes, bool]:
    with holdfast.open(path) as store:
        result = store.save(f"a-{compression}", make_tree(rank), timeout_s=PATIENCE_S, compression=compression)
        target = make_tree(rank)
        for value in (target["sharded"].to_local(), target["mine"].value):
            value.zero_()
        store.load_into(f"a-{compression}", target, timeout_s=PATIENCE_S)
    wanted = make_tree(rank)
    assert isinstance(target["sharded"], DTensor)
    is_same = torch.equal(target["sharded"].to_local(), wanted["sharded"].to_local())
    is_same &= torch.equal(target["mine"].value, wanted["mine"].value)
    return result.new_bytes, result.stored_bytes, bytes(result.digest), is_same


@pytest.mark.slow
def test_ranks_that_compress_share_a_store_with_one_declaration(world: World, tmp_path: Path) -> None:
    run = world(3)
    fast = run(save_and_load, tmp_path / "store", "fast")
    raw = run(save_and_load, tmp_path / "store", None)

    assert all(is_same for *_, is_same in [*fast, *raw])
    assert {digest for _, _, digest, _ in fast} == {digest for _, _, digest, _ in raw}
    ((new_bytes, stored_bytes),) = {(new, stored) for new, stored, _, _ in fast}
    assert stored_bytes < 0.8 * new_bytes
    assert {new for new, *_ in raw} == {0}
    with holdfast.open(tmp_path / "store", read_only=True) as store:
        assert keys(store.repository.store, "config/") == CONFIGS
        chunks = [chunk for entry in read_entries(store.repository, "a-None").values() for chunk in entry.chunks]
        assert {chunk.location.codec for chunk in chunks if chunk.location} == {BLOSC2}
        assert torch.equal(store.load("a-fast")["sharded"], make_full())
