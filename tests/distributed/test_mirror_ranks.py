"""A store with a mirror on several ranks: one of them uploads, and all of them resume from the mirror."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import holdfast
from tests.distributed.conftest import World


def _train(rank: int, folder: str, mirror: str) -> tuple[int | None, float, bool]:
    """Resume, save one step, and return the step, the value, and whether this rank has uploaded."""
    state: dict[str, Any] = {"w": torch.zeros(1000), "own": holdfast.per_rank(torch.full((3,), float(rank)))}
    with holdfast.open(folder, mirror=mirror) as store:
        with store.manager("run/", every=1, stop_signals=()) as manager:
            start = manager.resume(state)
            state["w"] += 1
            manager.step((start or 0) + 1, state)
        assert store.mirror is not None
        store.close()
        return start, state["w"][0].item(), bool(store.mirror.state.present)


def test_one_rank_uploads_and_all_resume_on_another_machine(world: World, tmp_path: Path) -> None:
    mirror = str(tmp_path / "mirror")

    first = world(2)(_train, str(tmp_path / "one"), mirror)
    again = world(2)(_train, str(tmp_path / "two"), mirror)

    assert first == [(None, 1.0, True), (None, 1.0, False)]
    assert again == [(1, 2.0, True), (1, 2.0, False)]
    assert list(holdfast.open(mirror)) == ["run/step-1", "run/step-2"]
    assert list(holdfast.open(tmp_path / "two")) == ["run/step-2"]
