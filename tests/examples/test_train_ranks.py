"""The example for many ranks goes on with another number of them, and with another way to spread the model."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import pytest

import holdfast
from tests.kit.capabilities import FSDP

SCRIPT: Final = Path(__file__).resolve().parents[2] / "examples/train_ranks.py"


def train(store: Path, launcher: Sequence[str], *words: str) -> list[str]:
    command = [sys.executable, *launcher, str(SCRIPT), "--store", str(store), "--double", "--layers", "1", *words]
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    run = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout.splitlines()


def on_ranks(num_ranks: int) -> list[str]:
    return ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]


def find_losses(lines: Sequence[str]) -> list[float]:
    return [float(line.split()[3]) for line in lines if line.startswith("step ")]


@FSDP
@pytest.mark.slow
def test_copies_on_two_ranks_go_on_as_shards_on_two_and_in_one_plain_process(tmp_path: Path) -> None:
    store = tmp_path / "store"

    copies = train(store, on_ranks(2), "--parallel", "ddp", "--steps", "2")
    shards = train(store, on_ranks(2), "--parallel", "fsdp", "--steps", "4")
    plain = train(store, [], "--steps", "6")

    alone = train(store, [], "--steps", "6", "--prefix", "alone/")
    assert (shards[0], plain[0]) == ("resumed from run/step-2", "resumed from run/step-4")
    assert find_losses(copies + shards + plain) == pytest.approx(find_losses(alone), rel=1e-12)
    with holdfast.open(store) as opened:
        assert opened.check(read=True) == []
