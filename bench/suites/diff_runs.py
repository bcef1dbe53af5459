"""Measures the comparison of two full recordings that differ from a step on, against torch.load with torch.allclose."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
import torch
from torch import nn

from bench.kit.arena import compare
from bench.kit.bare_work import CHUNK_BYTES, blake3_of, count_cores
from bench.kit.measure import Contestant, Goal, Result, Sizes, WrongResult, race
from holdfast.capture.compare.compare import diff_runs
from holdfast.capture.compare.result import RunDiff
from holdfast.capture.record.options import make_options
from holdfast.capture.record.recorder import record
from holdfast.capture.stored.events import Event
from holdfast.capture.stored.runs import Run, read_run
from holdfast.objects.local.local_store import LocalStore
from holdfast.repo.handle.repository import Repository, open_repository

_OWN: Final = "holdfast"
_PEER: Final = "torch.load and torch.allclose"
_BARE: Final = "read, BLAKE3 and one comparison"
_MOST_STEPS: Final = 6
_CHANGED: Final = ("layers.1.linear1.weight", 1)
"""The parameter that is changed by hand in the second run, and before which step."""
_LEAST_PER_CORE: Final = 1.0


@dataclass(frozen=True, slots=True)
class _Shape:
    """The size of the model and of its batches."""

    width: int
    layers: int
    words: int
    tokens: int
    batch: int
    steps: int = _MOST_STEPS


def _find_shape(sizes: Sizes) -> _Shape:
    if sizes.save_bytes >= 1 << 30:
        return _Shape(256, 4, 8192, 128, 4)
    return _Shape(128, 2, 1024, 64, 4) if sizes.save_bytes >= 64 << 20 else _Shape(16, 2, 32, 4, 2, steps=2)


class _Language(nn.Module):
    """A language model of the form of GPT-2, of torch's own layers."""

    def __init__(self, shape: _Shape) -> None:
        super().__init__()
        self.embed = nn.Embedding(shape.words, shape.width)
        self.layers = nn.Sequential(
            *(
                nn.TransformerEncoderLayer(shape.width, 4, 4 * shape.width, 0.0, "gelu", batch_first=True)
                for _ in range(shape.layers)
            )
        )
        self.head = nn.Linear(shape.width, shape.words)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.layers(self.embed(words)))
        return found


def run(sizes: Sizes, work: Path) -> list[Result]:
    """Record two trainings, compare them, and compare the same tensors in other ways."""
    shape = _find_shape(sizes)
    repo = open_repository(LocalStore(work / "store"), create=True)
    for name in ("good", "bad"):
        _train(repo, name, shape)
    good, bad = read_run(repo, "good"), read_run(repo, "bad")
    pairs = _list_pairs(diff_runs(good, bad))
    size_bytes = sum(_write_files(work, step, some, (good, bad)) for step, some in pairs.items())
    contestants = {
        _OWN: Contestant(partial(_compare, repo), verify=_verify),
        _PEER: Contestant(partial(_load_and_compare, work, [*pairs]), verify=_verify_count),
        _BARE: Contestant(partial(_read_and_compare, work, [*pairs]), verify=_verify_count),
    }
    timings = race(contestants, rounds=max(2, sizes.rounds))
    label = f"compare two recordings, {size_bytes / 1e6:.0f} MB that differ"
    per_core = {name: size_bytes / 1e9 / min(timing.cpu_seconds) for name, timing in timings.items()}
    cpu = ", ".join(f"{name} {min(timing.cpu_seconds):.2f}" for name, timing in timings.items())
    by_wall = partial(compare, label, timings, _OWN, size_bytes=size_bytes, goal=None)
    return [
        replace(by_wall([_PEER]), note=f"CPU seconds: {cpu}"),
        by_wall([_BARE]),
        Result(
            f"{label}, for each CPU second",
            per_core[_OWN],
            "GB/s",
            _BARE,
            per_core[_BARE],
            Goal("figure", ">=", _LEAST_PER_CORE),
            f"{_PEER} {per_core[_PEER]:.2f}",
            {name: timing.cpu_seconds for name, timing in timings.items()},
            per_core,
        ),
    ]


def _train(repo: Repository, name: str, shape: _Shape) -> None:
    torch.manual_seed(0)
    model = _Language(shape)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    changed, before = _CHANGED
    with record(repo, name, model, optimizer, options=make_options(level="full")):
        for step in range(shape.steps):
            words = torch.randint(0, shape.words, (shape.batch, shape.tokens))
            if name == "bad" and step == before:
                with torch.no_grad():
                    model.get_parameter(changed)[0, 0] += 0.01
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(words).flatten(0, 1), words.flatten())
            loss.backward()  # type: ignore[no-untyped-call]  # torch's
            optimizer.step()


def _list_pairs(diff: RunDiff) -> dict[int, list[tuple[Event, Event]]]:
    """Return the tensors that differ, by step; those that are recorded several times, once."""
    found: dict[tuple[bytes, bytes], tuple[Event, Event]] = {}
    for row in diff.rows:
        if row.a and row.b and row.measure and row.measure.basis == "values":
            found.setdefault((row.a.digest, row.b.digest), (row.a, row.b))
    pairs: dict[int, list[tuple[Event, Event]]] = {}
    for a, b in found.values():
        pairs.setdefault(a.site.step, []).append((a, b))
    return pairs


def _write_files(work: Path, step: int, pairs: Sequence[tuple[Event, Event]], runs: tuple[Run, Run]) -> int:
    """Write the tensors of a step for the other contestants, and return their size; each run has its own files."""
    size_bytes = 0
    for side, run in enumerate(runs):
        tensors = [run.read_tensor(pair[side]).contiguous() for pair in pairs]
        torch.save(dict(enumerate(tensors)), work / f"{step}-{side}.pt")
        # As float32 alone: the bare loop compares one dtype.
        floats = torch.cat([tensor.flatten().float() for tensor in tensors])
        floats.numpy().tofile(work / f"{step}-{side}.raw")
        size_bytes += sum(tensor.nbytes for tensor in tensors)
    return size_bytes


def _compare(repo: Repository) -> RunDiff:
    return diff_runs(read_run(repo, "good"), read_run(repo, "bad"))


def _verify(result: object) -> None:
    assert isinstance(result, RunDiff)
    name, step = _CHANGED
    if result.origin is None or (result.origin.fqn, result.origin.step) != (name, step):
        raise WrongResult(f"the origin is {name} in step {step}, and this was found: {result.headline}")


def _load_and_compare(work: Path, steps: Sequence[int]) -> int:
    """Return how many pairs of tensors are not close."""
    count = 0
    for step in steps:
        ours, theirs = (torch.load(work / f"{step}-{side}.pt") for side in (0, 1))
        count += sum(not torch.allclose(ours[key].float(), theirs[key].float()) for key in ours)
    return count


def _verify_count(count: object) -> None:
    if not count:
        raise WrongResult("all tensors are close, although the runs differ")


def _read_and_compare(work: Path, steps: Sequence[int]) -> int:
    """Return how many values differ; reads both files, hashes every 1 MiB and subtracts once, on all cores."""
    jobs = []
    for step in steps:
        size = (work / f"{step}-0.raw").stat().st_size
        jobs += [(step, start) for start in range(0, size, CHUNK_BYTES)]
    with ThreadPoolExecutor(count_cores()) as threads:
        return sum(threads.map(partial(_compare_piece, work), jobs))


def _compare_piece(work: Path, job: tuple[int, int]) -> int:
    step, start = job
    sides = []
    for side in (0, 1):
        with (work / f"{step}-{side}.raw").open("rb", buffering=0) as file:
            file.seek(start)
            data = file.read(CHUNK_BYTES)
        blake3_of(memoryview(data))
        sides.append(np.frombuffer(data, dtype=np.float32))
    return int(np.count_nonzero(np.abs(sides[0] - sides[1]) > 0))
