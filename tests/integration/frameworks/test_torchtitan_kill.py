"""A run with TorchTitan's parts that is killed continues as if it had not been, also on another number of ranks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import holdfast
from tests.kit.capabilities import needs_package
from tests.kit.patience import RUN_S

pytestmark = [pytest.mark.slow, needs_package("torchtitan")]

ROOT = Path(__file__).parents[3]


def run(folder: Path, ranks: int, *options: str) -> tuple[bool, list[str]]:
    """Run the script on some ranks; return whether it ended well, and the digest of each rank's result."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    script = ["-m", "tests.integration.frameworks.torchtitan_run", str(folder), *options]
    result = subprocess.run([*launch, *script], cwd=ROOT, timeout=RUN_S, check=False)
    digests = [folder / f"result-{rank}" for rank in range(ranks)]
    return result.returncode == 0, [path.read_text() for path in digests if path.exists()]


def test_a_killed_run_ends_as_the_one_that_was_not(tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for folder in (whole, killed):
        folder.mkdir()
    ended, expected = run(whole, 2)
    assert ended
    assert len(expected) == 2

    assert run(killed, 2, "--kill-at=5") == (False, [])
    assert run(killed, 2) == (True, expected)


def test_a_killed_run_continues_on_another_number_of_ranks(tmp_path: Path) -> None:
    assert run(tmp_path, 2, "--kill-at=5") == (False, [])
    store = holdfast.open(tmp_path / "checkpoint" / "store")
    newest = store.latest()
    assert newest is not None
    first = newest.metadata["step"]
    assert first in (2, 4)

    # TorchTitan's loader cannot be divided differently, so its position is left out.
    ended, _ = run(tmp_path, 1, "--exclude", "dataloader")

    assert ended
    loaded = store.load("step-8")
    assert loaded["train_state"]["step"] == 8
    assert loaded["optimizer"]["state.0.weight.step"] == 8
