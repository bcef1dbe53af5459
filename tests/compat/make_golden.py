"""Makes the golden stores, each once and for ever; a new one is added by `python -m tests.compat.make_golden`."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed.checkpoint

import holdfast
from holdfast.capture.record.options import Hashes, LevelName
from holdfast.capture.stored.segments import iter_segments, write_segment
from holdfast.dcp import StorageWriter
from holdfast.repo.upkeep.collect import Rules
from holdfast.testing.ranks import run_ranks
from tests.compat.archive import HERE, add, pack
from tests.distributed.placing import LAYOUTS, Meshes
from tests.kit.runs_in_memory import as_observed

GOLDEN: Final = HERE / "golden"
RANKS: Final = 4
DCP_RANKS: Final = 3
STEPS: Final = 6
RECORDED: Final = "input output grad parameter buffer param_grad optimizer"
RECORDED_STEPS: Final = 3
ROWS: Final = 3000
"""Of a table that has several chunks."""
SHAPES: Final[dict[str, tuple[tuple[int, ...], torch.dtype]]] = {
    "uneven": ((7, 5), torch.float32),
    "few rows": ((2, 6), torch.int8),
    "line": ((11,), torch.float64),
    "cube": ((5, 3, 4), torch.int16),
    "scalar": ((), torch.float32),
    "nothing": ((4, 0), torch.float32),
    "bfloat16": ((9, 4), torch.bfloat16),
    "float8": ((6, 3), torch.float8_e4m3fn),
    "bool": ((5, 5), torch.bool),
    "large": ((ROWS, 257), torch.float32),
}
dcp: Any = torch.distributed.checkpoint
"""Its functions are not declared as exported."""


def make_full(name: str) -> torch.Tensor:
    """Return a tensor by arithmetic alone, so that it is the same for ever; it compresses well."""
    shape, dtype = SHAPES[name]
    count = torch.Size(shape).numel()
    return (torch.arange(count) % 13 - 6).reshape(shape).to(torch.float32).to(dtype)


def make_placed(*, shift: int = 0, zero: bool = False) -> dict[str, torch.Tensor]:
    """Return every tensor in every placement as this rank has it; with a shift, each in another one."""
    meshes, tree = Meshes(), {}
    for name in SHAPES:
        full = make_full(name)
        ways = [layout for layout in LAYOUTS if layout.fits(full)]
        for number, layout in enumerate(ways):
            other = ways[(number + shift) % len(ways)]
            tree[f"{name}, {layout.name}"] = meshes.place(torch.zeros_like(full) if zero else full, other)
    return tree


def make_for_dcp(*, shift: int = 0, zero: bool = False) -> dict[str, torch.Tensor]:
    """Return what torch's own planner can place: strided shards overlap for it."""
    tree = make_placed(shift=shift, zero=zero)
    return {name: tensor for name, tensor in tree.items() if "strided" not in name}


def make_state(step: int) -> dict[str, Any]:
    """Return what a run has at a step: some of it new, some as before, a view of it, and plain values."""
    table = (torch.arange(ROWS * 256, dtype=torch.int64) % 251).to(torch.float32).reshape(ROWS, 256)
    table[step] += step
    return {
        "model": {"table": table, "rows": table[10:20], "half": torch.full((70,), step / 2, dtype=torch.bfloat16)},
        "step": step,
        "history": [float(number) for number in range(step)],
    }


def save_run(path: Path) -> None:
    """Save steps, overwrite one, delete one, tag one, collect and repack."""
    with holdfast.open(path, environment=False) as store:
        for step in range(1, STEPS + 1):
            store.save(f"run/step-{step}", make_state(step), metadata={"loss": 1 / step})
        store.save("run/step-2", make_state(200), overwrite=True)
        store.delete("run/step-3")
        store.tag("best", "run/step-4")
        store.gc(Rules(min_age_s=0.0))


def save_ranks(path: Path) -> None:
    """Save every kind of placement, and what each rank has for itself."""
    run_ranks(RANKS, _save_rank, path, timeout_s=120.0)


def _save_rank(rank: int, path: Path) -> None:
    own = {"mine": holdfast.per_rank(torch.arange(5) + rank), "drifted": torch.full((3,), float(rank))}
    with holdfast.open(path, environment=False) as store:
        store.save("all", make_placed())
        store.save("own", own)


def save_dcp(path: Path) -> None:
    """Save a checkpoint by torch.distributed.checkpoint."""
    run_ranks(DCP_RANKS, _save_dcp_rank, path, timeout_s=120.0)


def _save_dcp_rank(rank: int, path: Path) -> None:
    state = {"model": make_for_dcp(), "step": 7, "note": {"text": "saved by torch"}}
    dcp.save(state, storage_writer=StorageWriter(str(path), "run/a"))


def record_training(
    store: holdfast.Store, name: str, *, slow_from: int = STEPS, level: LevelName = "full", hashes: Hashes = "auto"
) -> None:
    """Record training with numbers that every machine computes exactly; at half the rate from a step on."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU(), torch.nn.Linear(2, 1))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.arange(parameter.numel()).reshape(parameter.shape) - 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with store.record(name, model, optimizer, level=level, kinds=RECORDED, hashes=hashes):
        for step in range(RECORDED_STEPS):
            optimizer.param_groups[0]["lr"] = 0.25 if step >= slow_from else 0.5
            optimizer.zero_grad()
            model(torch.tensor([[1.0, step]])).sum().backward()
            optimizer.step()


def save_recorded(path: Path) -> None:
    """Record a run, and one that differs from it in a setting."""
    with holdfast.open(path, environment=False) as store:
        record_training(store, "good")
        record_training(store, "bad", slow_from=1)


def save_blake3(path: Path) -> None:
    """Record runs with BLAKE3 digests, and store one of them as an accelerator would have: without XXH3."""
    with holdfast.open(path, environment=False) as store:
        record_training(store, "both", level="digest", hashes="both")
        record_training(store, "full", hashes="both")
        for segment, _ in [*iter_segments(store.repository, "both")]:
            events = [event for step in segment.roots for event in store.run("both").events(step)]
            remote = as_observed(event._replace(digest=b"") for event in events)
            write_segment(store.repository, replace(segment, run="device"), remote, {})


def make_weights(step: int) -> dict[str, torch.Tensor]:
    """Return tensors that shrink by different shares, and one that does not, by arithmetic alone."""
    count = torch.arange(20_000, dtype=torch.int64) + 7 * step
    mixed = (count * 2_654_435_761 % 2**32) ^ (count * 40_503 >> 3)
    spread = (mixed % 2001 - 1000).to(torch.float32) / 4096
    return {
        "bfloat16": spread.to(torch.bfloat16),
        "float32": spread.reshape(20, 1000).clone(),
        "float64": spread[:3000].to(torch.float64),
        "complex64": torch.complex(spread[:2000], -spread[:2000]),
        "int8": (mixed % 7).to(torch.int8),
        "noise": (mixed * 25_214_903_917 >> 16).to(torch.uint8),
        "zeros": torch.zeros(6000 + step, dtype=torch.bfloat16),
        "large": (count.repeat(40) % 251).to(torch.float32),
        "small": spread[:300].clone(),
    }


def save_codecs(path: Path) -> None:
    """Save with every choice of compression, each time with chunks that another one has stored."""
    with holdfast.open(path, environment=False) as store:
        store.save("raw", make_weights(0))
        store.save("fast", make_weights(1), compression="fast")
        store.save("small", make_weights(2), compression="small")
        store.save("all", [make_weights(step) for step in range(3)], compression="small")
        store.save("gone", make_weights(3), compression="fast")
        store.save("mixed", {**make_weights(3), "more": make_weights(4)["float32"]}, compression="small")
        store.delete("gone")
        store.gc(Rules(min_age_s=0.0))


def make_trained(step: int) -> dict[str, torch.Tensor]:
    """Return weights of which each step changes the lowest bits of some numbers, and noise of which it changes all."""
    weights = make_weights(0)
    count = torch.arange(weights["bfloat16"].numel())
    flips = ((count * 2_654_435_761 + 97) % 100 < 3 * step).to(torch.int16)
    return {
        **weights,
        "bfloat16": (weights["bfloat16"].view(torch.int16) ^ flips).view(torch.bfloat16),
        "float32": (weights["float32"].flatten().view(torch.int32) ^ flips[:20_000].to(torch.int32))
        .view(torch.float32)
        .reshape(20, 1000),
        "noise": make_weights(step)["noise"],
        "step": torch.tensor(step),
    }


def save_deltas(path: Path) -> None:
    """Save steps as deltas by every codec, on encoded and on raw bases; some bases belong to no snapshot any more."""
    with holdfast.open(path, environment=False) as store:
        store.save("run/0", make_trained(0), compression="small")
        store.save("run/1", make_trained(1), compression="small")
        store.save("run/2", make_trained(2), compression="fast")
        store.save("run/3", make_trained(3), compression=None, delta=10)
        store.save("whole", make_trained(4), compression="small", delta="off")
        store.save("raw/0", make_trained(5), compression=None)
        store.save("raw/1", make_trained(6), compression=None, delta=2)
        store.delete("run/0")
        store.gc(Rules(min_age_s=0.0))


CASES: Final[dict[str, Callable[[Path], None]]] = {
    "run": save_run,
    "ranks": save_ranks,
    "dcp": save_dcp,
    "recorded": save_recorded,
    "blake3": save_blake3,
    "codecs": save_codecs,
    "deltas": save_deltas,
}


def _make(name: str) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        CASES[name](root)
        return pack({path.relative_to(root).as_posix(): path.read_bytes() for path in _iter_objects(root)})


def _iter_objects(root: Path) -> list[Path]:
    """Return the files that are objects: the lock and what is under way begin with a dot."""
    return [path for path in root.rglob("*") if path.is_file() and not path.name.startswith(".")]


if __name__ == "__main__":
    for case in CASES:
        add(GOLDEN / f"{case}.tar.gz", partial(_make, case))
