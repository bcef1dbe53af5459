"""Stores to show in a browser: two training runs of a small transformer, a fine-tuned one, and a sharded model."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Final

import torch

import holdfast
from tests.kit.compile_artifacts import make_artifact, store_artifact
from tests.kit.recordings import Recording, write_recorded
from tests.kit.thread_ranks import save_on_threads

LAYERS: Final = 6
WIDTH: Final = 64
STEPS: Final = range(100, 1300, 100)


def make_state(step: int, seed: int, *, frozen: int = 0) -> dict[str, object]:
    """Return the state of a small transformer after some steps: weights drift, the last layers most."""
    model: dict[str, torch.Tensor] = {"embed.weight": _draw(seed, 500, WIDTH)}
    for layer in range(LAYERS):
        speed = 0.0 if layer < frozen else 1e-4 * step * (layer + 1) / LAYERS
        for part, shape in (
            ("attn.q_proj.weight", (WIDTH, WIDTH)),
            ("attn.k_proj.weight", (WIDTH, WIDTH)),
            ("attn.v_proj.weight", (WIDTH, WIDTH)),
            ("attn.out_proj.weight", (WIDTH, WIDTH)),
            ("mlp.up_proj.weight", (4 * WIDTH, WIDTH)),
            ("mlp.down_proj.weight", (WIDTH, 4 * WIDTH)),
            ("norm.weight", (WIDTH,)),
        ):
            name = f"layers.{layer}.{part}"
            start = _draw(hash_name(name) + seed, *shape) * 0.05
            change = speed * (2.0 if "down" in part else 1.0)
            model[name] = start + change * _draw(hash_name(name) + seed + step, *shape)
    moments = {
        str(at): {"exp_avg": _draw(at + step, *value.shape) * 1e-3} for at, value in enumerate(list(model.values())[:9])
    }
    return {"model": model, "optimizer": {"state": moments, "lr": 3e-4 * math.exp(-step / 900)}, "step": step}


def hash_name(name: str) -> int:
    """Return a number for a name, the same in every process."""
    return sum(at * ord(char) for at, char in enumerate(name, 1)) % 100_003


def _draw(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def add_sharded(store: holdfast.Store) -> None:
    """Save a model that four ranks have together: rows, columns and a grid of weights, and norms that all have."""
    for step in (100, 200):
        save_on_threads(store.repository, f"fsdp/step-{step}", [_make_shards(rank, step) for rank in range(4)])


def _make_shards(rank: int, step: int) -> dict[str, object]:
    model: dict[str, object] = {"embed.weight": _cut(_draw(1, 512, WIDTH), rank, 4, 1)}
    for layer in range(4):
        weight = _draw(10 + layer, 4 * WIDTH, WIDTH) + (0.01 * step if layer > 1 else 0.0)
        model[f"layers.{layer}.attn.weight"] = _cut(weight, rank, 4, 1)
        model[f"layers.{layer}.up.weight"] = _cut(_draw(20 + layer, WIDTH, 4 * WIDTH), rank, 1, 4)
        model[f"layers.{layer}.down.weight"] = _cut(_draw(30 + layer, 4 * WIDTH, WIDTH), rank, 2, 2)
        model[f"layers.{layer}.norm"] = _draw(40 + layer, WIDTH, 4)
    model["positions"] = _draw(50, 3000, 400)
    return {"model": model, "rng": holdfast.per_rank(torch.full((300,), float(rank)))}


def _cut(tensor: torch.Tensor, rank: int, rows: int, columns: int) -> object:
    """Return a rank's box of a tensor that is cut into a grid."""
    tall, wide = tensor.shape[0] // rows, tensor.shape[1] // columns
    top, left = tall * (rank // columns % rows), wide * (rank % columns)
    part = tensor[top : top + tall, left : left + wide].clone()
    return holdfast.shard(part, global_shape=tensor.shape, offsets=(top, left))


def make_store(path: Path) -> holdfast.Store:
    """Save two runs with metrics, a fine-tuned one that shares layers, and tags; each save knows the one before."""
    store = holdfast.open(path)
    for run, seed in (("llama/base", 1), ("llama/wide-lr", 2)):
        for step in STEPS:
            loss = 1.4 + 2.6 * math.exp(-step / (300 if seed == 1 else 420)) + 0.03 * math.sin(step * seed)
            metrics = {"loss": loss, "val_loss": loss + 0.08 + step * 2e-5, "grad_norm": 0.4 + 1.2 / (1 + step / 150)}
            store.save(
                f"{run}/step-{step}", make_state(step, seed), metadata={"metrics": metrics, "tokens": step * 4096}
            )
    store.load("llama/base/step-1200")
    for step in (1300, 1400, 1500):
        metrics = {"loss": 1.3 - step * 1e-4, "val_loss": 1.5 - step * 1e-4}
        store.save(
            f"llama/finetune/step-{step}",
            make_state(step, 1, frozen=4),
            metadata={"metrics": metrics, "note": "frozen"},
        )
    store.tag("best", "llama/base/step-1200")
    store.tag("prod", "llama/finetune/step-1500")
    return store


def fill_store(store: holdfast.Store) -> None:
    """Add what a training run does not leave: recorded runs and compiled graphs."""
    settings = {"torch": torch.__version__, "torch.backends.cudnn.benchmark": "False", "host": "gpu-07"}
    burst = Recording("burst", is_bad=True, level="stats", hole=math.nan, steps=8, layers=LAYERS, environment=settings)
    for recording in (Recording("good"), Recording("bad", is_bad=True), burst):
        write_recorded(store.repository, recording)
    for seed in "ab":
        store_artifact(store.repository, make_artifact(seed))
