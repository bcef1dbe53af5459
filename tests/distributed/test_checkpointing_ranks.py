"""The checkpoint manager on several ranks: one decision for all, whichever rank has the reason."""

from __future__ import annotations

import signal
import warnings
from pathlib import Path
from typing import Any

import torch

import holdfast
from holdfast.query.lineage import parse_lineage
from holdfast.repo.format.layout import PACKS
from tests.distributed.conftest import World


def _train(
    rank: int, folder: Path, *, until: int = 100, signalled: int | None = None, stop_after: float | None = None
) -> object:
    """Train from the newest checkpoint; return the first step, the saved steps and why it stopped."""
    with holdfast.open(folder) as store:
        state: dict[str, Any] = {"w": torch.zeros(4), "own": holdfast.per_rank(torch.zeros(1))}
        with store.manager("run/", every=4, keep_last=1, stop_after=stop_after) as manager:
            start = (manager.resume(state) or 0) + 1
            saved = []
            for step in range(start, until):
                state["w"] += 1
                if signalled == rank and step == start + 4:
                    signal.raise_signal(signal.SIGTERM)
                saved += [step] * manager.step(step, state)
                if manager.should_stop:
                    break
            return start, saved, manager.stop_reason, state["w"][0].item()


def test_a_signal_to_one_rank_saves_and_stops_all_of_them_at_the_same_step(world: World, tmp_path: Path) -> None:
    first = world(2)(_train, tmp_path, signalled=1)

    assert first == [(1, [4, 6], "another rank was signalled", 6.0), (1, [4, 6], "SIGTERM", 6.0)]
    assert [snapshot.name for snapshot in holdfast.open(tmp_path).snapshots()] == ["run/step-6"]
    assert world(3)(_train, tmp_path, until=9) == [(7, [8], "", 8.0)] * 3, "on another number of ranks"
    (resumed,) = holdfast.open(tmp_path).snapshots(where="ranks = 3")
    assert [each.name for each in parse_lineage(resumed.environment).loaded] == ["run/step-6"]


def test_the_time_that_one_rank_sees_counts_for_all(world: World, tmp_path: Path) -> None:
    results = world(2)(_train, tmp_path, stop_after=0.0)

    assert results == [(1, [2], "the time is up", 2.0)] * 2


def _resume(rank: int, folder: Path) -> object:
    """Resume into zeros; return the step, the first value, and what was warned of."""
    with holdfast.open(folder) as store, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        state = {"w": torch.zeros(5000)}
        step = store.manager("run/", stop_signals=()).resume(state)
        return step, state["w"][0].item(), [str(each.message)[:12] for each in caught]


def test_all_ranks_skip_a_damaged_checkpoint(world: World, tmp_path: Path) -> None:
    store = holdfast.open(tmp_path)
    with store.manager("run/", every=1, async_=False) as manager:
        manager.step(1, {"w": torch.ones(5000)})
        before = set((tmp_path / PACKS).iterdir())
        manager.step(2, {"w": torch.randn(5000)})
    for pack in set((tmp_path / PACKS).iterdir()) - before:
        pack.chmod(0o600)
        pack.write_bytes(bytes(byte ^ 1 for byte in pack.read_bytes()))

    assert world(2)(_resume, tmp_path) == [(1, 1.0, ["'run/step-2'"])] * 2
