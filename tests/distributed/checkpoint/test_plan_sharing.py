"""Saves of one model by different numbers of ranks share their chunks, because chunks are cut from whole tensors."""

from __future__ import annotations

import pytest
import torch

from holdfast.distributed.checkpoint.plan import plan_save
from holdfast.repo.handle.repository import Repository
from holdfast.repo.write.writer import SaveResult, save
from holdfast.snapshot.save import SaveOptions
from holdfast.tensors.sharding import shard
from holdfast.trees.registered import Types
from tests.kit.saving import new_repo
from tests.kit.thread_ranks import ThreadRanks, run_threads

SHAPES = {"embedding": (12_800, 2_048), "attention": (12_288, 4_096), "mlp": (11_008, 4_096), "norm": (4_096,)}
"""Of bfloat16, as layers of a language model have; a sixteenth of each matrix is more than 3 MiB."""


@pytest.fixture(scope="module")
def model() -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(3)
    return {
        name: torch.randint(-(1 << 15), 1 << 15, shape, generator=random, dtype=torch.int16).view(torch.bfloat16)
        for name, shape in SHAPES.items()
    }


def save_rows(repo: Repository, model: dict[str, torch.Tensor], world_size: int) -> SaveResult:
    """Save a model cut by rows, as torch cuts it, from that many ranks; return what the first of them is told."""

    def act(ranks: ThreadRanks) -> SaveResult:
        tree = {}
        for name, full in model.items():
            step = -(-full.shape[0] // world_size)
            rows = full[ranks.rank * step : (ranks.rank + 1) * step]
            offsets = (min(ranks.rank * step, full.shape[0]), *[0] * (full.dim() - 1))
            tree[name] = shard(rows, global_shape=full.shape, offsets=offsets)
        name = f"from {world_size}"
        planned = plan_save(name, tree, SaveOptions(), Types(()), ranks, range(world_size))
        return save(repo, planned.request, ranks=ranks)

    results = run_threads(world_size, act)
    assert {type(result) for result in results} == {SaveResult}, results
    assert isinstance(results[0], SaveResult)
    return results[0]


@pytest.mark.slow  # a quarter of a gigabyte, four times
def test_saves_from_eight_and_sixteen_ranks_and_one_share_nine_tenths(model: dict[str, torch.Tensor]) -> None:
    repo = new_repo()
    total = sum(tensor.nbytes for tensor in model.values())

    results = {size: save_rows(repo, model, size) for size in (8, 16, 1, 3)}

    assert {size: result.logical_bytes for size, result in results.items()} == dict.fromkeys(results, total)
    assert results[8].new_bytes == total
    for size in (16, 1, 3):
        assert results[size].new_bytes <= total / 10, size
