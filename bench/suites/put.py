"""Measures what it costs to look for tensors in files: `put` as it is, and the same without looking."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Final
from unittest import mock

import torch
from safetensors.torch import save_file

import holdfast
from bench.kit.measure import Contestant, Goal, Result, Sizes, Timings, WrongResult, race
from bench.kit.stores import remove_store
from holdfast.files import keep
from holdfast.files.keep import FileCuts
from holdfast.repo.write.writer import SaveResult

_PLAIN: Final = "without looking into files"
_MOST: Final = 1.05
_ROUNDS: Final = 7
_SMALL_FILES: Final = 500
_SMALL_BYTES: Final = 256 << 10
"""Smaller files are not looked into."""


def run(sizes: Sizes, work: Path) -> list[Result]:
    """Measure files with tensors, and many small files without any."""
    size_bytes = sizes.save_bytes // 4
    state = _make_state(size_bytes)
    save_file(state, work / "model.safetensors")
    torch.save(state, work / "model.pt")
    _write_small(work / "small", min(_SMALL_FILES, size_bytes // _SMALL_BYTES))
    paths = {"a safetensors file": "model.safetensors", "a torch.save file": "model.pt", "small files": "small"}
    rounds = max(sizes.rounds, _ROUNDS)
    return [_measure(what, work / name, work / "store", rounds=rounds) for what, name in paths.items()]


def _make_state(size_bytes: int) -> dict[str, torch.Tensor]:
    """Return layers of a matrix and a vector each, of `size_bytes` in all."""
    torch.manual_seed(0)
    width = 768
    num_layers = max(1, size_bytes // (4 * 4 * width * width))
    state = {}
    for number in range(num_layers):
        state[f"layers.{number}.weight"] = torch.randn(4 * width, width)
        state[f"layers.{number}.bias"] = torch.randn(4 * width)
    return state


def _write_small(folder: Path, num_files: int) -> None:
    folder.mkdir()
    noise = torch.randint(0, 256, (num_files, _SMALL_BYTES), dtype=torch.uint8)
    for number, row in enumerate(noise):
        (folder / f"{number:06}").write_bytes(row.numpy().tobytes())


def _measure(what: str, path: Path, store: Path, *, rounds: int) -> Result:
    rules: dict[str, Callable[[], AbstractContextManager[object]]] = {
        what: nullcontext,
        _PLAIN: partial(mock.patch.object, keep, "read_cuts", return_value=FileCuts()),
    }
    contestants = {name: _putting(path, store, rule) for name, rule in rules.items()}
    return _make_row(what, race(contestants, rounds=rounds))


def _putting(path: Path, store: Path, rule: Callable[[], AbstractContextManager[object]]) -> Contestant:
    def put() -> SaveResult:
        with rule(), holdfast.open(store) as opened:
            return opened.put("files", path)

    def verify(result: object) -> None:
        size_bytes = sum(each.stat().st_size for each in ([path] if path.is_file() else path.iterdir()))
        if not isinstance(result, SaveResult) or result.logical_bytes != size_bytes:
            raise WrongResult(f"put of {size_bytes} bytes returned {result}")

    return Contestant(put, prepare=partial(remove_store, store), verify=verify)


def _make_row(what: str, timings: dict[str, Timings]) -> Result:
    """Compare CPU time: to look into files adds no waiting, and wall time depends on how fast the disk syncs."""
    own, plain = timings[what], timings[_PLAIN]
    note = f"CPU seconds; best wall {own.best:.3f} s, without looking {plain.best:.3f} s"
    samples = {what: own.cpu_seconds, _PLAIN: plain.cpu_seconds}
    figures = min(own.cpu_seconds), min(plain.cpu_seconds)
    return Result(f"put {what}", figures[0], "s", _PLAIN, figures[1], Goal("ratio", "<=", _MOST), note, samples)
