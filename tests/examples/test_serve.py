"""A trainer and two servers, killed at random: every answer is of exactly one version."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

import holdfast

SCRIPT: Final = Path(__file__).resolve().parents[2] / "examples/serve.py"


def run(store: Path, kills: int, *, seed: int = 0) -> str:
    command = [sys.executable, "-W", "error", str(SCRIPT), str(store), "run", f"--kills={kills}", f"--seed={seed}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def verify_left_whole(store: Path) -> None:
    with holdfast.open(store) as opened:
        assert {finding.code for finding in opened.check(read=True)} <= {"pack-unused", "manifest-unused"}
        assert len(opened.snapshots("policy/")) in (2, 3)


@pytest.mark.slow
def test_servers_answer_from_one_version_while_all_parts_are_killed(tmp_path: Path) -> None:
    assert "all of one of" in run(tmp_path / "store", 2)
    verify_left_whole(tmp_path / "store")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_it_goes_on_for_long(tmp_path: Path, seed: int) -> None:
    assert "all of one of" in run(tmp_path / "store", 60, seed=seed)
    verify_left_whole(tmp_path / "store")


def test_an_answer_of_a_mix_would_be_noticed() -> None:
    """The guard itself can fail: one layer of another version changes the answer."""
    program = f"""
import sys; sys.path.insert(0, {str(SCRIPT.parent)!r})
import torch, serve
torch.set_num_threads(1)
model, other = serve.make_model(), serve.make_model()
serve.train_to(model, 1); serve.train_to(other, 2)
serve.check_answers([f"policy/00000001 {{serve.answer(model)}}"])
model[0] = other[0]
try:
    serve.check_answers([f"policy/00000001 {{serve.answer(model)}}"])
except AssertionError as error:
    print("noticed", error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("noticed policy/00000001")
