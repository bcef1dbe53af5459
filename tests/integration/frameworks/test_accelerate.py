"""Ranks that train with Accelerate and are killed continue as if they had not been."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast.testing.ranks import Lost, RankFault, run_ranks
from tests.kit.patience import RUN_S

pytest.importorskip("accelerate", reason="needs Accelerate, which `make test` installs")

from tests.integration.frameworks.accelerate_run import train_rank  # after the test for the library

pytestmark = pytest.mark.slow

SIZE = 2
LIMITS: Any = {"timeout_s": RUN_S, "preload": ["tests.integration.frameworks.accelerate_run"]}


def run_two(folder: Path, faults: dict[int, RankFault] | None = None, **options: Any) -> list[Any]:
    return run_ranks(SIZE, partial(train_rank, **options), folder, SIZE, **LIMITS, faults=faults)


@pytest.mark.parametrize("sharded", [False, True], ids=["ddp", "fsdp2"])
def test_killed_ranks_end_as_those_that_were_not(tmp_path: Path, sharded: bool) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    expected = run_two(whole, sharded=sharded)
    fault = RankFault(marker=killed / "hanging")

    assert run_two(killed, {0: fault, 1: fault}, sharded=sharded, hang_at=7) == [Lost(0), Lost(1)]

    assert run_two(killed, sharded=sharded, resume=True) == expected
    with holdfast.open(killed / "store") as store:
        assert [each.name for each in store.snapshots("run/")] == ["run/checkpoint_2", "run/checkpoint_3"]
        assert store.check(read=True) == []


def test_what_two_ranks_have_saved_is_loaded_by_one(tmp_path: Path) -> None:
    run_two(tmp_path, sharded=True)

    run_ranks(1, partial(train_rank, resume=True), tmp_path, 1, **LIMITS)

    with holdfast.open(tmp_path / "store") as store:
        saved, loaded = (store.load(name, only="model.*")["model"] for name in ("run/checkpoint_3", "result"))
    assert saved.keys() == loaded.keys()
    assert all(torch.equal(saved[name], loaded[name]) for name in saved)
