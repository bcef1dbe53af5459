"""Measures imports of safetensors, torch.save files and DCP directories, against a save of the same tensors."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Final

import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict_saver import save as save_dcp

import holdfast
from bench.kit.measure import Contestant, Goal, Result, Sizes, Timings, WrongResult, race
from holdfast.digest import Digest

_SAVE: Final = "store.save from memory"
_LEAST: Final = 0.8
_ROUNDS: Final = 5
_TENSORS: Final = 16
_FORMATS: Final = ("safetensors", "torch.save", "DCP")


def run(sizes: Sizes, work: Path) -> list[Result]:
    """Measure each format with a warm page cache, each time into a new store."""
    torch.manual_seed(0)
    rows = sizes.save_bytes // 4 // _TENSORS // 4 // 1024
    state = {f"w{number:02}": torch.randn(rows, 1024) for number in range(_TENSORS)}
    for name in _FORMATS:
        _write(name, state, work / name)
    digest = holdfast.open(work / "expected").save("m", state).digest
    numbers = count()
    contestants = {
        name: _importing(work, lambda store, name=name: store.import_(work / name, "m").saved.digest, digest, numbers)  # type: ignore[misc]  # a default binds it
        for name in _FORMATS
    }
    contestants[_SAVE] = _importing(work, lambda store: store.save("m", state).digest, digest, numbers)
    timings = race(contestants, rounds=max(sizes.rounds, _ROUNDS))
    return [_make_row(name, timings, 4 * rows * 1024 * _TENSORS) for name in _FORMATS]


def _write(name: str, state: dict[str, torch.Tensor], path: Path) -> None:
    if name == "safetensors":
        save_file(state, path)
    elif name == "torch.save":
        torch.save(state, path)
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # DCP warns that there is only one process
            save_dcp(state, checkpoint_id=str(path), no_dist=True)


def _importing(
    work: Path, act: Callable[[holdfast.Store], Digest], expected: Digest, numbers: count[int]
) -> Contestant:
    stores: list[Path] = []

    def prepare() -> None:
        stores.append(work / f"store-{next(numbers)}")

    def act_on_new() -> Digest:
        with holdfast.open(stores[-1]) as store:
            return act(store)

    def verify(result: object) -> None:
        if result != expected:
            raise WrongResult("an import is not the snapshot that a save from memory makes")

    def release() -> None:
        shutil.rmtree(stores[-1])

    return Contestant(act_on_new, prepare=prepare, verify=verify, release=release)


def _make_row(name: str, timings: dict[str, Timings], size_bytes: int) -> Result:
    own, saving = (size_bytes / timings[each].best / 1e9 for each in (name, _SAVE))
    cpu = f"CPU {min(timings[name].cpu_seconds):.3f} s, save {min(timings[_SAVE].cpu_seconds):.3f} s"
    samples = {each: timings[each].seconds for each in (name, _SAVE)}
    return Result(f"import {name}", own, "GB/s", _SAVE, saving, Goal("ratio", ">=", _LEAST), cpu, samples)
